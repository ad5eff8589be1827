"""Strings that a template's program looks for in the texts it is given."""

from dataclasses import dataclass

_METHODS = frozenset(
    {"split", "rsplit", "partition", "startswith", "endswith", "find", "index", "count", "replace"}
)


@dataclass(frozen=True, slots=True)
class Markers:
    """What a template compares texts with."""

    inside: tuple[str, ...]
    """Looked for within a text: `'x' in text`, `text.split('x')`, `text.startswith('x')`."""
    whole: tuple[str, ...]
    """Compared with a whole value: `value == 'x'`."""


def find_markers(source: str) -> Markers:
    """Read the markers off a template's tokens."""
    from jinja2 import Environment

    lexed = Environment().lex(source)
    tokens = [(kind, text) for _, kind, text in lexed if kind != "whitespace"]
    around = [("", ""), ("", ""), *tokens, ("", "")]
    inside: list[str] = []
    whole: list[str] = []
    for index, (kind, text) in enumerate(around):
        if kind != "string":
            continue
        value = _unquote(text)
        before, opening, after = around[index - 2][1], around[index - 1][1], around[index + 1][1]
        if (opening == "(" and before in _METHODS) or after in ("in", "not"):
            inside.append(value)
        elif {opening, after} & {"==", "!="}:
            whole.append(value)
    return Markers(tuple(dict.fromkeys(inside)), tuple(dict.fromkeys(whole)))


def _unquote(literal: str) -> str:
    """The value of a Jinja string, which unlike Python's may run over lines."""
    return literal[1:-1].encode("ascii", "backslashreplace").decode("unicode-escape")
