"""Log-probabilities of a whole batch under one set of weights, without gradient."""

import torch
from torch import Tensor

from agentrl.workers.batches import split_micro_batches
from agentrl.workers.log_probs import TokenScores
from agentrl.workers.memory import telling_out_of_memory
from agentrl.workers.model import PolicyModel, ScoringParams
from agentrl.workers.packing import PackedBatch, PaddedRows


@torch.no_grad()
def score_rows(
    policy: PolicyModel, rows: PaddedRows, params: ScoringParams, *, budget: int
) -> TokenScores:
    """Score every trained token of a batch; other positions are 0. A collective.

    Args:
        policy: Whose log-probabilities; left in the mode in which it was found.
        rows: The padded batch.
        params: Temperature, size of a block of logits, and whether squares are summed.
        budget: Tokens of one packed micro-batch.

    Returns:
        `[B, T]` each, float32, on the device of `rows`.
    """
    shape, device = rows.response_mask.shape, rows.input_ids.device
    log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
    entropy = torch.zeros_like(log_probs)
    squares = torch.zeros_like(log_probs) if params.with_sum_pi_squared else None
    was_training = policy.training
    policy.eval()
    try:
        for packed in split_micro_batches(rows, range(shape[0]), budget, policy.world):
            with telling_out_of_memory("log-probabilities", packed):
                scores = policy(packed, params)
            _put(log_probs, packed, scores.log_probs)
            _put(entropy, packed, scores.entropy)
            if squares is not None and scores.sum_pi_squared is not None:
                _put(squares, packed, scores.sum_pi_squared)
    finally:
        policy.train(was_training)
        policy.release_gathered()
    return TokenScores(log_probs, entropy, squares)


def _put(padded: Tensor, packed: PackedBatch, values: Tensor) -> None:
    if packed.row_index:
        index = torch.tensor(packed.row_index, device=padded.device)
        padded[index] = packed.unpack(values).to(padded)
