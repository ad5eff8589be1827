"""The convention of scorers: what they are told, and what they may return.

A scorer is `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)`, a
plain or an `async` function that returns a number, or a dict with the number under `score`.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any, NamedTuple, SupportsFloat, cast

from agentrl.errors import RewardError
from agentrl.messages import CallOutcome
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
