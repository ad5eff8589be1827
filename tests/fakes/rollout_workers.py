"""Rollout workers in this process, which can be killed and can hang."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from agentrl.config import parse_config
from agentrl.config.schema.reward import RewardConfig
from agentrl.config.schema.run import DataConfig, RolloutConfig
from agentrl.errors import WorkerLateError, WorkerLostError
from agentrl.interactions import BaseInteraction
from agentrl.rewards import make_reward_manager
from agentrl.rewards.scoring import ScoreFn
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.manager import RolloutManager, RunRequest
from agentrl.rollout.runner import run_request
from agentrl.tools import BaseTool
from agentrl.trainer import rollout_pool
from agentrl.trainer.rollout_messages import Received, WorkerInfo, WorkerSettings
from agentrl.trainer.rollout_pool import RolloutPool
from agentrl.trainer.rollout_worker import RankEngine, RolloutWorker, WorkerParts
from agentrl.trainer.setup.plugins import Plugins
from tests.fakes.plugins import make_context

T = TypeVar("T")

MAX_MODEL_LEN = 32_768


class FakeConnection:
    """A worker of this process. It behaves as one that Ray restarts after its death.

    Args:
        name: For messages.
        build: Builds a worker's parts.
    """

    def __init__(self, name: str, build: Callable[[WorkerSettings], WorkerParts]) -> None:
        self.name = name
        self.build = build
        self.worker = RolloutWorker(name, build)
        self.num_deaths = 0
        self.num_sent_bytes = 0
        self.is_hanging = False
        self.is_refusing = False
        self._dead = asyncio.Event()

    async def open(self, session: str, settings: WorkerSettings) -> WorkerInfo:
        if self.is_refusing:
            raise WorkerLostError(f"{self.name} does not start")
        return await self._call(self.worker.open(session, settings))

    async def send(self, session: str, messages: bytes) -> None:
        self.num_sent_bytes += len(messages)
        await self._call(self.worker.send(session, messages))

    async def receive(self, session: str) -> Received:
        return await self._call(self.worker.receive(session))

    async def close_session(self, session: str) -> None:
        await self._call(self.worker.close_session(session))

    async def restart(self) -> None:
        self.kill()

    def kill(self) -> None:
        """End the process: what runs in it sends nothing more, and its calls fail."""
        self.num_deaths += 1
        self.is_hanging = False
        self._dead.set()
        self._dead = asyncio.Event()
        for session in self.worker._sessions.values():  # pyright: ignore[reportPrivateUsage]
            session.is_closed = True
            for job in session.jobs.values():
                job.task.cancel()
        self.worker = RolloutWorker(self.name, self.build)

    async def _call(self, call: Awaitable[T]) -> T:
        # As with Ray, the call runs in the worker, and the caller waits for its answer or death.
        answer, died = asyncio.ensure_future(call), asyncio.ensure_future(self._dead.wait())
        try:
            if self.is_hanging:
                await asyncio.wait([died], timeout=0.1)
                if not died.done():
                    raise WorkerLateError(f"{self.name} did not answer for 0.1 s")
            await asyncio.wait([answer, died], return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise WorkerLostError(f"{self.name} died")
            return answer.result()
        finally:
            for task in (answer, died):
                task.cancel()


class WorkerSetup:
    """Builds managers of workers and of a rank, with the same plug-ins.

    Args:
        tools: Makes the tools of one process.
        users: Makes the interactions of one process.
        reward: The scorer.
        rewards: The section `reward`.
        context: Changes a context.
        rollout: The section `rollout`.
        run: Drives one request.
        response: Tokens of a response.
    """

    def __init__(
        self,
        *,
        tools: Callable[[], Sequence[BaseTool]] = tuple,
        users: Callable[[], Sequence[BaseInteraction]] = tuple,
        reward: ScoreFn = lambda **_: 0.5,  # pyright: ignore[reportArgumentType]
        rewards: dict[str, Any] | None = None,
        context: Callable[[RolloutContext], RolloutContext] = lambda context: context,
        multi_turn: dict[str, Any] | None = None,
        run: RunRequest = run_request,
        response: int = 4096,
        **rollout: Any,
    ) -> None:
        self.make_tools, self.make_users, self.change = tools, users, context
        self.run = run
        self.multi_turn, self.rollout, self.response = multi_turn or {}, rollout, response
        self.scorer, self.reward_config = reward, RewardConfig(**rewards or {})
        self.tools: list[BaseTool] = []
        """Of all workers, in the order in which they were built."""

    def build(self, _: WorkerSettings) -> WorkerParts:
        """Build the parts of a worker."""
        tools = list(self.make_tools())
        self.tools += tools
        return WorkerParts(
            plugins=Plugins(tools, {}, self.make_rewards()),
            manager=self.local_manager(RankEngine(MAX_MODEL_LEN), tools),
            max_concurrent_scores=self.reward_config.max_concurrent_scores,
        )

    def make_rewards(self) -> Any:
        return make_reward_manager(self.reward_config, self.scorer)

    def local_manager(self, engine: Any, tools: Sequence[BaseTool] | None = None) -> RolloutManager:
        """Make a manager that runs requests in this process."""
        tools = list(self.make_tools()) if tools is None else tools
        context = make_context(
            engine, tools=tools, interactions=self.make_users(), **self.multi_turn
        )
        return self._manager(self.change(context), self.run)

    def connect(self, number: int) -> list[FakeConnection]:
        """Start workers."""
        return [FakeConnection(f"rollout worker {index}", self.build) for index in range(number)]

    def make_pool(self, connections: Sequence[FakeConnection], **fields: Any) -> RolloutPool:
        """Make a rank's pool."""
        settings = WorkerSettings(
            config=parse_config({"data": {"train_files": ["none"]}, "model": {"path": "none"}}),
            now=None,
            max_model_len=MAX_MODEL_LEN,
            asks_servers=False,
            version=0,
            silence_s=60.0,
        )
        return RolloutPool(connections, settings, tools=list(self.make_tools()), **fields)

    def pool_manager(self, pool: RolloutPool, engine: Any) -> RolloutManager:
        """Make a rank's manager that runs requests in workers."""
        context = self.local_manager(engine).context
        return self._manager(context, pool.run)

    def _manager(self, context: RolloutContext, run: RunRequest) -> RolloutManager:
        config = RolloutConfig(multi_turn=context.settings, **self.rollout)
        return RolloutManager(context, config, DataConfig(max_response_length=self.response), run)


def hurry(monkeypatch: Any) -> None:
    """Shorten the waits of a pool."""
    monkeypatch.setattr(rollout_pool, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(rollout_pool, "WAIT_S", 0.3)
    monkeypatch.setattr(rollout_pool, "CANCEL_S", 2.0)
