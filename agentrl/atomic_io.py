"""Files that are whole or absent: written beside their place, then moved into it."""

import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

_DRAFT = ".draft"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a path to write to; it becomes `path` when the block ends, and vanishes if it raises.

    The folder is made where it is missing. An earlier file stays as it is until the move.

    Raises:
        OSError: naming `path`, where the disk does not take it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}{_DRAFT}")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield draft
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def remove_drafts(folder: Path) -> None:
    """Remove what killed processes were writing in a folder that no other process writes to."""
    for draft in folder.glob(f".*.[0-9]*{_DRAFT}"):
        draft.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an `OSError` of the block say which file it was about: a full disk does not by itself.

    Libraries written in Rust (safetensors, tokenizers) raise something else, with the system's
    error in its text.

    Raises:
        OSError: naming `path`, for either.
    """
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write: {reason}", str(path)) from error
    except Exception as error:
        number = _OS_ERROR.search(str(error))
        if number is None:
            raise
        errno = int(number.group(1))
        raise OSError(errno, f"cannot write: {os.strerror(errno)}", str(path)) from error


logger = logging.getLogger(__name__)

_WRITING = ".writing-"
_REPLACED = ".replaced-"
_REMOVED = ".removed-"


@contextmanager
def folder_written_whole(place: Path) -> Iterator[Path]:
    """Give a folder to fill; it becomes `place` when the block ends, and vanishes if it raises.

    Its files are on the disk before the move, and the move before this ends. An earlier folder
    stays as it is until the move, and is gone after it. What goes wrong behind the move is told as
    a warning: the new folder stands then.

    Raises:
        OSError: where the disk does not take it.
    """
    make_folder(place.parent)
    put_back_replaced(place)
    aside = place.with_name(_WRITING + place.name)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        yield aside
        _flush_tree(aside)
        _publish(aside, place)
    except Exception:
        shutil.rmtree(aside, ignore_errors=True)
        put_back_replaced(place)
        raise


def remove_folder(place: Path) -> None:
    """Remove a folder so that it is never there in part.

    Raises:
        OSError: where it cannot be removed.
    """
    gone = place.with_name(_REMOVED + place.name)
    shutil.rmtree(gone, ignore_errors=True)
    place.rename(gone)
    shutil.rmtree(gone)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed runs were writing, replacing or removing in a folder."""
    put_back_all_replaced(parent)
    for prefix in (_WRITING, _REPLACED, _REMOVED):
        for path in parent.glob(f"{prefix}*"):
            shutil.rmtree(path)


def put_back_all_replaced(parent: Path) -> None:
    """Put every folder of `parent` back that a killed run had moved away and not replaced yet."""
    for path in parent.glob(f"{_REPLACED}*"):
        put_back_replaced(path.with_name(path.name.removeprefix(_REPLACED)))


def put_back_replaced(place: Path) -> None:
    """Put a folder back, if a killed run had moved it away and not replaced it yet."""
    gone = place.with_name(_REPLACED + place.name)
    if gone.exists() and not place.exists():
        gone.rename(place)


def set_aside(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Move files or folders into a folder, each under the first free one of `name`, `name.1`, ...

    Returns:
        Where each lies now.

    Raises:
        OSError: where one cannot be moved.
    """
    if not paths:
        return []
    make_folder(folder)
    moved = [path.rename(_free_place(folder, path.name)) for path in paths]
    for changed in {folder, *(path.parent for path in paths)}:
        flush(changed)
    return moved


def make_folder(place: Path) -> None:
    """Make a folder and those above it, and bring their names to the disk."""
    missing = [path for path in (place, *place.parents) if not path.exists()]
    place.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush(path.parent)


def flush(path: Path) -> None:
    """Bring a file, or a folder's list of names, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _free_place(folder: Path, name: str) -> Path:
    places = (folder / (f"{name}.{number}" if number else name) for number in count())
    return next(place for place in places if not place.exists())


def _flush_tree(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _flush_tree(path)
        elif path.is_file():
            flush(path)
    flush(folder)


def _publish(aside: Path, place: Path) -> None:
    gone = place.with_name(_REPLACED + place.name)
    if place.exists():
        shutil.rmtree(gone, ignore_errors=True)
        place.rename(gone)
    aside.rename(place)
    try:
        flush(place.parent)
        if gone.exists():
            shutil.rmtree(gone)
    except OSError as error:
        logger.warning("%s is written; what it replaced may still be there: %s", place, error)
