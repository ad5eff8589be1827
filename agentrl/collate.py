"""Finished requests -> `DataProto`: here the first tensors are born.

Shapes: B requests, P the widest prompt, T the widest response, L = P + T.

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
                                    `agentrl.collate`; -1 where none was sampled
`policy_versions`    [B, T] int64   the weights that sampled a token; -1 where none did
`token_level_scores` [B, T] float32 rewards, on trained tokens (see `agentrl.rewards.placement`)
`in_baseline`        [B] bool       whether the group's statistics count the row
`batch_data_id`      [B] int64      the prompt's place in the batch, over all ranks
==================== ============== ===========================================================

Objects: `uid` (the group), `request_id`, `stop_reason`, `messages` (dicts), `reward_scores`,
`reward_extra_info`, `reward_index` (where the trajectory's reward is attached, None where nothing
is trained), `data_source`, `ground_truth`, `extra_info`, and the row's own columns (one that has
one of these names gives way).

Every request has its row, also a failed one: with a mask of zeros, outside its group's baseline,
and with one token of padding where it had not even a prompt.
"""

import json
from array import array
from collections.abc import Sequence
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
"""Turn of padding."""
NO_STATE = -1
"""State of a token that no policy sampled."""
NO_VERSION = -1
"""Policy version of a token that no policy sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    """One request as lists of numbers, each of the response's length but the first."""

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
    """Lay finished requests side by side, in their order.

    Args:
        requests: Scored, where there is to be anything to learn. None are a batch of no rows: what
            a rank without work trains on.
        pad_token_id: What stands on padding; no mask shows it.
        reward: How rewards of several sources become one, and on which trained tokens they land.
        prompt_width: P, where batches are to be joined; None: as the longest prompt.
        response_width: T; None: as the longest response.

    Raises:
        DataError: for a request that has not ended, and for a width that does not suffice.
    """
    rows = [_read_request(request, pad_token_id, reward) for request in requests]
    ids = [request.request_id for request in requests]
    prompt_width = _width("prompt", [len(row.prompt_ids) for row in rows], prompt_width, ids)
    response_width = _width(
        "response", [len(row.response_ids) for row in rows], response_width, ids
    )
    tensors = _layout(rows, pad_token_id, prompt_width, response_width)
    tensors["in_baseline"] = torch.tensor([r.in_baseline for r in requests], dtype=torch.bool)
    places = [request.batch_data_id for request in requests]
    tensors["batch_data_id"] = torch.tensor(places, dtype=torch.int64)
    columns = _row_columns(requests) | _own_columns(requests, rows)
    return DataProto.from_dict(tensors, columns)


def widest(requests: Sequence[AsyncRolloutRequest]) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest response, at least one each."""
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
    """Roll out a batch of prompts, for trainers written elsewhere: one row in, one row out.

    Each row is sampled once: repeat the batch for groups, as is usual (`plan.n` is not read).

    Args:
        manager: Drives the requests.
        prompts: Objects only are read: the columns of a dataset's row, with the messages as
            `raw_prompt` or `prompt`. A `uid` is kept; rows without one are groups of their own.
        plan: How hot to sample.
        pad_token_id: What stands on padding.
        step: Enters the seeds.

    Returns:
        The columns of `collate`; those that were in `prompts` as they were there.
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
    return _Row(
        prompt_ids=request.prompt_ids or [pad_token_id],
        response_ids=request.response_ids,
        loss_mask=request.loss_mask if request.is_trained else [0] * num_tokens,
        log_probs=request.rollout_log_probs,
        turn_ids=_turn_ids(request),
        state_ids=_state_ids(request),
        versions=_versions(request),
        placement=place_rewards(request, reward),
    )


def _turn_ids(request: AsyncRolloutRequest) -> list[int]:
    ids = [NO_TURN] * request.num_response_tokens
    for turn in request.turns:
        ids[turn.start : turn.end] = [turn.index] * turn.num_tokens
    return ids


def _state_ids(request: AsyncRolloutRequest) -> list[int]:
    ids = [NO_STATE] * request.num_response_tokens
    for turn, state in compute_turn_states(request):
        ids[turn.start : turn.end] = [state] * turn.num_tokens
    return ids


def _versions(request: AsyncRolloutRequest) -> list[int]:
    versions = [NO_VERSION] * request.num_response_tokens
    for turn in request.turns:
        for span in turn.weight_versions:
            start, end = turn.start + span.start, turn.start + span.end
            versions[start:end] = [span.version] * (end - start)
    return versions


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
    tensors["token_level_scores"] = _place([row.placement for row in rows], response_width)
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


def _place(placements: Sequence[RewardPlacement], width: int) -> torch.Tensor:
    scores = np.zeros((len(placements), width), dtype=np.float32)
    for row, placement in zip(scores, placements, strict=True):
        for position, value in placement.rewards:
            row[position] = value
    return torch.from_numpy(scores)


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


def _row_columns(requests: Sequence[AsyncRolloutRequest]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for request in requests for name in request.columns)
    return {name: [request.columns.get(name) for request in requests] for name in names}


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
