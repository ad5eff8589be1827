"""Collate finished requests into a `DataProto`: the first tensors are made here.

Shapes: B requests, P tokens of the longest prompt, T of the longest response, L = P + T.

==================== ============== ===========================================================
tensor               shape, dtype   what
==================== ============== ===========================================================
`prompts`            [B, P] int64   tokens before the first sampled one, padded on the left
`responses`          [B, T] int64   all later tokens, padded on the right
`input_ids`          [B, L] int64   prompts and responses
`attention_mask`     [B, L] int64   1 on tokens, 0 on padding
`position_ids`       [B, L] int64   see `compute_position_ids`
`response_mask`      [B, T] int64   1 on trained tokens
`rollout_log_probs`  [B, T] float32 at sampling; 0 on observed tokens and padding
`turn_ids`           [B, T] int64   the turn that a token belongs to; -1 on padding
`state_ids`          [B, T] int64   the state in which a sampled turn began, see
                                    `compute_turn_states`; -1 on other tokens
`policy_versions`    [B, T] int64   version of the weights that sampled a token; -1 on other tokens
`token_level_scores` [B, T] float32 rewards, on trained tokens (see `agentrl.rewards.placement`)
`in_baseline`        [B] bool       whether the statistics of the group count the row
`batch_data_id`      [B] int64      index of the prompt in the global batch
==================== ============== ===========================================================

Objects: `uid` (the group), `request_id`, `stop_reason`, `messages` (dicts), `reward_scores`,
`reward_extra_info`, `reward_index` (the token that has the trajectory's reward; None if nothing is
trained), `data_source`, `ground_truth`, `extra_info`, and the row's own columns. If a column has
one of these names, it is left out.

Every request has a row. The row of a failed request has a mask of zeros and is not in the baseline
of its group. If a request has no prompt, one token of padding replaces it.
"""

import json
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import torch

from agentrl.config.schema.reward import RewardConfig
from agentrl.config.schema.run import DataConfig
from agentrl.data.rows import RowReader
from agentrl.errors import DataError
from agentrl.protocol import DataProto
from agentrl.rewards.combination import TRAJECTORY_ALONE
from agentrl.rewards.placement import RewardPlacement, place_rewards
from agentrl.rollout.manager import RolloutManager, SamplingPlan
from agentrl.rollout.records import Turn, to_plain
from agentrl.rollout.request import AsyncRolloutRequest

NO_TURN = -1
"""Turn id of padding."""
NO_STATE = -1
"""State id of a token that was not sampled."""
NO_VERSION = -1
"""Policy version of a token that was not sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One request as lists of numbers. All but the first have the length of the response."""

    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    log_probs: list[float]
    turn_ids: list[int]
    state_ids: list[int]
    versions: list[int]
    placement: RewardPlacement


def collate(
    requests: Sequence[AsyncRolloutRequest],
    *,
    pad_token_id: int,
    reward: RewardConfig = TRAJECTORY_ALONE,
    prompt_width: int | None = None,
    response_width: int | None = None,
) -> DataProto:
    """Make one row of tensors from each finished request, in order.

    Args:
        requests: Scored requests. The batch of a rank without work has no rows.
        pad_token_id: Token id of padding.
        reward: How rewards are combined, and on which trained tokens they are placed.
        prompt_width: P, for batches that are concatenated; None: length of the longest prompt.
        response_width: T; None: length of the longest response.

    Raises:
        DataError: If a request has not ended, or does not fit into a width.
    """
    rows = [_read_request(request, pad_token_id, reward) for request in requests]
    ids = [request.request_id for request in requests]
    prompt_width = _width("prompt", [len(row.prompt_ids) for row in rows], prompt_width, ids)
    response_width = _width(
        "response", [len(row.response_ids) for row in rows], response_width, ids
    )
    tensors = _layout(rows, pad_token_id, prompt_width, response_width)
    tensors["in_baseline"] = torch.tensor([r.in_baseline for r in requests], dtype=torch.bool)
    indices = [request.batch_data_id for request in requests]
    tensors["batch_data_id"] = torch.tensor(indices, dtype=torch.int64)
    names = dict.fromkeys(name for request in requests for name in request.columns)
    columns = {name: [request.columns.get(name) for request in requests] for name in names}
    return DataProto.from_dict(tensors, columns | _own_columns(requests, rows))


