"""The whole run -> disk, and back: complete, or absent.

    global_step_10/
        model.safetensors        weights, float32, Hugging Face names
        optimizer.safetensors    moments, named `moment/weight`
        state.json               identity of the model, counters, random streams, the data's order
        manifest.json            size and SHA-256 of each file above; written last

A checkpoint is written beside its place, flushed, and made visible by one rename; it goes by one
rename too. Nothing in it is ever unpickled. On several ranks the main one writes the whole,
gathered from all.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.atomic_io import (
    atomic_folder,
    flush,
    make_folder,
    move_into,
    remove_folder,
    remove_leftovers,
    restore_all_replaced,
)
from agentrl.errors import CheckpointError
from agentrl.workers.rng import RandomState

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
SUPERSEDED = "superseded"
"""Where checkpoints of an abandoned course of the run are put."""
_FOLDER = re.compile(r"global_step_(\d+)")


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What makes a checkpoint this model's and no other's."""

    architecture: str
    """The Hugging Face class."""
    shapes: dict[str, list[int]]
    """Of every weight."""


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class RunState:
    """Everything of a run that is no tensor; JSON values throughout."""

    step: int
    """Training steps done."""
    identity: ModelIdentity
    config_digest: str = ""
    """Of the resolved configuration."""
    origin: str = ""
    """Which policy the run began from; empty where that was not recorded."""
    actor: dict[str, int] = field(default_factory=dict[str, int])
    """The actor's counters."""
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])
    """The run's summary so far: best validation, seconds spent, ..."""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """Where the data's order stands."""
    random: list[RandomState] = field(default_factory=list[RandomState])
    """The random streams of each rank."""
    unlogged: dict[str, float] | None = None
    """Figures of the last step, where the run was stopped before it was validated and logged."""


_STATE = TypeAdapter(RunState)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment."""

    state: RunState
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def save_checkpoint(
    root: Path, snapshot: Snapshot, *, keep: int | None = None, best: int | None = None
) -> Path:
    """Write a checkpoint, then drop the oldest of those before it.

    Args:
        root: The folder of the run's checkpoints.
        snapshot: What to write.
        keep: Checkpoints to keep, this one included; None: all. Those of later steps are another
            run's: they neither count nor go (see `set_aside_later`).
        best: A step whose checkpoint is kept besides those.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: where it cannot be written; what was there before is untouched.
    """
    step = snapshot.state.step
    place = root / f"global_step_{step}"
    try:
        make_folder(root)
        remove_leftovers(root)
        with atomic_folder(place) as aside:
            _write_files(aside, snapshot)
    # safetensors tells a full disk by an error of its own.
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write a checkpoint: {error}", path=place) from error
    before = [path for number, path in newest_first(root) if number < step and number != best]
    _drop(before[keep - 1 :] if keep else [])
    return place


def set_aside_later(root: Path, step: int) -> list[Path]:
    """Move the checkpoints behind a step aside, for a run that goes on from there on its own.

    `find_latest` would take them for its newest. Nothing is lost: they lie in `superseded/`, under
    their own names, numbered where one was there before.

    Args:
        root: The folder of the run's checkpoints.
        step: Where the run starts; 0: anew.

    Returns:
        Where each lies now, the newest first.

    Raises:
        CheckpointError: where they cannot be moved.
    """
    later = [path for number, path in newest_first(root) if number > step]
    try:
        return move_into(later, root / SUPERSEDED)
    except OSError as error:
        raise CheckpointError(f"cannot set an earlier checkpoint aside: {error}",
                              path=root) from error  # fmt: skip


def load_checkpoint(path: Path, expected: ModelIdentity) -> Snapshot:
    """Read a checkpoint after checking every byte of it.

    Args:
        path: The checkpoint's folder.
        expected: The model that it must be of.

    Raises:
        CheckpointError: where it is incomplete, damaged, or of another model.
    """
    state = verify_checkpoint(path)
    _check_identity(path, state.identity, expected)
    return Snapshot(
        state=state, model=load_file(path / MODEL), optimizer=load_file(path / OPTIMIZER)
    )


def verify_checkpoint(path: Path) -> RunState:
    """Hold a checkpoint against its manifest, every byte of it.

    Returns:
        What it holds beside tensors.

    Raises:
        CheckpointError: naming the file that is missing, damaged or of another format.
    """
    files = _read_manifest(path)
    for name in sorted({MODEL, OPTIMIZER, STATE} | files.keys()):
        if name not in files or not _is_as_written(path / name, files[name]):
            raise CheckpointError(
                f"{path.name} is damaged: {name} is not what was written", path=path
            )
    return _read_contents(path)


def find_latest(root: Path) -> Path | None:
    """Find the newest complete checkpoint; each damaged one that is passed over is told.

    Returns:
        None where there is no checkpoint at all.

    Raises:
        CheckpointError: where there are some and all are damaged: to begin anew is not for us to
            choose then.
    """
    restore_all_replaced(root)
    damaged: list[str] = []
    for _, path in newest_first(root):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            logger.warning("%s; looking for the one before it", error)
            damaged.append(path.name)
        else:
            return path
    if damaged:
        raise CheckpointError(
            f"none of the run's checkpoints can be used: {', '.join(damaged)}",
            path=root,
            expected="one that is whole; trainer.resume_mode=disable begins anew and moves these "
            f"to {SUPERSEDED}/",
        )
    return None


def _read_manifest(path: Path) -> dict[str, Any]:
    """Read what is known of each file, by name."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        version, files = manifest["format"], dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path.name} is incomplete: it has no readable {MANIFEST}", path=path
        ) from error
    if version != FORMAT:
        raise CheckpointError(f"{path.name} has format {version}", path=path, expected=FORMAT)
    return files


