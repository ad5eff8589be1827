"""Where in users' code an exception came from: for the log in a word, for the record in full."""

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from agentrl.errors import words_of

LONGEST_TRACEBACK = 4000
"""Characters that are kept, the last ones."""

_NOT_THEIRS = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
)
"""Folders of agentrl, of Python, and of what is installed."""


def place_of(error: BaseException) -> str | None:
    """Name the last line of users' code that an exception passed through; None: there is none.

    Example:
        >>> place_of(error)
        'my_tools.py:12'
    """
    places = [
        f"{Path(frame.f_code.co_filename).name}:{line}"
        for frame, line in _frames(error)
        if _is_theirs(frame.f_code.co_filename)
    ]
    return places[-1] if places else None


def words_and_place_of(error: BaseException) -> str:
    """Word an exception in a line, with the last line of users' code that it passed through.

    Example:
        >>> words_and_place_of(error)
        'KeyError: price (at my_tools.py:12)'
    """
    return f"{words_of(error)}{at_place_of(error)}"


def at_place_of(error: BaseException) -> str:
    """Word `place_of` for the end of a message; empty if there is no such line."""
    place = place_of(error)
    return f" (at {place})" if place else ""


def traceback_of(error: BaseException) -> str:
    """Write out the end of an exception's traceback; raises nothing, however broken the error."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - users' errors may break when they are asked what they are
        text = "".join(traceback.format_tb(error.__traceback__))
    return text[-LONGEST_TRACEBACK:]


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Walk the frames, outermost first; those of what it was raised from behind its own."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield from traceback.walk_tb(one.__traceback__)
        one = one.__cause__


def _is_theirs(file: str) -> bool:
    return not file.startswith(("<", *_NOT_THEIRS))
