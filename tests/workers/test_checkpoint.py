import errno
import hashlib
import json
import logging
import os
import random
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from agentrl import atomic_io as folders
from agentrl.errors import CheckpointError
from agentrl.workers import checkpoint
from agentrl.workers.checkpoint import (
    ModelIdentity,
    RunState,
    Snapshot,
    find_latest,
    load_checkpoint,
    save_checkpoint,
    set_aside_later,
    verify_checkpoint,
)
from agentrl.workers.distributed import World
from agentrl.workers.rng import (
    RandomState,
    capture_random_state,
    restore_random_state,
    seed_everything,
)
from agentrl.workers.snapshot import identify, load_run, save_run
from tests.fakes.training import make_actor, make_batch, make_policy, random_rows, weights

IDENTITY = ModelIdentity("Toy", {"w": [2, 3]})
FILES = ["manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"]


def snapshot(step: int) -> Snapshot:
    state = RunState(step, IDENTITY, trainer={"best": 0.5}, data={"epoch": 1, "position": 8})
    return Snapshot(state, {"w": torch.full((2, 3), float(step))}, {"exp_avg/w": torch.ones(2, 3)})


def test_checkpoint_is_loaded_completely(tmp_path: Path):
    path = save_checkpoint(tmp_path, snapshot(10))
    assert path.name == "global_step_10"
    assert sorted(file.name for file in path.iterdir()) == FILES
    found = load_checkpoint(path, IDENTITY)
    assert found.state == snapshot(10).state
    assert torch.equal(found.model["w"], snapshot(10).model["w"])
    assert torch.equal(found.optimizer["exp_avg/w"], torch.ones(2, 3))