def _read_contents(path: Path) -> RunState:
    """Read what is small of each file: whole bytes may still be of another format."""
    name = STATE
    try:
        state = _STATE.validate_json((path / name).read_bytes())
        for name in (MODEL, OPTIMIZER):
            with safe_open(path / name, "pt"):
                pass
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise _other_format(path, f"{name}: {where}: {first['msg']}") from error
    except SafetensorError as error:
        raise _other_format(path, f"{name}: {error}") from error
    return state


def _other_format(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path.name} is of another format: {what}", path=path)


def _check_identity(path: Path, found: ModelIdentity, expected: ModelIdentity) -> None:
    if found == expected:
        return
    raise CheckpointError(
        f"{path.name} is of another model: {_difference(found, expected)}",
        path=path,
        expected=f"a {expected.architecture} of the run's own shapes; trainer.resume_mode=disable "
        "or another trainer.default_local_dir begins anew",
    )


def _difference(found: ModelIdentity, expected: ModelIdentity) -> str:
    if found.architecture != expected.architecture:
        return f"{found.architecture}, not {expected.architecture}"
    for name in sorted(found.shapes.keys() | expected.shapes.keys()):
        theirs, ours = found.shapes.get(name), expected.shapes.get(name)
        if theirs != ours:
            return f"{name} is {theirs or 'absent'}, not {ours or 'absent'}"
    return "no difference"


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    """Write the files, and the manifest once they are on the disk."""
    save_file(_contiguous(snapshot.model), folder / MODEL)
    save_file(_contiguous(snapshot.optimizer), folder / OPTIMIZER)
    _write_json(folder / STATE, asdict(snapshot.state))
    files = sorted(folder.iterdir())
    for file in files:
        flush(file)
    entries = {file.name: _describe(file) for file in files}
    _write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})


def _drop(checkpoints: Iterable[Path]) -> None:
    """Remove old checkpoints. One that stays is told, and no reason to end a run."""
    for path in checkpoints:
        try:
            remove_folder(path)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path.name, error)


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="utf-8")


def _is_as_written(file: Path, entry: object) -> bool:
    try:
        return _describe(file) == entry
    except OSError:
        return False


def _describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def newest_first(root: Path) -> list[tuple[int, Path]]:
    """Checkpoint folders with their steps."""
    return sorted(_numbered(root), reverse=True)


def _numbered(root: Path) -> Iterator[tuple[int, Path]]:
    for path in root.iterdir() if root.is_dir() else []:
        match = _FOLDER.fullmatch(path.name)
        if match:
            yield int(match.group(1)), path
