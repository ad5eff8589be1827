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
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agentrl.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT = 1
MANIFEST = "manifest.json"
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
    actor: dict[str, int] = field(default_factory=dict[str, int])
    """The actor's counters."""
    trainer: dict[str, Any] = field(default_factory=dict[str, Any])
    """The trainer's counters: policy version, best metric, ..."""
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
    """Write a checkpoint, then drop the oldest beyond `keep`.

    Args:
        root: The folder of the run's checkpoints.
        snapshot: What to write.
        keep: Complete checkpoints to keep, this one included; None: all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: where it cannot be written; what was there before is untouched.
    """
    place = root / f"global_step_{snapshot.state.step}"
    aside = root / f".writing-{place.name}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        aside.mkdir()
        _write_files(aside, snapshot)
        _publish(aside, place)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise CheckpointError(f"cannot write a checkpoint: {error}", path=place) from error
    for old in _steps(root)[keep:] if keep else []:
        shutil.rmtree(old)
    return place


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
    for path in _steps(root):
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
    written = sorted(folder.iterdir())
    for file in written:
        _flush(file)
    entries = {file.name: _describe(file) for file in written}
    _write_json(folder / MANIFEST, {"format": FORMAT, "files": entries})
    _flush(folder / MANIFEST)
    _flush(folder)


def _publish(aside: Path, place: Path) -> None:
    """Make a complete folder visible; one of the same step, from an earlier run, gives way."""
    if place.exists():
        gone = place.with_name(f".replaced-{place.name}")
        place.rename(gone)
        aside.rename(place)
        shutil.rmtree(gone)
    else:
        aside.rename(place)
    _flush(place.parent)


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, sort_keys=True))


def _describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"bytes": file.stat().st_size, "sha256": digest}


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _steps(root: Path) -> list[Path]:
    """Checkpoint folders, the newest first."""
    found = dict(_numbered(root))
    return [found[step] for step in sorted(found, reverse=True)]


def _numbered(root: Path) -> Iterator[tuple[int, Path]]:
    for path in root.iterdir() if root.is_dir() else []:
        match = _FOLDER.fullmatch(path.name)
        if match:
            yield int(match.group(1)), path


def _remove_leftovers(root: Path) -> None:
    """Remove what a killed run was writing."""
    for pattern in (".writing-*", ".replaced-*"):
        for path in root.glob(pattern):
            shutil.rmtree(path)
