"""Registries: tables from names to functions and classes of one kind."""

from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Generic, TypeVar, cast

from agentrl.errors import ConfigError, did_you_mean

T = TypeVar("T")
F = TypeVar("F")


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

        Raises:
            ConfigError: if another object has the name. (The same object, defined again in a
                notebook or a reloaded module, replaces itself.)
        """
        plain = _plain(name)

        def put(found: F) -> F:
            taken = self._found.get(plain)
            if taken is not None and _origin(taken) != _origin(found):
                raise ConfigError(f"the {self._kind} {plain!r} is {_origin(taken)} already")
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
    return ConfigError(
        f"unknown {kind} {name!r}{did_you_mean(name, names)}",
        key=key,
        expected=f"one of {', '.join(names)}; or one of your own, registered by a module that the "
        "key plugins names",
    )


def _plain(name: str | Enum) -> str:
    return str(name.value) if isinstance(name, Enum) else name


def _origin(found: Any) -> str:
    return f"{found.__module__}.{found.__qualname__}"
