"""Whether a policy reads what the tokenizer writes as text."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from agentrl.workers.model import PolicyModel, ScoringParams
from agentrl.workers.packing import PaddedRows
from agentrl.workers.scoring import score_rows

SUSPICIOUS_NATS = 1.0
"""How much less likely than chance a token has to be. A policy of random weights, which knows no
tokenizer, comes to about chance."""
NUM_RELABELLED = 4
"""Strange tokenizers that the prompt is held against."""


def find_implausible(policy: PolicyModel, prompt_ids: Sequence[int], budget: int) -> str | None:
    """Let a policy judge a prompt; a tokenizer of another family with as many tokens shows here.

    To a policy whose tokenizer it is not, a prompt is about as unlikely as the same prompt with its
    ids exchanged for others at random. One that was trained a little only, and on other text, may
    find its own prompts less likely than chance, but clearly likelier than that: a warmed-up policy
    of 600 tokens (chance: 6.4 nats a token) gave 7.6 to a prompt and 11 to 13 to relabelled ones.

    A collective.

    Args:
        policy: With the weights of the run's start.
        prompt_ids: A rendered prompt, the same on every rank.
        budget: Tokens of one packed micro-batch.

    Returns:
        A sentence, where the prompt is nearer to relabelled ones than to chance; else None.
    """
    if len(prompt_ids) < 2:
        return None
    vocab_size, device = policy.config.vocab_size, policy.world.device
    ids = _with_relabelled(torch.tensor(list(prompt_ids)), vocab_size).to(device)
    every = torch.ones_like(ids)
    rows = PaddedRows(input_ids=ids, attention_mask=every, response_mask=every[:, 1:])
    scores = score_rows(policy, rows, ScoringParams(temperature=1.0), budget=budget)
    found, *strange = (-scores.log_probs.mean(dim=1)).tolist()
    chance, relabelled = math.log(vocab_size), sum(strange) / len(strange)
    if found <= max(chance + SUSPICIOUS_NATS, (chance + relabelled) / 2):
        return None
    return (
        f"the policy finds its first prompt about as unlikely as random tokens ({found:.1f} nats a "
        f"token, with ids exchanged at random {relabelled:.1f}, chance {chance:.1f}): is the "
        "tokenizer the model's own?"
    )


def _with_relabelled(ids: Tensor, vocab_size: int) -> Tensor:
    """Put a prompt `[L]` above the same under random bijections of the vocabulary."""
    draws = torch.Generator().manual_seed(0)
    strange = [torch.randperm(vocab_size, generator=draws)[ids] for _ in range(NUM_RELABELLED)]
    return torch.stack([ids, *strange])
