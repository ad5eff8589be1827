"""Files that are whole or absent: written beside their place, then moved into it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a path to write to; it becomes `path` when the block ends, and vanishes if it raises.

    The folder is made where it is missing. An earlier file stays as it is until the move.

    Raises:
        OSError: naming `path`, where the disk does not take it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield draft
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let an `OSError` of the block say which file it was about: a full disk does not by itself."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        reason = error.strerror or str(error)
        raise OSError(error.errno, f"cannot write: {reason}", str(path)) from error
