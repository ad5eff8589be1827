"""The convention of scorers: what they are told, and what they may return.

A scorer is `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`, a
plain or an `async` function that returns a number, or a dict with the number under `score`.
"""

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import groupby
from numbers import Number
from typing import Any, NamedTuple, SupportsFloat, cast

from agentrl.errors import RewardError, words_of
from agentrl.messages import CallOutcome
from agentrl.plugins.call import call_method
from agentrl.rollout.request import AsyncRolloutRequest

ScoreFn = Callable[..., Any]
"""A scorer: a function of the convention above, its `reward_kwargs` bound."""

MAX_REWARD = 1e30
"""Larger ones would overflow float32, in which batches hold rewards."""


class Score(NamedTuple):
    """What a scorer said of one request."""

    value: float
    extra: dict[str, Any]
    """What else it returned; of a bare number, the number as `acc`."""


def make_told(request: AsyncRolloutRequest) -> dict[str, Any]:
    """Gather what a scorer is called with. It may do with it what it likes: it is a copy."""
    return {
        "data_source": request.data_source,
        "solution_str": solution_text(request),
        "ground_truth": copy.deepcopy(request.ground_truth),
        "extra_info": make_extra_info(request),
    }


def solution_text(request: AsyncRolloutRequest) -> str:
    """The text that is scored: the last message that the policy wrote.

    Not the whole response, of which tool results and users' replies are a part: an answer that
    stands in one of those would be scored as the policy's own. A scorer that wants more finds the
    whole conversation in `extra_info["messages"]`.
    """
    if not request.num_assistant_turns:
        return ""
    written = [message for message in request.messages if message.role == "assistant"]
    return written[-1].text if written else ""


def make_extra_info(request: AsyncRolloutRequest) -> dict[str, Any]:
    """What a scorer is told beside the solution: the row's own `extra_info`, and of the rollout.

    Returns:
        The row's entries and `num_turns` (the prompt counts as one, several tool results in
        succession as one), `num_tool_calls` (by tool: calls that it answered), `turn_scores`
        (rewards of turns), `tool_rewards` (rewards of single calls), `rollout_reward_scores`
        (`calc_reward` of each tool by name, and `user_turn_rewards`), `stop_reason`, `messages`.
    """
    calls = [call for turn in request.turns for call in turn.calls]
    return copy.deepcopy(request.extra_info) | {
        "num_turns": 1 + sum(1 for _ in groupby(turn.role for turn in request.turns)),
        "num_tool_calls": dict(
            Counter(call.name for call in calls if call.outcome == CallOutcome.OK)
        ),
        "turn_scores": [turn.reward for turn in request.turns if turn.reward is not None],
        "tool_rewards": [call.reward for call in calls if call.reward is not None],
        "rollout_reward_scores": request.reward_scores,
        "stop_reason": None if request.stop_reason is None else str(request.stop_reason),
        "messages": [message.to_template() for message in request.messages],
    }


def read_score(returned: object) -> Score:
    """Read what a scorer returned.

    Raises:
        RewardError: where it is, or holds under `score`, no finite number.
    """
    if not isinstance(returned, Mapping):
        value = check_number(returned, "the scorer's return value")
        return Score(value, {"acc": value})
    mapping = cast("Mapping[str, Any]", returned)
    if "score" not in mapping:
        raise RewardError(f"the scorer returned {_shown(mapping)}", expected="the key 'score'")
    extra = {key: value for key, value in mapping.items() if key != "score"}
    return Score(check_number(mapping["score"], "the scorer's 'score'"), extra)


def check_number(value: object, what: str) -> float:
    """Read a reward: numbers of every library count, texts and containers do not.

    Raises:
        RewardError: naming what it is.
    """
    if isinstance(value, SupportsFloat):
        try:
            number = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            number = math.nan
        if abs(number) <= MAX_REWARD:
            return number
    raise RewardError(
        f"{what} is {_shown(value)}", expected=f"a finite number, at most {MAX_REWARD:g}"
    )


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({type(value).__name__})"


def read_text(truth: Any, *, expected: str) -> str:
    """Read a right answer that is a text or a number, as a text.

    Args:
        truth: As the row has it.
        expected: What the scorer compares with, for the error.

    Raises:
        RewardError: for anything else: null, a truth value, a list, a mapping, an empty text.
    """
    is_plain = not isinstance(truth, bool) and isinstance(truth, str | Number)
    text = str(truth).strip() if is_plain else ""
    if not text:
        raise RewardError(f"the ground truth is {truth!r:.200}", expected=expected)
    return text


def read_number(truth: Any) -> str:
    """Read a right answer that is a number, with or without `$` and commas, as a text.

    Raises:
        RewardError: for anything else.
    """
    text = read_text(truth, expected="a number")
    try:
        is_number = Decimal(text.replace("$", "").replace(",", "")).is_finite()
    except InvalidOperation:
        is_number = False
    if not is_number:
        raise RewardError(f"the ground truth is {truth!r:.200}", expected="a number")
    return text


@dataclass(frozen=True, slots=True)
class NamedScorer:
    """One of several scorers."""

    name: str
    scorer: ScoreFn
    weight: float


class WeightedScorers:
    """Several scorers, whose weighted numbers are summed.

    Args:
        parts: The scorers, each with its name and weight.
    """

    def __init__(self, parts: Sequence[NamedScorer]) -> None:
        self.parts = tuple(parts)

    async def __call__(self, **told: Any) -> dict[str, Any]:
        """Score as one scorer would: for managers that know of one alone."""
        calls = (call_method(part.scorer, **told) for part in self.parts)
        score = self.combine(await asyncio.gather(*calls, return_exceptions=True))
        return {**score.extra, "score": score.value}

    def combine(self, outcomes: Sequence[Any]) -> Score:
        """Make one score of what each scorer returned, or raised.

        Beside the sum the score keeps each function's number under its name, and of what else they
        said the first word on every key: `acc` and `success` are those of the first function that
        tells them. A bare number says nothing else.

        Raises:
            RewardError: naming the function that raised, or returned no finite number.
        """
        scores = [_read(part, outcome) for part, outcome in zip(self.parts, outcomes, strict=True)]
        said = [score.extra for score in reversed(scores)]
        extra = {key: value for one in said for key, value in one.items()}
        values = {part.name: s.value for part, s in zip(self.parts, scores, strict=True)}
        total = math.fsum(part.weight * values[part.name] for part in self.parts)
        return Score(total, extra | values)


def _read(part: NamedScorer, outcome: Any) -> Score:
    try:
        if isinstance(outcome, BaseException):
            raise outcome
        score = read_score(outcome)
    except Exception as error:
        raise RewardError(f"the reward function {part.name!r}: {words_of(error)}") from error
    return score if isinstance(outcome, dict) else Score(score.value, {})
