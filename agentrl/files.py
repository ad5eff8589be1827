"""Files that are whole or absent: written beside their place, then moved into it."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
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
