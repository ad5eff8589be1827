"""Checkpoints in a store, which has no rename: complete, or absent."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from agentrl.errors import CheckpointError, StoreError
from agentrl.remote_io import RemotePath
from agentrl.workers import checkpoint_writer
from agentrl.workers.checkpoint import (
    ModelIdentity,
    RunState,
    newest_first,
    open_checkpoint,
    set_aside_later,
)
from agentrl.workers.checkpoint_writer import CheckpointWriter, copy_to_host
from agentrl.workers.distributed import World
from agentrl.workers.snapshot import find_latest, identify, load_run, save_run
from tests.fakes.checkpoint_ranks import OPTIMIZERS, resave_all, save_all
from tests.fakes.checkpoints import read_tensors, whole, write_checkpoint
from tests.fakes.stores import memory_store, s3_server
from tests.fakes.torchrun import ranks_of
from tests.fakes.training import make_actor, make_batch, make_policy, random_rows, weights

pytestmark = pytest.mark.usefixtures("impatient")
IDENTITY = ModelIdentity("Toy", {"w": [2, 3]})
MEMORY = fsspec.get_filesystem_class("memory")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_writer, "_STORE_POLL_S", 0.01)


def write(root: RemotePath, step: int, value: float | None = None, **settings: Any) -> RemotePath:
    weight = torch.full((2, 3), float(step) if value is None else value)
    tensors = {"weight/w": weight, "exp_avg/w": torch.ones(2, 3), "step/w": torch.tensor(7.0)}
    path = write_checkpoint(root, RunState(step, IDENTITY), tensors, **settings)
    assert isinstance(path, RemotePath)
    return path


def steps(root: RemotePath) -> list[int]:
    return [step for step, _ in newest_first(root)]


def test_checkpoint_is_loaded_completely_and_leaves_no_other_file():
    path = write(memory_store(), 3)
    assert sorted(path.file_sizes()) == ["manifest.json", "rank_0.safetensors", "state.json"]
    checkpoint = open_checkpoint(path)
    assert (checkpoint.path, checkpoint.state.step) == (path, 3)
    assert torch.equal(read_tensors(path)["weight/w"], torch.full((2, 3), 3.0))
    assert read_tensors(path)["step/w"] == 7.0


def test_only_so_many_are_kept_and_the_best_one_and_the_newest_is_found(world: World):
    root = memory_store()
    for step in range(1, 6):
        write(root, step, keep=2, best=2)
    assert steps(root) == [5, 4, 2]
    assert [folder.name for folder in root.folders()] == [f"global_step_{n}" for n in (2, 4, 5)]
    found = find_latest(root, world)
    assert found is not None
    assert found.path == root / "global_step_5"


def test_checkpoints_of_later_steps_are_moved_and_not_overwritten(world: World):
    root = memory_store()
    for value in (1.0, 2.0):
        write(root, 3, value)
        write(root, 1)
        (moved,) = set_aside_later(root, 1)
    assert steps(root) == [1]
    assert str(moved) == f"{root}/superseded/global_step_3.1"
    for name, value in (("global_step_3", 1.0), ("global_step_3.1", 2.0)):
        assert read_tensors(root / "superseded" / name)["weight/w"][0, 0] == value


@pytest.mark.parametrize("name", ["rank_0.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["removed", "cut", "changed"])
def test_damaged_file_is_named_and_the_checkpoint_before_is_found(
    world: World, name: str, harm: str, caplog: pytest.LogCaptureFixture
):
    root = memory_store()
    write(root, 1)
    path = write(root, 2)
    data = (path / name).read_bytes()
    if harm == "removed":
        path.remove_files([name])
    else:
        (path / name).write_bytes(data[:-3] if harm == "cut" else data[:-3] + b"???")
    with pytest.raises(CheckpointError, match=f"global_step_2 is damaged: {name}"):
        open_checkpoint(path)
    with caplog.at_level(logging.WARNING):
        found = find_latest(root, world)
    assert found is not None
    assert found.path.name == "global_step_1"


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int | None], list[str]]]:
    """Count the requests that change the store; end the process at one of them."""
    log: list[str] = []
    limit: list[int | None] = [None]

    def counted(name: str) -> Any:
        function = getattr(MEMORY, name)

        def call(fs: Any, path: Any, *rest: Any, **more: Any) -> Any:
            log.append(f"{name} {path}")
            if len(log) == limit[0]:
                raise Killed
            return function(fs, path, *rest, **more)

        return call

    for name in ("pipe_file", "_open", "cp_file", "_rm"):
        monkeypatch.setattr(MEMORY, name, counted(name))

    def start(at: int | None) -> list[str]:
        log.clear()
        limit[0] = at
        return log

    yield start
    limit[0] = None


def test_resume_is_exact_run_killed_at_any_request_leaves_whole_checkpoints_alone(
    world: World, requests: Callable[[int | None], list[str]]
):
    def write_two() -> RemotePath:
        requests(None)
        root = memory_store()
        for step in (1, 2):
            write(root, step, keep=2)
        return root

    counted = write_two()
    events = requests(None)
    write(counted, 3, keep=2)
    assert len(events) > 10
    found = set[int]()
    for at, event in enumerate(list(events), start=1):
        root = write_two()
        requests(at)
        with pytest.raises(Killed):
            write(root, 3, keep=2)
        requests(None)
        for step, path in newest_first(root):
            assert read_tensors(path)["weight/w"][0, 0] == step, event
        newest = find_latest(root, world)
        assert newest is not None
        found.add(newest.state.step)
        write(root, 4, keep=2)
        kept = steps(root)
        assert kept in ([4, 3], [4, 2]), event
        assert len(root.folders()) == 2, f"after {event}: leftovers are removed"
    assert found == {2, 3}


def test_store_that_takes_no_more_leaves_the_checkpoint_before(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    root = memory_store()
    write(root, 1)
    opened = MEMORY._open

    def full(fs: Any, path: str, mode: str = "rb", **more: Any) -> Any:
        if "w" in mode and "rank_0.safetensors" in path:
            raise OSError(122, "Disk quota exceeded")
        return opened(fs, path, mode, **more)

    with monkeypatch.context() as patch:
        patch.setattr(MEMORY, "_open", full)
        with pytest.raises(CheckpointError) as caught:
            write(root, 2)
    assert "cannot write a checkpoint" in str(caught.value)
    assert "Disk quota exceeded" in str(caught.value)
    assert caught.value.details["path"] == root / "global_step_2"
    assert steps(root) == [1]


def test_store_that_cannot_be_read_ends_the_start_and_skips_no_checkpoint(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    root = memory_store()
    write(root, 1)
    write(root, 2)
    read = MEMORY.cat_file

    def cut(fs: Any, path: str, *rest: Any, **more: Any) -> bytes:
        if "global_step_2/rank_0" in path:
            raise ConnectionError("the line was cut")
        return read(fs, path, *rest, **more)

    monkeypatch.setattr(MEMORY, "cat_file", cut)
    with pytest.raises(StoreError, match=r"cannot read .*the line was cut"):
        find_latest(root, world)


def test_file_that_the_store_cut_is_no_checkpoint(monkeypatch: pytest.MonkeyPatch):
    root = memory_store()
    writer = CheckpointWriter(root, RunState(1, IDENTITY), patience_s=0.0)
    draft = writer.begin()
    writer.write_rank(draft, 0, copy_to_host({"weight/w": whole(torch.ones(2, 3))}, 0))
    file = draft / "rank_0.safetensors"
    file.write_bytes(file.read_bytes()[:-4])  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"the store has \d+ bytes of rank_0.safetensors"):
        writer.publish(draft)
    assert steps(root) == []


def test_rank_that_uploads_nothing_is_named_and_nothing_is_published():
    writer = CheckpointWriter(memory_store(), RunState(1, IDENTITY), num_ranks=2, patience_s=0.0)
    draft = writer.begin()
    writer.write_rank(draft, 0, copy_to_host({"weight/w": whole(torch.ones(2, 3))}, 0))
    with pytest.raises(CheckpointError, match="rank_1 did not write its part"):
        writer.publish(draft)


def test_resume_is_exact_resumed_run_is_the_uninterrupted_one_bit_for_bit(world: World):
    def actor(seed: int):
        return make_actor(make_policy(world, seed=seed), optim={"lr": 1e-2})

    batches = [make_batch(random_rows(8, seed=seed)) for seed in range(4)]
    first, second = actor(0), actor(9)
    for batch in batches[:2]:
        first.update_policy(batch, temperature=1.0)
    path = save_run(memory_store(), first, RunState(2, identify(first.policy)))
    expected = [first.update_policy(batch, temperature=1.0).metrics for batch in batches[2:]]
    load_run(open_checkpoint(path), second)
    assert [second.update_policy(b, temperature=1.0).metrics for b in batches[2:]] == expected
    for name, weight in weights(first.policy).items():
        assert torch.equal(weight, weights(second.policy)[name])


@pytest.mark.slow
def test_resume_is_exact_on_another_number_of_ranks_through_a_server_of_s3(
    world: World, tmp_path: Path
):
    with s3_server("bucket") as environment:
        root = RemotePath("s3://bucket/run")
        save_all(world, root / "one")
        task = ("remote", str(tmp_path), root.url)
        with ranks_of("tests.fakes.checkpoint_ranks", *task, environment=environment) as ranks:
            ended = [rank.wait() for rank in ranks]
        assert [rank.code for rank in ended] == [0, 0], "\n".join(rank.err for rank in ended)
        seen = [json.loads((tmp_path / f"remote_{rank}.json").read_text()) for rank in (0, 1)]
        resave_all(world, root / "two", root / "one_of_two")
        for optimizer in OPTIMIZERS:
            paths = [root / name / optimizer / "global_step_1" for name in ("one", "two_of_one")]
            one, two = (read_tensors(path) for path in paths)
            assert all(torch.equal(one[name], two[name]) for name in one | two), optimizer
            paths = [root / name / optimizer / "global_step_1" for name in ("two", "one_of_two")]
            one, two = (read_tensors(path) for path in paths)
            assert all(torch.equal(one[name], two[name]) for name in one | two), optimizer
        assert all("did not write its part" in rank["lost"] for rank in seen)
        assert [rank["latest"] for rank in seen] == ["global_step_1"] * 2
        kept = ["global_step_1", "global_step_3"]
        assert [rank["kept"] for rank in seen] == [kept] * 2
