"""Collate finished requests into a `DataProto`: the first tensors are made here.

Shapes: B sequences, P tokens of the longest prompt, T of the longest response, L = P + T.

==================== ============== ===========================================================
tensor               shape, dtype   what
==================== ============== ===========================================================
`prompts`            [B, P] int64   tokens before the first sampled one, padded on the left
`responses`          [B, T] int64   all later tokens, padded on the right
`input_ids`          [B, L] int64   prompts and responses
`attention_mask`     [B, L] int64   1 on tokens, 0 on padding
`position_ids`       [B, L] int64   0, 1, 2, ... on tokens; 0 on padding. With three-dimensional
                                    positions (mrope): [B, 3, L]
`response_mask`      [B, T] int64   1 on trained tokens
`rollout_log_probs`  [B, T] float32 at sampling; 0 on observed tokens and padding
`turn_ids`           [B, T] int64   the turn that a token belongs to; -1 on padding
`state_ids`          [B, T] int64   the state in which a sampled turn began, see
                                    `compute_turn_states`; -1 on other tokens
`policy_versions`    [B, T] int64   version of the weights that sampled a token; -1 on other tokens
`token_level_scores` [B, T] float32 rewards, on trained tokens (see `agentrl.rewards.placement`)
`rm_scores`          [B, T] float32 the reward model's weighted score on the last trained token;
                                    only if the run has a reward model
`in_baseline`        [B] bool       whether the statistics of the group count the row
`batch_data_id`      [B] int64      index of the prompt in the global batch
`trajectory_ids`     [B] int64      the same for the sequences of one request, and for no others
==================== ============== ===========================================================

Objects: `uid` (the group), `request_id` (of the sequence), `stop_reason`, `messages` (dicts),
`multi_modal_data`, `multi_modal_inputs` (`MultiModalInputs`; if there is a processor),
`reward_scores`,
`reward_extra_info`, `reward_index` (the token that has the trajectory's reward; None if another row
has it, or nothing is trained), `data_source`, `ground_truth`, `extra_info`, and the row's own
columns. If a column has one of these names, it is left out.

A request has a row for each of its sequences: those of its branches, then its own. Most requests
have one. All rows of a trajectory have its `in_baseline`, rewards and columns; conversation, tokens
and stop reason are the sequence's own. The rows of a failed request have a mask of zeros and are
not in the baseline of its group. If a request has no prompt, one token of padding replaces it.
"""

import json
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from agentrl.config.schema.reward import RewardConfig
from agentrl.config.schema.run import DataConfig
from agentrl.config.schema.training import SegmentCredit
from agentrl.data.rows import RowReader, with_media_columns
from agentrl.errors import DataError
from agentrl.media.inputs import MultiModalInputs
from agentrl.media.processor import MediaProcessor
from agentrl.protocol import DataProto
from agentrl.rewards.combination import TRAJECTORY_ALONE, Source, combine_rewards
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
    """The numbers of one sequence."""

    request: AsyncRolloutRequest
    """The request of the trajectory."""
    sequence: AsyncRolloutRequest
    prompt_ids: "array[int]"
    response_ids: "array[int]"
    loss_mask: bytes
    log_probs: bytes
    """float32."""
    spans: dict[str, list[tuple[int, int, int]]]
    """For columns of equal values: start and end in the response, and the value."""
    placement: RewardPlacement


