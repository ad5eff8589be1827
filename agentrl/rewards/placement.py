"""From the reward of a request to rewards of its tokens (rewards are on trained tokens).

Each part of the reward belongs to the trajectory, to a turn, or to a call of a turn, and lands on
trained tokens of it. `reward.placement` says on which:

===================== ==================== ================== ==================================
placement             of the trajectory    of a turn          of a call
===================== ==================== ================== ==================================
`last_token`          last token           last token         last token of its turn
`turn_last_token`     last token of every  last token         last token of its turn
                      turn, equal parts
`uniform`             all, equal parts     all, equal parts   all of its turn, equal parts
`exponential_decay`   all, falling by      all, falling       all of its turn, falling
                      `placement_decay`
                      from the last one
`tool_call_tokens`    the tokens of all    last token         the call's tokens, equal parts
                      calls, equal parts
===================== ==================== ================== ==================================

"Token" is a trained token: observed ones are never seen. A call whose tokens are not known is its
whole turn, and under `tool_call_tokens` a trajectory without calls is rewarded on its last token.

A turn of which nothing is trained (it was excluded, or it is a reply) gives its reward to the
nearest trained token before it, which led to it; where there is none, to the first trained token,
so that the parts always sum to the combined reward. A request of which nothing is trained places
nothing, and says so.
"""

import math
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.config.schema.reward import Placement, RewardConfig
from agentrl.rewards.combination import TRAJECTORY_ALONE, combine_rewards
from agentrl.rollout.records import CallRecord, Turn
from agentrl.rollout.request import AsyncRolloutRequest


class PlacedReward(NamedTuple):
    """A reward on a token."""

    position: int
    """Index into the response."""
    value: float
    """As float32 holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlacement:
    """Where the rewards of one request landed."""

    combined: float
    """The request's rewards, weighted and summed."""
    rewards: tuple[PlacedReward, ...] = ()
    """By position, each position once. Their sum is `combined`, in float32."""
    index: int | None = None
    """Where the trajectory's reward is attached: the last token on which a part of it lies. None:
    nothing is trained, and nothing was placed."""
    moved_turns: tuple[int, ...] = ()
    """Turns whose reward landed on a token of another turn."""


def place_rewards(
    request: AsyncRolloutRequest, config: RewardConfig = TRAJECTORY_ALONE
) -> RewardPlacement:
    """Combine a finished request's rewards and place them on its trained tokens.

    Example:
        A response of four tokens, of which `[1, 1, 0, 1]` are trained, with the reward 1: under
        `last_token` it is `(PlacedReward(3, 1.0),)`; under `uniform` a third on each of 0, 1, 3.
    """
    reward = combine_rewards(request, config)
    ground = _Ground.of(request)
    if not ground.tokens:
        return RewardPlacement(combined=reward.total)
    place, decay = _PLACEMENTS[config.placement], config.placement_decay
    attached = place(_Lot(ground, ground.tokens, None, None, decay)).tokens[-1]
    placed, moved = {attached: 0.0}, dict[int, None]()
    for part in reward.parts:
        tokens = ground.of_turn(part.turn)
        if part.turn is not None and not tokens:
            tokens = [ground.nearest(part.turn)]
            moved[part.turn.index] = None
        shares = place(_Lot(ground, tokens, part.turn, part.call, decay))
        for token, value in shares.of(part.value):
            placed[token] = placed.get(token, 0.0) + value
    settled = settle(placed, reward.total, spare=ground.tokens)
    return RewardPlacement(
        combined=reward.total,
        rewards=tuple(PlacedReward(token, settled[token]) for token in sorted(settled)),
        index=attached,
        moved_turns=tuple(moved),
    )


@dataclass(frozen=True, slots=True)
class _Ground:
    """What rewards may land on: the trained tokens of a request, and whose they are."""

    tokens: Sequence[int]
    """Positions in the response, in order."""
    turns: Sequence[Turn]

    @classmethod
    def of(cls, request: AsyncRolloutRequest) -> "_Ground":
        mask = request.loss_mask if request.is_trained else []
        return cls([place for place, is_trained in enumerate(mask) if is_trained], request.turns)

    def between(self, start: int, end: int) -> Sequence[int]:
        return self.tokens[bisect_left(self.tokens, start) : bisect_left(self.tokens, end)]

    def of_turn(self, turn: Turn | None) -> Sequence[int]:
        """The trained tokens of a turn; None: of the trajectory."""
        return self.tokens if turn is None else self.between(turn.start, turn.end)

    def of_call(self, turn: Turn, call: CallRecord) -> Sequence[int]:
        """The trained tokens of a call: those of its turn, where they are not known."""
        return (call.span and self.between(*call.span)) or self.of_turn(turn)

    def of_calls(self) -> Sequence[int]:
        """The trained tokens of all calls, each once."""
        calls = ((turn, call) for turn in self.turns for call in turn.calls)
        return sorted({token for turn, call in calls for token in self.of_call(turn, call)})

    def nearest(self, turn: Turn) -> int:
        """The token before a turn of which nothing is trained; else the first of all."""
        return self.tokens[max(bisect_left(self.tokens, turn.start) - 1, 0)]


