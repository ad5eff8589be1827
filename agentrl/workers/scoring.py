"""Log-probabilities and values of a whole batch under one set of weights, without gradient."""

import math
from collections.abc import Callable, Hashable, Sequence

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
from agentrl.workers.model import PackedModel, PolicyModel, ScoringParams
from agentrl.workers.packing import PackedBatch, PaddedRows, count_tokens
from agentrl.workers.row_exchange import plan_exchange


def score_rows(
    policy: PolicyModel,
    rows: PaddedRows,
    params: ScoringParams,
    *,
    budget: int | None,
    groups: Sequence[Hashable] | None = None,
) -> TokenScores:
    """Score every trained token of a batch; other positions are 0. A collective.

    Args:
        policy: The policy; its training mode is restored.
        rows: The padded batch.
        params: Temperature, size of a block of logits, whether squares are summed.
        budget: Tokens of one packed micro-batch; None: a default for the device.
        groups: As of `compute_rows`.

    Returns:
        `[B, T]` each, float32, on the device of `rows`.
    """
    found = compute_rows(
        policy,
        rows,
        lambda packed: policy(packed, params),
        num_outputs=3 if params.with_sum_pi_squared else 2,
        budget=budget,
        groups=groups,
        share_prefixes=params.share_prefixes,
    )
    return TokenScores(*found)


@torch.no_grad()
def compute_rows(
    model: PackedModel,
    rows: PaddedRows,
    compute: Callable[[PackedBatch], Sequence[Tensor | None]],
    *,
    num_outputs: int,
    budget: int | None,
    groups: Sequence[Hashable] | None = None,
    share_prefixes: bool = True,
    doing: str = "log-probabilities",
    section: str = "actor",
) -> list[Tensor]:
    """Compute numbers of every trained token of a batch; other positions are 0. A collective.

    The ranks exchange rows so that each computes about the same number of tokens.

    Args:
        model: The module; its training mode is restored.
        rows: The padded batch.
        compute: Runs the module on a micro-batch; returns `[N]` each.
        num_outputs: How many numbers of each token it computes; later results are None.
        budget: Tokens of one packed micro-batch; None: a default for the device.
        groups: The group of samples of each row; rows of a group are computed on the same rank if
            the balance allows it. None: each row is a group.
        share_prefixes: Whether a prefix that rows share is computed once.
        doing: Name of the numbers, for errors.
        section: The section of the run file that has the keys of the model.

    Returns:
        `[B, T]` each, float32, on the device of `rows`.
    """
    lengths = count_tokens(rows)
    exchange = plan_exchange(model.world, lengths, groups or range(len(lengths)))
    rows = move_padded_rows(rows, exchange)
    shape, device = rows.response_mask.shape, rows.input_ids.device
    columns = torch.zeros(num_outputs, *shape, dtype=torch.float32, device=device)
    was_training = model.training
    found: list[tuple[PackedBatch, Sequence[Tensor | None]]] = []
    model.eval()
    try:
        sharing = model.max_sharing_length(share_prefixes=share_prefixes)
        micros = split_micro_batches(
            rows, range(shape[0]), budget, model.world, max_sharing_length=sharing
        )
        with model.on_device(), model.world.status.count(shape[0]) as advance:
            for packed in micros:
                with explain_out_of_memory(doing, packed, section=section):
                    found.append((packed, compute(packed)))
                advance(len(packed.row_index))
    finally:
        model.train(was_training)
        model.release_gathered()
    for packed, outputs in found:  # after the loop: each copy waits for the device
        for column, numbers in zip(columns, outputs, strict=False):
            if numbers is not None and packed.row_index:
                index = torch.tensor(packed.row_index, device=device)
                column[index] = packed.unpack(numbers).to(column)
    return [exchange.send_back(column) for column in columns]


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
    vocab_size = policy.text_config.vocab_size
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
