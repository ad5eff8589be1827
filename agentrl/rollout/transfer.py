"""Requests and completions as bytes, for the processes of one run.

Pickle is faster than JSON here and keeps every value. The lists of a ledger and of a completion are
packed into arrays. A request that comes back from a rollout worker carries what the rollout added;
the inputs, which the sender has, return only if a plug-in changed them.
"""

import copyreg
import io
import pickle
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.engines.protocol import Completion
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.rollout.ledger import Ledger
from agentrl.rollout.request import AsyncRolloutRequest

INPUT_FIELDS = (
    "request_id", "batch_data_id", "rollout_offset", "uid", "attempt", "tools_kwargs",
    "interaction_kwargs", "tool_selection", "data_source", "ground_truth", "extra_info", "columns",
    "sampling", "budgets", "seed",
)  # fmt: skip
"""Fields that the sender of a request sets, and that no rollout changes."""
SCORE_FIELDS = (
    "reward", "reward_extra_info", "metrics", "_state", "_stop_reason", "_error",
)  # fmt: skip
"""Fields that a score of one request sets."""

Schemas = Mapping[str, OpenAIFunctionToolSchema]
"""The schemas of a run's tools by name. Both sides have them, so that requests only name them."""


def dump(value: Any) -> bytes:
    """Return a value as bytes, with packed ledgers and completions.

    Raises:
        Exception: Part of it cannot be pickled.
    """
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def load(data: bytes) -> Any:
    """Return the value of `dump`. Only for bytes from processes of the same run."""
    return pickle.loads(data)


def dump_inputs(request: AsyncRolloutRequest) -> bytes:
    """Return the input fields of a request as bytes."""
    state = vars(request)
    return dump([state[name] for name in INPUT_FIELDS])


def dump_results(request: AsyncRolloutRequest, inputs: bytes, schemas: Schemas) -> bytes:
    """Return what a rollout has added to a request.

    Args:
        request: The request that has ended.
        inputs: `dump_inputs` of the request before the rollout.
        schemas: Those of the run's tools.
    """
    state = {name: value for name, value in vars(request).items() if name not in INPUT_FIELDS}
    if dump_inputs(request) != inputs:
        state |= {name: getattr(request, name) for name in INPUT_FIELDS}
    found = [schema for schema in request.tool_schemas if schema is schemas.get(schema.name)]
    if len(found) == len(request.tool_schemas):
        state["tool_schemas"] = [schema.name for schema in found]
    return dump(state)


def load_results(request: AsyncRolloutRequest, results: bytes, schemas: Schemas) -> None:
    """Set what a rollout has added to a request, in place.

    Args:
        request: The sender's own object.
        results: From `dump_results` or `dump_score`.
        schemas: Those of the run's tools.
    """
    state: dict[str, Any] = load(results)
    state["tool_schemas"] = [
        schemas[schema] if isinstance(schema, str) else schema
        for schema in state.get("tool_schemas", request.tool_schemas)
    ]
    vars(request).update(state)
    for one in request.sequences:
        one.share_media()


def dump_score(request: AsyncRolloutRequest) -> bytes:
    """Return what a score has changed in a request."""
    return dump({name: vars(request)[name] for name in SCORE_FIELDS})


def pack_ids(ids: Sequence[int]) -> "array[int]":
    """Pack token ids into the smallest of two kinds of arrays."""
    return array("I" if max(ids, default=0) < 1 << 32 else "Q", ids)


def _pack_numbers(numbers: Sequence[float]) -> "array[float]":
    """Pack numbers as float32 if that keeps each of them, which is what engines return."""
    try:
        packed = array("f", numbers)
    except OverflowError:
        return array("d", numbers)
    return packed if packed.tolist() == numbers else array("d", numbers)


def _reduce_ledger(ledger: Ledger) -> tuple[Any, ...]:
    return _load_ledger, (
        pack_ids(ledger.prompt_ids),
        pack_ids(ledger.response_ids),
        bytes(ledger.loss_mask),
        _pack_numbers(ledger.rollout_log_probs),
    )


def _load_ledger(
    prompt: "array[int]", response: "array[int]", mask: bytes, log_probs: "array[float]"
) -> Ledger:
    ledger = Ledger()
    ledger.prompt_ids, ledger.response_ids = prompt.tolist(), response.tolist()
    ledger.loss_mask, ledger.rollout_log_probs = list(mask), log_probs.tolist()
    return ledger


def _reduce_completion(completion: Completion) -> tuple[Any, ...]:
    return _load_completion, (
        pack_ids(completion.token_ids),
        _pack_numbers(completion.log_probs),
        completion.finish_reason,
        completion.weight_versions,
        completion.cached_tokens,
    )


def _load_completion(
    ids: "array[int]", log_probs: "array[float]", reason: Any, versions: Any, cached: int
) -> Completion:
    return Completion(
        token_ids=ids.tolist(),
        log_probs=log_probs.tolist(),
        finish_reason=reason,
        weight_versions=versions,
        cached_tokens=cached,
    )


class _Pickler(pickle.Pickler):
    dispatch_table = copyreg.dispatch_table | {
        Ledger: _reduce_ledger,
        Completion: _reduce_completion,
    }