class _Shares(NamedTuple):
    """How a reward is cut: tokens in order, and what part of it each is given."""

    tokens: Sequence[int]
    parts: Sequence[float] = ()
    """They sum to 1, the last is the largest; none: equal ones."""

    def of(self, reward: float) -> Iterator[tuple[int, float]]:
        """Cut a reward: each token's own."""
        cut = split(reward, self.parts) if self.parts else split_evenly(reward, len(self.tokens))
        return zip(self.tokens, cut, strict=True)


class _Lot(NamedTuple):
    """What one part of the reward belongs to."""

    ground: _Ground
    tokens: Sequence[int]
    """The trained tokens of its turn, or of the trajectory; where there are none, the nearest."""
    turn: Turn | None
    """None: the trajectory."""
    call: CallRecord | None
    decay: float


def _last_token(lot: _Lot) -> _Shares:
    return _Shares(lot.tokens[-1:])


def _turn_last_token(lot: _Lot) -> _Shares:
    if lot.turn is not None:
        return _last_token(lot)
    of_turns = map(lot.ground.of_turn, lot.ground.turns)
    return _Shares([tokens[-1] for tokens in of_turns if tokens])


def _uniform(lot: _Lot) -> _Shares:
    return _Shares(lot.tokens)


def _exponential_decay(lot: _Lot) -> _Shares:
    shares = [lot.decay**back for back in range(len(lot.tokens))]
    total = sum(shares)
    return _Shares(lot.tokens, [share / total for share in reversed(shares)])


def _tool_call_tokens(lot: _Lot) -> _Shares:
    if lot.turn is None:
        return _Shares(lot.ground.of_calls() or lot.tokens[-1:])
    if lot.call is None:
        return _last_token(lot)
    return _Shares(lot.ground.of_call(lot.turn, lot.call) or lot.tokens)


_PLACEMENTS: Mapping[Placement, Callable[[_Lot], _Shares]] = {
    "last_token": _last_token,
    "turn_last_token": _turn_last_token,
    "uniform": _uniform,
    "exponential_decay": _exponential_decay,
    "tool_call_tokens": _tool_call_tokens,
}


def split_evenly(total: float, count: int) -> list[float]:
    """Cut a reward into equal parts, but for a rest of the rounding in the last."""
    return split(total, [1 / count] * count)


def split(total: float, shares: Sequence[float]) -> list[float]:
    """Cut a reward by shares, so that the parts, each a float32, sum to it in float32.

    All but the last part are rounded to multiples of a power of two, coarse enough that the last,
    which takes the rest, has no more digits than float32 holds.

    Args:
        total: The reward.
        shares: They sum to 1, and none is larger than the last.
    """
    if len(shares) == 1:
        return [total]
    total = to_float32(total)
    step = math.ldexp(1.0, math.frexp(total * shares[-1])[1] - 22)
    parts = [round(total * share / step) * step for share in shares[:-1]]
    return [*parts, total - sum(parts)]  # exact: all are multiples of one power of two


def settle(placed: Mapping[int, float], total: float, *, spare: Sequence[int]) -> dict[int, float]:
    """Round rewards of tokens to float32, so that their sum is the total, in float32.

    What the rounding took is given to the largest, and what that cannot hold to smaller ones, down
    to a spare token: where a large reward and a large penalty cancel, the difference has finer
    digits than either. (Where there is no spare token left, it stays rounded as they are.)

    Args:
        placed: By token.
        total: What they were cut from.
        spare: Tokens that may be given such a remainder, the last ones first.
    """
    settled = {token: to_float32(value) for token, value in placed.items()}
    wanted = to_float32(total)
    if to_float32(math.fsum(settled.values())) == wanted:
        return settled
    takers = sorted(settled, key=lambda token: (-abs(settled[token]), -token))
    free = next((token for token in reversed(spare) if token not in settled), None)
    for token in [*takers, *([] if free is None else [free])]:
        found = math.fsum(settled.values())
        if to_float32(found) == wanted:
            break
        settled[token] = to_float32(settled.get(token, 0.0) + wanted - found)
    return settled


def to_float32(value: float) -> float:
    """Round to the nearest number that float32 holds."""
    return struct.unpack("f", struct.pack("f", value))[0]
