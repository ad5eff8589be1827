"""Tool parsers by the name that `rollout.multi_turn.format` gives them."""

from collections.abc import Callable
from typing import TypeVar

from agentrl.errors import ConfigError, did_you_mean
from agentrl.rollout.tool_parsers.base import ToolParser

P = TypeVar("P", bound=type[ToolParser])

_PARSERS: dict[str, type[ToolParser]] = {}
_FAMILIES: dict[str, Callable[[str], ToolParser]] = {}


def register_tool_parser(name: str) -> Callable[[P], P]:
    """Register the decorated class under a name.

    Raises:
        ConfigError: where another class has the name.
    """

    def register(parser: P) -> P:
        if _PARSERS.setdefault(name, parser) is not parser:
            raise ConfigError(f"there is a tool parser {name!r} already: {_PARSERS[name]}")
        return parser

    return register


def register_tool_parser_family(
    prefix: str,
) -> Callable[[Callable[[str], ToolParser]], Callable[[str], ToolParser]]:
    """Let the decorated function make the parsers whose names begin with a prefix.

    It is called with what stands behind the prefix.
    """

    def register(make: Callable[[str], ToolParser]) -> Callable[[str], ToolParser]:
        _FAMILIES[prefix] = make
        return make

    return register


def get_tool_parser(name: str) -> ToolParser:
    """Make the parser of that name.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
        MissingExtraError: for one of a family whose packages are not installed.
    """
    for prefix, make in _FAMILIES.items():
        if name.startswith(prefix):
            return make(name.removeprefix(prefix))
    if name not in _PARSERS:
        raise ConfigError(
            f"unknown tool-call format {name!r}{did_you_mean(name, _PARSERS)}",
            key="rollout.multi_turn.format",
            expected=expected_formats(),
        )
    return _PARSERS[name]()


def tool_parser_names() -> list[str]:
    """List the names there are, in alphabetical order; those of families are not among them."""
    return sorted(_PARSERS)


def expected_formats() -> str:
    """Say in one line which formats there are, for an error message."""
    families = [f"{prefix}NAME" for prefix in sorted(_FAMILIES)]
    return (
        f"one of {', '.join(tool_parser_names())}; {', '.join(families)} (a parser of the "
        "installed SGLang); or a parser of your own (register_tool_parser)"
    )
