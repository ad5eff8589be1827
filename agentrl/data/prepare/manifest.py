"""Make files once: what was made with the same arguments is left alone.

`manifest.json` in the folder says what made its files. It is written before the first of them as
incomplete and after the last as complete, so a run that was killed is noticed, and files that
somebody else put there are never overwritten. Inputs stand in it by their content, so a folder that
was moved, or is written another way, is still the same.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.errors import DataError
from agentrl.files import remove_drafts, written_whole

Arguments = dict[str, Any]
_NAME = "manifest.json"
_MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")


class Manifest(BaseModel):
    """What made the files of a folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    maker: str
    """Name of the generator, with its version: another version makes other files."""
    arguments: Arguments
    complete: bool
    """Whether every file was written."""


def make_once(
    out_dir: Path,
    maker: str,
    arguments: Mapping[str, Any],
    files: Sequence[Path],
    write: Callable[[], None],
) -> bool:
    """Call `write`, unless `files` were made with the same arguments before.

    Where `write` raises and has left no file, nothing of it is left: no manifest, and no folder
    that was not there before. (What was interrupted is known as unfinished.)

    Returns:
        Whether anything was written.

    Raises:
        DataError: where the folder has such files and no manifest: they are somebody else's.
    """
    wanted = Manifest(maker=maker, arguments=dict(arguments), complete=True)
    path = out_dir / _NAME
    found = _read(path)
    present = [file for file in files if file.exists()]
    if found == wanted and len(present) == len(files):
        return False
    if present and (found is None or _family(found) != _family(wanted)):
        raise DataError(
            f"{present[0]} exists and was not made by {maker}",
            file=present[0],
            expected="another out_dir, or a folder without these files",
        )
    remove_drafts(out_dir)
    was_there = out_dir.is_dir()
    _write(path, wanted.model_copy(update={"complete": False}))
    try:
        write()
    except Exception:
        if list(out_dir.iterdir()) == [path]:
            path.unlink()
            if not was_there:
                out_dir.rmdir()
        raise
    _write(path, wanted)
    return True


def content_of(path: Path | str) -> str:
    """Name an input by its content: the hash of a file, or of the files in a model's folder.

    What is no path here, such as a name of the hub, stands for itself.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.suffix in _MODEL_FILES and p.name != _NAME)
        lines = "\n".join(f"{file.name} {content_of(file)}" for file in files)
        return hashlib.sha256(lines.encode()).hexdigest()
    if not path.is_file():
        return str(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_made(out_dir: Path) -> bool:
    """Whether a folder's files were made whole, by whatever arguments."""
    found = _read(out_dir / _NAME)
    return found is not None and found.complete


def is_unfinished(out_dir: Path) -> bool:
    """Whether the making of a folder's files was begun, and not ended."""
    found = _read(out_dir / _NAME)
    return found is not None and not found.complete


def _family(manifest: Manifest) -> str:
    return manifest.maker.partition("/")[0]


def _read(path: Path) -> Manifest | None:
    try:
        return Manifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError, ValidationError, ValueError):
        return None


def _write(path: Path, manifest: Manifest) -> None:
    with written_whole(path) as partial:
        text = json.dumps(manifest.model_dump(mode="json"), indent=2)
        partial.write_text(text + "\n", encoding="utf-8")