def collate(
    requests: Sequence[AsyncRolloutRequest],
    *,
    pad_token_id: int,
    reward: RewardConfig = TRAJECTORY_ALONE,
    segment_credit: SegmentCredit = "trajectory",
    processor: MediaProcessor | None = None,
    prompt_width: int | None = None,
    response_width: int | None = None,
) -> DataProto:
    """Make one row of tensors from each sequence of each finished request, in order.

    Args:
        requests: Scored requests. The batch of a rank without work has no rows.
        pad_token_id: Token id of padding.
        reward: How rewards are combined, and on which trained tokens they are placed.
        segment_credit: Which sequences of a trajectory are trained.
        processor: The processor of a model that reads images or videos.
        prompt_width: P, for batches that are concatenated; None: length of the longest prompt.
        response_width: T; None: length of the longest response.

    Raises:
        DataError: If a request has not ended, or does not fit into a width.
    """
    rows = [
        row
        for request in requests
        for row in _read_request(request, pad_token_id, reward, segment_credit)
    ]
    ids = [row.sequence.request_id for row in rows]
    prompt_width = _width("prompt", [len(row.prompt_ids) for row in rows], prompt_width, ids)
    response_width = _width(
        "response", [len(row.response_ids) for row in rows], response_width, ids
    )
    tensors = _layout(rows, pad_token_id, prompt_width, response_width)
    owners = [row.request for row in rows]
    tensors["in_baseline"] = torch.tensor([r.in_baseline for r in owners], dtype=torch.bool)
    if reward.model is not None:
        tensors["rm_scores"] = _place_rm_scores(rows, tensors["response_mask"], reward)
    indices = [request.batch_data_id for request in owners]
    tensors["batch_data_id"] = torch.tensor(indices, dtype=torch.int64)
    trajectories = [_number(request.request_id.encode()) for request in owners]
    if processor is not None and processor.has_mrope:
        tensors["position_ids"] = _mrope_position_ids(rows, prompt_width, response_width)
    tensors["trajectory_ids"] = torch.tensor(trajectories, dtype=torch.int64)
    names = dict.fromkeys(name for request in requests for name in request.columns)
    columns = {name: [request.columns.get(name) for request in owners] for name in names}
    if processor is not None:  # on all ranks, also on one that has no images
        spans = [row.sequence.media_spans for row in rows]
        columns["multi_modal_inputs"] = [MultiModalInputs(own) for own in spans]
    return DataProto.from_dict(tensors, columns | _own_columns(rows))


def widest(requests: Sequence[AsyncRolloutRequest]) -> tuple[int, int]:
    """Return the lengths of the longest prompt and of the longest response, at least 1 each."""
    sequences = [one for request in requests for one in request.sequences]
    prompts = [one.num_prompt_tokens for one in sequences]
    responses = [one.num_response_tokens for one in sequences]
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
    reader = RowReader("prompts", DataConfig(prompt_key=key))
    rows = [{key: column[row] for key, column in given.items()} for row in range(len(prompts))]
    read = [reader.read(with_media_columns(row), at, at) for at, row in enumerate(rows)]
    requests = manager.make_requests(read, plan._replace(n=1), step=step)
    for request, row in zip(requests, rows, strict=True):
        request.uid = str(row.get("uid", request.uid))
    batch = collate(
        await manager.rollout(requests),
        pad_token_id=pad_token_id,
        processor=manager.context.template.media,
    )
    batch.non_tensor_batch |= given
    return batch


def _read_request(
    request: AsyncRolloutRequest,
    pad_token_id: int,
    reward: RewardConfig,
    segment_credit: SegmentCredit,
) -> list[_Row]:
    if not request.is_finished:
        raise DataError(f"the request {request.request_id} is still {request.state}")
    only_last = segment_credit == "final"
    placements = place_rewards(request, reward, only_last=only_last).by_sequence()
    return [
        _read_sequence(
            one,
            request,
            pad_token_id,
            placement,
            is_trained=request.is_trained and one.is_trained and (one is request or not only_last),
        )
        for one, placement in zip(request.sequences, placements, strict=True)
    ]


