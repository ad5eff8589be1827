"""Registries: tables from names to functions and classes of one kind."""

import logging
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from agentrl.config.other_names import table as other_names
from agentrl.errors import ConfigError, did_you_mean

T = TypeVar("T")
F = TypeVar("F")

logger = logging.getLogger(__name__)


class Registry(Generic[T]):
    """A table that users extend with a decorator and configurations choose from by name.

    Args:
        kind: The kind of its entries, for messages.
        key: The configuration key that chooses.

    Example:
        >>> greetings: Registry[Callable[[], str]] = Registry("greeting", key="demo.greeting")
        >>> @greetings.register("plain")
        ... def say_hello() -> str:
        ...     return "hello"
        >>> greetings.get("plain")()
        'hello'
    """

    def __init__(self, kind: str, *, key: str) -> None:
        self._kind = kind
        self._key = key
        self._found: dict[str, T] = {}

    def register(self, name: str | Enum) -> Callable[[F], F]:
        """Return a decorator that registers an object under `name`.

        An object of a user replaces a bundled one, and a note says so. The same object, defined
        again in a notebook or a reloaded module, replaces itself.

        Raises:
            ConfigError: if another object has the name, and it is not a bundled one.
        """
        plain = _plain(name)

        def put(found: F) -> F:
            taken = self._found.get(plain)
            if taken is not None and _origin(taken) != _origin(found):
                if not is_bundled(taken) or is_bundled(found):
                    raise ConfigError(f"the {self._kind} {plain!r} is {_origin(taken)} already")
                note_replaced(self._kind, plain, found)
            self._found[plain] = cast("T", found)
            return found

        return put

    def get(self, name: str | Enum) -> T:
        """Return the object that is registered under a name.

        Raises:
            ConfigError: for an unknown name, with the nearest known one.
        """
        plain = _plain(name)
        if plain not in self._found:
            raise unknown_name(self._kind, plain, self._found, key=self._key)
        return self._found[plain]

    @property
    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._found)


def unknown_name(kind: str, name: str, known: Iterable[str], *, key: str) -> ConfigError:
    """Build the error for an unregistered name."""
    names = sorted(known)
    meant = other_names()["values"].get(key, {}).get(name)
    guess = f"; did you mean {meant}?" if meant else did_you_mean(name, names)
    return ConfigError(
        f"unknown {kind} {name!r}{guess}",
        key=key,
        expected=f"one of {', '.join(names)}; or one of your own, registered by a module that the "
        "key plugins names",
    )


def is_bundled(found: Any) -> bool:
    """Whether a function or class is agentrl's own."""
    return found.__module__.partition(".")[0] == "agentrl"


def note_replaced(kind: str, name: str, found: Any) -> None:
    """Report that an object of a user replaces a bundled one."""
    logger.warning("note: %s replaces the bundled %s %r", _origin(found), kind, name)


def _plain(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def _origin(found: Any) -> str:
    return f"{found.__module__}.{found.__qualname__}"