def test_only_so_many_are_kept_and_the_newest_is_found(tmp_path: Path):
    for step in (1, 2, 9, 10):
        save_checkpoint(tmp_path, snapshot(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_10", "global_step_9"]
    assert find_latest(tmp_path) == tmp_path / "global_step_10"


def test_best_checkpoint_is_kept_besides_the_last_ones(tmp_path: Path):
    for step in range(1, 7):
        save_checkpoint(tmp_path, snapshot(step), keep=2, best=2 if step > 1 else 1)
    assert {path.name for path in tmp_path.iterdir()} == {
        "global_step_2", "global_step_5", "global_step_6",
    }  # fmt: skip


def test_run_among_later_checkpoints_keeps_what_it_writes_and_what_is_later(tmp_path: Path):
    for step in (20, 40, 60):
        save_checkpoint(tmp_path, snapshot(step))
    for step in (10, 15, 18):
        place = save_checkpoint(tmp_path, snapshot(step), keep=2)
        assert load_checkpoint(place, IDENTITY).state.step == step
    steps = sorted(int(path.name.removeprefix("global_step_")) for path in tmp_path.iterdir())
    assert steps == [15, 18, 20, 40, 60]


@given(
    there=st.sets(st.integers(1, 30), max_size=6),
    step=st.integers(1, 30),
    keep=st.none() | st.integers(1, 5),
)
@settings(max_examples=20, deadline=None)
def test_resume_is_exact_the_last_checkpoint_is_kept_and_older_ones_are_removed(
    tmp_path_factory: pytest.TempPathFactory, there: set[int], step: int, keep: int | None
):
    root = tmp_path_factory.mktemp("c")
    for other in there:
        (root / f"global_step_{other}").mkdir()
    save_checkpoint(root, snapshot(step), keep=keep)
    older = sorted(other for other in there if other < step)
    kept = older if keep is None else older[len(older) - min(len(older), keep - 1) :]
    left = {int(path.name.removeprefix("global_step_")) for path in root.iterdir()}
    assert left == {step, *kept, *(other for other in there if other > step)}


def test_checkpoints_of_another_course_are_set_aside_and_not_lost(tmp_path: Path):
    for step in (20, 40, 60):
        save_checkpoint(tmp_path, snapshot(step))
    aside = tmp_path / "superseded"
    moved = set_aside_later(tmp_path, 20)
    assert moved == [aside / "global_step_60", aside / "global_step_40"]
    assert find_latest(tmp_path) == tmp_path / "global_step_20"
    assert load_checkpoint(moved[0], IDENTITY).state.step == 60
    assert set_aside_later(tmp_path, 20) == []


def test_what_was_set_aside_before_is_not_overwritten(tmp_path: Path):
    for value in (1.0, 2.0, 3.0):
        filled = replace(snapshot(40), model={"w": torch.full((2, 3), value)})
        save_checkpoint(tmp_path, filled)
        set_aside_later(tmp_path, 0)
    names = ["global_step_40", "global_step_40.1", "global_step_40.2"]
    found = [load_checkpoint(tmp_path / "superseded" / name, IDENTITY) for name in names]
    assert [float(one.model["w"][0, 0]) for one in found] == [1.0, 2.0, 3.0]
    assert find_latest(tmp_path) is None


def test_nothing_is_found_where_nothing_is(tmp_path: Path):
    assert find_latest(tmp_path / "nowhere") is None
    assert set_aside_later(tmp_path / "nowhere", 0) == []
    assert find_latest(tmp_path) is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["removed", "cut", "changed"])
def test_damaged_file_is_named_and_the_checkpoint_before_is_found(
    tmp_path: Path, name: str, harm: str, caplog: pytest.LogCaptureFixture
):
    save_checkpoint(tmp_path, snapshot(1))
    path = save_checkpoint(tmp_path, snapshot(2))
    data = (path / name).read_bytes()
    if harm == "removed":
        (path / name).unlink()
    else:
        broken = data[:-3] if harm == "cut" else data[:-3] + b"???"
        (path / name).write_bytes(broken)
    with pytest.raises(CheckpointError, match="global_step_2") as caught:
        load_checkpoint(path, IDENTITY)
    assert caught.value.details["path"] == path
    assert name == "manifest.json" or name in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert find_latest(tmp_path) == tmp_path / "global_step_1"
    assert "global_step_2" in caplog.text


def write_two(root: Path) -> None:
    for step in (1, 2):
        save_checkpoint(root, snapshot(step))


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Put a file into a checkpoint whose manifest says that it belongs there."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    manifest["files"][name] = {"bytes": len(content), "sha256": digest}
    (path / "manifest.json").write_text(json.dumps(manifest))


STATE = {"step": 2, "identity": {"architecture": "Toy", "shapes": {"w": [2, 3]}}}


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("state.json", b"\x00\xff no JSON", "state.json: .*Invalid JSON"),
        ("state.json", b"[]", "state.json"),
        ("state.json", b'{"step": 2}', "state.json: identity: Field required"),
        ("state.json", json.dumps(STATE | {"step": "two"}).encode(), "state.json: step"),
        ("state.json", json.dumps(STATE | {"later": 1}).encode(), "state.json: later"),
        ("state.json", json.dumps(STATE | {"random": [{}]}).encode(), r"state.json: random\.0"),
        ("model.safetensors", b"no tensors", "model.safetensors"),
        ("optimizer.safetensors", b"", "optimizer.safetensors"),
    ],
)
def test_file_of_another_format_is_named_and_the_checkpoint_before_is_found(
    tmp_path: Path, name: str, content: bytes, said: str
):
    write_two(tmp_path)
    path = tmp_path / "global_step_2"
    rewrite(path, name, content)
    with pytest.raises(CheckpointError, match=f"global_step_2 is of another format: {said}"):
        load_checkpoint(path, IDENTITY)
    assert find_latest(tmp_path) == tmp_path / "global_step_1"


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ("[]", "incomplete"),
        ("{}", "incomplete"),
        ('{"format": 1, "files": 3}', "incomplete"),
        ('{"format": 1, "files": {}}', "damaged: model.safetensors"),
        ('{"format": 2, "files": {}}', "has format 2"),
        ("\udcff", "incomplete"),
    ],
)
def test_manifest_that_does_not_vouch_for_every_file_is_refused(
    tmp_path: Path, manifest: str, said: str
):
    path = save_checkpoint(tmp_path, snapshot(2))
    (path / "manifest.json").write_text(manifest, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=f"global_step_2 .*{said}"):
        verify_checkpoint(path)


def test_run_with_only_damaged_checkpoints_is_not_started_again(tmp_path: Path):
    write_two(tmp_path)
    for path in tmp_path.iterdir():
        (path / "model.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"can be used: global_step_2, global_step_1"
    ) as error:
        find_latest(tmp_path)
    assert "trainer.resume_mode=disable" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", "global_step_2"]


