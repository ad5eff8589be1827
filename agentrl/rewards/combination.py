"""Combine all rewards of a request into one number, by one declared rule (rewards are on trained
tokens).

    combined = weights.trajectory  * (scorer's number + overlong punishment)
             + model.weight        * the reward model's score
             + weights.interaction * sum of the interaction's scores of turns
             + weights.tool_call   * sum of what `execute` returned for single calls
             + weights.tool        * sum of `calc_reward` of the tools
             + tool_call_bonus     * answered calls, at most max_bonus_calls
             + interaction_bonus     if the interaction ended the conversation (its metadata's
                                     `ended_by` is not `budget`)
             - length_penalty      * sampled tokens / data.max_response_length

If the trajectory has several sequences, the turns, calls and sampled tokens of all its trained
sequences count; the overlong punishment is that of the sequence in which the trajectory ended.

No weight multiplies bonuses and penalties. Nothing here changes a request: the scorer's number,
`success` and `acc` stay as the scorer returned them, so validation and `rollout/reward` contain no
bonus.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import islice

from agentrl.config.schema.reward import OverlongBufferConfig, RewardConfig
from agentrl.messages import CallOutcome
from agentrl.rollout.records import CallRecord, Turn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason

TRAJECTORY_ALONE = RewardConfig()


class Source(StrEnum):
    """The origin of a part of the reward. The value is its name in `reward_extra_info`."""

    TRAJECTORY = "trajectory_reward"
    """The scorer's number for the finished request."""
    REWARD_MODEL = "reward_model"
    """The score of the reward model (`reward.model`)."""
    INTERACTION = "interaction_reward"
    """The interaction's score of a turn."""
    TOOL_CALL = "tool_call_reward"
    """The reward that `execute` returned for a call."""
    TOOL = "tool_reward"
    """The rewards that `calc_reward` of the tools returned at the end."""
    OVERLONG = "overlong_reward"
    """The penalty of `reward.overlong_buffer`."""
    TOOL_CALL_BONUS = "tool_call_bonus"
    INTERACTION_BONUS = "interaction_bonus"
    LENGTH_PENALTY = "length_penalty"


SHAPING = frozenset({
    Source.OVERLONG, Source.TOOL_CALL_BONUS, Source.INTERACTION_BONUS, Source.LENGTH_PENALTY,
})  # fmt: skip
"""Sources that the configuration adds, and that no scorer or plug-in returns."""


@dataclass(frozen=True, slots=True)
class RewardPart:
    """One weighted number of a request's reward, and the part of the request it belongs to."""

    source: Source
    value: float
    """The number that enters the combined reward; a penalty is negative."""
    turn: Turn | None = None
    """The turn it belongs to; None if it belongs to the trajectory."""
    call: CallRecord | None = None
    """The call of the turn; None if it belongs to the whole turn."""


@dataclass(frozen=True)
class CombinedReward:
    """All parts of a request's reward that are not 0."""

    parts: tuple[RewardPart, ...] = ()

    @cached_property
    def total(self) -> float:
        """The combined reward, summed without intermediate rounding."""
        return math.fsum(part.value for part in self.parts)

    def of(self, source: Source) -> float:
        """Return the sum of one source's parts."""
        return math.fsum(part.value for part in self.parts if part.source is source)


def combine_rewards(
    request: AsyncRolloutRequest, config: RewardConfig = TRAJECTORY_ALONE
) -> CombinedReward:
    """Combine the rewards of a finished request by the configured weights, bonuses and penalties.

    Example:
        A score of 1 and two answered calls of 0.25 each: with the default weights `total` is 1.0;
        under `weights.tool_call: 1` it is 1.5, in three parts.
    """
    sources = (_of_trajectory, _of_turns, _of_bonuses)
    found = (part for source in sources for part in source(request, config))
    return CombinedReward(tuple(part for part in found if part.value))


def active_sources(config: RewardConfig) -> list[Source]:
    """List the sources that may enter the combined reward, besides the scorer's number."""
    weights = config.weights
    sizes = {
        Source.REWARD_MODEL: config.model is not None and config.model.weight,
        Source.INTERACTION: weights.interaction,
        Source.TOOL_CALL: weights.tool_call,
        Source.TOOL: weights.tool,
        Source.OVERLONG: config.overlong_buffer.enable,
        Source.TOOL_CALL_BONUS: config.tool_call_bonus,
        Source.INTERACTION_BONUS: config.interaction_bonus,
        Source.LENGTH_PENALTY: config.length_penalty,
    }
    return [source for source, size in sizes.items() if size]


