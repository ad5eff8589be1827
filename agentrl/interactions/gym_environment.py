"""A thread that belongs to one object which must be made, used and closed on the same one."""

import asyncio
import inspect
import queue
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, cast

from agentrl.answers import without_thought

T = TypeVar("T")

THREAD_NAME = "agentrl-environment"

_Job = tuple[Future[Any], Callable[[], Any]]


class OwnThread:
    """Run blocking functions one after the other, all on one daemon thread.

    A thread cannot be killed. One that hangs is left behind, and being a daemon holds up nothing;
    should it ever come back, what was given to `end` is run, and it ends.

    Example:
        >>> async def main():
        ...     thread = OwnThread()
        ...     try:
        ...         return await thread.run(lambda: 2 + 3)
        ...     finally:
        ...         await thread.end(lambda: None)
        >>> asyncio.run(main())
        5
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._is_started = False

    async def run(self, function: Callable[[], T]) -> T:
        """Run a function behind those before it. Cancelling drops one that has not begun.

        Raises:
            Exception: what it raised; a `SystemExit` and its like come out as a `RuntimeError`.
        """
        return await asyncio.wrap_future(self._put(function))

    async def end(self, last: Callable[[], None]) -> None:
        """Run a last function and end the thread. Cancelling drops neither.

        Raises:
            Exception: what it raised.
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
            _do(*job)


def _do(future: Future[Any], function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        value = function()
    except BaseException as error:  # noqa: BLE001 - the boundary round users' code
        future.set_exception(_awaitable(error))
    else:
        future.set_result(value)


def _awaitable(error: BaseException) -> Exception:
    """Make an error that a future can carry: not `StopIteration`, and none that ends a program."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    wrapped = RuntimeError(f"raised {type(error).__name__}")
    wrapped.__cause__ = error
    return wrapped


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


_TERMINAL_CODE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
)
"""A colour, a movement of the cursor, a title: of a terminal, nothing for a policy to read."""


class Step(NamedTuple):
    """What came of one action."""

    text: str
    """The observation as the policy reads it."""
    reward: float
    terminated: bool
    truncated: bool


class Episode:
    """Makes, resets, steps and closes one environment. All methods run on one thread.

    Environments of the older manner will do: a `reset` that returns an observation alone or takes
    no seed, a `step` that returns four values, no `action_space`, no `close`.

    Args:
        make: Makes the environment.
        write: Words an observation, from the fields `observation`, `rendered`, `reward`, `step`.
        reads_rendering: Whether `write` wants the text of `render`.
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
        """Make the environment and reset it; word the first observation.

        Args:
            **given: `seed` and `options` of the reset.

        Raises:
            TypeError: for actions that are neither integers nor texts.
        """
        self._env = self._make()
        space = self.action_space
        if not (is_discrete(space) or takes_text(space)):
            raise TypeError(f"its actions are {space}; expected a Discrete or a Text space")
        found = self._env.reset(**_taken(self._env.reset, given))
        return self._word(found[0] if _has_info(found) else found, 0.0)

    @property
    def action_space(self) -> Any:
        """What actions there are; None where the environment does not say."""
        return getattr(self._env, "action_space", None)

    def act(self, reader: ActionReader, answer: str) -> Step:
        """Take the action of an answer.

        Raises:
            InvalidActionError: where there is none; nothing was done.
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
        return Step(self._word(fields[0], reward), reward, bool(fields[2]), truncated)

    def close(self) -> None:
        """Close the environment, where one was made."""
        env, self._env = self._env, None
        close = getattr(env, "close", None)
        if close is not None:
            close()

    def _word(self, observation: Any, reward: float) -> str:
        rendered = self._render() if self._reads_rendering else ""
        return self._write(
            observation=observation, rendered=rendered, reward=reward, step=self.num_steps
        )

    def _render(self) -> str:
        rendered = self._env.render()
        if not isinstance(rendered, str):
            raise TypeError(
                f"render returned {rendered!r:.80}; expected a text, as of "
                "env_kwargs: {render_mode: ansi}"
            )
        return _TERMINAL_CODE.sub("", rendered)


def _has_info(found: Any) -> bool:
    """Whether `reset` returned an observation and its info, and not an observation alone."""
    if not isinstance(found, tuple):
        return False
    fields = cast("tuple[Any, ...]", found)
    return len(fields) == 2 and isinstance(fields[1], Mapping)


def _taken(method: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what the method does not take, or was not given."""
    parameters = inspect.signature(method).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {
        name: value
        for name, value in given.items()
        if value is not None and (takes_any or name in parameters)
    }
