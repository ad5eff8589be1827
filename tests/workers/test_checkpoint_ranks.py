"""Checkpoints of several ranks: saved on n, resumed on m; faults of one rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.workers.checkpoint import open_checkpoint
from agentrl.workers.distributed import World
from agentrl.workers.snapshot import find_latest
from tests.fakes.checkpoint_ranks import OPTIMIZERS, resave_all, save_all
from tests.fakes.checkpoints import read_tensors
from tests.fakes.torchrun import RankOutput, ranks_of

pytestmark = pytest.mark.slow


def run_ranks(folder: Path, task: str, *rest: str, size: int) -> list[RankOutput]:
    with ranks_of("tests.fakes.checkpoint_ranks", task, str(folder), *rest, size=size) as ranks:
        return [rank.wait() for rank in ranks]


@pytest.fixture(scope="module")
def folder(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of one rank, of two, and of four."""
    folder = tmp_path_factory.mktemp("ranks")
    save_all(world, folder / "one")
    for task, size in (("two", 2), ("four", 4)):
        ended = run_ranks(folder, task, size=size)
        assert [rank.code for rank in ended] == [0] * size, "\n".join(rank.err for rank in ended)
    resave_all(world, folder / "two", folder / "one_of_two")
    return folder


def seen(folder: Path, task: str, size: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{task}_{rank}.json").read_text()) for rank in range(size)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    ("saved", "resumed"), [("one", "two_of_one"), ("two", "one_of_two"), ("two", "four_of_two")]
)
def test_resume_is_exact_on_another_number_of_ranks(
    folder: Path, optimizer: str, saved: str, resumed: str
):
    before, after = (folder / name / optimizer / "global_step_1" for name in (saved, resumed))
    expected, found = read_tensors(before), read_tensors(after)
    assert found.keys() == expected.keys()
    moment = "momentum_buffer/" if "muon" in optimizer else "exp_avg_sq/"
    assert any(name.startswith(moment) for name in found)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert (optimizer == "lora") == all("lora_" in name for name in found)
    has_head = found.get("critic/exp_avg/score.weight", torch.zeros(1)).any()
    assert (optimizer == "critic") == bool(has_head)
    states = [open_checkpoint(path).state for path in (before, after)]
    assert states[0].actor == states[1].actor
    assert states[0].critic == states[1].critic
    assert (states[1].critic_identity is not None) == (optimizer == "critic")


def test_rank_writes_its_share_only(folder: Path):
    for name, size in (("one", 1), ("two", 2), ("four_of_two", 4)):
        path = folder / name / "adamw/global_step_1"
        sizes = [file.stat().st_size for file in path.glob("rank_*.safetensors")]
        assert len(sizes) == size
        assert max(sizes) < 1.3 * sum(sizes) / size


def test_replicated_slice_is_written_by_one_of_its_ranks(folder: Path):
    written = seen(folder, "four", 4)
    for number in range(6):
        slices = [rank[f"weight/{number}"] for rank in written if f"weight/{number}" in rank]
        assert sorted(one["offset"] for one in slices) == [[0, 0], [3, 0]]
        assert sorted(one["shape"] for one in slices) == [[2, 2], [3, 2]]
    assert sum("step/w" in rank for rank in written) == 1
    assert min(len(rank) for rank in written) >= 3, "replicas share the work"


def test_full_disk_of_one_rank_is_an_error_of_all_and_leaves_earlier_checkpoints(folder: Path):
    for rank in seen(folder, "two", 2):
        for full in (0, 1):
            assert rank[f"disk of rank {full} is full"].startswith(
                "CheckpointError: cannot write a checkpoint: [Errno 27] File too large"
            )
            assert "global_step_3" in rank[f"disk of rank {full} is full"]
            assert rank[f"after {full}"] == ["global_step_1", "global_step_2"]
        assert rank["finished"] == "global_step_4"


def test_damaged_and_missing_files_of_one_rank_are_passed_over_by_all(folder: Path):
    assert [rank["latest"] for rank in seen(folder, "two", 2)] == ["global_step_1"] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_is_killed_in_the_background_write_leaves_the_previous_checkpoint(
    tmp_path: Path, world: World, rank: int
):
    ended = run_ranks(tmp_path, "killed", str(rank), size=2)
    assert ended[rank].code == -9
    assert ended[1 - rank].code == 2, ended[1 - rank].err
    assert "RankError" in ended[1 - rank].err
    latest = find_latest(tmp_path / "killed", world)
    assert latest is not None
    assert latest.path.name == "global_step_1"
    left = {path.name for path in (tmp_path / "killed").iterdir()}
    assert left == {"global_step_1"} if rank == 1 else {"global_step_1", ".writing-global_step_2"}
