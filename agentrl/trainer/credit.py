"""Advantages of a batch whose rows lie on several ranks."""

from agentrl.algorithms import columns_read, compute_advantage
from agentrl.config.schema import AlgorithmConfig
from agentrl.protocol import DataProto
from agentrl.training.distributed import World
from agentrl.training.whole_batch import gather_batch

COMPUTED = ("token_level_rewards", "advantages", "returns")


def compute_batch_advantage(batch: DataProto, config: AlgorithmConfig, world: World) -> None:
    """Add advantages and returns to this rank's rows, by what all rows of the batch are worth.

    A collective. Groups and whatever else an estimator compares may be spread over ranks: each rank
    computes the whole batch, in the same order as one rank alone, and keeps its own rows.

    Args:
        batch: This rank's rows; it may have none.
        config: The estimator.
        world: The ranks.

    Raises:
        ConfigError: see `compute_advantage`.
    """
    if world.is_alone:
        compute_advantage(batch, config)
        return
    names = columns_read(batch, config)
    whole = gather_batch(batch, names.tensors, names.objects, world)
    computed = compute_advantage(whole.data, config).select(batch_keys=COMPUTED)
    batch.union(DataProto(computed.select_idxs(whole.own).batch))