def widest(requests: Sequence[AsyncRolloutRequest]) -> tuple[int, int]:
    """Return the lengths of the longest prompt and of the longest response, at least 1 each."""
    prompts = [request.num_prompt_tokens for request in requests]
    responses = [request.num_response_tokens for request in requests]
    return max([1, *prompts]), max([1, *responses])


async def generate_sequences(
    manager: RolloutManager,
    prompts: DataProto,
    *,
    plan: SamplingPlan,
    pad_token_id: int,
    step: int = 0,
) -> DataProto:
    """Roll out a batch of prompts for another trainer: one row in, one row out.

    Each row is sampled once (`plan.n` is not used). For groups, repeat the rows of the batch.

    Args:
        manager: Drives the requests.
        prompts: The columns of a dataset's rows as objects, with the messages in `raw_prompt` or
            `prompt`; tensors are not read. A `uid` is kept; a row without one is its own group.
        plan: Sampling parameters.
        pad_token_id: Token id of padding.
        step: Training step; part of the seeds.

    Returns:
        The columns of `collate`. Columns of `prompts` are unchanged.
    """
    given = prompts.non_tensor_batch
    key = "raw_prompt" if "raw_prompt" in given else "prompt"
    reader = RowReader("prompts", DataConfig(prompt_key=key, image_key="multi_modal_data"))
    rows = [{key: column[row] for key, column in given.items()} for row in range(len(prompts))]
    read = [reader.read(row, number, number) for number, row in enumerate(rows)]
    requests = manager.make_requests(read, plan._replace(n=1), step=step)
    for request, row in zip(requests, rows, strict=True):
        request.uid = str(row.get("uid", request.uid))
    batch = collate(await manager.rollout(requests), pad_token_id=pad_token_id)
    batch.non_tensor_batch |= given
    return batch


def compute_position_ids(attention_mask: torch.Tensor) -> torch.Tensor:
    """Number the tokens of each row from 0, `[B, L]` int64; 0 on padding."""
    counted = attention_mask.long().cumsum(dim=-1) - 1
    return counted.clamp(min=0) * attention_mask.long()


def _read_request(request: AsyncRolloutRequest, pad_token_id: int, reward: RewardConfig) -> _Row:
    if not request.is_finished:
        raise DataError(f"the request {request.request_id} is still {request.state}")
    num_tokens = request.num_response_tokens
    turns = [(turn.start, turn.end, turn.index) for turn in request.turns]
    states = [(turn.start, turn.end, state) for turn, state in compute_turn_states(request)]
    versions = [
        (turn.start + span.start, turn.start + span.end, span.version)
        for turn in request.turns
        for span in turn.weight_versions
    ]
    return _Row(
        prompt_ids=request.prompt_ids or [pad_token_id],
        response_ids=request.response_ids,
        loss_mask=request.loss_mask if request.is_trained else [0] * num_tokens,
        log_probs=request.rollout_log_probs,
        turn_ids=_spread(num_tokens, NO_TURN, turns),
        state_ids=_spread(num_tokens, NO_STATE, states),
        versions=_spread(num_tokens, NO_VERSION, versions),
        placement=place_rewards(request, reward),
    )


