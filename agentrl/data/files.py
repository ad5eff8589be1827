"""Read rows from Parquet, JSON and JSONL files, and write them atomically.

`datasets` reads Parquet, because it knows its own column types. Python's `json` reads JSON: Arrow's
reader converts `"4"` to 4 and texts that look like dates to dates, drops keys that only some rows
have, and does not report the line of an error.
"""

import importlib
import json
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from agentrl.atomic_io import atomic_file
from agentrl.errors import DataError
from agentrl.messages import dump_json

_TEXT = "utf-8-sig"
"""UTF-8. A byte order mark, which some editors add, is skipped."""
Row = dict[str, Any]
"""A row as in its file."""


def read_rows(file: str | Path, max_rows: int | None = None) -> list[Row]:
    """Read the rows of a data file.

    Args:
        file: Parquet, JSON or JSONL.
        max_rows: Return only the first rows (and read only these from Parquet); None: all.

    Raises:
        DataError: If the file is missing, empty, malformed or of an unknown kind, or a row is not
            a mapping.
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
    """Write rows as Parquet, atomically."""
    untyped = untyped_datasets()
    with _quiet(), atomic_file(file) as partial:
        untyped.Dataset.from_list(rows).to_parquet(partial)


def write_jsonl(file: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines, atomically."""
    with atomic_file(file) as partial, partial.open("w", encoding="utf-8") as stream:
        stream.writelines(dump_json(row) + "\n" for row in rows)


def download_split(
    name: str, split: str, *, subset: str | None = None, otherwise: str
) -> list[Row]:
    """Download the rows of a dataset of the Hugging Face hub; images stay encoded.

    Args:
        name: Of the dataset.
        split: Of the dataset.
        subset: The dataset's configuration; None: it has only one.
        otherwise: What a user without network can do, for the error.

    Raises:
        DataError: If the hub cannot be reached, or has no such dataset.
    """
    try:
        if os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0"):
            raise ConnectionError("HF_HUB_OFFLINE is set")
        return list(without_decoding(untyped_datasets().load_dataset(name, subset, split=split)))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{name} cannot be downloaded: {error}",
            expected=f"a connection to the hub, or {otherwise}",
        ) from error


def untyped_datasets() -> Any:
    """Import Hugging Face's `datasets`, which is slow to load and ships no types."""
    return importlib.import_module("datasets")


def _first_rows(path: Path, reader: Callable[[Path], list[Row]], max_rows: int) -> list[Row]:
    if reader is _read_jsonl:
        return _read_jsonl(path, max_rows)
    if reader is not _read_parquet:
        return reader(path)[:max_rows]
    # A file of 70 KB may contain gigabytes of equal texts, so do not read all of it.
    with _quiet():
        try:
            rows = untyped_datasets().load_dataset(
                "parquet", data_files=str(path), split="train", streaming=True, batch_size=max_rows
            )
            return list(without_decoding(rows).take(max_rows))
        except (ValueError, OSError) as error:
            raise DataError(f"cannot read Parquet: {error}", file=path) from None


def _read_parquet(path: Path) -> list[Row]:
    untyped = untyped_datasets()
    # `datasets` writes an Arrow copy of the file. The rows are in memory, so it can be removed.
    with _quiet(), tempfile.TemporaryDirectory() as cache:
        try:
            table = untyped.Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
            return list(without_decoding(table))
        except (untyped.exceptions.DatasetGenerationError, ValueError, OSError) as error:
            cause = error.__cause__ or error
            # An error of the disk is about the copy.
            disk = tempfile.gettempdir() if isinstance(cause, OSError) else None
            raise DataError(f"cannot read Parquet: {cause}", file=path, copied_to=disk) from None


def without_decoding(table: Any) -> Any:
    """Leave images and videos encoded: a request decodes its own when it starts."""
    decoded = untyped_datasets().features

    def undecoded(feature: Any) -> Any:
        if isinstance(feature, decoded.Image | decoded.Video):
            return type(feature)(decode=False)
        if isinstance(feature, decoded.List | decoded.LargeList):
            return type(feature)(undecoded(feature.feature))
        return feature

    features: dict[str, Any] = table.features or {}
    for name, feature in features.items():
        if (changed := undecoded(feature)) is not feature and changed != feature:
            table = table.cast_column(name, changed)
    return table


def _read_json(path: Path) -> list[Row]:
    text = path.read_text(encoding=_TEXT)
    # Many files of JSON lines are named .json.
    return _parse(text, path) if text.lstrip().startswith("[") else _read_jsonl(path)


def _read_jsonl(path: Path, max_rows: int | None = None) -> list[Row]:
    with path.open(encoding=_TEXT) as stream:
        filled = ((number, line) for number, line in enumerate(stream) if line.strip())
        return [_parse(line, path, number) for number, line in islice(filled, max_rows)]


def _parse(text: str, path: Path, lines_before: int = 0) -> Any:
    text = text.rstrip()  # what is not closed is a fault of the last line, not of the one after it
    try:
        return json.loads(text)
    except RecursionError:
        reason = f"malformed JSON: nested too deeply in line {lines_before + 1}"
        raise DataError(reason, file=path) from None
    except json.JSONDecodeError as error:
        begin = text[error.pos - error.colno + 1 :].partition("\n")[0][:40]
        at = f"line {lines_before + error.lineno}, column {error.colno}, which begins {begin!r}"
        raise DataError(f"malformed JSON: {error.msg} in {at}", file=path) from None
    except ValueError as error:
        raise DataError(f"malformed JSON: {error}", file=path) from None


@contextmanager
def _quiet() -> Generator[None, None, None]:
    """Disable the progress bars of `datasets` within the block."""
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
