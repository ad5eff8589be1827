"""Log-probabilities of a whole batch under one set of weights, without gradient."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig, RefConfig
from agentrl.protocol import DataProto
from agentrl.workers.batches import read_padded_rows, split_micro_batches
from agentrl.workers.distributed import World
from agentrl.workers.log_probs import TokenScores
from agentrl.workers.memory import explain_out_of_memory
from agentrl.workers.model import PolicyModel, ScoringParams, load_policy
from agentrl.workers.packing import PackedBatch, PaddedRows


@torch.no_grad()
def score_rows(
    policy: PolicyModel, rows: PaddedRows, params: ScoringParams, *, budget: int
) -> TokenScores:
    """Score every trained token of a batch; other positions are 0. A collective.

    Args:
        policy: The policy; its training mode is restored.
        rows: The padded batch.
        params: Temperature, size of a block of logits, whether squares are summed.
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
            with explain_out_of_memory("log-probabilities", packed):
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


class Reference:
    """A policy that never changes.

    Args:
        policy: A module of its own, not the actor's.
        budget: Tokens of one packed micro-batch.
        logits_block_bytes: Bytes of one block of logits; None: what suits the device.
    """

    def __init__(
        self, policy: PolicyModel, *, budget: int, logits_block_bytes: int | None = None
    ) -> None:
        self.policy = policy.eval().requires_grad_(False)
        self.budget = budget
        self.logits_block_bytes = logits_block_bytes

    def compute_ref_log_prob(self, batch: DataProto, *, temperature: float) -> torch.Tensor:
        """Return `ref_log_prob`, `[B, T]` float32, 0 at masked positions. A collective."""
        params = ScoringParams(temperature=temperature, logits_block_bytes=self.logits_block_bytes)
        return score_rows(
            self.policy, read_padded_rows(batch), params, budget=self.budget
        ).log_probs


def load_reference_policy(
    config: RefConfig, model: ModelConfig, world: World, fsdp: FsdpConfig
) -> PolicyModel:
    """Load the reference's weights: from `ref.path`, or from the policy's initial folder."""
    own = model.model_copy(
        update={"path": config.path or model.path, "enable_gradient_checkpointing": False}
    )
    return load_policy(own, world, fsdp)


SUSPICIOUS_NATS = 1.0
"""Nats per token above chance from which a prompt is suspicious. A policy of random weights is near
chance with any tokenizer."""
NUM_RELABELLED = 4
"""Random relabelings that the prompt is compared with."""


def find_implausible(policy: PolicyModel, prompt_ids: Sequence[int], budget: int) -> str | None:
    """Detect a tokenizer of another model with the same number of tokens, from a prompt's score.

    With the wrong tokenizer, a prompt is about as unlikely as the same prompt with its ids replaced
    at random. A policy that was trained little, and on other text, may find its own prompts less
    likely than chance, but clearly likelier than that: a warmed-up policy of 600 tokens (chance:
    6.4 nats per token) gave 7.6 to a prompt and 11 to 13 to relabeled ones.

    A collective.

    Args:
        policy: The policy at the start of the run.
        prompt_ids: A rendered prompt, the same on every rank.
        budget: Tokens of one packed micro-batch.

    Returns:
        A message if the prompt is nearer to relabeled ones than to chance; else None.
    """
    if len(prompt_ids) < 2:
        return None
    vocab_size, device = policy.config.vocab_size, policy.world.device
    prompt = torch.tensor(list(prompt_ids))
    draws = torch.Generator().manual_seed(0)
    # The prompt under random permutations of the vocabulary.
    copies = [torch.randperm(vocab_size, generator=draws)[prompt] for _ in range(NUM_RELABELLED)]
    ids = torch.stack([prompt, *copies]).to(device)
    ones = torch.ones_like(ids)
    rows = PaddedRows(input_ids=ids, attention_mask=ones, response_mask=ones[:, 1:])
    scores = score_rows(policy, rows, ScoringParams(temperature=1.0), budget=budget)
    found, *others = (-scores.log_probs.mean(dim=1)).tolist()
    chance, relabelled = math.log(vocab_size), sum(others) / len(others)
    if found <= max(chance + SUSPICIOUS_NATS, (chance + relabelled) / 2):
        return None
    return (
        f"the policy finds its first prompt about as unlikely as random tokens ({found:.1f} nats "
        f"per token, with random ids {relabelled:.1f}, chance {chance:.1f}): check that "
        "model.path or model.tokenizer_path has the tokenizer that the model was trained with"
    )
