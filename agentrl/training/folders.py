"""Folders that are whole or absent: written beside their place, then moved into it."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WRITING = ".writing-"
_REPLACED = ".replaced-"


@contextmanager
def folder_written_whole(place: Path) -> Iterator[Path]:
    """Give a folder to fill; it becomes `place` when the block ends, and vanishes if it raises.

    An earlier folder stays as it is until the move, and is gone after it.

    Raises:
        OSError: where the disk does not take it.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    aside = place.with_name(_WRITING + place.name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        for path in (*_files(aside), aside):
            flush(path)
        _publish(aside, place)
    except Exception:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def remove_leftovers(parent: Path) -> None:
    """Remove what killed runs were writing or replacing in a folder."""
    for prefix in (_WRITING, _REPLACED):
        for path in parent.glob(f"{prefix}*"):
            shutil.rmtree(path)


def flush(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_file()]


def _publish(aside: Path, place: Path) -> None:
    if place.exists():
        gone = place.with_name(_REPLACED + place.name)
        shutil.rmtree(gone, ignore_errors=True)
        place.rename(gone)
        aside.rename(place)
        shutil.rmtree(gone)
    else:
        aside.rename(place)
    flush(place.parent)