def _spread(num_tokens: int, empty: int, spans: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return a value for each token, from spans `(start, end, value)`."""
    values = [empty] * num_tokens
    for start, end, value in spans:
        values[start:end] = [value] * (end - start)
    return values


def _layout(
    rows: Sequence[_Row], pad_token_id: int, prompt_width: int, response_width: int
) -> dict[str, torch.Tensor]:
    def prompts(lists: list[list[int]], fill: int) -> torch.Tensor:
        return _pad(lists, prompt_width, fill, np.int64, "left")

    def responses(lists: list[list[int]], fill: int) -> torch.Tensor:
        return _pad(lists, response_width, fill, np.int64, "right")

    tensors = {
        "prompts": prompts([row.prompt_ids for row in rows], pad_token_id),
        "responses": responses([row.response_ids for row in rows], pad_token_id),
        "response_mask": responses([row.loss_mask for row in rows], 0),
        "turn_ids": responses([row.turn_ids for row in rows], NO_TURN),
        "state_ids": responses([row.state_ids for row in rows], NO_STATE),
        "policy_versions": responses([row.versions for row in rows], NO_VERSION),
    }
    log_probs = [row.log_probs for row in rows]
    tensors["rollout_log_probs"] = _pad(log_probs, response_width, 0.0, np.float32, "right")
    scores = np.zeros((len(rows), response_width), dtype=np.float32)
    for row_scores, row in zip(scores, rows, strict=True):
        for position, value in row.placement.rewards:
            row_scores[position] = value
    tensors["token_level_scores"] = torch.from_numpy(scores)
    tensors["input_ids"] = torch.cat([tensors["prompts"], tensors["responses"]], dim=-1)
    tensors["attention_mask"] = torch.cat(
        [
            prompts([[1] * len(row.prompt_ids) for row in rows], 0),
            responses([[1] * len(row.response_ids) for row in rows], 0),
        ],
        dim=-1,
    )
    tensors["position_ids"] = compute_position_ids(tensors["attention_mask"])
    return tensors


def _pad(
    lists: Sequence[Sequence[float]],
    width: int,
    fill: float,
    dtype: type[np.number[Any]],
    side: Literal["left", "right"],
) -> torch.Tensor:
    padded = np.full((len(lists), width), fill, dtype=dtype)
    for row, values in zip(padded, lists, strict=True):
        start = width - len(values) if side == "left" else 0
        row[start : start + len(values)] = values
    return torch.from_numpy(padded)


def _width(what: str, lengths: Sequence[int], width: int | None, request_ids: Sequence[str]) -> int:
    longest = max(lengths, default=0)
    if width is not None and longest > width:
        raise DataError(
            f"the {what} of request {request_ids[lengths.index(longest)]} has {longest} tokens",
            expected=f"at most {width}",
        )
    return max(longest, 1) if width is None else width


def _own_columns(
    requests: Sequence[AsyncRolloutRequest], rows: Sequence[_Row]
) -> dict[str, list[Any]]:
    return {
        "uid": [request.uid for request in requests],
        "request_id": [request.request_id for request in requests],
        "stop_reason": [str(request.stop_reason) for request in requests],
        "messages": [[m.to_template() for m in request.messages] for request in requests],
        "multi_modal_data": [request.multi_modal_data for request in requests],
        "reward_scores": [request.reward_scores for request in requests],
        "reward_extra_info": [request.reward_extra_info for request in requests],
        "reward_index": [row.placement.index for row in rows],
        "data_source": [request.data_source for request in requests],
        "ground_truth": [request.ground_truth for request in requests],
        "extra_info": [request.extra_info for request in requests],
    }


STATE_KEY = "state"
"""Key of a declared state in the metrics of a tool or the metadata of an interaction."""


def compute_turn_states(request: AsyncRolloutRequest) -> list[tuple[Turn, int]]:
    """Number the states in which the sampled turns of a request began, for step-level groups.

    The state is what a tool or interaction declared under the key `state` when it answered the
    previous turn: in the metrics of the call, or in the metadata of the interaction. If none did,
    it is the tokens that the policy was shown since its last turn. For the first turn it is the
    prompt. If the policy was shown nothing in between, it is the whole history.

    The numbers are 63-bit hashes of the content, equal in every process and every run.

    Returns:
        Each sampled turn in order, and the number of its state, 0 or more.
    """
    prompt_ids, response_ids = request.prompt_ids, request.response_ids
    states: list[tuple[Turn, int]] = []
    for turn in request.turns:
        if turn.role == "assistant":
            previous = states[-1][0] if states else None
            shown = response_ids[previous.end if previous else 0 : turn.start]
            seen = shown if previous and shown else prompt_ids + response_ids[: turn.start]
            content = _declared_state(previous) or b"tokens " + array("q", seen).tobytes()
            number = int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 1
            states.append((turn, number))
    return states


def _declared_state(turn: Turn | None) -> bytes:
    """Return what was declared when a turn was answered; empty if nothing was."""
    if turn is None:
        return b""
    reports: list[dict[str, Any]] = [*(call.metrics for call in turn.calls), turn.metadata]
    declared = [report[STATE_KEY] for report in reports if STATE_KEY in report]
    plain = json.dumps(declared, sort_keys=True, default=to_plain)
    return b"declared " + plain.encode() if declared else b""
