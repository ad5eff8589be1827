"""New weights -> the engine."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from agentrl.training.model import PolicyModel, full_tensor

if TYPE_CHECKING:
    from agentrl.engines.protocol import Engine


def iter_full_weights(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Give each weight whole, once, under its Hugging Face name.

    On one rank these are the trainer's own tensors and nothing is copied; on several each is
    gathered as it is asked for, so that one whole weight exists at a time. A collective: every
    rank must exhaust it.
    """
    for name, weight in policy.named_weights():
        yield name, full_tensor(weight.detach())


async def sync_weights(policy: PolicyModel, engine: "Engine", *, version: int) -> None:
    """Bring the engine to the policy's weights; its caches of older ones are dropped.

    Args:
        policy: The new weights.
        engine: This rank's engine.
        version: The policy version that these weights are.
    """
    weights = iter_full_weights(policy)
    try:
        await engine.update_weights(weights, version=version)
    finally:
        # The others wait in the gathering of what this engine did not read.
        for _ in weights:
            pass