def record_shaping(request: AsyncRolloutRequest, config: RewardConfig) -> None:
    """Record each bonus and penalty of a scored request in `reward_extra_info`, also if it is 0.

    So a saved rollout shows it, and `algorithm.gdpo_reward_keys` can name it. The overlong penalty
    is recorded before it is multiplied by `weights.trajectory`. The score of the reward model is
    recorded too, before it is multiplied by its weight.
    """
    if config.model is not None and request.rm_score is not None:
        request.reward_extra_info[Source.REWARD_MODEL.value] = request.rm_score
    if request.reward is None:
        return
    reward = combine_rewards(request, config)
    for source in SHAPING & {*active_sources(config)}:
        value = _overlong(request, config) if source is Source.OVERLONG else reward.of(source)
        request.reward_extra_info[source.value] = value


def _of_trajectory(request: AsyncRolloutRequest, config: RewardConfig) -> Iterator[RewardPart]:
    weights = config.weights
    if request.reward is not None:
        yield RewardPart(Source.TRAJECTORY, weights.trajectory * request.reward)
        yield RewardPart(Source.OVERLONG, weights.trajectory * _overlong(request, config))
    if config.model is not None and request.rm_score is not None:
        yield RewardPart(Source.REWARD_MODEL, config.model.weight * request.rm_score)
    rewards = (value for one in counted_sequences(request) for value in one.tool_rewards.values())
    yield RewardPart(Source.TOOL, weights.tool * math.fsum(rewards))


def _overlong(request: AsyncRolloutRequest, config: RewardConfig) -> float:
    buffer, budget = config.overlong_buffer, request.budgets.max_response_tokens
    if not buffer.enable:
        return 0.0
    return compute_overlong_reward(count_sampled_tokens(request.turns), budget, buffer)


def _of_turns(request: AsyncRolloutRequest, config: RewardConfig) -> Iterator[RewardPart]:
    """A turn either made calls or was answered by the interaction: its calls show which."""
    weights = config.weights
    for turn in _turns_of(request):
        if not turn.calls:
            yield RewardPart(Source.INTERACTION, weights.interaction * (turn.reward or 0.0), turn)
        for call in turn.calls:
            value = weights.tool_call * (call.reward or 0.0)
            yield RewardPart(Source.TOOL_CALL, value, turn, call)


def _of_bonuses(request: AsyncRolloutRequest, config: RewardConfig) -> Iterator[RewardPart]:
    turns = _turns_of(request)
    calls = ((turn, call) for turn in turns for call in turn.calls)
    answered = ((turn, call) for turn, call in calls if call.outcome == CallOutcome.OK)
    for turn, call in islice(answered, config.max_bonus_calls):
        yield RewardPart(Source.TOOL_CALL_BONUS, config.tool_call_bonus, turn, call)
    last = next((turn for turn in reversed(request.turns) if turn.role == "assistant"), None)
    is_out_of_budget = last is not None and last.metadata.get("ended_by") == "budget"
    if request.stop_reason is StopReason.INTERACTION_ENDED and not is_out_of_budget:
        yield RewardPart(Source.INTERACTION_BONUS, config.interaction_bonus, last)
    share = count_sampled_tokens(turns) / request.budgets.max_response_tokens
    yield RewardPart(Source.LENGTH_PENALTY, -config.length_penalty * share)


def counted_sequences(request: AsyncRolloutRequest) -> Sequence[AsyncRolloutRequest]:
    """Return the sequences of which rewards count: not those of delegates that failed."""
    if not request.branches:
        return (request,)
    return [one for one in request.sequences if one is request or one.is_trained]


def _turns_of(request: AsyncRolloutRequest) -> Sequence[Turn]:
    return [turn for one in counted_sequences(request) for turn in one.turns]


def compute_overlong_reward(
    num_tokens: int, max_response_length: int, config: OverlongBufferConfig
) -> float:
    """Compute the penalty for an answer's length (0 or negative).

    It is 0 up to `max_response_length - len` tokens, falls linearly from there, and is
    `-penalty_factor` from `max_response_length` on.

    Source: Yu et al. 2025 (arXiv 2503.14476), section 3.4, equation 13.

    Args:
        num_tokens: Number of sampled tokens of the answer.
        max_response_length: The key of the data section.
        config: `len`, the buffer's tokens, and `penalty_factor`.

    Example:
        >>> buffer = OverlongBufferConfig(enable=True, len=40, penalty_factor=2.0)
        >>> [compute_overlong_reward(n, 100, buffer) for n in (60, 70, 100)]
        [0.0, -0.5, -2.0]
    """
    over = num_tokens - (max_response_length - config.len)
    share = min(max(over, 0) / config.len, 1.0)
    return -share * config.penalty_factor if share else 0.0


def count_sampled_tokens(turns: Sequence[Turn]) -> int:
    """Count the tokens that the policy sampled, including those of excluded turns.

    Observed tokens do not count: the policy did not write a tool's long result, and no observed
    token may change a return (observations are invisible).
    """
    return sum(turn.num_tokens for turn in turns if turn.role == "assistant")
