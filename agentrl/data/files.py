"""Rows on disk: Parquet, JSON and JSONL in, and out again atomically.

Parquet goes through `datasets`, which knows its own column types. JSON is read as it stands:
Arrow's reader would turn `"4"` into 4 and a text that looks like a date into a date, drop keys
that only some rows have, and lose the line of an error.
"""

import importlib
import json
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentrl.atomic_io import atomic_file
from agentrl.errors import DataError

_TEXT = "utf-8-sig"
"""UTF-8; the mark that some editors put at the beginning is passed over."""
Row = dict[str, Any]
"""A row as its file has it: string keys stop at the dataset's border."""


def read_rows(file: str | Path, max_rows: int | None = None) -> list[Row]:
    """Read the rows of a data file.

    Args:
        file: Parquet, JSON or JSONL.
        max_rows: Give only the first rows; of Parquet, read no others. None: all.

    Raises:
        DataError: for a missing, empty, unknown or malformed file, or a row that is no mapping.
    """
    path = Path(file).expanduser()
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"unknown kind of file: {path.name}", file=path, expected=_KINDS)
    if not path.is_file():
        raise DataError(f"no file {path}", file=path, expected="an existing data file")
    try:
        rows = reader(path) if max_rows is None else _first_rows(path, reader, max_rows)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the file: {error}", file=path) from None
    if not rows:
        raise DataError("the file has no rows", file=path, expected="at least one row")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):  # pyright: ignore[reportUnnecessaryIsInstance] - JSON's
            reason = f"a row is {type(row).__name__}, not a mapping"
            raise DataError(reason, file=path, row=number, expected="an object with named columns")
    return rows


def write_parquet(file: Path, rows: list[Row]) -> None:
    """Write rows as Parquet: whole, or not at all."""
    untyped = untyped_datasets()
    with _quiet(), atomic_file(file) as partial:
        untyped.Dataset.from_list(rows).to_parquet(partial)


def write_jsonl(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines: whole, or not at all."""
    with atomic_file(file) as partial, partial.open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def untyped_datasets() -> Any:
    """Import Hugging Face's `datasets`, which is slow to load and ships no types."""
    return importlib.import_module("datasets")


def _first_rows(path: Path, reader: Callable[[Path], list[Row]], max_rows: int) -> list[Row]:
    if reader is not _read_parquet:
        return reader(path)[:max_rows]
    # A file of 70 KB may hold gigabytes of equal texts.
    with _quiet():
        try:
            rows = untyped_datasets().load_dataset(
                "parquet", data_files=str(path), split="train", streaming=True, batch_size=max_rows
            )
            return list(rows.take(max_rows))
        except (ValueError, OSError) as error:
            raise DataError(f"cannot read Parquet: {error}", file=path) from None


def _read_parquet(path: Path) -> list[Row]:
    untyped = untyped_datasets()
    # `datasets` writes an Arrow copy of what it reads; the rows are held in memory, so it can go.
    with _quiet(), tempfile.TemporaryDirectory() as cache:
        try:
            table = untyped.Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
            return list(table)
        except (untyped.exceptions.DatasetGenerationError, ValueError, OSError) as error:
            cause = error.__cause__ or error
            # Where it is an error of the disk, it is the copy's.
            disk = tempfile.gettempdir() if isinstance(cause, OSError) else None
            raise DataError(f"cannot read Parquet: {cause}", file=path, copied_to=disk) from None


def _read_json(path: Path) -> list[Row]:
    text = path.read_text(encoding=_TEXT)
    # Many a file of JSON lines is called .json.
    return _parse(text, path) if text.lstrip().startswith("[") else _read_jsonl(path)


def _read_jsonl(path: Path) -> list[Row]:
    with path.open(encoding=_TEXT) as stream:
        return [_parse(line, path, number) for number, line in enumerate(stream) if line.strip()]


def _parse(text: str, path: Path, lines_before: int = 0) -> Any:
    try:
        return json.loads(text)
    except RecursionError:
        reason = f"malformed JSON: nested too deeply in line {lines_before + 1}"
        raise DataError(reason, file=path) from None
    except ValueError as error:
        raise DataError(f"malformed JSON: {_placed(error, lines_before)}", file=path) from None


def _placed(error: ValueError, lines_before: int) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    return f"{error.msg} in line {lines_before + error.lineno}, column {error.colno}"


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Keep the progress bars of `datasets` off the console, and leave its setting as it was."""
    untyped = untyped_datasets()
    shown = untyped.is_progress_bar_enabled()
    untyped.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            untyped.enable_progress_bars()


_READERS = {".parquet": _read_parquet, ".json": _read_json, ".jsonl": _read_jsonl}
_KINDS = "one of " + ", ".join(_READERS)
