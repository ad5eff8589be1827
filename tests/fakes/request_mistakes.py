"""What can go wrong in a call of a request, and the ways to copy, save and damage a request."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

from agentrl.engines.protocol import VersionSpan
from agentrl.errors import Fault
from agentrl.rollout.records import Failure
from agentrl.rollout.request import AsyncRolloutRequest

BROKEN = Failure(fault=Fault.ENGINE, kind="EngineError", message="gone", turn=0)
NAN, INFINITE = float("nan"), float("inf")

COPIES: dict[str, Callable[[AsyncRolloutRequest], AsyncRolloutRequest]] = {
    "deep copy": copy.deepcopy,
    "shallow copy": copy.copy,
    "model copy": lambda request: request.model_copy(),
    "deep model copy": lambda request: request.model_copy(deep=True),
    "pickle": lambda request: pickle.loads(pickle.dumps(request)),
}
SAVES: dict[str, Callable[[AsyncRolloutRequest], AsyncRolloutRequest]] = {
    "python": lambda request: AsyncRolloutRequest.model_validate(request.model_dump()),
    "plain": lambda request: AsyncRolloutRequest.model_validate(request.model_dump(mode="json")),
    "json": lambda request: AsyncRolloutRequest.model_validate_json(request.model_dump_json()),
}

Damage = Callable[[dict[str, Any]], object]
DAMAGES: dict[str, Damage] = {
    "version": lambda saved: saved.update(version=99),
    "a token more": lambda saved: saved["response_ids"].append(1),
    "a mask more": lambda saved: saved["loss_mask"].append(0),
    "a log-probability less": lambda saved: saved["rollout_log_probs"].insert(0, 0.0),
    "no such token": lambda saved: saved["prompt_ids"].append(-1),
    "a key less": lambda saved: saved.pop("turns"),
    "a turn more": lambda saved: saved["turns"].append(
        {"index": 0, "role": "tool", "start": 0, "end": 1}
    ),
    "another end": lambda saved: saved.update(
        state="completed", stop_reason="failed", error=BROKEN.model_dump(mode="json")
    ),
    "an end without a reason": lambda saved: saved.update(state="completed", stop_reason=None),
    "a failure without an error": lambda saved: saved.update(
        state="failed", stop_reason="aborted", error=None
    ),
    "an error without a failure": lambda saved: saved.update(
        state="running", stop_reason=None, error=BROKEN.model_dump(mode="json")
    ),
    "a mask flipped": lambda saved: saved.update(
        loss_mask=[1 - mask for mask in saved["loss_mask"]] or [1]
    ),
}
WRONG_SAMPLES: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "a log-probability less": lambda ids: {"ids": ids, "log_probs": [-0.5] * (len(ids) - 1)},
    "a log-probability more": lambda ids: {"ids": ids, "log_probs": [-0.5] * (len(ids) + 1)},
    "nan": lambda ids: {"ids": ids, "log_probs": [-0.5] * (len(ids) - 1) + [NAN]},
    "minus infinity": lambda ids: {"ids": ids, "log_probs": [-INFINITE] + [-0.5] * (len(ids) - 1)},
    "positive": lambda ids: {"ids": ids, "log_probs": [0.5] * len(ids)},
    "no number": lambda ids: {"ids": ids, "log_probs": [None] * len(ids)},
    "a negative id": lambda ids: {"ids": [*ids[:-1], -1], "log_probs": [-0.5] * len(ids)},
    "a fractional id": lambda ids: {"ids": [*ids[:-1], 2.5], "log_probs": [-0.5] * len(ids)},
    "a textual id": lambda ids: {"ids": [*ids[:-1], "7"], "log_probs": [-0.5] * len(ids)},
    "versions too short": lambda ids: _versioned(ids, VersionSpan(1, 0, len(ids) - 1)),
    "versions too long": lambda ids: _versioned(ids, VersionSpan(1, 0, len(ids) + 1)),
    "versions with a gap": lambda ids: _versioned(ids, VersionSpan(1, 1, len(ids))),
    "versions that go back": lambda ids: _versioned(
        ids, VersionSpan(1, 0, len(ids) + 1), VersionSpan(2, len(ids) + 1, len(ids))
    ),
    "no finish reason": lambda ids: _versioned(ids) | {"finish_reason": "tired"},
    "no duration": lambda ids: _versioned(ids) | {"seconds": "long"},
}
WRONG_OBSERVATIONS: dict[str, Callable[[list[int]], dict[str, Any]]] = {
    "a negative id": lambda ids: {"ids": [*ids[:-1], -1], "role": "tool"},
    "a fractional id": lambda ids: {"ids": [*ids[:-1], 2.5], "role": "user"},
    "a policy's role": lambda ids: {"ids": ids, "role": "assistant"},
    "no role": lambda ids: {"ids": ids, "role": "narrator"},
}


def _versioned(ids: list[int], *spans: VersionSpan) -> dict[str, Any]:
    return {"ids": ids, "log_probs": [-0.5] * len(ids), "weight_versions": spans}
