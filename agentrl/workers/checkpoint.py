"""Checkpoints of a run on disk: complete, or absent.

    global_step_10/
        model.safetensors        weights, float32, Hugging Face names
        optimizer.safetensors    moments, named `moment/weight`
        state.json               identity of the model, counters, random streams, the data's order
        manifest.json            size and SHA-256 of each file above; written last

A checkpoint is written to a temporary folder, flushed, and made visible by one rename. It is also
removed by one rename. It contains no pickles. On several ranks, the main rank gathers and writes
it.
"""

import hashlib
import json
import logging
import re
from contextlib import suppress
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
"""Subfolder for the checkpoints that a run from an earlier step replaces."""
_FOLDER = re.compile(r"global_step_(\d+)")


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Identifies the model of a checkpoint."""

    architecture: str
    """The Hugging Face class."""
    shapes: dict[str, list[int]]
    """Shape of every weight."""


@with_config(ConfigDict(extra="forbid"))
@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run except tensors, as JSON values."""

    step: int
    """Training steps done."""
    identity: ModelIdentity
    config_digest: str = ""
    """Digest of the resolved configuration."""
    origin: str = ""
    """The initial policy of the run; empty if it was not recorded."""
    actor: dict[str, int] = field(default_factory=dict[str, int])
    """The actor's counters."""
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])
    """The run's summary so far: best validation, seconds spent, ..."""
    data: dict[str, Any] = field(default_factory=dict[str, Any])
    """The position in the data."""
    random: list[RandomState] = field(default_factory=list[RandomState])
    """The random streams of each rank."""
    unlogged: dict[str, float] | None = None
    """Metrics of the last step, if the run stopped before it was validated and logged."""


_STATE = TypeAdapter(RunState)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of a run after one step."""

    state: RunState
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def save_checkpoint(
    root: Path, snapshot: Snapshot, *, keep: int | None = None, best: int | None = None
) -> Path:
    """Write a checkpoint, then remove the oldest earlier ones.

    Args:
        root: The folder of the run's checkpoints.
        snapshot: What to write.
        keep: Number of checkpoints to keep, including this one; None: all. Those of later steps
            belong to another run: they are not counted and not removed (see `set_aside_later`).
        best: A step; its checkpoint is kept in addition.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: if it cannot be written; earlier checkpoints are unchanged.
    """
    step = snapshot.state.step
    folder = root / f"global_step_{step}"
    try:
        make_folder(root)
        remove_leftovers(root)
        with atomic_folder(folder) as aside:
            _write_files(aside, snapshot)
    # safetensors reports a full disk by an error of its own.
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write a checkpoint: {error}", path=folder) from error
    before = [path for number, path in newest_first(root) if number < step and number != best]
    for path in before[keep - 1 :] if keep else []:
        try:
            remove_folder(path)
        except OSError as error:
            logger.warning("%s cannot be removed: %s", path.name, error)
    return folder


def set_aside_later(root: Path, step: int) -> list[Path]:
    """Move checkpoints of later steps to `superseded/`, for a run that continues from this step.

    Otherwise `find_latest` would return them. They keep their names, with a number if the name
    exists already.

    Args:
        root: The folder of the run's checkpoints.
        step: The first step of the run; 0: it starts from the beginning.

    Returns:
        The new path of each, the newest first.

    Raises:
        CheckpointError: if they cannot be moved.
    """
    later = [path for number, path in newest_first(root) if number > step]
    try:
        return move_into(later, root / SUPERSEDED)
    except OSError as error:
        raise CheckpointError(
            f"cannot move an earlier checkpoint to {SUPERSEDED}/: {error}", path=root
        ) from error


def load_checkpoint(path: Path, expected: ModelIdentity) -> Snapshot:
    """Read a checkpoint and verify every byte.

    Args:
        path: The checkpoint's folder.
        expected: The model of the run.

    Raises:
        CheckpointError: if it is incomplete, damaged, or of another model.
    """
    state = verify_checkpoint(path)
    if state.identity != expected:
        raise CheckpointError(
            f"{path.name} is of another model: {_difference(state.identity, expected)}",
            path=path,
            expected=f"a {expected.architecture} of the run's own shapes; "
            "trainer.resume_mode=disable or another trainer.default_local_dir starts from the "
            "beginning",
        )
    return Snapshot(
        state=state, model=load_file(path / MODEL), optimizer=load_file(path / OPTIMIZER)
    )


def verify_checkpoint(path: Path) -> RunState:
    """Check every byte of a checkpoint against its manifest.

    Returns:
        Its state except tensors.

    Raises:
        CheckpointError: with the file that is missing, damaged or of another format.
    """
    files = _read_manifest(path)
    for name in sorted({MODEL, OPTIMIZER, STATE} | files.keys()):
        is_as_written = False
        if name in files:
            with suppress(OSError):
                is_as_written = _describe(path / name) == files[name]
        if not is_as_written:
            raise CheckpointError(
                f"{path.name} is damaged: {name} is missing or was changed", path=path
            )
    return _read_contents(path)


def find_latest(root: Path) -> Path | None:
    """Find the newest complete checkpoint, and log each damaged one that is skipped.

    Returns:
        None if there is no checkpoint.

    Raises:
        CheckpointError: if all checkpoints are damaged. The user must choose to start again.
    """
    restore_all_replaced(root)
    damaged: list[str] = []
    for _, path in newest_first(root):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            logger.warning("%s; trying the previous one", error)
            damaged.append(path.name)
        else:
            return path
    if damaged:
        raise CheckpointError(
            f"none of the run's checkpoints can be used: {', '.join(damaged)}",
            path=root,
            expected="a complete checkpoint; trainer.resume_mode=disable starts from the beginning "
            f"and moves these to {SUPERSEDED}/",
        )
    return None


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the recorded size and digest of each file by name."""
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
    """Read the state and the headers: undamaged files may still be of another format."""
    name = STATE
    try:
        state = _STATE.validate_json((path / name).read_bytes())
        for name in (MODEL, OPTIMIZER):
            with safe_open(path / name, "pt"):
                pass
    except (ValidationError, SafetensorError) as error:
        text = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            text = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise CheckpointError(
            f"{path.name} is of another format: {name}: {text}", path=path
        ) from error
    return state


def _difference(found: ModelIdentity, expected: ModelIdentity) -> str:
    if found.architecture != expected.architecture:
        return f"{found.architecture}, not {expected.architecture}"
    for name in sorted(found.shapes.keys() | expected.shapes.keys()):
        theirs, ours = found.shapes.get(name), expected.shapes.get(name)
        if theirs != ours:
            return f"{name} is {theirs or 'absent'}, not {ours or 'absent'}"
    return "no difference"


def _write_files(folder: Path, snapshot: Snapshot) -> None:
    """Write the files; write the manifest after they are flushed."""
    save_file(_contiguous(snapshot.model), folder / MODEL)
    save_file(_contiguous(snapshot.optimizer), folder / OPTIMIZER)
    _write_json(folder / STATE, asdict(snapshot.state))
    files = sorted(folder.iterdir())
    for file in files:
        flush(file)
    entries = {file.name: _describe(file) for file in files}
    _write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="utf-8")


def _describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def newest_first(root: Path) -> list[tuple[int, Path]]:
    """List steps and checkpoint folders, the newest first."""
    folders = root.iterdir() if root.is_dir() else []
    matches = ((_FOLDER.fullmatch(path.name), path) for path in folders)
    return sorted(((int(match[1]), path) for match, path in matches if match), reverse=True)
