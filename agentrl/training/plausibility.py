"""Whether a policy reads what the tokenizer writes as text."""

import math
from collections.abc import Sequence

import torch

from agentrl.training.model import PolicyModel, ScoringParams
from agentrl.training.packing import PaddedRows
from agentrl.training.scoring import score_rows

SUSPICIOUS_NATS = 1.0
"""How much less likely than chance a token has to be. A policy of random weights comes to about
chance, one that was trained far below it, one whose tokenizer is another's above it."""


def find_implausible(policy: PolicyModel, prompt_ids: Sequence[int], budget: int) -> str | None:
    """Let a policy judge a prompt; a tokenizer of another family with as many tokens shows here.

    A collective.

    Args:
        policy: With the weights of the run's start.
        prompt_ids: A rendered prompt, the same on every rank.
        budget: Tokens of one packed micro-batch.

    Returns:
        A sentence, where the prompt is less likely than noise; else None.
    """
    ids = torch.tensor([list(prompt_ids)], device=policy.world.device)
    if ids.shape[1] < 2:
        return None
    every = torch.ones_like(ids)
    rows = PaddedRows(input_ids=ids, attention_mask=every, response_mask=every[:, 1:])
    scores = score_rows(policy, rows, ScoringParams(temperature=1.0), budget=budget)
    found, chance = -scores.log_probs.mean().item(), math.log(policy.config.vocab_size)
    if found <= chance + SUSPICIOUS_NATS:
        return None
    return (
        f"the policy finds its first prompt less likely than noise ({found:.1f} nats a token, "
        f"noise has {chance:.1f}): is the tokenizer the model's own?"
    )
