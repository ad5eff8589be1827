"""Log-probabilities of a whole batch under one set of weights, without gradient."""

import math
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig, RefConfig
from agentrl.protocol import DataProto
from agentrl.workers.batches import (
    move_padded_rows,
    read_groups,
    read_padded_rows,
    split_micro_batches,
)
from agentrl.workers.distributed import World
from agentrl.workers.load import load_policy
from agentrl.workers.log_probs import TokenScores
from agentrl.workers.memory import explain_out_of_memory
from agentrl.workers.model import PolicyModel, ScoringParams
from agentrl.workers.packing import PackedBatch, PaddedRows, count_tokens
from agentrl.workers.row_exchange import plan_exchange


@torch.no_grad()
def score_rows(
    policy: PolicyModel,
    rows: PaddedRows,
    params: ScoringParams,
    *,
    budget: int | None,
    groups: Sequence[Hashable] | None = None,
) -> TokenScores:
    """Score every trained token of a batch; other positions are 0. A collective.

    The ranks exchange rows so that each computes about the same number of tokens.

    Args:
        policy: The policy; its training mode is restored.
        rows: The padded batch.
        params: Temperature, size of a block of logits, whether squares are summed.
        budget: Tokens of one packed micro-batch; None: a default for the device.
        groups: The group of samples of each row; rows of a group are computed on the same rank if
            the balance allows it. None: each row is a group.

    Returns:
        `[B, T]` each, float32, on the device of `rows`.
    """
    lengths = count_tokens(rows)
    exchange = plan_exchange(policy.world, lengths, groups or range(len(lengths)))
    rows = move_padded_rows(rows, exchange)
    shape, device = rows.response_mask.shape, rows.input_ids.device
    log_probs = torch.zeros(shape, dtype=torch.float32, device=device)
    entropy = torch.zeros_like(log_probs)
    squares = torch.zeros_like(log_probs) if params.with_sum_pi_squared else None
    was_training = policy.training
    found: list[tuple[PackedBatch, TokenScores]] = []
    policy.eval()
    try:
        sharing = policy.max_sharing_length(share_prefixes=params.share_prefixes)
        micros = split_micro_batches(
            rows, range(shape[0]), budget, policy.world, max_sharing_length=sharing
        )
        with policy.on_device():
            for packed in micros:
                with explain_out_of_memory("log-probabilities", packed):
                    found.append((packed, policy(packed, params)))
    finally:
        policy.train(was_training)
        policy.release_gathered()
    for packed, scores in found:  # after the loop: each copy waits for the device
        _put(log_probs, packed, scores.log_probs)
        _put(entropy, packed, scores.entropy)
        if squares is not None and scores.sum_pi_squared is not None:
            _put(squares, packed, scores.sum_pi_squared)
    back = exchange.send_back
    return TokenScores(back(log_probs), back(entropy), None if squares is None else back(squares))


def _put(padded: Tensor, packed: PackedBatch, values: Tensor) -> None:
    if packed.row_index:
        index = torch.tensor(packed.row_index, device=padded.device)
        padded[index] = packed.unpack(values).to(padded)


class Reference:
    """A policy that never changes: the one at the start of the run, or another one.

    Args:
        policy: A module of its own, which is frozen; or with LoRA the actor's, which is computed
            as it was at the start (see `Adapters.as_at_start`).
        budget: Tokens of one packed micro-batch; None: a default for the device.
        logits_block_bytes: Bytes of one block of logits; None: what suits the device.
        share_prefixes: Whether a prefix that rows share is computed once.
    """

    def __init__(
        self,
        policy: PolicyModel,
        *,
        budget: int | None,
        logits_block_bytes: int | None = None,
        share_prefixes: bool = True,
    ) -> None:
        self.policy = policy if policy.adapters else policy.eval().requires_grad_(False)
        self.budget = budget
        self.logits_block_bytes = logits_block_bytes
        self.share_prefixes = share_prefixes

    def compute_ref_log_prob(self, batch: DataProto, *, temperature: float) -> torch.Tensor:
        """Return `ref_log_prob`, `[B, T]` float32, 0 at masked positions. A collective."""
        params = ScoringParams(
            temperature=temperature,
            logits_block_bytes=self.logits_block_bytes,
            share_prefixes=self.share_prefixes,
        )
        rows, groups = read_padded_rows(batch), read_groups(batch)
        with self.policy.as_at_start():
            scores = score_rows(self.policy, rows, params, budget=self.budget, groups=groups)
        return scores.log_probs


def load_reference_policy(
    config: RefConfig, model: ModelConfig, world: World, fsdp: FsdpConfig
) -> PolicyModel:
    """Load the reference's weights: from `ref.path`, or from the policy's initial folder."""
    own = model.without_lora().model_copy(
        update={
            "path": config.path or model.path,
            "enable_gradient_checkpointing": False,
            "enable_activation_offload": False,
        }
    )
    return load_policy(own, world, fsdp)


SUSPICIOUS_NATS = 1.0
"""Nats per token above chance from which a prompt is suspicious. A policy of random weights is near
chance with any tokenizer."""
NUM_RELABELLED = 4
"""Random relabelings that the prompt is compared with."""


def find_implausible(
    policy: PolicyModel, prompt_ids: Sequence[int], budget: int | None
) -> str | None:
    """Detect a tokenizer of another model with the same number of tokens, from a prompt's score.

    With the wrong tokenizer, a prompt is about as unlikely as the same prompt with its ids replaced
    at random. A policy that was trained little, and on other text, may find its own prompts less
    likely than chance, but clearly likelier than that: a warmed-up policy of 600 tokens (chance:
    6.4 nats per token) gave 7.6 to a prompt and 11 to 13 to relabeled ones.

    A collective.

    Args:
        policy: The policy at the start of the run.
        prompt_ids: A rendered prompt, the same on every rank.
        budget: Tokens of one packed micro-batch; None: a default for the device.

    Returns:
        A message if the prompt is nearer to relabeled ones than to chance; else None.
    """
    if len(prompt_ids) < 2:
        return None
    vocab_size = policy.config.vocab_size
    prompt = torch.tensor(list(prompt_ids))
    draws = torch.Generator().manual_seed(0)
    # The prompt under random permutations of the vocabulary.
    copies = [torch.randperm(vocab_size, generator=draws)[prompt] for _ in range(NUM_RELABELLED)]
    ids = torch.stack([prompt, *copies])
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
