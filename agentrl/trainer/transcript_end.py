"""How a transcript ends: how the request ended, what broke, and what it earned.

reward: 0.9, on 2 tokens, the last is response token 51
  interaction_reward: 0.9
  scorer: 0
"""

import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from agentrl.rewards import CombinedReward, RewardPlacement, Source
from agentrl.rollout.records import Failure
from agentrl.rollout.request import AsyncRolloutRequest

_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$', re.M)
_NOT_THE_USERS = (
    str(Path(__file__).resolve().parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)
"""Where files of agentrl and of libraries begin."""


def read_end(
    request: AsyncRolloutRequest, reward: CombinedReward, placement: RewardPlacement
) -> tuple[str, ...]:
    """Say how a request ended, line by line; text is not yet escaped."""
    lines = [f"{request.state}: {request.stop_reason or 'not finished'}"]
    if request.dropped:
        lines.append(f"dropped: {request.dropped}")
    if request.error is not None:
        lines += _failure_lines(request.error)
    lines += _reward_lines(request, reward, placement)
    lines += [f"reward of tool {name}: {value:g}" for name, value in request.tool_rewards.items()]
    said = {part.source for part in reward.parts}  # a bonus stands in both
    extra = request.reward_extra_info
    lines += [f"{name}: {value}" for name, value in extra.items() if name not in said]
    lines += [
        f"tokens differ from the rendering in turn {d.turn} ({d.kind}): "
        f"expected {d.expected!r}, have {d.actual!r}"
        for d in request.differences
    ]
    return tuple(lines)


def _failure_lines(error: Failure) -> Iterator[str]:
    first, *more = error.message.splitlines() or [""]
    told = f": {first}" if first else ""
    yield f"fault of the {error.fault} in turn {error.turn}: {error.kind}{told}"
    yield from (f"  {line.strip()}" for line in more)
    if (place := find_place(error.traceback)) is not None:
        yield f"  at {place}"


def find_place(traceback: str) -> str | None:
    """Find the last frame of a traceback that is the user's own code; None: there is none.

    Example:
        >>> find_place('  File "/home/me/tools.py", line 3, in execute')
        '/home/me/tools.py:3, in execute'
    """
    frames = [m for m in _FRAME.finditer(traceback) if not m["file"].startswith(_NOT_THE_USERS)]
    return f"{frames[-1]['file']}:{frames[-1]['line']}, in {frames[-1]['name']}" if frames else None


def _reward_lines(
    request: AsyncRolloutRequest, reward: CombinedReward, placement: RewardPlacement
) -> Iterator[str]:
    """Tell what is trained; and of what it is made, where that is not the scorer's number alone."""
    is_scored = request.reward is not None
    if not is_scored and (request.error is not None or not reward.parts):
        yield "reward: not scored"
        return
    yield f"reward: {reward.total:g}{_place(placement)}"
    if is_scored and reward.total == request.reward and len(reward.parts) <= 1:
        return
    earned = {part.source: reward.of(part.source) for part in reward.parts}
    yield from (f"  {source}: {earned[source]:g}" for source in Source if source in earned)
    if not is_scored:
        yield "  scorer: not scored"
    elif earned.get(Source.TRAJECTORY) != request.reward:
        yield f"  scorer: {request.reward:g}"


def _place(placement: RewardPlacement) -> str:
    if placement.index is None:
        return ", on no token: none is trained"
    tokens = [placed.position for placed in placement.rewards if placed.value]
    if len(tokens) > 1:
        return f", on {len(tokens)} tokens, the last is response token {tokens[-1]}"
    return f", on response token {tokens[0] if tokens else placement.index}"
