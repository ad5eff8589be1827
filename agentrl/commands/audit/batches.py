"""Collate a step's rows again, compute their credit, and compare columns and metrics."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from agentrl.collate import collate
from agentrl.commands.audit.saved_run import TOLERANCE, Check, Step
from agentrl.errors import DataError
from agentrl.protocol import DataProto
from agentrl.trainer.credit import IS_COMPUTED, Credit, tensors_of
from agentrl.trainer.metrics.aggregators import compute_values
from agentrl.trainer.metrics.rollout import reward_metrics, rollout_metrics
from agentrl.trainer.metrics.step import batch_metrics
from agentrl.trainer.rollouts.token_files import TOKEN_COLUMNS, tabulate_tokens, token_path
from agentrl.trainer.sampling import StepSamples, read_baselines

_OF_MODELS = ("old_log_probs", "entropies", "ref_log_prob", "values")
"""Columns that a model computed: they are taken as they were saved."""
_OF_ROWS = (
    "step", "request_id", "uid", "batch_data_id", "trajectory_id", "in_baseline",
    "num_prompt_tokens",
)  # fmt: skip
"""Columns with one value of each row."""


def check_batch(advantages: Check, rewards: Check, metrics: Check, step: Step) -> None:
    """Compare the columns of the step's tokens, and its metrics."""
    batch, before_update = _collate(step)
    _compare(advantages, step, batch, ["rollout_log_probs"])
    with rewards.collecting(token_path(step.path)):
        _compare(rewards, step, batch, ["token_level_scores"])
    credit = Credit(step.config.algorithm, None, is_before_update=before_update)
    if (coefficient := step.metrics.get("actor/reward_kl_penalty_coeff")) is not None:
        credit.kl_ctrl.value = coefficient
    found = credit.compute(batch)
    compared = [name for name in TOKEN_COLUMNS if name not in _OF_MODELS]
    _compare(advantages, step, batch, compared)
    tensors = tensors_of(batch)
    if "old_log_probs" in step.tokens.column_names and "old_log_probs" not in tensors:
        tensors.update(_columns_of_models(step, batch, ["old_log_probs"]))
        is_null = step.tokens["old_log_probs"].is_null().to_pylist()
        tensors[IS_COMPUTED] = torch.tensor([not one for one in is_null])
    with metrics.collecting(step.path):
        _check_metrics(metrics, step, batch, found if before_update else {})


def _check_metrics(check: Check, step: Step, batch: DataProto, found: Mapping[str, float]) -> None:
    values = compute_values(
        {
            **rollout_metrics(step.sampled),
            **batch_metrics(batch),
            **reward_metrics(step.sampled, step.config.reward),
        }
    )
    check.compare_metrics(step.number, step.metrics, values | dict(found))


def _collate(step: Step) -> tuple[DataProto, bool]:
    """Make the batch before its credit; and whether log-probabilities were known before it."""
    config, names = step.config, step.tokens["request_id"].to_pylist()
    owners = {one.request_id: request for request in step.requests for one in request.sequences}
    if unknown := next((name for name in names if name not in owners), None):
        raise DataError("tokens of a trajectory that is not there", request=unknown)
    requests = list({id(owners[name]): owners[name] for name in names}.values())
    batch = collate(
        requests,
        pad_token_id=0,
        reward=config.reward,
        segment_credit=config.algorithm.segment_credit,
    )
    found = batch.non_tensor_batch["request_id"].tolist()
    if sorted(found) != sorted(names):
        raise DataError("the sequences of the batch are others", file=token_path(step.path))
    indices = {name: index for index, name in enumerate(found)}
    batch = batch[[indices[name] for name in names]]
    before_update = "timing_s/old_log_prob" in step.metrics
    before_update |= config.algorithm.rollout_correction.bypass_mode
    known = [name for name in _OF_MODELS if name in step.tokens.column_names]
    if not before_update:
        known = [name for name in known if name not in ("old_log_probs", "entropies")]
    tensors_of(batch).update(_columns_of_models(step, batch, known))
    if greedy := [one for one in step.requests if one.sampling.temperature == 0]:
        for one in greedy:
            one.dropped = None  # as it was when the baselines were read
        baselines = read_baselines(greedy, config.reward, None)
        StepSamples(baselines=baselines).add_baselines(batch)
    _compare_rows(step, batch)
    return batch, before_update


def _compare_rows(step: Step, batch: DataProto) -> None:
    made = tabulate_tokens(batch, step.number)
    for name in _OF_ROWS:
        if (saved := step.tokens[name].to_pylist()) != (found := made[name].to_pylist()):
            row = next(row for row, one in enumerate(saved) if one != found[row])
            raise DataError(
                f"{name} of a row of tokens is not that of its request",
                file=token_path(step.path), row=row, saved=saved[row], expected=found[row],
            )  # fmt: skip


def _columns_of_models(step: Step, batch: DataProto, names: Sequence[str]) -> dict[str, Tensor]:
    """Return saved columns as `[B, T]` float32, 0 on padding."""
    shape = tuple(tensors_of(batch)["responses"].shape)
    columns: dict[str, Tensor] = {}
    for name in names:
        column = columns[name] = torch.zeros(shape)
        for row, values in zip(column, step.tokens[name].to_pylist(), strict=True):
            row[: len(values or ())] = torch.tensor(values or [])
    return columns


def _compare(check: Check, step: Step, batch: DataProto, names: Sequence[str]) -> None:
    """Compare columns of the batch with those that were saved."""
    tensors, file = tensors_of(batch), token_path(step.path)
    width = tensors["responses"].shape[1]
    lengths = tensors["attention_mask"][:, -width:].sum(-1).tolist()
    requests = step.tokens["request_id"].to_pylist()
    for name in names:
        if (name in tensors) is not (name in step.tokens.column_names):
            raise DataError(f"{name} was {'not ' * (name in tensors)}saved", file=file)
        if name not in tensors:
            continue
        column = step.tokens[name].to_pylist()
        for row, (saved, length) in enumerate(zip(column, lengths, strict=True)):
            check.num += 1
            expected = tensors[name][row, :length].float().numpy()
            found = np.asarray(saved, np.float32)
            if found.shape != expected.shape:
                message = f"{name} has {len(found)} tokens"
                raise DataError(message, file=file, request=requests[row], expected=length)
            wrong = np.flatnonzero(~np.isclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE))
            if len(wrong):
                raise DataError(
                    f"{name} of response token {wrong[0]} does not follow from the rows",
                    file=file, request=requests[row],
                    saved=float(found[wrong[0]]), expected=float(expected[wrong[0]]),
                )  # fmt: skip
