"""A language model that plays the user, from a persona and a goal."""

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from agentrl.answers import without_thought
from agentrl.clients.chat import ChatBudget, ChatBudgetError, ChatClient, ChatConfig
from agentrl.config.schema.section import Section
from agentrl.interactions.base import SHARED_KEYS, BaseInteraction, InteractionResult
from agentrl.interactions.user_simulator_prompts import (
    Role,
    judge_messages,
    read_verdict,
    user_messages,
)
from agentrl.plugins.keys import read_keys

Message = dict[str, Any]

TIMEOUT_S = 600.0
"""Seconds of one reply, if the config has no `timeout_s`. Each call has a time-out of its own; this
one includes the wait for `chat.max_concurrency`, so it is long."""


class UserSimulatorSettings(Section):
    """The `config` of `UserSimulatorInteraction`."""

    chat: ChatConfig
    """The model that plays the user."""
    persona: str = ""
    """Who the user is; a row's own `persona` replaces it."""
    goal: str = ""
    """What the user wants; a row's own `goal` replaces it. One of the two is needed."""
    stop_phrase: str = Field(default="###STOP###", min_length=1)
    """The text by which the simulator ends the conversation."""
    speaks_first: bool = False
    """Let the simulator write the first message, after the row's prompt."""
    show_tools: bool = False
    """Show the simulator the policy's tool calls and their results, as text."""
    max_turns: int | None = Field(default=None, ge=1)
    """Replies of the simulator in one conversation; null: no limit."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens of its prompts and replies in one conversation; null: no limit."""
    goal_check: str | None = None
    """A rubric that says what the policy must reach. The model scores the conversation from 0 to 1
    by the rubric, in a separate call; a row's own `goal_check` replaces it. null: no score."""
    goal_check_at: Literal["end", "every_turn"] = "end"
    """Score only when the simulator or a budget ends the conversation, or each answer."""
    max_unreadable: int = Field(default=2, ge=0)
    """How often the score is asked for again, if a reply does not end with a number from 0 to 1."""


@dataclass(slots=True)
class _Talk:
    role: Role
    goal_check: str | None
    budget: ChatBudget
    checked: ChatBudget
    """Calls and tokens of the scoring: only recorded, not limited."""


