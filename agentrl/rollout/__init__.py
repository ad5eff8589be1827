"""One request from its first token to its last: states, ledger, template, parsers, runner.

Names load on first use; importing this package loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.engines.protocol import FinishReason
    from agentrl.rollout.manager import RolloutManager
    from agentrl.rollout.request import AsyncRolloutRequest
    from agentrl.rollout.states import TRANSITIONS, RequestState, StopReason

__all__ = [
    "TRANSITIONS",
    "AsyncRolloutRequest",
    "FinishReason",
    "RequestState",
    "RolloutManager",
    "StopReason",
]

_HOMES = {
    "AsyncRolloutRequest": "agentrl.rollout.request",
    "FinishReason": "agentrl.engines.protocol",
    "RequestState": "agentrl.rollout.states",
    "RolloutManager": "agentrl.rollout.manager",
    "StopReason": "agentrl.rollout.states",
    "TRANSITIONS": "agentrl.rollout.states",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentrl.rollout' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
