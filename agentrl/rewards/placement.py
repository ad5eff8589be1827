"""From the rewards of a request to rewards of its tokens (law 7).

Rewards of three sources become one, by declared weights: the scorer's for the trajectory, those of
turns (in which an interaction's score and the rewards of the turn's calls are summed already), and
`calc_reward` of the tools. Each lands on trained tokens of what it belongs to: the trajectory, or
its turn. Under `last` it lands on the last of them; under `spread` in equal parts on all of them.

A turn of which nothing is trained (it was excluded, or it is a reply) gives its reward to the
nearest trained token before it, which led to it; where there is none, to the first trained token,
so that the parts always sum to the combined reward. A request of which nothing is trained places
nothing, and says so.
"""

import math
import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from agentrl.config.schema import RewardWeightsConfig
from agentrl.rollout.records import Turn
from agentrl.rollout.request import AsyncRolloutRequest

Placement = Literal["last", "spread"]
TRAJECTORY_ALONE = RewardWeightsConfig()


class PlacedReward(NamedTuple):
    """A reward on a token."""

    position: int
    """Index into the response."""
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlacement:
    """Where the rewards of one request landed."""

    combined: float
    """The request's rewards, weighted and summed."""
    rewards: tuple[PlacedReward, ...] = ()
    """By position, each position once. Their values sum to `combined` (in float32)."""
    index: int | None = None
    """Where the trajectory's reward is attached: its last trained token. None: nothing is trained,
    and nothing was placed."""
    moved_turns: tuple[int, ...] = ()
    """Turns whose reward landed on a token of another turn."""


def place_rewards(
    request: AsyncRolloutRequest,
    weights: RewardWeightsConfig = TRAJECTORY_ALONE,
    placement: Placement = "last",
) -> RewardPlacement:
    """Combine a finished request's rewards and place them on its trained tokens.

    Example:
        A response of four tokens, of which `[1, 1, 0, 1]` are trained, with the reward 1: under
        `last` it is `(PlacedReward(3, 1.0),)`; under `spread` a third on each of 0, 1 and 3.
    """
    mask = request.loss_mask if request.is_trained else []
    trained = [place for place, is_trained in enumerate(mask) if is_trained]
    whole = weights.trajectory * (request.reward or 0.0)
    whole += weights.tool * math.fsum(request.tool_rewards.values())
    scored = [turn for turn in request.turns if turn.reward] if weights.turn else []
    by_turn = [(turn, weights.turn * (turn.reward or 0.0)) for turn in scored]
    combined = math.fsum([whole, *(reward for _, reward in by_turn)])
    if not trained:
        return RewardPlacement(combined=combined)

    placed: dict[int, float] = dict.fromkeys([trained[-1]], 0.0)
    moved: list[int] = []
    _add(placed, trained, whole, placement)
    for turn, reward in by_turn:
        tokens = _tokens_of(turn, trained)
        if not tokens:
            moved.append(turn.index)
            tokens = [_nearest(turn, trained)]
        _add(placed, tokens, reward, placement)
    return RewardPlacement(
        combined=combined,
        rewards=tuple(PlacedReward(place, placed[place]) for place in sorted(placed)),
        index=trained[-1],
        moved_turns=tuple(moved),
    )


def _tokens_of(turn: Turn, trained: Sequence[int]) -> Sequence[int]:
    return trained[bisect_left(trained, turn.start) : bisect_left(trained, turn.end)]


def _nearest(turn: Turn, trained: Sequence[int]) -> int:
    return trained[max(bisect_left(trained, turn.start) - 1, 0)]


def _add(
    placed: dict[int, float], tokens: Sequence[int], reward: float, placement: Placement
) -> None:
    if placement == "last":
        tokens = tokens[-1:]
    for token, part in zip(tokens, split_evenly(reward, len(tokens)), strict=True):
        placed[token] = placed.get(token, 0.0) + part


def split_evenly(total: float, count: int) -> list[float]:
    """Cut a reward into equal parts that float32 holds, and whose sum is the reward, in float32.

    Were the parts just rounded, equal rewards of responses of different length would differ in
    their last digits, and a group-relative estimator would train on the difference (law 9). The
    parts are rounded to multiples of a power of two; the last takes the rest.
    """
    if count == 1:
        return [total]
    total = _to_float32(total)
    step = math.ldexp(1.0, math.frexp(total / count)[1] - 22)
    part = math.floor(total / count / step) * step
    return [part] * (count - 1) + [total - part * (count - 1)]


def _to_float32(value: float) -> float:
    return struct.unpack("f", struct.pack("f", value))[0]
