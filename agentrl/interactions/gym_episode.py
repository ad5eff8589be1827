"""One environment in the gymnasium manner, from its first observation to its end."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from agentrl.interactions.gym_actions import ActionReader, is_discrete, takes_text

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
