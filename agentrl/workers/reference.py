"""The frozen reference of the KL term."""

import torch

from agentrl.config.schema import FsdpConfig, ModelConfig, RefConfig
from agentrl.protocol import DataProto
from agentrl.workers.batches import read_padded_rows
from agentrl.workers.distributed import World
from agentrl.workers.model import PolicyModel, ScoringParams, load_policy
from agentrl.workers.scoring import score_rows


class Reference:
    """A policy that never changes.

    Args:
        policy: Its own module, apart from the actor's.
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
        """Give `ref_log_prob`, `[B, T]` float32, 0 where nothing is trained. A collective."""
        params = ScoringParams(temperature=temperature, logits_block_bytes=self.logits_block_bytes)
        return score_rows(
            self.policy, read_padded_rows(batch), params, budget=self.budget
        ).log_probs


def load_reference_policy(
    config: RefConfig, model: ModelConfig, world: World, fsdp: FsdpConfig
) -> PolicyModel:
    """Load the reference's weights: its own folder, or the one that the policy starts from."""
    own = model.model_copy(
        update={"path": config.path or model.path, "enable_gradient_checkpointing": False}
    )
    return load_policy(own, world, fsdp)