class UserSimulatorInteraction(BaseInteraction):
    """Ask a language model what the user says next.

    The roles are swapped: the policy's answers are the simulator's user messages, and its replies
    are the user's messages. It sees the conversation, its persona and its goal. It does not see the
    row's right answer, unless persona or goal contain it, nor the policy's thoughts. It sees the
    policy's tool calls if `show_tools` is true. A row may have `persona`, `goal` and `goal_check`
    in its `interaction_kwargs`.

    The conversation ends when the simulator writes the stop phrase, or when its own budget of calls
    or tokens is used up (`metadata["ended_by"]`: `user` or `budget`; the latter gets no
    `reward.interaction_bonus`). If the model gives no reply, or a budget of the whole run is used
    up (`chat.max_calls`, `chat.max_total_tokens`), the request fails with `Fault.INTERACTION`.

    Args:
        config: The keys of `UserSimulatorSettings`: `chat` (those of `ChatConfig`), `persona`,
            `goal`, `stop_phrase` (`###STOP###`), `speaks_first` (false), `show_tools` (false),
            `max_turns` (null), `max_tokens` (null), `goal_check` (null), `goal_check_at` (`end`),
            `max_unreadable` (2); and `timeout_s` (600), seconds of one reply, with its waits,
            retries and goal check.

    Raises:
        MissingExtraError: if the extra `openai` is not installed.
        ConfigError: if the environment variable of the key is not set.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__({"timeout_s": TIMEOUT_S, **config})
        self._settings = read_keys(UserSimulatorSettings, config, key="", also_known=SHARED_KEYS)
        self._client = ChatClient(self._settings.chat)
        self._talks: dict[str, _Talk] = {}

    async def start_interaction(
        self,
        instance_id: str | None = None,
        persona: str | None = None,
        goal: str | None = None,
        goal_check: str | None = None,
        **kwargs: Any,
    ) -> str | tuple[str, str]:
        """Set the simulator's role; let it write the first message if `speaks_first` is true."""
        settings = self._settings
        instance_id = instance_id or uuid.uuid4().hex
        role = Role(persona or settings.persona, goal or settings.goal, settings.stop_phrase)
        if not (role.persona or role.goal):
            raise ValueError(
                "the simulated user has no role; expected a persona or a goal in the row's "
                "interaction_kwargs or in the config"
            )
        budget = ChatBudget(max_calls=settings.max_turns, max_tokens=settings.max_tokens)
        talk = _Talk(role, goal_check or settings.goal_check, budget, ChatBudget())
        self._talks[instance_id] = talk
        if not settings.speaks_first:
            return instance_id
        opening, _ = await self._say(instance_id, talk, [])
        return instance_id, opening

    async def generate_response(
        self, instance_id: str, messages: list[Message], **kwargs: Any
    ) -> InteractionResult:
        """Ask for the user's reply, or end the conversation."""
        talk = self._talks[instance_id]
        try:
            said, is_over = await self._say(instance_id, talk, messages)
        except ChatBudgetError as error:
            if talk.budget.spent is None:
                raise  # the budget of the whole run: the request fails
            return await self._end(instance_id, talk, messages, "budget", budget=error.args[0])
        if is_over:
            return await self._end(instance_id, talk, messages, "user", said)
        score = None
        if self._settings.goal_check_at == "every_turn":
            score = await self._check(instance_id, talk, messages)
        return InteractionResult(False, said, score, _used(talk))

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the request."""
        self._talks.pop(instance_id, None)

    async def shutdown(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _say(
        self, instance_id: str, talk: _Talk, messages: Sequence[Message]
    ) -> tuple[str, bool]:
        """Return the user's next message, and whether it ends the conversation."""
        asked = user_messages(talk.role, messages, show_tools=self._settings.show_tools)
        seed = self._seed(instance_id, f"say:{talk.budget.num_calls}")
        reply = await self._client.complete(asked, budget=talk.budget, **seed)
        said, stop, _ = without_thought(reply.text).partition(talk.role.stop_phrase)
        if not said.strip() and not stop:
            raise ValueError(f"the simulator wrote no text (it ended by {reply.finish_reason!r})")
        return said.strip(), bool(stop)

    async def _end(
        self,
        instance_id: str,
        talk: _Talk,
        messages: Sequence[Message],
        ended_by: str,
        said: str = "",
        **metadata: Any,
    ) -> InteractionResult:
        score = await self._check(instance_id, talk, messages)
        return InteractionResult(
            True, said, score, {**_used(talk), "ended_by": ended_by, **metadata}
        )

    async def _check(
        self, instance_id: str, talk: _Talk, messages: Sequence[Message]
    ) -> float | None:
        """Return the score of the conversation; None if there is no rubric.

        Raises:
            ValueError: if no reply ends with a number.
        """
        if talk.goal_check is None:
            return None
        asked = judge_messages(
            talk.role, talk.goal_check, messages, show_tools=self._settings.show_tools
        )
        said = ""
        for _ in range(self._settings.max_unreadable + 1):
            seed = self._seed(instance_id, f"check:{talk.checked.num_calls}")
            reply = await self._client.complete(asked, budget=talk.checked, **seed)
            said = without_thought(reply.text)
            if (score := read_verdict(said)) is not None:
                return score
        raise ValueError(
            f"the goal check ended with {said[-80:]!r}; expected a number from 0 to 1 at its end"
        )

    def _seed(self, instance_id: str, call: str) -> dict[str, int]:
        """Return the call's seed, derived from the configured one; empty if there is none."""
        seed = self._settings.chat.seed
        if seed is None:
            return {}
        digest = hashlib.blake2b(f"{seed}:{instance_id}:{call}".encode(), digest_size=4).digest()
        return {"seed": int.from_bytes(digest) >> 1}


def _used(talk: _Talk) -> dict[str, Any]:
    return {
        "num_calls": talk.budget.num_calls + talk.checked.num_calls,
        "num_tokens": talk.budget.num_tokens + talk.checked.num_tokens,
    }
