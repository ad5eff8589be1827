"""A run on two ranks with the real SGLang: one in each rank's keep, and servers that they share."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.runs import read_lines, tiny_run, write_yaml
from tests.fakes.serve_command import Serving
from tests.fakes.torchrun import ranks_of

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]


@pytest.fixture
def serving(tiny_home: Path, tmp_path: Path) -> Iterator[Serving]:
    """Two servers of the run's policy."""
    policy = tmp_path / "served/policy"
    policy.parent.mkdir()
    policy.symlink_to(tiny_home / "policy")
    serving = Serving(policy)
    yield serving
    serving.end()


def train(home: Path, folder: Path, engine: dict[str, Any]) -> None:
    """Two steps of five groups of three, which no two ranks can share evenly."""
    run = tiny_run(
        home,
        folder / "run",
        data__train_batch_size=5,
        data__val_files=None,
        rollout__n=3,
        rollout__engine=engine,
        actor__ppo_mini_batch_size=None,
        actor__entropy_coeff=1e-3,  # every row is computed, also without a reward
        trainer__rollout_data_dir=f"{folder}/rollouts",
        trainer__collective_timeout_s=240,
    )
    with ranks_of("agentrl", "train", str(write_yaml(folder / "run.yaml", run))) as ranks:
        outputs = [rank.wait(timeout_s=400) for rank in ranks]
    assert [rank.code for rank in outputs] == [0, 0], "\n".join(rank.err for rank in outputs)


def check(folder: Path) -> None:
    """Each step was sampled by the weights of the one before, as the trainer knows them."""
    lines = read_lines(folder / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["rollout/num_requests"] == 15
        assert line["training/rollout_probs_diff_max"] < 1e-4
    for step in (1, 2):
        requests = [
            r["request"] for r in read_lines(folder / f"rollouts/step_00000{step}.jsonl.zst")
        ]
        sampled = [t for r in requests for t in r["turns"] if t["role"] == "assistant"]
        versions = {version for turn in sampled for version, _, _ in turn["weight_versions"]}
        assert versions == {step - 1}
        assert len(requests) == 15


def test_two_ranks_with_an_engine_each(tiny_home: Path, tmp_path: Path):
    train(tiny_home, tmp_path, {"name": "sglang"})
    check(tmp_path)


def test_two_ranks_that_share_two_servers(tiny_home: Path, tmp_path: Path, serving: Serving):
    addresses = serving.start()
    train(tiny_home, tmp_path, {"name": "sglang_server", "sglang_server": {"addresses": addresses}})
    check(tmp_path)
