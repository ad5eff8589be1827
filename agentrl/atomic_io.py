"""Files and folders that are complete or absent: written next to their path, then renamed."""

import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

logger = logging.getLogger(__name__)

_DRAFT = ".draft"
_WRITING = ".writing-"
_REPLACED = ".replaced-"
_REMOVED = ".removed-"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Give a path to write to. It becomes `path` at the end of the block; an error removes it.

    Missing folders are made. An earlier file stays until it is replaced.

    Raises:
        OSError: If the disk does not take the file. The error names `path`.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}{_DRAFT}")
    with naming_path(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield draft
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def remove_drafts(folder: Path) -> None:
    """Remove unfinished files of killed processes. No other process may write to the folder."""
    for draft in folder.glob(f".*.[0-9]*{_DRAFT}"):
        draft.unlink(missing_ok=True)


@contextmanager
def naming_path(path: Path) -> Iterator[None]:
    """Add the path to an `OSError` of the block that has none: that of a full disk, for example.

    Libraries written in Rust (safetensors, tokenizers) raise other errors, which have the error
    number of the system in their text. They become an `OSError`.

    Raises:
        OSError: With `path`.
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


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Give a folder to fill. It becomes `path` at the end of the block; an error removes it.

    All data is on the disk before the folder is renamed, and the rename is on the disk before this
    returns. An earlier folder stays until it is replaced. An error after the rename is only logged
    as a warning, because the new folder is complete.

    Raises:
        OSError: If the disk does not take the files.
    """
    make_folder(path.parent)
    restore_replaced(path)
    draft = path.with_name(_WRITING + path.name)
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        yield draft
        _flush_tree(draft)
        _publish(draft, path)
    except Exception:
        shutil.rmtree(draft, ignore_errors=True)
        restore_replaced(path)
        raise


def _publish(draft: Path, path: Path) -> None:
    replaced = path.with_name(_REPLACED + path.name)
    if path.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        path.rename(replaced)
    draft.rename(path)
    try:
        flush(path.parent)
        if replaced.exists():
            shutil.rmtree(replaced)
    except OSError as error:
        logger.warning("%s is complete, but its old version may still exist: %s", path, error)


def remove_folder(path: Path) -> None:
    """Remove a folder. At no time does a part of it exist under its name.

    Raises:
        OSError: If it cannot be removed.
    """
    removed = path.with_name(_REMOVED + path.name)
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    shutil.rmtree(removed)


def remove_leftovers(parent: Path) -> None:
    """Restore or remove the folders that killed runs were writing, replacing or removing."""
    restore_all_replaced(parent)
    for prefix in (_WRITING, _REPLACED, _REMOVED):
        for path in parent.glob(f"{prefix}*"):
            shutil.rmtree(path)


def restore_all_replaced(parent: Path) -> None:
    """Restore every folder of `parent` that a killed run had renamed but not replaced."""
    for path in parent.glob(f"{_REPLACED}*"):
        restore_replaced(path.with_name(path.name.removeprefix(_REPLACED)))


def restore_replaced(path: Path) -> None:
    """Restore a folder, if a killed run had renamed but not replaced it."""
    replaced = path.with_name(_REPLACED + path.name)
    if replaced.exists() and not path.exists():
        replaced.rename(path)


def move_into(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Move files or folders into a folder, each to the first free name: `name`, `name.1`, ...

    Returns:
        The new paths.

    Raises:
        OSError: If one cannot be moved.
    """
    if not paths:
        return []
    make_folder(folder)
    moved: list[Path] = []
    for path in paths:
        names = (f"{path.name}.{number}" if number else path.name for number in count())
        target = next(folder / name for name in names if not (folder / name).exists())
        moved.append(path.rename(target))
    for changed in {folder, *(path.parent for path in paths)}:
        flush(changed)
    return moved


def make_folder(path: Path) -> None:
    """Make a folder and its parents, and write their names to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush(folder.parent)


def flush(path: Path) -> None:
    """Write a file, or the list of names of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _flush_tree(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            _flush_tree(path)
        elif path.is_file():
            flush(path)
    flush(folder)
