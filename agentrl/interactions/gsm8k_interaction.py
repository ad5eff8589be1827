"""A user with a GSM8K problem, who knows whether an answer is right."""

import math
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from agentrl.answers import (
    Method,
    extract_gsm8k_answer,
    read_number,
    same_number,
    to_number,
    without_thought,
)
from agentrl.config.schema.section import Penalty, Section
from agentrl.interactions.base import SHARED_KEYS, BaseInteraction, InteractionResult
from agentrl.interactions.session import last_answer
from agentrl.plugins.keys import read_keys

_RIGHT = "Your answer is correct."
_WRONG = (
    "Your answer is not correct. Check your reasoning and answer again; write the number behind "
    "#### on the last line."
)
_CLOSER = "That is closer than before."
_READABLE = "The form of your answer is right now."
_REPEATED = "That is the answer that you gave before."


class Gsm8kSettings(Section):
    """The `config` of `Gsm8kInteraction`."""

    max_hints: int | None = Field(default=2, ge=0)
    """Replies to wrong answers; null: as many as the run allows."""
    method: Method = "flexible"
    """How an answer is read: `strict`, the number after `####`; `flexible`, the last number."""
    hints: list[str] = Field(default_factory=list[str])
    """Given one with each reply, in order; the last one is repeated. A row's own `hints` replace
    them."""
    score: float = 1.0
    """Score of a right answer."""
    format_score: float = 0.0
    """Score of a wrong answer that can be read; an answer that cannot be read scores 0."""
    hint_penalty: Penalty = 0.0
    """Subtracted from `score` for each reply before the right answer; not below `format_score`."""
    encourage: bool = False
    """Say what is better than in the previous answer: its form, or its distance from the right
    answer. The distance gives the policy information about the right answer."""


@dataclass(slots=True)
class _Talk:
    ground_truth: str
    hints: Sequence[str]
    num_hints: int = 0
    before: str | None = None
    """The previous answer; None if it could not be read, or there was none."""


class Gsm8kInteraction(BaseInteraction):
    """Say that an answer is wrong and ask again, at most `max_hints` times, then end.

    The right answer is the row's `interaction_kwargs.ground_truth`, else its
    `reward_model.ground_truth`; `interaction_kwargs.hints` are the row's own hints. Thoughts of the
    policy (`<think>`) are not read.

    Args:
        config: The keys of `Gsm8kSettings`: `max_hints` (2), `method` (`flexible`), `hints` (none),
            `score` (1.0), `format_score` (0.0), `hint_penalty` (0.0), `encourage` (false). A
            subclass with keys of its own names them by its `keys_class`.
    """

    keys_class: type[Gsm8kSettings] = Gsm8kSettings

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self._settings = read_keys(self.keys_class, config, key="", also_known=SHARED_KEYS)
        self._talks: dict[str, _Talk] = {}

    async def start_interaction(
        self,
        instance_id: str | None = None,
        ground_truth: Any = None,
        hints: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> str:
        """Store the right answer and the hints of one request."""
        if ground_truth is None:
            raise ValueError(
                "the row has no right answer; expected interaction_kwargs.ground_truth or "
                "reward_model.ground_truth"
            )
        instance_id = instance_id or uuid.uuid4().hex
        own = [hints] if isinstance(hints, str) else hints
        self._talks[instance_id] = _Talk(read_number(ground_truth), own or self._settings.hints)
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> InteractionResult:
        """Score the last answer, and reply to it."""
        talk, settings = self._talks[instance_id], self._settings
        said = without_thought(last_answer(messages))
        answer = extract_gsm8k_answer(said, settings.method)
        score = self._score(talk, answer)
        if answer is not None and same_number(answer, talk.ground_truth):
            reply = _RIGHT
            return InteractionResult(True, reply, score, {"num_hints": talk.num_hints})
        if settings.max_hints is not None and talk.num_hints >= settings.max_hints:
            return InteractionResult(True, "", score, {"num_hints": talk.num_hints})
        reply = self._reply(talk, answer)
        talk.num_hints += 1
        talk.before = answer
        return InteractionResult(False, reply, score, {"num_hints": talk.num_hints})

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the request."""
        self._talks.pop(instance_id, None)

    def _score(self, talk: _Talk, answer: str | None) -> float:
        settings = self._settings
        if answer is None:
            return 0.0
        if not same_number(answer, talk.ground_truth):
            return settings.format_score
        discounted = settings.score - settings.hint_penalty * talk.num_hints
        return max(discounted, min(settings.format_score, settings.score))

    def _reply(self, talk: _Talk, answer: str | None) -> str:
        said = [_WRONG]
        if self._settings.encourage and talk.num_hints and (progress := _progress(talk, answer)):
            said.append(progress)
        if talk.hints:
            said.append(f"Hint: {talk.hints[min(talk.num_hints, len(talk.hints) - 1)]}")
        return " ".join(said)


def _progress(talk: _Talk, answer: str | None) -> str | None:
    """Return what is better than in the previous answer; None if nothing is."""
    if answer is None:
        return None
    if talk.before is None:
        return _READABLE
    if same_number(answer, talk.before):
        return _REPEATED
    is_closer = _distance(answer, talk.ground_truth) < _distance(talk.before, talk.ground_truth)
    return _CLOSER if is_closer else None


def _distance(answer: str, truth: str) -> float:
    """Return the distance of two numbers; infinity if one is not a number."""
    one, other = to_number(answer), to_number(truth)
    if one is None or other is None:
        return math.inf
    return abs(float(one) - float(other))