def _read_sequence(
    sequence: AsyncRolloutRequest,
    request: AsyncRolloutRequest,
    pad_token_id: int,
    placement: RewardPlacement,
    *,
    is_trained: bool,
) -> _Row:
    num_tokens, turns = sequence.num_response_tokens, sequence.turns
    prompt_ids, response_ids = array("Q", sequence.prompt_ids), array("Q", sequence.response_ids)
    states = compute_turn_states(turns, prompt_ids, response_ids)
    versions = [
        (turn.start + span.start, turn.start + span.end, span.version)
        for turn in turns
        for span in turn.weight_versions
    ]
    return _Row(
        request=request,
        sequence=sequence,
        prompt_ids=prompt_ids or array("Q", [pad_token_id]),
        response_ids=response_ids,
        loss_mask=bytes(sequence.loss_mask if is_trained else num_tokens),
        log_probs=struct.pack(f"{num_tokens}f", *sequence.rollout_log_probs),
        spans={
            "turn_ids": [(turn.start, turn.end, turn.index) for turn in turns],
            "state_ids": [(turn.start, turn.end, state) for turn, state in states],
            "policy_versions": versions,
        },
        placement=placement,
    )


def _layout(
    rows: Sequence[_Row], pad_token_id: int, prompt_width: int, response_width: int
) -> dict[str, torch.Tensor]:
    width = prompt_width + response_width
    padded = {
        "prompts": (prompt_width, pad_token_id),
        "responses": (response_width, pad_token_id),
        "input_ids": (width, pad_token_id),
        "attention_mask": (width, 0),
        "position_ids": (width, 0),
        "response_mask": (response_width, 0),
        "turn_ids": (response_width, NO_TURN),
        "state_ids": (response_width, NO_STATE),
        "policy_versions": (response_width, NO_VERSION),
        "rollout_log_probs": (response_width, 0.0),
        "token_level_scores": (response_width, 0.0),
    }
    # NumPy puts large arrays on huge pages and does not write zeros, which takes less time.
    columns: dict[str, np.ndarray[Any, Any]] = {}
    for name, (length, value) in padded.items():
        dtype = np.float32 if isinstance(value, float) else np.int64
        shape = len(rows), length
        columns[name] = np.full(shape, value, dtype) if value else np.zeros(shape, dtype)
    positions = np.arange(width)
    for index, row in enumerate(rows):
        _write(row, {name: column[index] for name, column in columns.items()}, positions)
    return {name: torch.from_numpy(column) for name, column in columns.items()}


def _write(
    row: _Row, columns: dict[str, "np.ndarray[Any, Any]"], positions: "np.ndarray[Any, Any]"
) -> None:
    """Write a request into its row of each column."""
    num_tokens, prompt_width = len(row.response_ids), len(columns["prompts"])
    start, end = prompt_width - len(row.prompt_ids), prompt_width + num_tokens
    columns["prompts"][start:] = row.prompt_ids
    columns["responses"][:num_tokens] = row.response_ids
    columns["input_ids"][start:prompt_width] = row.prompt_ids
    columns["input_ids"][prompt_width:end] = row.response_ids
    columns["attention_mask"][start:end] = 1
    columns["position_ids"][start:end] = positions[: end - start]
    columns["response_mask"][:num_tokens] = np.frombuffer(row.loss_mask, np.uint8)
    columns["rollout_log_probs"][:num_tokens] = np.frombuffer(row.log_probs, np.float32)
    for name, spans in row.spans.items():
        for first, last, value in spans:
            columns[name][first:last] = value
    for position, value in row.placement.rewards:
        columns["token_level_scores"][position] = value


def _mrope_position_ids(
    rows: Sequence[_Row], prompt_width: int, response_width: int
) -> torch.Tensor:
    """Return the positions in time, height and width, `[B, 3, L]`; 0 on padding."""
    positions = np.zeros((len(rows), 3, prompt_width + response_width), np.int64)
    for index, row in enumerate(rows):
        own = row.sequence.mrope_position_ids
        start = prompt_width - len(row.prompt_ids)
        positions[index, :, start : start + own.shape[1]] = own
    return torch.from_numpy(positions)


