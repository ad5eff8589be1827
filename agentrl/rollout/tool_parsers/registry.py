"""Tool parsers by the name that `rollout.multi_turn.format` gives them."""

from collections.abc import Callable

from agentrl.errors import ConfigError, did_you_mean
from agentrl.plugins.registry import Registry
from agentrl.rollout.tool_parsers.base import ToolParser

ParserFactory = Callable[[str], ToolParser]

_KEY = "rollout.multi_turn.format"
_PARSERS: Registry[type[ToolParser]] = Registry("tool-call format", key=_KEY)
_FAMILIES: dict[str, ParserFactory] = {}

register_tool_parser = _PARSERS.register
"""Decorate a subclass of `ToolParser` to register it under a name."""


def register_tool_parser_family(prefix: str) -> Callable[[ParserFactory], ParserFactory]:
    """Decorate a function that makes the parsers of all names with a prefix.

    The function gets the name without the prefix.
    """

    def register(make: ParserFactory) -> ParserFactory:
        _FAMILIES[prefix] = make
        return make

    return register


def get_tool_parser(name: str) -> ToolParser:
    """Make the parser of that name.

    Raises:
        ConfigError: for an unknown name, with the nearest known one.
        MissingExtraError: for a parser of a family whose packages are not installed.
    """
    for prefix, make in _FAMILIES.items():
        if name.startswith(prefix):
            return make(name.removeprefix(prefix))
    if name not in _PARSERS.names:
        raise ConfigError(
            f"unknown tool-call format {name!r}{did_you_mean(name, _PARSERS.names)}",
            key=_KEY,
            expected=expected_formats(),
        )
    return _PARSERS.get(name)()


def tool_parser_names() -> list[str]:
    """List the registered names in alphabetical order, without those of families."""
    return _PARSERS.names


def expected_formats() -> str:
    """Describe the known formats in one line, for an error message."""
    families = [f"{prefix}NAME" for prefix in sorted(_FAMILIES)]
    return (
        f"one of {', '.join(tool_parser_names())}; {', '.join(families)} (a parser of the "
        "installed SGLang); or a parser of your own (register_tool_parser)"
    )
