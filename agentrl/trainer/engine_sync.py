"""What the engine is told of a training step: give memory back, take it again, take new weights."""

import asyncio
from dataclasses import dataclass

from agentrl.config.schema.run import RunConfig
from agentrl.engines import Engine
from agentrl.engines.protocol import MemoryTag
from agentrl.trainer.metrics.aggregators import Figures, Largest, Total
from agentrl.workers.memory import give_back_cached
from agentrl.workers.model import PolicyModel
from agentrl.workers.weight_sync import SyncResult, sync_weights


@dataclass(slots=True, kw_only=True)
class HandOver:
    """The engine's side of a training step, on one rank.

    Where engine and training have one accelerator between them, the engine sleeps while the other
    computes. It wakes in two steps, so that its cache and what a sync takes beside the weights are
    never there at once.
    """

    engine: Engine
    policy: PolicyModel
    max_attempts: int
    """How often one sync is tried."""
    gives_memory: bool
    """Whether the engine sleeps through the update."""
    last_sync: SyncResult | None = None

    @classmethod
    def of(cls, config: RunConfig, engine: Engine, policy: PolicyModel) -> "HandOver":
        """Read what a run file says of it; servers have their own accelerators."""
        is_cpu = policy.world.device.type == "cpu"
        return cls(
            engine=engine,
            policy=policy,
            max_attempts=config.weight_sync.max_attempts,
            gives_memory=config.rollout.free_cache_engine and not is_cpu and not engine.is_shared,
        )

    def sleep(self, runner: asyncio.Runner) -> None:
        """Have the engine give its memory to the update."""
        runner.run(self.give_memory())

    def sync(self, runner: asyncio.Runner, *, version: int) -> None:
        """Bring the engine to the policy's weights, and wake it. A collective.

        Raises:
            EngineError: where its weights cannot be renewed.
        """
        runner.run(self.renew(version))

    def figures(self) -> Figures:
        """Describe the last sync, on this rank."""
        if self.last_sync is None:
            return {}
        return {
            "weight_sync/seconds": Largest(self.last_sync.seconds),
            "weight_sync/bytes": Total(float(self.last_sync.num_bytes)),
            "weight_sync/buckets": Total(float(self.last_sync.num_buckets)),
            "weight_sync/attempts": Largest(float(self.last_sync.num_attempts)),
        }

    async def give_memory(self) -> None:
        """Do what `sleep` does, in its loop."""
        if self.gives_memory:
            with self.policy.world.agreeing():
                await self.engine.sleep()

    async def renew(self, version: int) -> None:
        """Do what `sync` does, in its loop."""
        await self._wake(MemoryTag.WEIGHTS)
        self.last_sync = await sync_weights(
            self.policy, self.engine, version=version, max_attempts=self.max_attempts
        )
        await self._wake(MemoryTag.KV_CACHE)

    async def _wake(self, tag: MemoryTag) -> None:
        if self.gives_memory:
            with self.policy.world.agreeing():
                give_back_cached(self.policy.world.device)
                await self.engine.wake((tag,))