def _place_rm_scores(
    rows: Sequence[_Row], response_mask: torch.Tensor, reward: RewardConfig
) -> torch.Tensor:
    """Place each trajectory's score on the last trained token of its last trained row."""
    is_trained = response_mask.any(dim=1).tolist()
    last_rows = {id(row.request): index for index, row in enumerate(rows) if is_trained[index]}
    scores = [
        combine_rewards(row.request, reward).of(Source.REWARD_MODEL)
        if last_rows.get(id(row.request)) == index
        else 0.0
        for index, row in enumerate(rows)
    ]
    positions = torch.arange(1, response_mask.shape[1] + 1)
    last = (response_mask * positions).amax(dim=1)  # 0: no token is trained
    is_last = (positions == last[:, None]) & (last[:, None] > 0)
    return is_last * torch.tensor(scores, dtype=torch.float32)[:, None]


def _width(what: str, lengths: Sequence[int], width: int | None, request_ids: Sequence[str]) -> int:
    longest = max(lengths, default=0)
    if width is not None and longest > width:
        raise DataError(
            f"the {what} of request {request_ids[lengths.index(longest)]} has {longest} tokens",
            expected=f"at most {width}",
        )
    return max(longest, 1) if width is None else width


def _own_columns(rows: Sequence[_Row]) -> dict[str, list[Any]]:
    requests, sequences = [row.request for row in rows], [row.sequence for row in rows]
    return {
        "uid": [request.uid for request in requests],
        "request_id": [one.request_id for one in sequences],
        "stop_reason": [str(one.stop_reason) for one in sequences],
        "messages": [[m.to_template() for m in one.messages] for one in sequences],
        "multi_modal_data": [one.multi_modal_data for one in sequences],
        "reward_scores": [request.reward_scores for request in requests],
        "reward_extra_info": [request.reward_extra_info for request in requests],
        "reward_index": [row.placement.index for row in rows],
        "data_source": [request.data_source for request in requests],
        "ground_truth": [request.ground_truth for request in requests],
        "extra_info": [request.extra_info for request in requests],
    }


STATE_KEY = "state"
"""Key of a declared state in the metrics of a tool or the metadata of an interaction."""


def compute_turn_states(
    turns: Sequence[Turn], prompt_ids: "array[int]", response_ids: "array[int]"
) -> list[tuple[Turn, int]]:
    """Number the states in which the sampled turns of a request began, for step-level groups.

    The state is what a tool or interaction declared under the key `state` when it answered the
    previous turn: in the metrics of the call, or in the metadata of the interaction. If none did,
    it is the tokens that the policy was shown since its last turn. For the first turn it is the
    prompt. If the policy was shown nothing in between, it is the whole history.

    The numbers are 63-bit hashes of the content, equal in every process and every run.

    Args:
        turns: All turns of the request.
        prompt_ids: Arrays of 64-bit integers.
        response_ids: As `prompt_ids`.

    Returns:
        Each sampled turn in order, and the number of its state, 0 or more.
    """
    states: list[tuple[Turn, int]] = []
    for turn in turns:
        if turn.role == "assistant":
            previous = states[-1][0] if states else None
            shown = response_ids[previous.end if previous else 0 : turn.start]
            seen = shown if previous and shown else prompt_ids + response_ids[: turn.start]
            content = _declared_state(previous) or b"tokens " + seen.tobytes()
            states.append((turn, _number(content)))
    return states


def _number(content: bytes) -> int:
    """Hash to 63 bits, equal in every process and every run."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big") >> 1


def _declared_state(turn: Turn | None) -> bytes:
    """Return what was declared when a turn was answered; empty if nothing was."""
    if turn is None:
        return b""
    reports: list[dict[str, Any]] = [*(call.metrics for call in turn.calls), turn.metadata]
    declared = [report[STATE_KEY] for report in reports if STATE_KEY in report]
    if not declared:
        return b""
    return b"declared " + json.dumps(declared, sort_keys=True, default=to_plain).encode()
