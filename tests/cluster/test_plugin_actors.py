"""A run on two nodes with a tool and a scorer that ask for a resource of the second one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.ray_nodes import ray_nodes, wait_until
from tests.fakes.runs import ROOT, read_lines, tiny_run, write_yaml

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

PLUGINS = """
import os
from pathlib import Path

from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.tools import BaseTool, ToolResponse

HERE = Path(__file__).parent


def note(what):
    import ray

    host, node = os.environ.get("AGENTRL_HOST", ""), ray.get_runtime_context().get_node_id()
    with (HERE / what).open("a") as file:
        print(host.rsplit(".", 2)[1], node, file=file)


class Index(BaseTool):
    def get_openai_tool_schema(self):
        function = {"name": "index", "parameters": {"type": "object", "properties": {}}}
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(self, instance_id=None, **_):
        note("tool")
        if (HERE / "armed").exists():
            (HERE / "armed").unlink()
            os.kill(os.getpid(), 9)
        return instance_id, ToolResponse()

    async def execute(self, instance_id, parameters, **_):
        return "found"

    async def calc_reward(self, instance_id, **_):
        return 0.25

    async def shutdown(self):
        note("shutdown")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    note("scorer")
    return float(len(solution_str) % 5)
"""


def test_tools_and_scorers_run_where_their_resources_are(tiny_home: Path, tmp_path: Path):
    (tmp_path / "own.py").write_text(PLUGINS)
    (tmp_path / "armed").touch()
    asked = {"num_cpus": 1, "disk": 0.5}
    entry = {"class_name": f"{tmp_path}/own.py:Index", "config": {}, "resources": asked}
    main = {
        "name": "main", "devices_per_node": 1, "roles": ["train", "rollout"],
        "resources": {"train_node": 0.1},
    }  # fmt: skip
    with ray_nodes("train_node", "disk") as nodes:
        config = tiny_run(
            tiny_home,
            tmp_path / "run",
            cluster={"address": nodes.address, "pools": [main], "heartbeat_s": 0.5},
            rollout__num_workers=1,
            rollout__max_concurrent_requests=2,
            rollout__multi_turn__tool_config_path=str(
                write_yaml(tmp_path / "tools.yaml", {"tools": [entry]})
            ),
            reward__custom_reward_function={"path": f"{tmp_path}/own.py", "resources": asked},
            trainer__rollout_data_dir=str(tmp_path / "rollouts"),
        )
        file = write_yaml(tmp_path / "run.yaml", config)
        command = [sys.executable, "-m", "agentrl", "train", str(file)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        wait_until(lambda: not nodes.processes(), seconds=30)
        write_yaml(tmp_path / "tools.yaml", {"tools": [entry | {"resources": {"tape": 1}}]})
        refused = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
        )
    assert "tool index: 1 node x 1 CPU, 0.5 disk" in done.stdout
    assert re.search(r"plugin_0 \(process \d+ .*\) was lost and replaced", done.stdout), done.stdout
    places = {
        what: {tuple(line.split()) for line in (tmp_path / what).read_text().splitlines()}
        for what in ("tool", "scorer", "shutdown")
    }
    assert {host for host, _ in places["tool"] | places["shutdown"]} == {"plugin_0"}
    assert {host for host, _ in places["scorer"]} == {"plugin_1"}
    assert len({node for found in places.values() for _, node in found}) == 1
    assert not (tmp_path / "armed").exists()
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines if line["step"]] == [1, 2]
    files = [tmp_path / f"rollouts/step_{step:06d}.jsonl.zst" for step in (1, 2)]
    rewards = [line["request"]["tool_rewards"] for file in files for line in read_lines(file)]
    assert {"index": 0.25} in rewards
    assert refused.returncode != 0
    assert "tool index asks for 1 x (1 tape), and 0 of 3 nodes have it" in refused.stderr
