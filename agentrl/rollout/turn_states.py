"""In which state each sampled turn began, as a number: what group-in-group credit compares.

The state is what a tool or interaction declared under the key `state` (of a call's metrics, or of
an interaction's metadata) when it answered the turn before. Where none did, it is what the policy
was shown since its last turn, token by token; for the first turn, the prompt. Where it was shown
nothing in between, it is the whole history.
"""

import json
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from agentrl.rollout.records import Turn, to_plain
from agentrl.rollout.request import AsyncRolloutRequest

STATE_KEY = "state"
"""Under which tools' metrics and interactions' metadata declare one."""


def compute_turn_states(request: AsyncRolloutRequest) -> list[tuple[Turn, int]]:
    """Number the states in which a request's sampled turns began.

    The numbers are hashes of content, of 63 bits: equal in every process and every run.

    Returns:
        Each sampled turn in order, and its state's number, 0 or more.
    """
    prompt_ids, response_ids = request.prompt_ids, request.response_ids
    states: list[tuple[Turn, int]] = []
    for turn in request.turns:
        if turn.role == "assistant":
            before = states[-1][0] if states else None
            shown = response_ids[before.end if before else 0 : turn.start]
            seen = shown if before and shown else prompt_ids + response_ids[: turn.start]
            states.append((turn, _number(_declared(before) or _tokens(seen))))
    return states


def _declared(before: Turn | None) -> bytes:
    """What was declared when the turn before was answered; empty where nothing was."""
    if before is None:
        return b""
    reports: list[dict[str, Any]] = [*(call.metrics for call in before.calls), before.metadata]
    declared = [report[STATE_KEY] for report in reports if STATE_KEY in report]
    plain = json.dumps(declared, sort_keys=True, default=to_plain)
    return b"declared " + plain.encode() if declared else b""


def _tokens(ids: Sequence[int]) -> bytes:
    return b"tokens " + array("q", ids).tobytes()


def _number(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 1
