"""Values and errors whose own code runs, and fails, when somebody reads them."""

import sys
from typing import NoReturn


class ShownError(BaseException):
    """What `ExitsWhenRead` raises when it is shown: pytest, which shows much, survives it."""


class ExitsWhenRead:
    """Ends the program when it is made a number, a truth value or a text."""

    def _exit(self) -> NoReturn:
        sys.exit(3)

    def __float__(self) -> float:
        self._exit()

    def __bool__(self) -> bool:
        self._exit()

    def __repr__(self) -> str:
        raise ShownError


class UntellableError(Exception):
    """Raises when it is asked what it says."""

    def __str__(self) -> str:
        raise KeyError("it was built elsewhere")


class HollowError(Exception):
    """Looks every name up in what it does not have: also those that a traceback asks for."""

    def __getattr__(self, name: str) -> object:
        raise KeyError(name)


UNTOLD = "(its message raises KeyError)"
"""What is told of an `UntellableError`."""
