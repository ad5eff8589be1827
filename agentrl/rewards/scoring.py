"""The convention of scorers: their arguments, their results, and ground truths.

A scorer is `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`, a
plain or an `async` function that returns a number, or a dict with the number under `score`.
"""

import asyncio
import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, SupportsFloat, cast

from agentrl.errors import RewardError, words_of
from agentrl.messages import CallOutcome
from agentrl.plugins.call import call_method
from agentrl.rollout.request import AsyncRolloutRequest

ScoreFn = Callable[..., Any]
"""A scorer of this convention, with its `reward_kwargs` bound."""

MAX_REWARD = 1e30
"""Largest allowed reward. Larger ones could overflow float32, the dtype of rewards in batches."""


class Score(NamedTuple):
    """A scorer's result for one request."""

    value: float
    extra: dict[str, Any]
    """The other entries of a dict; for a bare number, the number as `acc`."""


def make_arguments(request: AsyncRolloutRequest) -> dict[str, Any]:
    """Return the arguments of a scorer. They are copies, so a scorer may change them."""
    return {
        "data_source": request.data_source,
        "solution_str": solution_text(request),
        "ground_truth": copy.deepcopy(request.ground_truth),
        "extra_info": make_extra_info(request),
    }


def solution_text(request: AsyncRolloutRequest) -> str:
    """Return the text to score: the last message that the policy wrote.

    It is not the whole response, which includes tool results and users' replies: an answer in one
    of those would be scored as the policy's own. The whole conversation is in
    `extra_info["messages"]`.
    """
    if not request.num_assistant_turns:
        return ""
    written = [message for message in request.messages if message.role == "assistant"]
    return written[-1].text if written else ""


def make_extra_info(request: AsyncRolloutRequest) -> dict[str, Any]:
    """Return a scorer's `extra_info`: the row's own, and entries about the rollout.

    Returns:
        The row's entries, and `num_turns` (the prompt counts as one, several tool results in
        succession as one), `num_tool_calls` (answered calls by tool), `turn_scores`
        (rewards of turns), `tool_rewards` (rewards of single calls), `rollout_reward_scores`
        (`calc_reward` of each tool by name, and `user_turn_rewards`), `stop_reason`, `messages`.
    """
    turns = [turn for turn in request.trajectory_turns if not turn.is_compaction]
    calls = [call for turn in turns for call in turn.calls]
    return copy.deepcopy(request.extra_info) | {
        "num_turns": request.num_turns,
        "num_tool_calls": dict(
            Counter(call.name for call in calls if call.outcome == CallOutcome.OK)
        ),
        "turn_scores": [turn.reward for turn in turns if turn.reward is not None],
        "tool_rewards": [call.reward for call in calls if call.reward is not None],
        "rollout_reward_scores": request.reward_scores,
        "stop_reason": None if request.stop_reason is None else str(request.stop_reason),
        "messages": [message.to_template() for message in request.messages],
    }


def read_score(returned: object) -> Score:
    """Read a scorer's return value.

    Raises:
        RewardError: If it is no finite number and has none under `score`.
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
    """Return a reward as a float. It may be a number of any library, but no text or container.

    Raises:
        RewardError: If it is no finite number.
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


@dataclass(frozen=True, slots=True)
class NamedScorer:
    """One of several scorers."""

    name: str
    scorer: ScoreFn
    weight: float


class WeightedScorers:
    """Several scorers. The reward is the weighted sum of their numbers.

    Args:
        parts: The scorers, each with its name and weight.
    """

    def __init__(self, parts: Sequence[NamedScorer]) -> None:
        self.parts = tuple(parts)

    async def __call__(self, **arguments: Any) -> dict[str, Any]:
        """Score as one scorer, for managers that expect one."""
        calls = (call_method(part.scorer, **arguments) for part in self.parts)
        score = self.combine(await asyncio.gather(*calls, return_exceptions=True))
        return {**score.extra, "score": score.value}

    def combine(self, results: Sequence[Any]) -> Score:
        """Make one score of the scorers' results or errors.

        The score keeps each function's number under its name. If several functions return the same
        other key (`acc`, `success`), the first function's value counts. A bare number has no other
        keys.

        Raises:
            RewardError: If a function raised or returned no finite number; it names the function.
        """
        scores = [_read(part, result) for part, result in zip(self.parts, results, strict=True)]
        extra = {key: value for s in reversed(scores) for key, value in s.extra.items()}
        values = {part.name: s.value for part, s in zip(self.parts, scores, strict=True)}
        total = math.fsum(part.weight * values[part.name] for part in self.parts)
        return Score(total, extra | values)


def _read(part: NamedScorer, result: Any) -> Score:
    try:
        if isinstance(result, BaseException):
            raise result
        score = read_score(result)
    except Exception as error:
        raise RewardError(f"the reward function {part.name!r}: {words_of(error)}") from error
    return score if isinstance(result, dict) else Score(score.value, {})
