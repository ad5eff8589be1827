"""Place the rewards of a request on its trained tokens (rewards are on trained tokens).

Each part of the reward belongs to the trajectory, to a turn, or to a call of a turn.
`reward.placement` chooses trained tokens of it:

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

"Token" means trained token; observed tokens are skipped. If the tokens of a call are unknown, its
whole turn is used. Under `tool_call_tokens` a trajectory without calls is rewarded on its last
token.

If a turn has no trained token (it was excluded, or it is a reply), its reward goes to the nearest
trained token before it; if there is none, to the first trained token. So the parts always sum to
the combined reward. If a request has no trained token, nothing is placed, and `index` is None.

If a trajectory has several sequences, they are placed on as one: the trained tokens of all
sequences, in their order. So the trajectory's reward is, under `last_token`, on the last trained
token of the sequence in which the trajectory ended.

Batches store rewards of tokens in float32, and group-relative estimators compare their sums. With
plain rounding, equal rewards of responses of different lengths would differ in their last digits,
and the estimator would train on the difference (equal rewards train nothing). So the parts are
float32 numbers that sum to exactly the reward in float32.
"""

import math
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, pairwise
from typing import NamedTuple

from agentrl.config.schema.reward import Placement, RewardConfig
from agentrl.rewards.combination import TRAJECTORY_ALONE, combine_rewards
from agentrl.rollout.records import CallRecord, Turn
from agentrl.rollout.request import AsyncRolloutRequest


class PlacedReward(NamedTuple):
    """A reward on a token."""

    position: int
    """Index into the response; with several sequences, into their responses one after the other."""
    value: float
    """A float32 number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardPlacement:
    """The placed rewards of one request."""

    combined: float
    """The request's rewards, weighted and summed."""
    rewards: tuple[PlacedReward, ...] = ()
    """Rewards by position, each position once. Their float32 sum is `combined`."""
    index: int | None = None
    """The last token with a part of the trajectory's reward; None if nothing is trained."""
    moved_turns: tuple[int, ...] = ()
    """Turns that have their reward on a token of another turn."""
    starts: tuple[int, ...] = (0,)
    """Position of the first response token of each sequence."""

    def by_sequence(self) -> "list[RewardPlacement]":
        """Return the placed rewards of each sequence, with positions in its own response."""
        if len(self.starts) == 1:
            return [self]
        found: list[RewardPlacement] = []
        for start, end in pairwise((*self.starts, math.inf)):
            inside = [one for one in self.rewards if start <= one.position < end]
            is_inside = self.index is not None and start <= self.index < end
            placed = RewardPlacement(
                combined=self.combined,
                rewards=tuple(PlacedReward(at - int(start), value) for at, value in inside),
                index=self.index - int(start) if self.index is not None and is_inside else None,
            )
            found.append(placed)
        return found


def place_rewards(
    request: AsyncRolloutRequest,
    config: RewardConfig = TRAJECTORY_ALONE,
    *,
    only_last: bool = False,
) -> RewardPlacement:
    """Combine a finished request's rewards and place them on its trained tokens.

    Args:
        request: A finished request.
        config: Weights, bonuses, penalties and the placement.
        only_last: Whether only the sequence in which the trajectory ended is trained.

    Example:
        A response of four tokens, of which `[1, 1, 0, 1]` are trained, with the reward 1: under
        `last_token` it is `(PlacedReward(3, 1.0),)`; under `uniform` a third on each of 0, 1, 3.
    """
    reward = combine_rewards(request, config)
    trained = _TrainedTokens.of(request, only_last=only_last)
    if not trained.tokens:
        return RewardPlacement(combined=reward.total, starts=trained.starts)
    place, decay = _PLACEMENTS[config.placement], config.placement_decay
    attached = place(_Target(trained, trained.tokens, None, None, decay)).tokens[-1]
    placed, moved = {attached: 0.0}, dict[int, None]()
    for part in reward.parts:
        tokens = trained.of_turn(part.turn)
        if part.turn is not None and not tokens:
            tokens = [trained.nearest(part.turn)]
            moved[part.turn.index] = None
        shares = place(_Target(trained, tokens, part.turn, part.call, decay))
        for token, value in shares.of(part.value):
            placed[token] = placed.get(token, 0.0) + value
    exact = distribute_exactly(placed, reward.total, spare=trained.tokens)
    return RewardPlacement(
        combined=reward.total,
        rewards=tuple(PlacedReward(token, exact[token]) for token in sorted(exact)),
        index=attached,
        moved_turns=tuple(moved),
        starts=trained.starts,
    )


