"""The whole run -> disk, and back: complete, or absent.

    global_step_10/
        model.safetensors        weights, float32, Hugging Face names
        optimizer.safetensors    moments, named `moment/weight`
        state.json               identity of the model, counters, random streams, the data's order
        manifest.json            size and SHA-256 of each file above; written last

A checkpoint is written beside its place, flushed, and made visible by one rename. Nothing in it is
ever unpickled. On several ranks the main one writes the whole, gathered from all.
"""

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.errors import CheckpointError
from agentrl.training.folders import flush, folder_written_whole, remove_leftovers

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
SUPERSEDED = "superseded"
"""Where checkpoints of an abandoned course of the run are put."""
_FOLDER = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What makes a checkpoint this model's and no other's."""

    architecture: str
    """The Hugging Face class."""
    shapes: dict[str, list[int]]
    """Of every weight."""


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
    random: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """The random streams of each rank."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A run at one moment."""

    state: RunState
    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def save_checkpoint(root: Path, snapshot: Snapshot, *, keep: int | None = None) -> Path:
    """Write a checkpoint, then drop the oldest of those before it.

    Args:
        root: The folder of the run's checkpoints.
        snapshot: What to write.
        keep: Checkpoints to keep, this one included; None: all. Those of later steps are another
            run's: they neither count nor go (see `set_aside_later`).

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: where it cannot be written; what was there before is untouched.
    """
    step = snapshot.state.step
    place = root / f"global_step_{step}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        with folder_written_whole(place) as aside:
            _write_files(aside, snapshot)
    # safetensors tells a full disk by an error of its own.
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write a checkpoint: {error}", path=place) from error
    before = [path for number, path in _newest_first(root) if number < step]
    for old in before[keep - 1 :] if keep else []:
        shutil.rmtree(old)
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
    later = [path for number, path in _newest_first(root) if number > step]
    try:
        return [_move(path, root / SUPERSEDED) for path in later]
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
    verify_checkpoint(path)
    try:
        raw = json.loads((path / "state.json").read_text())
        state = RunState(**{**raw, "identity": ModelIdentity(**raw["identity"])})
        _check_identity(path, state.identity, expected)
        return Snapshot(
            state=state,
            model=load_file(path / "model.safetensors"),
            optimizer=load_file(path / "optimizer.safetensors"),
        )
    except (TypeError, KeyError, SafetensorError) as error:
        raise CheckpointError(f"{path.name} is of another format: {error}", path=path) from error


def verify_checkpoint(path: Path) -> None:
    """Hold a checkpoint against its manifest.

    Raises:
        CheckpointError: naming the file that is missing or damaged.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path.name} is incomplete: it has no readable manifest", path=path
        ) from error
    if manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path.name} has format {manifest.get('format')}", path=path, expected=FORMAT
        )
    for name, entry in files.items():
        if not (path / name).is_file() or _describe(path / name) != entry:
            raise CheckpointError(f"{path.name} is damaged: {name} is not what was written",
                                  path=path)  # fmt: skip


def find_latest(root: Path) -> Path | None:
    """Find the newest complete checkpoint; each damaged one that is passed over is told."""
    for _, path in _newest_first(root):
        try:
            verify_checkpoint(path)
        except CheckpointError as error:
            logger.warning("%s; looking for the one before it", error)
        else:
            return path
    return None


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
    save_file(_contiguous(snapshot.model), folder / "model.safetensors")
    save_file(_contiguous(snapshot.optimizer), folder / "optimizer.safetensors")
    _write_json(folder / "state.json", asdict(snapshot.state))
    entries = {file.name: _describe(file) for file in sorted(folder.iterdir())}
    _write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})


def _move(path: Path, folder: Path) -> Path:
    """Move a checkpoint into a folder, under the first of `name`, `name.1`, ... that is free."""
    folder.mkdir(exist_ok=True)
    names = (f"{path.name}.{number}" if number else path.name for number in count())
    moved = path.rename(next(folder / name for name in names if not (folder / name).exists()))
    flush(folder)
    flush(path.parent)
    return moved


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, sort_keys=True))


def _describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _newest_first(root: Path) -> list[tuple[int, Path]]:
    """Checkpoint folders with their steps."""
    return sorted(_numbered(root), reverse=True)


def _numbered(root: Path) -> Iterator[tuple[int, Path]]:
    for path in root.iterdir() if root.is_dir() else []:
        match = _FOLDER.fullmatch(path.name)
        if match:
            yield int(match.group(1)), path