def test_what_a_killed_run_was_writing_is_no_checkpoint(tmp_path: Path):
    save_checkpoint(tmp_path, snapshot(2)).rename(tmp_path / ".writing-global_step_2")
    assert find_latest(tmp_path) is None


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_resume_is_exact_any_changed_byte_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data
):
    path = save_checkpoint(tmp_path_factory.mktemp("c"), snapshot(3))
    file = path / data.draw(st.sampled_from(FILES[1:]))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    with pytest.raises(CheckpointError):
        verify_checkpoint(path)


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (folders, "flush", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        (checkpoint, "save_file", SafetensorError("I/O error: No space left on device")),
    ],
)
def test_full_disk_is_reported_and_leaves_nothing_half_written(
    tmp_path: Path, module: ModuleType, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    save_checkpoint(tmp_path, snapshot(1))

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, name, full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_checkpoint(tmp_path, snapshot(2))
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


def test_same_step_of_an_earlier_run_gives_way(tmp_path: Path):
    save_checkpoint(tmp_path, snapshot(1))
    changed = replace(snapshot(1), model={"w": torch.zeros(2, 3)})
    path = save_checkpoint(tmp_path, changed)
    assert torch.equal(load_checkpoint(path, IDENTITY).model["w"], torch.zeros(2, 3))
    assert [found.name for found in tmp_path.iterdir()] == ["global_step_1"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (ModelIdentity("Other", {"w": [2, 3]}), "Toy, not Other"),
        (ModelIdentity("Toy", {"w": [2, 4]}), r"w is \[2, 3\], not \[2, 4\]"),
        (ModelIdentity("Toy", {"w": [2, 3], "v": [1]}), r"v is absent, not \[1\]"),
    ],
)
def test_checkpoint_of_another_model_is_refused_by_name(
    tmp_path: Path, other: ModelIdentity, said: str
):
    path = save_checkpoint(tmp_path, snapshot(1))
    with pytest.raises(CheckpointError, match=said):
        load_checkpoint(path, other)


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path):
    path = save_checkpoint(tmp_path, snapshot(1))
    for file in path.iterdir():
        if file.suffix == ".json":
            json.loads(file.read_text())
        else:
            assert file.suffix == ".safetensors"


def draw_everywhere() -> tuple[float, float, float]:
    return random.gauss(0, 1), float(np.random.normal()), float(torch.randn(()))


def test_random_streams_go_on_where_they_stood():
    seed_everything(3)
    draw_everywhere()
    state = RandomState(**json.loads(json.dumps(asdict(capture_random_state()))))
    expected = draw_everywhere()
    seed_everything(4)
    restore_random_state(state)
    assert draw_everywhere() == expected


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_is_exact_resumed_run_is_the_uninterrupted_one_bit_for_bit(
    world: World, tmp_path: Path, optimizer: str
):
    def actor(seed: int):
        return make_actor(
            make_policy(world, seed=seed),
            ppo_mini_batch_size=2, shuffle=True,
            optim={"name": optimizer, "lr": 1e-2, "lr_scheduler": "cosine"},
        )  # fmt: skip

    batches = [make_batch(random_rows(8, seed=seed)) for seed in range(4)]
    first = actor(0)
    seed_everything(1)
    for batch in batches[:2]:
        first.update_policy(batch, temperature=1.0)
    state = RunState(2, identify(first.policy), trainer={"best": 1}, data={"epoch": 0})
    path = save_run(tmp_path, first, state)
    draws = draw_everywhere()
    expected = [first.update_policy(batch, temperature=1.0).metrics for batch in batches[2:]]

    second = actor(9)
    seed_everything(77)
    found = load_run(path, second)
    assert (found.step, found.trainer, found.data) == (2, {"best": 1}, {"epoch": 0})
    assert draw_everywhere() == draws
    assert [second.update_policy(b, temperature=1.0).metrics for b in batches[2:]] == expected
    for name, weight in weights(first.policy).items():
        assert torch.equal(weight, weights(second.policy)[name])


def test_checkpoint_of_another_optimizer_is_refused(world: World, tmp_path: Path):
    policy = make_policy(world)
    muon = make_actor(policy, optim={"name": "muon"})
    muon.update_policy(make_batch(random_rows(4)), temperature=1.0)
    path = save_run(tmp_path, muon, RunState(1, identify(policy)))
    with pytest.raises(CheckpointError, match="another optimizer"):
        load_run(path, make_actor(make_policy(world)))


def test_checkpoint_of_another_model_changes_nothing(world: World, tmp_path: Path):
    small, large = make_policy(world), make_policy(world, num_hidden_layers=3)
    path = save_run(tmp_path, make_actor(small), RunState(1, identify(small)))
    before = weights(large)
    with pytest.raises(CheckpointError, match=r"layers\.2"):
        load_run(path, make_actor(large))
    assert all(torch.equal(weight, before[name]) for name, weight in weights(large).items())
