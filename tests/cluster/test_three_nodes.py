"""A run on three nodes with separate object stores: ranks on two, the real SGLang on the third, and
a rollout worker on each.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.ray_nodes import POOLS, SERVERS, ray_nodes, wait_until
from tests.fakes.runs import ROOT, read_lines, tiny_run, write_yaml

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def test_ranks_on_two_nodes_train_with_servers_on_the_third(tiny_home: Path, tmp_path: Path):
    with ray_nodes("train_node", "train_node", "serve_node") as nodes:
        config = tiny_run(
            tiny_home,
            tmp_path / "run",
            cluster={
                "address": nodes.address,
                "pools": [
                    POOLS[0] | {"roles": ["train", "rollout"]},
                    SERVERS | {"roles": ["engine", "rollout"]},
                ],
            },
            rollout__num_workers=3,
            rollout__engine={"name": "sglang_server"},
            trainer__rollout_data_dir=str(tmp_path / "rollouts"),
        )
        file = write_yaml(tmp_path / "run.yaml", config)
        command = [sys.executable, "-m", "agentrl", "train", str(file)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, (done.stdout, done.stderr)
        wait_until(lambda: not nodes.processes(), seconds=30)
    logs = {log.name for log in (tmp_path / "run/logs").glob("rollout_*.log")}
    assert logs == {f"rollout_{index}.log" for index in range(3)}
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines if line["step"]] == [1, 2]
    for step in (1, 2):
        rollouts = read_lines(tmp_path / f"rollouts/step_{step:06d}.jsonl.zst")
        assert len(rollouts) == 8
        versions = {
            span[0] if isinstance(span, list) else span["version"]
            for line in rollouts
            for turn in line["request"]["turns"]
            for span in turn.get("weight_versions") or ()
        }
        assert versions == {step - 1}, "servers have the weights of the step before"
