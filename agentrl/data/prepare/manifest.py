"""Make files once. Finished files are never replaced, because a run may use them.

`manifest.json` in the folder records what made its files. It is written as incomplete before the
first file and as complete after the last one. So an interrupted run is detected, and files of
another origin are never overwritten. Inputs are recorded by their content, so moving a folder
changes nothing.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.atomic_io import atomic_file, remove_drafts
from agentrl.config.schema.prepare import Geometry3kConfig, Gsm8kConfig
from agentrl.data.files import Row, write_parquet
from agentrl.errors import DataError

Arguments = dict[str, Any]
SPLITS = ("train", "test")
"""The splits of a dataset that is converted."""
_NAME = "manifest.json"
_MAX_SHOWN = 60
"""Maximum length of a value in an error."""
_MODEL_FILES = (".safetensors", ".json", ".jinja", ".model", ".txt")


class Manifest(BaseModel):
    """A record of what made the files of a folder."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    maker: str
    """Name and version of the generator. Another version makes other files."""
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
    """Call `write`, unless `files` exist and were made with the same arguments.

    Finished files that were made with other arguments are not replaced. If `write` raises and has
    written no file, the manifest and a new folder are removed. Otherwise the folder stays marked as
    unfinished.

    Returns:
        Whether files were written.

    Raises:
        DataError: See `must_make`.
    """
    if not must_make(out_dir, maker, arguments, files):
        return False
    wanted = Manifest(maker=maker, arguments=dict(arguments), complete=True)
    path = out_dir / _NAME
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


def must_make(
    out_dir: Path, maker: str, arguments: Mapping[str, Any], files: Sequence[Path]
) -> bool:
    """Return whether `make_once` would write. Changes nothing.

    Raises:
        DataError: If the folder has such files without a manifest (of another origin), or files
            that were made with other arguments.
    """
    wanted = Manifest(maker=maker, arguments=dict(arguments), complete=True)
    found = _read(out_dir / _NAME)
    present = [file for file in files if file.exists()]
    if found == wanted and len(present) == len(files):
        return False
    generator = wanted.maker.partition("/")[0]
    if present and (found is None or found.maker.partition("/")[0] != generator):
        raise DataError(
            f"{present[0]} exists and was not made by {maker}",
            file=present[0],
            expected="another out_dir, or a folder without these files",
        )
    if present and found is not None and found.complete and found != wanted:
        raise _made_otherwise(out_dir, found, wanted)
    return True


def content_of(path: Path | str) -> str:
    """Identify an input by its content: the hash of a file, or of the files of a model's folder.

    A string that is not a path, such as a name on the hub, is returned unchanged.
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
    """Whether the files of a folder were completed, with any arguments."""
    found = _read(out_dir / _NAME)
    return found is not None and found.complete


def is_unfinished(out_dir: Path) -> bool:
    """Whether the files of a folder were started but not completed."""
    found = _read(out_dir / _NAME)
    return found is not None and not found.complete


def _made_otherwise(out_dir: Path, found: Manifest, wanted: Manifest) -> DataError:
    changes = _changes(found.arguments, wanted.arguments)
    if found.maker != wanted.maker:
        changes.append(f"maker: {found.maker} -> {wanted.maker}")
    return DataError(
        f"{out_dir} was made with other settings or inputs; finished files are not replaced, "
        "because a run may use them",
        changed="; ".join(changes) or "one of its files is missing",
        expected=f"another out_dir, or the old settings; to make it again, delete {out_dir}",
    )


def _changes(found: Any, wanted: Any, key: str = "") -> list[str]:
    """List the dotted keys with different values, with both values."""
    if found == wanted:
        return []
    if isinstance(found, dict) and isinstance(wanted, dict):
        old, new = cast("Arguments", found), cast("Arguments", wanted)
        names = list(dict.fromkeys([*old, *new]))
        return [
            change
            for name in names
            for change in _changes(old.get(name), new.get(name), f"{key}.{name}".lstrip("."))
        ]
    if key == "of":
        return ["the content of the input files"]
    values = json.dumps(found), json.dumps(wanted)
    is_short = max(map(len, values)) <= _MAX_SHOWN
    return [f"{key}: {values[0]} -> {values[1]}" if is_short else key]


def _read(path: Path) -> Manifest | None:
    try:
        return Manifest.model_validate(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError, ValidationError, ValueError):
        return None


def _write(path: Path, manifest: Manifest) -> None:
    with atomic_file(path) as partial:
        text = json.dumps(manifest.model_dump(mode="json"), indent=2)
        partial.write_text(text + "\n", encoding="utf-8")


class SplitFiles(NamedTuple):
    """The files of a converted dataset, and whether this call made them."""

    train: Path
    test: Path
    made: bool


def convert_splits(
    config: Gsm8kConfig | Geometry3kConfig,
    maker: str,
    inputs: Sequence[Path],
    read: Callable[[str], tuple[Sequence[Row], str]],
    convert: Callable[[Row, int, str, str], Row],
) -> SplitFiles:
    """Write train.parquet and test.parquet to `out_dir`, unless they exist.

    Args:
        config: The settings of the dataset.
        maker: Name and version of the conversion.
        inputs: The files that are read; their content is recorded.
        read: Returns the rows of a split, and their source for errors.
        convert: Makes a row from a raw row, its index, its split and its source.

    Raises:
        DataError: See `make_once`, and those of `read` and `convert`.
    """
    files = [config.out_dir / f"{split}.parquet" for split in SPLITS]
    arguments = config.model_dump(mode="json", exclude={"out_dir", "source_dir"})
    if inputs:
        arguments["of"] = [content_of(path) for path in inputs]

    def write() -> None:
        for split, file in zip(SPLITS, files, strict=True):
            raw, source = read(split)
            chosen = raw[: config.max_samples]
            write_parquet(file, [convert(row, n, split, source) for n, row in enumerate(chosen)])

    return SplitFiles(*files, made=make_once(config.out_dir, maker, arguments, files, write))
