"""Read the action of a text environment in the policy's answer."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentrl.answers import without_thought

_OPENING, _CLOSING = "<action>", "</action>"
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_MAX_SHOWN = 60


class InvalidActionError(ValueError):
    """An answer without an action that the environment takes; its text is for the policy."""


@dataclass(frozen=True, slots=True)
class ActionReader:
    """Turns an answer into what the environment's `step` takes.

    Args:
        space: The environment's `action_space`; None: any text is an action.
        pattern: Finds the action: the last match, its first group where there is one. None: what
            stands in the last `<action>...</action>`, else the whole answer. Neither looks into
            the policy's thoughts.
        names: Of the actions of a discrete space, in order; of any other, the only texts allowed.
    """

    space: Any = None
    pattern: re.Pattern[str] | None = None
    names: Sequence[str] = ()

    def read(self, answer: str) -> Any:
        """Read the action.

        Raises:
            InvalidActionError: saying what was expected.
        """
        text = self._find(without_thought(answer))
        return self._number(text) if is_discrete(self.space) else self._text(text)

    def _find(self, said: str) -> str:
        if self.pattern is None:
            return _tagged(said)
        found = list(self.pattern.finditer(said))
        if not found:
            raise self._refusal(said)
        return (found[-1][1] if self.pattern.groups else found[-1][0]) or ""

    def _number(self, text: str) -> int:
        first, size = int(self.space.start), int(self.space.n)
        named = self._named(text)
        number = first + named if named is not None else _integer(text)
        if number is None or not first <= number < first + size:
            raise self._refusal(text)
        return number

    def _text(self, text: str) -> str:
        named = self._named(text)
        if self.names and named is None:
            raise self._refusal(text)
        action = text if named is None else self.names[named]
        if _is_a(self.space, "Text") and not self.space.contains(action):
            raise self._refusal(text)
        return action

    def _named(self, text: str) -> int | None:
        plain = [name.casefold() for name in self.names]
        wanted = text.strip().casefold()
        return plain.index(wanted) if wanted in plain else None

    def _refusal(self, text: str) -> InvalidActionError:
        how = "" if self.pattern else f", written as {_OPENING}...{_CLOSING}"
        shown = text.strip()[:_MAX_SHOWN]
        return InvalidActionError(f"{shown!r} is not an action; expected {self._expected()}{how}.")

    def _expected(self) -> str:
        if self.names:
            return f"one of {', '.join(self.names)}"
        if is_discrete(self.space):
            first = int(self.space.start)
            return f"a number from {first} to {first + int(self.space.n) - 1}"
        return "an action that the environment takes"


def is_discrete(space: Any) -> bool:
    """Whether actions are integers."""
    return _is_a(space, "Discrete")


def takes_text(space: Any) -> bool:
    """Whether actions are texts: where there is no space, or it is none of gymnasium's."""
    return not _is_a(space, "Space") or _is_a(space, "Text")


def _is_a(space: Any, kind: str) -> bool:
    # Whoever has a space of gymnasium's has imported it.
    spaces = cast("Any", sys.modules.get("gymnasium.spaces"))
    return spaces is not None and isinstance(space, getattr(spaces, kind))


def _tagged(said: str) -> str:
    """What stands in the last tags; the whole where there are none. Linear in any text."""
    head, closing, _ = said.rpartition(_CLOSING)
    inside = head.rpartition(_OPENING) if closing else ("", "", "")
    return (inside[2] if inside[1] else said).strip()


def _integer(text: str) -> int | None:
    found = _INTEGER.fullmatch(text.strip())
    return int(found[0]) if found else None
