"""The engine's side of a training step: sleep, wake, new weights."""

import time
from dataclasses import dataclass

from agentrl.config.schema.run import RunConfig
from agentrl.engines import Engine
from agentrl.engines.protocol import MemoryTag, SharesDevices
from agentrl.trainer.metrics.aggregators import MaxMetric, MetricDict, SumMetric
from agentrl.workers.memory import give_back_cached
from agentrl.workers.model import PolicyModel
from agentrl.workers.weight_files import digest_weights, sum_placed_bits
from agentrl.workers.weight_sync import SyncResult, sync_weights


@dataclass(slots=True, kw_only=True)
class EngineSync:
    """Puts one rank's engine to sleep during the update, and sends it the new weights.

    If engine and training share one accelerator, the engine sleeps while the policy is updated. It
    wakes in two steps (weights, then KV cache), so that the cache and the buffers of the weight
    sync never need memory at the same time.
    """

    engine: Engine
    policy: PolicyModel
    max_attempts: int
    """Attempts of one weight sync."""
    gives_memory: bool
    """Whether the engine sleeps during the update."""
    records_digest: bool = False
    """Whether the trained weights are hashed with each sync."""
    last_sync: SyncResult | None = None
    weight_digest: str | None = None
    """Of the trained weights of the last sync, if `records_digest`."""
    digest_s: float = 0.0
    """Seconds that it took."""

    @classmethod
    def of(cls, config: RunConfig, engine: Engine, policy: PolicyModel) -> "EngineSync":
        """Read the settings from a configuration."""
        trainer, is_cpu = config.trainer, policy.world.device.type == "cpu"
        is_apart = engine.is_shared and not (
            isinstance(engine, SharesDevices) and engine.shares_devices
        )
        return cls(
            engine=engine,
            policy=policy,
            max_attempts=config.weight_sync.max_attempts,
            records_digest=trainer.weight_digests
            and trainer.rollout_data_dir is not None
            and not trainer.val_only,
            gives_memory=config.rollout.free_cache_engine and not is_cpu and not is_apart,
        )

    async def sleep(self) -> None:
        """Make the engine free its memory for the update."""
        if self.gives_memory:
            with self.policy.world.raise_on_all_ranks():
                if self._acts:
                    await self.engine.sleep()

    async def sync(self, version: int) -> None:
        """Wake the engine and send it the policy's weights. A collective.

        Raises:
            EngineError: if its weights cannot be updated.
        """
        await self._wake(MemoryTag.WEIGHTS)
        with self.policy.on_device():
            self.last_sync = await sync_weights(
                self.policy, self.engine, version=version, max_attempts=self.max_attempts
            )
            if self.records_digest:
                begun = time.monotonic()
                trained = self.policy.trained_weights()
                self.weight_digest = digest_weights(trained, self.policy.world, sum_placed_bits)
                self.digest_s = time.monotonic() - begun
        await self._wake(MemoryTag.KV_CACHE)

    def metrics(self) -> MetricDict:
        """Measure the last sync, on this rank."""
        if self.last_sync is None:
            return {}
        found: MetricDict = (
            {"timing_s/digest_weights": MaxMetric(self.digest_s)} if self.records_digest else {}
        )
        return found | {
            "weight_sync/seconds": MaxMetric(self.last_sync.seconds),
            "weight_sync/bytes": SumMetric(float(self.last_sync.num_bytes)),
            "weight_sync/buckets": SumMetric(float(self.last_sync.num_buckets)),
            "weight_sync/attempts": MaxMetric(float(self.last_sync.num_attempts)),
        }

    async def _wake(self, tag: MemoryTag) -> None:
        if self.gives_memory:
            with self.policy.world.raise_on_all_ranks():
                give_back_cached(self.policy.world.device)
                if self._acts:
                    await self.engine.wake((tag,))

    @property
    def _acts(self) -> bool:
        """Whether this rank controls the engine: one rank does, if all share it."""
        return not self.engine.is_shared or self.policy.world.is_main
