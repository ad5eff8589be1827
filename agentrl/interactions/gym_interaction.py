"""Games and other environments with text actions, in the gymnasium manner."""

import hashlib
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from string import Formatter
from typing import Any, Literal

from pydantic import Field, field_validator

from agentrl.config.schema.section import Section
from agentrl.errors import ConfigError, MissingExtraError, PluginError
from agentrl.interactions.base import SHARED_KEYS, BaseInteraction, InteractionResult
from agentrl.interactions.gym_environment import (
    ActionReader,
    EnvironmentThread,
    Episode,
    InvalidActionError,
    Step,
)
from agentrl.interactions.session import last_answer
from agentrl.plugins import load_object
from agentrl.plugins.environment import install_command
from agentrl.plugins.keys import read_keys

_FIELDS = ("observation", "rendered", "reward", "step")
_PYTHON_PATH = re.compile(r".*[.:][A-Za-z_]\w*")


class GymSettings(Section):
    """The `config` of `GymInteraction`."""

    env: str
    """A class or function that makes one environment (`package.module:Factory`), or an id that
    gymnasium knows (`FrozenLake-v1`; extra `gym`)."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of the environment; a row's own `env_kwargs` override these."""
    seed: int = 0
    """For rows without a `seed`: together with the group's id it seeds the reset, so that all
    samples of a group begin with the same state."""
    tell_first: bool = True
    """Append the first observation to the prompt as a user message; false: the rows contain it."""
    observation_template: str = "{observation}"
    """The text of an observation: a format string of `observation`, `rendered` (the text of
    `render`), `reward` and `step`."""
    action_pattern: str | None = None
    """Regular expression of the action: the last match, and its first group if it has one; null:
    the last `<action>...</action>`, else the whole answer."""
    action_names: list[str] = Field(default_factory=list[str])
    """Names of the actions of a discrete space, in order; else the only allowed texts."""
    on_invalid_action: Literal["tell", "end"] = "tell"
    """For an answer without an action: tell the policy what was expected, or end the request."""
    invalid_action_score: float = 0.0
    """Score of such an answer."""

    @field_validator("observation_template")
    @classmethod
    def _known_fields(cls, value: str) -> str:
        for name in template_fields(value):
            if name not in _FIELDS:
                raise ValueError(f"unknown field {name!r}; expected one of {', '.join(_FIELDS)}")
        return value

    @field_validator("action_pattern")
    @classmethod
    def _is_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "")
        except re.error as error:
            raise ValueError(f"no regular expression: {error}") from None
        return value


@dataclass(slots=True)
class _Play:
    """The environment of one request, and its thread."""

    episode: Episode
    thread: EnvironmentThread = field(default_factory=EnvironmentThread)
    num_invalid: int = 0


class GymInteraction(BaseInteraction):
    """Let the policy play an environment: each answer is an action, each observation a reply.

    The reward of a step is the score of the answer. The request ends when the environment returns
    `terminated` or `truncated`. Environments may block: each has a thread of its own, on which it
    is made, reset, stepped and always closed. A row may have `env_kwargs`, `seed` and `options` (of
    the reset) in its `interaction_kwargs`.

    Args:
        config: The keys of `GymSettings`: `env`, `env_kwargs` ({}), `seed` (0), `tell_first`
            (true), `observation_template` (`{observation}`), `action_pattern` (null),
            `action_names` ([]), `on_invalid_action` (`tell`), `invalid_action_score` (0.0).

    Raises:
        ConfigError: for an id that gymnasium does not know.
        PluginError: for a path that does not exist.
        MissingExtraError: for an id, if the extra `gym` is not installed.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        settings = self._settings = read_keys(GymSettings, config, key="", also_known=SHARED_KEYS)
        self._make = find_factory(settings.env)
        self._pattern = re.compile(settings.action_pattern) if settings.action_pattern else None
        self._plays: dict[str, _Play] = {}

    async def start_interaction(
        self,
        instance_id: str | None = None,
        uid: str | None = None,
        seed: int | None = None,
        env_kwargs: Mapping[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> str | tuple[str, str]:
        """Make and reset an environment; return the first observation."""
        instance_id = instance_id or uuid.uuid4().hex
        settings = self._settings
        if seed is None:
            name = f"{settings.seed}:{uid or instance_id}"
            digest = hashlib.blake2b(name.encode(), digest_size=4).digest()
            seed = int.from_bytes(digest) >> 1
        episode = Episode(
            partial(self._make, **{**settings.env_kwargs, **(env_kwargs or {})}),
            settings.observation_template.format,
            reads_rendering="rendered" in template_fields(settings.observation_template),
        )
        # Stored before it is made, so that `finalize_interaction` always closes it.
        play = self._plays[instance_id] = _Play(episode)
        first = await play.thread.run(partial(episode.begin, seed=seed, options=options))
        return (instance_id, first) if settings.tell_first else instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult:
        """Take the action of the last answer."""
        play = self._plays[instance_id]
        space = play.episode.action_space
        reader = ActionReader(space, self._pattern, self._settings.action_names)
        try:
            step = await play.thread.run(partial(play.episode.act, reader, last_answer(messages)))
        except InvalidActionError as error:
            return self._refuse(play, error)
        return InteractionResult(
            step.terminated or step.truncated, step.text, step.reward, _metadata(play, step)
        )

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Close the environment. If it hangs in a step, it is closed after that step."""
        play = self._plays.pop(instance_id, None)
        if play is not None:
            await play.thread.end(play.episode.close)

    def _refuse(self, play: _Play, error: InvalidActionError) -> InteractionResult:
        play.num_invalid += 1
        settings = self._settings
        is_over = settings.on_invalid_action == "end"
        return InteractionResult(
            is_over, str(error), settings.invalid_action_score, _metadata(play)
        )


def _metadata(play: _Play, step: Step | None = None) -> dict[str, Any]:
    return {
        "num_steps": play.episode.num_steps,
        "num_invalid": play.num_invalid,
        "return": play.episode.total,
        "terminated": step is not None and step.terminated,
        "truncated": step is not None and step.truncated,
    }


def find_factory(env: str) -> Callable[..., Any]:
    """Return the function that makes the environment: of a Python path, or `make` for an id.

    Raises:
        ConfigError: for an id that gymnasium does not know.
        PluginError: for a path that does not exist, or is not callable.
        MissingExtraError: for an id, if the extra `gym` is not installed.
    """
    if not _PYTHON_PATH.fullmatch(env):
        return _registered(env)
    try:
        factory = load_object(env)
    except PluginError as error:
        error.details["key"] = "env"
        raise
    if not callable(factory):
        what = f"{env!r} is {factory!r:.80}, which is not callable"
        raise PluginError(what, key="env", expected="a class or function")
    return factory


def _registered(env: str) -> Callable[..., Any]:
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError(
            f"the environment {env!r} needs the package gymnasium",
            install=install_command("gym"),
        ) from error
    try:
        gymnasium.spec(env)
    except (gymnasium.error.Error, ImportError) as error:
        raise ConfigError(
            str(error), key="env", expected="an id that gymnasium knows, or package.module:Factory"
        ) from error
    return partial(gymnasium.make, env)


def template_fields(template: str) -> list[str]:
    """Return the names of the fields of a format string, without attributes and indices."""
    names = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    return [re.split(r"[.\[]", name)[0] for name in names]
