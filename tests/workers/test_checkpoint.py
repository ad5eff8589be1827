import copy
import errno
import hashlib
import json
import logging
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from agentrl import atomic_io as folders
from agentrl.errors import CheckpointError
from agentrl.workers import checkpoint_writer
from agentrl.workers.checkpoint import (
    Checkpoint,
    ModelIdentity,
    Piece,
    RunState,
    open_checkpoint,
    set_aside_later,
)
from agentrl.workers.distributed import World
from agentrl.workers.rng import (
    RandomState,
    capture_random_state,
    restore_random_state,
    seed_everything,
)
from agentrl.workers.snapshot import find_latest, identify, load_run, save_run
from tests.fakes.checkpoints import read_tensors, write_checkpoint
from tests.fakes.training import make_actor, make_batch, make_policy, random_rows, weights

IDENTITY = ModelIdentity("Toy", {"w": [2, 3]})
FILES = ["manifest.json", "rank_0.safetensors", "state.json"]


def state_of(step: int) -> RunState:
    return RunState(step, IDENTITY, trainer={"best": 0.5}, data={"epoch": 1, "position": 8})


def write(
    root: Path, step: int, *, keep: int | None = None, best: int | None = None,
    value: float | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint whose weight is the number of its step, or a value."""
    weight = torch.full((2, 3), float(step) if value is None else value)
    tensors = {"weight/w": weight, "exp_avg/w": torch.ones(2, 3), "step/w": torch.tensor(7.0)}
    return write_checkpoint(root, state_of(step), tensors, keep=keep, best=best)


def load(path: Path) -> Checkpoint:
    """Verify every byte of a checkpoint of this model."""
    checkpoint = open_checkpoint(path)
    checkpoint.check_model(IDENTITY)
    return checkpoint


def latest(root: Path, world: World) -> Path | None:
    found = find_latest(root, world)
    return None if found is None else found.path


def weight_in(path: Path) -> float:
    return float(read_tensors(path)["weight/w"][1, 2])


def test_checkpoint_is_loaded_completely(tmp_path: Path):
    path = write(tmp_path, 10)
    assert path.name == "global_step_10"
    assert sorted(file.name for file in path.iterdir()) == FILES
    assert load(path).state == state_of(10)
    tensors = read_tensors(path)
    assert torch.equal(tensors["weight/w"], torch.full((2, 3), 10.0))
    assert torch.equal(tensors["exp_avg/w"], torch.ones(2, 3))
    assert torch.equal(tensors["step/w"], torch.tensor(7.0))


def test_file_of_a_rank_is_read_by_safetensors(tmp_path: Path):
    tensors = {"weight/w": torch.randn(3, 5), "exp_avg/w": torch.randn(5).bfloat16()}
    path = write_checkpoint(tmp_path, state_of(1), tensors)
    stored = load_file(path / "rank_0.safetensors")
    assert stored.keys() == tensors.keys()
    assert all(torch.equal(stored[name], tensors[name]) for name in tensors)
    assert [stored[name].dtype for name in tensors] == [torch.float32, torch.bfloat16]


def test_state_larger_than_a_piece_is_copied_written_and_verified_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(checkpoint_writer, "PIECE_BYTES", 64)
    tensors = {f"weight/{n}": torch.randn(n, 7) for n in range(1, 9)} | {"step/w": torch.ones(())}
    path = write_checkpoint(tmp_path, state_of(1), tensors)
    pieces = open_checkpoint(path).manifest.files["rank_0.safetensors"]
    assert len(pieces) > 10
    assert {piece.num_bytes for piece in pieces[1:-1]} == {64}
    found = read_tensors(path)
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
    content = bytearray((path / "rank_0.safetensors").read_bytes())
    content[-200] ^= 1
    (path / "rank_0.safetensors").write_bytes(content)
    shares = [refuses(path, rank) for rank in range(3)]
    assert shares.count(True) == 1, "each byte is verified by one rank"


def refuses(path: Path, rank: int) -> bool:
    try:
        open_checkpoint(path, rank=rank, num_ranks=3)
    except CheckpointError:
        return True
    return False


def test_checkpoint_of_format_1_is_loaded(tmp_path: Path):
    path = tmp_path / "global_step_3"
    path.mkdir()
    weight = torch.randn(2, 3)
    save_file({"w": weight}, path / "model.safetensors")
    save_file({"exp_avg/w": torch.ones(2, 3), "step/w": torch.ones(())},
              path / "optimizer.safetensors")  # fmt: skip
    (path / "state.json").write_text(json.dumps(asdict(state_of(3))))
    files = {
        file.name: {
            "bytes": file.stat().st_size,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        }
        for file in path.iterdir()
    }
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": files}))
    assert load(path).state == state_of(3)
    found = read_tensors(path)
    assert found.keys() == {"weight/w", "exp_avg/w", "step/w"}
    assert torch.equal(found["weight/w"], weight)
    (path / "model.safetensors").write_bytes(b"?" * files["model.safetensors"]["bytes"])
    with pytest.raises(CheckpointError, match=r"damaged: model\.safetensors"):
        load(path)


def test_only_so_many_are_kept_and_the_newest_is_found(world: World, tmp_path: Path):
    for step in (1, 2, 9, 10):
        write(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_10", "global_step_9"]
    assert latest(tmp_path, world) == tmp_path / "global_step_10"


def test_best_checkpoint_is_kept_besides_the_last_ones(tmp_path: Path):
    for step in range(1, 7):
        write(tmp_path, step, keep=2, best=2 if step > 1 else 1)
    assert {path.name for path in tmp_path.iterdir()} == {
        "global_step_2", "global_step_5", "global_step_6",
    }  # fmt: skip


def test_run_among_later_checkpoints_keeps_what_it_writes_and_what_is_later(tmp_path: Path):
    for step in (20, 40, 60):
        write(tmp_path, step)
    for step in (10, 15, 18):
        place = write(tmp_path, step, keep=2)
        assert load(place).state.step == step
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
    write(root, step, keep=keep)
    older = sorted(other for other in there if other < step)
    kept = older if keep is None else older[len(older) - min(len(older), keep - 1) :]
    left = {int(path.name.removeprefix("global_step_")) for path in root.iterdir()}
    assert left == {step, *kept, *(other for other in there if other > step)}


def test_checkpoints_of_another_course_are_set_aside_and_not_lost(world: World, tmp_path: Path):
    for step in (20, 40, 60):
        write(tmp_path, step)
    aside = tmp_path / "superseded"
    moved = set_aside_later(tmp_path, 20)
    assert moved == [aside / "global_step_60", aside / "global_step_40"]
    assert latest(tmp_path, world) == tmp_path / "global_step_20"
    assert load(moved[0]).state.step == 60
    assert set_aside_later(tmp_path, 20) == []


def test_what_was_set_aside_before_is_not_overwritten(world: World, tmp_path: Path):
    for value in (1.0, 2.0, 3.0):
        write(tmp_path, 40, value=value)
        set_aside_later(tmp_path, 0)
    names = ["global_step_40", "global_step_40.1", "global_step_40.2"]
    assert [weight_in(tmp_path / "superseded" / name) for name in names] == [1.0, 2.0, 3.0]
    assert latest(tmp_path, world) is None


def test_nothing_is_found_where_nothing_is(world: World, tmp_path: Path):
    assert latest(tmp_path / "nowhere", world) is None
    assert set_aside_later(tmp_path / "nowhere", 0) == []
    assert latest(tmp_path, world) is None


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("harm", ["removed", "cut", "changed"])
def test_damaged_file_is_named_and_the_checkpoint_before_is_found(
    world: World, tmp_path: Path, name: str, harm: str, caplog: pytest.LogCaptureFixture
):
    write(tmp_path, 1)
    path = write(tmp_path, 2)
    data = (path / name).read_bytes()
    if harm == "removed":
        (path / name).unlink()
    else:
        broken = data[:-3] if harm == "cut" else data[:-3] + b"???"
        (path / name).write_bytes(broken)
    with pytest.raises(CheckpointError, match="global_step_2") as caught:
        load(path)
    assert caught.value.details["path"] == path
    assert name == "manifest.json" or name in str(caught.value)
    with caplog.at_level(logging.WARNING):
        assert latest(tmp_path, world) == tmp_path / "global_step_1"
    assert "global_step_2" in caplog.text


def write_two(root: Path) -> None:
    for step in (1, 2):
        write(root, step)


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Put a file into a checkpoint whose manifest says that it belongs there."""
    manifest = open_checkpoint(path).manifest
    (path / name).write_bytes(content)
    piece = Piece(len(content), hashlib.sha256(content).hexdigest())
    changed = replace(manifest, files=manifest.files | {name: [piece]})
    (path / "manifest.json").write_text(changed.to_json())


WRONG: list[Any] = ["absent", None, "é", -1, {"x": 1}]
"""What a damaged value becomes; the first is removed."""


def damaged(tree: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Make the copies of a JSON tree in which one value is wrong; of long lists, the first ones."""
    inner = tree
    for key in keys:
        inner = inner[key]
    for key in inner if isinstance(inner, dict) else range(min(2, len(inner))):
        for wrong in WRONG:
            changed = copy.deepcopy(tree)
            above = changed
            for each in keys:
                above = above[each]
            if wrong == "absent":
                del above[key]
            else:
                above[key] = wrong
            yield (*keys, key), changed
        if isinstance(inner[key], dict | list):
            yield from damaged(tree, (*keys, key))


@pytest.mark.slow
def test_any_damage_of_a_file_whose_digest_is_right_names_the_file(world: World, tmp_path: Path):
    policy = make_policy(world)
    actor = make_actor(policy)
    actor.update_policy(make_batch(random_rows(4)), temperature=1.0)
    path = save_run(tmp_path, actor, RunState(1, identify(policy)))
    names = ["state.json", "rank_0.safetensors"]
    whole = {name: (path / name).read_bytes() for name in [*names, "manifest.json"]}
    size = 8 + int.from_bytes(whole[names[1]][:8], "little")
    header = json.loads(whole[names[1]][8:size])
    first = dict([*header.items()][:1])
    found = [("state.json", keys, json.dumps(tree).encode())
             for keys, tree in damaged(json.loads(whole["state.json"]))
             if keys[0] != "identity"]  # fmt: skip
    for keys, tree in damaged(first):
        text = json.dumps({**tree, **dict([*header.items()][1:])}).encode()
        content = len(text).to_bytes(8, "little") + text + whole[names[1]][size:]
        found.append((names[1], keys, content))
    errors: list[tuple[str, tuple[Any, ...], str]] = []
    for name, keys, content in found:
        for each, before in whole.items():
            (path / each).write_bytes(before)
        rewrite(path, name, content)
        try:
            load_run(open_checkpoint(path), actor)
        except CheckpointError as error:
            errors.append((name, keys, str(error)))
    assert [each for each in errors if each[0] not in each[2]] == []
    assert len(errors) > len(found) // 2


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
        ("rank_0.safetensors", b"no tensors", "rank_0.safetensors"),
        ("rank_0.safetensors", b"", "rank_0.safetensors"),
    ],
)
def test_file_of_another_format_is_named_and_the_checkpoint_before_is_found(
    world: World, tmp_path: Path, name: str, content: bytes, said: str
):
    write_two(tmp_path)
    path = tmp_path / "global_step_2"
    rewrite(path, name, content)
    with pytest.raises(CheckpointError, match=f"global_step_2 is of another format: {said}"):
        load(path)
    assert latest(tmp_path, world) == tmp_path / "global_step_1"


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ("[]", "incomplete"),
        ("{}", "incomplete"),
        ('{"format": 1, "files": 3}', "incomplete"),
        ('{"format": 1, "files": {}}', "damaged: model.safetensors"),
        ('{"format": 2, "files": {}, "tensors": {}, "sha256": ""}', "incomplete"),
        ('{"format": 2, "files": {}, "tensors": {}}', "incomplete"),
        ('{"format": 3}', "has format 3"),
        ("\udcff", "incomplete"),
    ],
)
def test_manifest_that_does_not_vouch_for_every_file_is_refused(
    tmp_path: Path, manifest: str, said: str
):
    path = write(tmp_path, 2)
    (path / "manifest.json").write_text(manifest, errors="surrogateescape")
    with pytest.raises(CheckpointError, match=f"global_step_2 .*{said}"):
        open_checkpoint(path)


def test_run_with_only_damaged_checkpoints_is_not_started_again(world: World, tmp_path: Path):
    write_two(tmp_path)
    for path in tmp_path.iterdir():
        (path / "rank_0.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"can be used: global_step_2, global_step_1"
    ) as error:
        latest(tmp_path, world)
    assert "trainer.resume_mode=disable" in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", "global_step_2"]


def test_what_a_killed_run_was_writing_is_no_checkpoint(world: World, tmp_path: Path):
    write(tmp_path, 2).rename(tmp_path / ".writing-global_step_2")
    assert latest(tmp_path, world) is None


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_resume_is_exact_any_changed_byte_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data
):
    path = write(tmp_path_factory.mktemp("c"), 3)
    file = path / data.draw(st.sampled_from(FILES[1:]))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    file.write_bytes(content)
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (folders, "flush", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        (os, "fsync", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    ],
)
def test_full_disk_is_reported_and_leaves_nothing_half_written(
    tmp_path: Path, module: ModuleType, name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path, 1)

    def full(*_: object) -> None:
        raise error

    monkeypatch.setattr(module, name, full)
    with pytest.raises(CheckpointError, match="No space left"):
        write(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["global_step_1"]


def test_same_step_of_an_earlier_run_gives_way(tmp_path: Path):
    write(tmp_path, 1)
    path = write(tmp_path, 1, value=9.0)
    assert weight_in(path) == 9.0
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
    path = write(tmp_path, 1)
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(path).check_model(other)


def test_nothing_in_a_checkpoint_is_a_pickle(tmp_path: Path):
    path = write(tmp_path, 1)
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
    found = load_run(open_checkpoint(path), second)
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
        load_run(open_checkpoint(path), make_actor(make_policy(world)))


def test_checkpoint_of_another_model_changes_nothing(world: World, tmp_path: Path):
    small, large = make_policy(world), make_policy(world, num_hidden_layers=3)
    path = save_run(tmp_path, make_actor(small), RunState(1, identify(small)))
    before = weights(large)
    with pytest.raises(CheckpointError, match=r"layers\.2"):
        load_run(open_checkpoint(path), make_actor(large))
    assert all(torch.equal(weight, before[name]) for name, weight in weights(large).items())
