"""One gymnasium-style environment: its thread, its actions and its episode."""

import asyncio
import queue
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from agentrl.answers import without_thought
from agentrl.plugins.call import accepted_keywords

T = TypeVar("T")

THREAD_NAME = "agentrl-environment"

_OPENING, _CLOSING = "<action>", "</action>"
_INTEGER = re.compile(r"[+-]?\d{1,18}", re.ASCII)
_MAX_SHOWN = 60
_TERMINAL_CODE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
)
"""Codes that control a terminal: colors, cursor movements, titles. They are removed."""


class EnvironmentThread:
    """Run blocking functions one after another, all on one daemon thread.

    A thread cannot be killed. A thread that hangs is abandoned, and does not block the end of the
    process. If it continues later, the function given to `end` runs, and the thread ends.

    Example:
        >>> async def main():
        ...     thread = EnvironmentThread()
        ...     try:
        ...         return await thread.run(lambda: 2 + 3)
        ...     finally:
        ...         await thread.end(lambda: None)
        >>> asyncio.run(main())
        5
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._is_started = False

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function after those before it. Cancelling drops one that has not begun.

        Raises:
            Exception: the function's error; a `RuntimeError` for `SystemExit` and similar.
        """
        return await asyncio.wrap_future(self._put(function))

    async def end(self, last: Callable[[], None]) -> None:
        """Run a last function and end the thread, also if the caller is cancelled.

        Raises:
            Exception: the function's error.
        """
        done = self._put(last)
        self._jobs.put(None)
        await asyncio.shield(asyncio.wrap_future(done))

    def _put(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._jobs.put((future, function))
        if not self._is_started:
            self._is_started = True
            threading.Thread(target=self._work, name=THREAD_NAME, daemon=True).start()
        return future

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the boundary around code of users
                # A future cannot carry `StopIteration`, nor an error that ends a program.
                if not isinstance(error, Exception) or isinstance(error, StopIteration):
                    wrapped = RuntimeError(f"raised {type(error).__name__}")
                    wrapped.__cause__ = error
                    error = wrapped
                future.set_exception(error)


class InvalidActionError(ValueError):
    """An answer without a valid action; its text is shown to the policy."""


@dataclass(frozen=True, slots=True)
class ActionReader:
    """Read the action of an answer, as the environment's `step` expects it.

    Args:
        space: The environment's `action_space`; None: any text is an action.
        pattern: Finds the action: the last match, and its first group if it has one. None: the
            text in the last `<action>...</action>`, else the whole answer. Thoughts of the policy
            are removed before.
        names: Names of the actions of a discrete space, in order; of another space, the only
            allowed texts.
    """

    space: Any = None
    pattern: re.Pattern[str] | None = None
    names: Sequence[str] = ()

    def read(self, answer: str) -> Any:
        """Read the action.

        Raises:
            InvalidActionError: if there is no valid one; it says what was expected.
        """
        text = self._find(without_thought(answer))
        names = [name.casefold() for name in self.names]
        wanted = text.strip().casefold()
        index = names.index(wanted) if wanted in names else None
        if is_discrete(self.space):
            first, size = int(self.space.start), int(self.space.n)
            is_integer = _INTEGER.fullmatch(text.strip()) is not None
            number = first + index if index is not None else int(text) if is_integer else None
            if number is None or not first <= number < first + size:
                raise self._refusal(text)
            return number
        if self.names and index is None:
            raise self._refusal(text)
        action = text if index is None else self.names[index]
        if _is_a(self.space, "Text") and not self.space.contains(action):
            raise self._refusal(text)
        return action

    def _find(self, answer: str) -> str:
        if self.pattern is None:
            # Two searches from the end: the time is linear in the length of any text.
            head, closing, _ = answer.rpartition(_CLOSING)
            _, opening, inside = head.rpartition(_OPENING)
            return (inside if closing and opening else answer).strip()
        found = list(self.pattern.finditer(answer))
        if not found:
            raise self._refusal(answer)
        return (found[-1][1] if self.pattern.groups else found[-1][0]) or ""

    def _refusal(self, text: str) -> InvalidActionError:
        expected = "an action that the environment takes"
        if self.names:
            expected = f"one of {', '.join(self.names)}"
        elif is_discrete(self.space):
            first = int(self.space.start)
            expected = f"a number from {first} to {first + int(self.space.n) - 1}"
        how = "" if self.pattern else f", written as {_OPENING}...{_CLOSING}"
        shown = text.strip()[:_MAX_SHOWN]
        return InvalidActionError(f"{shown!r} is not an action; expected {expected}{how}.")


def is_discrete(space: Any) -> bool:
    """Whether actions are integers."""
    return _is_a(space, "Discrete")


def takes_text(space: Any) -> bool:
    """Whether actions are texts: the space is a `Text` space, or not one of gymnasium's."""
    return not _is_a(space, "Space") or _is_a(space, "Text")


def _is_a(space: Any, kind: str) -> bool:
    # An object of gymnasium's exists only if gymnasium was imported.
    spaces = cast("Any", sys.modules.get("gymnasium.spaces"))
    return spaces is not None and isinstance(space, getattr(spaces, kind))


class Step(NamedTuple):
    """The result of one action."""

    text: str
    """The observation, as text for the policy."""
    reward: float
    terminated: bool
    truncated: bool


class Episode:
    """Make, reset, step and close one environment. All methods run on one thread.

    Environments of the older interface are accepted: a `reset` that returns only an observation or
    takes no seed, a `step` that returns four values, no `action_space`, no `close`.

    Args:
        make: Makes the environment.
        write: Makes the text of an observation from `observation`, `rendered`, `reward`, `step`.
        reads_rendering: Whether `write` uses `rendered`, the text of `render`.
    """

    def __init__(
        self, make: Callable[[], Any], write: Callable[..., str], *, reads_rendering: bool
    ) -> None:
        self._make = make
        self._write = write
        self._reads_rendering = reads_rendering
        self._env: Any = None
        self.num_steps = 0
        self.total = 0.0
        """Sum of the rewards."""

    def begin(self, **given: Any) -> str:
        """Make the environment and reset it; return the first observation.

        Args:
            **given: `seed` and `options` of the reset.

        Raises:
            TypeError: if its actions are neither integers nor texts.
        """
        self._env = self._make()
        space = self.action_space
        if not (is_discrete(space) or takes_text(space)):
            raise TypeError(f"its actions are {space}; expected a Discrete or a Text space")
        given = {name: value for name, value in given.items() if value is not None}
        found = self._env.reset(**accepted_keywords(self._env.reset, given))
        # `reset` returns an observation and its info, or an observation alone.
        if isinstance(found, tuple):
            fields = cast("tuple[Any, ...]", found)
            if len(fields) == 2 and isinstance(fields[1], Mapping):
                found = fields[0]
        return self._describe(found, 0.0)

    @property
    def action_space(self) -> Any:
        """The environment's `action_space`; None if it has none."""
        return getattr(self._env, "action_space", None)

    def act(self, reader: ActionReader, answer: str) -> Step:
        """Take the action of an answer.

        Raises:
            InvalidActionError: if there is none; the environment makes no step.
        """
        found = self._env.step(reader.read(answer))
        if not isinstance(found, tuple) or len(cast("tuple[Any, ...]", found)) not in (4, 5):
            raise TypeError(
                f"step returned {found!r:.80}; expected (observation, reward, terminated, "
                "truncated, info)"
            )
        fields = cast("tuple[Any, ...]", found)
        reward = float(fields[1])
        self.num_steps += 1
        self.total += reward
        truncated = bool(fields[3]) if len(fields) == 5 else False
        return Step(self._describe(fields[0], reward), reward, bool(fields[2]), truncated)

    def close(self) -> None:
        """Close the environment, if one was made."""
        env, self._env = self._env, None
        close = getattr(env, "close", None)
        if close is not None:
            close()

    def _describe(self, observation: Any, reward: float) -> str:
        rendered = ""
        if self._reads_rendering:
            rendered = self._env.render()
            if not isinstance(rendered, str):
                raise TypeError(
                    f"render returned {rendered!r:.80}; expected a text, as with "
                    "env_kwargs: {render_mode: ansi}"
                )
            rendered = _TERMINAL_CODE.sub("", rendered)
        return self._write(
            observation=observation, rendered=rendered, reward=reward, step=self.num_steps
        )
