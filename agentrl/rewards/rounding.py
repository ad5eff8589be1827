"""Parts of a reward that float32 holds, and whose sum is the reward, in float32.

Batches hold rewards of tokens in float32, and a group-relative estimator compares their sums. Were
the parts just rounded, equal rewards of responses of different length would differ in their last
digits, and the estimator would train on the difference (equal rewards train nothing).
"""

import math
import struct
from collections.abc import Mapping, Sequence


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