@dataclass(frozen=True, slots=True)
class _TrainedTokens:
    """The trained tokens of a request, and the turns and calls that they belong to."""

    tokens: Sequence[int]
    """Positions in the response, in order; those of several sequences follow each other."""
    turns: Sequence[Turn]
    starts: tuple[int, ...] = (0,)
    """Position of the first response token of each sequence."""
    shifts: Mapping[int, int] = field(default_factory=dict[int, int])
    """By `id` of a turn: the start of its sequence, if that is not 0."""

    @classmethod
    def of(cls, request: AsyncRolloutRequest, *, only_last: bool) -> "_TrainedTokens":
        if not request.branches:
            mask = request.loss_mask if request.is_trained else []
            return cls(list(compress(range(len(mask)), mask)), request.turns)
        tokens, starts, shifts = list[int](), [0], dict[int, int]()
        for one in request.sequences:
            is_trained = one is request or (one.is_trained and not only_last)
            mask = one.loss_mask if request.is_trained and is_trained else []
            tokens += [starts[-1] + at for at in compress(range(len(mask)), mask)]
            shifts |= {id(turn): starts[-1] for turn in one.turns}
            starts.append(starts[-1] + one.num_response_tokens)
        turns = [turn for one in request.sequences for turn in one.turns]
        return cls(tokens, turns, tuple(starts[:-1]), shifts)

    def between(self, start: int, end: int) -> Sequence[int]:
        return self.tokens[bisect_left(self.tokens, start) : bisect_left(self.tokens, end)]

    def of_turn(self, turn: Turn | None) -> Sequence[int]:
        """Return the trained tokens of a turn; for None, those of the trajectory."""
        if turn is None:
            return self.tokens
        shift = self.shifts.get(id(turn), 0)
        return self.between(shift + turn.start, shift + turn.end)

    def of_call(self, turn: Turn, call: CallRecord) -> Sequence[int]:
        """Return the trained tokens of a call; those of its turn if they are unknown."""
        if call.span is None:
            return self.of_turn(turn)
        shift = self.shifts.get(id(turn), 0)
        start, end = call.span
        return self.between(shift + start, shift + end) or self.of_turn(turn)

    def of_calls(self) -> Sequence[int]:
        """Return the trained tokens of all calls, each once."""
        calls = ((turn, call) for turn in self.turns for call in turn.calls)
        return sorted({token for turn, call in calls for token in self.of_call(turn, call)})

    def nearest(self, turn: Turn) -> int:
        """Return the last trained token before a turn; if there is none, the first one."""
        start = self.shifts.get(id(turn), 0) + turn.start
        return self.tokens[max(bisect_left(self.tokens, start) - 1, 0)]


class _Shares(NamedTuple):
    """Tokens in order, and each token's share of a reward."""

    tokens: Sequence[int]
    parts: Sequence[float] = ()
    """Shares that sum to 1, the last one the largest; empty for equal shares."""

    def of(self, reward: float) -> Iterator[tuple[int, float]]:
        """Yield each token and its part of a reward."""
        cut = split(reward, self.parts) if self.parts else split_evenly(reward, len(self.tokens))
        return zip(self.tokens, cut, strict=True)


class _Target(NamedTuple):
    """The tokens, turn and call that one part of the reward belongs to."""

    trained: _TrainedTokens
    tokens: Sequence[int]
    """Trained tokens of the turn or the trajectory; if there are none, the nearest one."""
    turn: Turn | None
    """None for the trajectory."""
    call: CallRecord | None
    decay: float


def _last_token(target: _Target) -> _Shares:
    return _Shares(target.tokens[-1:])


def _turn_last_token(target: _Target) -> _Shares:
    if target.turn is not None:
        return _last_token(target)
    of_turns = map(target.trained.of_turn, target.trained.turns)
    return _Shares([tokens[-1] for tokens in of_turns if tokens])


def _uniform(target: _Target) -> _Shares:
    return _Shares(target.tokens)


def _exponential_decay(target: _Target) -> _Shares:
    shares = [target.decay**back for back in range(len(target.tokens))]
    total = sum(shares)
    return _Shares(target.tokens, [share / total for share in reversed(shares)])


def _tool_call_tokens(target: _Target) -> _Shares:
    if target.turn is None:
        return _Shares(target.trained.of_calls() or target.tokens[-1:])
    if target.call is None:
        return _last_token(target)
    return _Shares(target.trained.of_call(target.turn, target.call) or target.tokens)


_PLACEMENTS: Mapping[Placement, Callable[[_Target], _Shares]] = {
    "last_token": _last_token,
    "turn_last_token": _turn_last_token,
    "uniform": _uniform,
    "exponential_decay": _exponential_decay,
    "tool_call_tokens": _tool_call_tokens,
}


def split_evenly(total: float, count: int) -> list[float]:
    """Cut a reward into equal parts; the last one takes the rest of the rounding."""
    return split(total, [1 / count] * count)


def split(total: float, shares: Sequence[float]) -> list[float]:
    """Cut a reward by shares into float32 parts that sum to the reward in float32.

    All parts except the last are rounded to multiples of a power of two. It is coarse enough that
    the last part, which takes the rest, is a float32 number too.

    Args:
        total: The reward.
        shares: Shares that sum to 1; none is larger than the last.
    """
    if len(shares) == 1:
        return [total]
    total = to_float32(total)
    step = math.ldexp(1.0, math.frexp(total * shares[-1])[1] - 22)
    parts = [round(total * share / step) * step for share in shares[:-1]]
    return [*parts, total - sum(parts)]  # exact: all are multiples of one power of two


def distribute_exactly(
    placed: Mapping[int, float], total: float, *, spare: Sequence[int]
) -> dict[int, float]:
    """Round rewards of tokens to float32, so that their float32 sum is the total.

    The rounding error goes to the largest reward; what that cannot represent goes to smaller ones,
    and last to a spare token. (If a large reward and a large penalty cancel, their difference has
    finer digits than either.) If no spare token is left, the rest of the error stays.

    Args:
        placed: Rewards by token.
        total: The sum.
        spare: Tokens that may take a remainder, the last ones first.
    """
    exact = {token: to_float32(value) for token, value in placed.items()}
    wanted = to_float32(total)
    if to_float32(math.fsum(exact.values())) == wanted:
        return exact
    takers = sorted(exact, key=lambda token: (-abs(exact[token]), -token))
    free = next((token for token in reversed(spare) if token not in exact), None)
    for token in [*takers, *([] if free is None else [free])]:
        found = math.fsum(exact.values())
        if to_float32(found) == wanted:
            break
        exact[token] = to_float32(exact.get(token, 0.0) + wanted - found)
    return exact


def to_float32(value: float) -> float:
    """Round to the nearest float32 number."""
    return struct.unpack("f", struct.pack("f", value))[0]
