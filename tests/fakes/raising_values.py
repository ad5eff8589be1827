"""Values and errors that raise when they are read."""

import sys
from typing import NoReturn


class ReprError(BaseException):
    """Raised by `ExitsWhenRead.__repr__`; pytest, which prints values, survives it."""


class ExitsWhenRead:
    """Exits the program on conversion to a number, and raises on conversion to text."""

    def _exit(self) -> NoReturn:
        sys.exit(3)

    def __float__(self) -> float:
        self._exit()

    def __bool__(self) -> bool:
        self._exit()

    def __repr__(self) -> str:
        raise ReprError


class UnprintableError(Exception):
    """Raises when it is converted to text."""

    def __str__(self) -> str:
        raise KeyError("it was built elsewhere")


class RaisingAttributesError(Exception):
    """Raises `KeyError` for every attribute, also for those that a traceback reads."""

    def __getattr__(self, name: str) -> object:
        raise KeyError(name)


UNPRINTABLE_MESSAGE = "(its message raises KeyError)"
"""The text that is reported for an `UnprintableError`."""
