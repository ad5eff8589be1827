"""Rollout workers in real actors: the batch of one process, also if a worker is killed."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import parse_config
from agentrl.engines import ScriptedEngine
from agentrl.engines.scripted import ScriptedAnswer
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.trainer.rollout_messages import WorkerSettings
from agentrl.trainer.rollout_pool import RolloutPool
from agentrl.trainer.setup.plugins import load_plugins
from agentrl.trainer.setup.rollout_setup import make_manager, make_rollout_setup, probe_model
from tests.fakes.plugins import make_prompts
from tests.fakes.rollout_actors import HostedWorker
from tests.fakes.runs import CALL, make_home, tiny_run

DELEGATE = CALL.replace("calculator", "delegate").replace("expression", "task")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    """Two workers that Ray starts again after their deaths."""
    ray: Any = pytest.importorskip("ray")
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100_000_000,
        log_to_driver=False,
        logging_level="ERROR",
    )
    actor = ray.remote(HostedWorker).options(num_cpus=0, max_restarts=-1)
    yield [actor.remote() for _ in range(2)]
    ray.shutdown()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("home"))


class Work:
    """Twelve requests of two turns, which call the calculator."""

    def __init__(
        self, home: Path, actors: list[Any], *, call_timeout_s: float = 60.0, **changes: Any
    ) -> None:
        from agentrl.cluster.handles import RemoteHost
        from agentrl.cluster.rollout_workers import connect_workers

        longer = {"data__max_response_length": 400, "rollout__multi_turn__max_tokens_per_turn": 200}
        self.config = parse_config(tiny_run(home, home / "run", **longer | changes))
        plugins = load_plugins(self.config)
        self.setup = make_rollout_setup(self.config, plugins, probe_model(self.config, plugins))
        hosts = [RemoteHost(f"rollout_{i}", "rollout", "main", a) for i, a in enumerate(actors)]
        settings = WorkerSettings(
            config=self.config,
            now=None,
            max_model_len=32_768,
            asks_servers=False,
            version=0,
            silence_s=60.0,
        )
        made = connect_workers(hosts, call_timeout_s=call_timeout_s, start_timeout_s=120.0)
        self.pool = RolloutPool(made, settings, tools=plugins.tools)

    async def run(self, *, local: bool = False, delay_s: float = 0.0) -> list[AsyncRolloutRequest]:
        answers = [ScriptedAnswer(CALL, delay_s=delay_s), ScriptedAnswer("It is 42.")]
        engine = ScriptedEngine(answers, tokenizer=self.setup.tokenizer)
        manager = make_manager(self.config, self.setup, engine, None if local else self.pool.run)
        return await manager.rollout(manager.make_requests(make_prompts(6), manager.train_plan()))


def delegate_once(ids: Any, sampling: Any, request_id: str, turn: int) -> str:
    """Ask a sub-agent, which calls the calculator."""
    if "/" in request_id:
        return CALL if turn == 0 else "42"
    return DELEGATE if turn == 0 else "It is 42."


def kept(requests: list[AsyncRolloutRequest]) -> list[Any]:
    return [(r.request_id, r.stop_reason, r.input_ids, r.loss_mask, r.messages) for r in requests]


def test_a_killed_worker_costs_no_sample(home: Path, actors: list[Any], caplog: Any):
    work = Work(home, actors)

    async def main() -> None:
        await work.pool.open()
        expected = kept(await work.run(local=True))
        assert kept(await work.run()) == expected
        pid = await actors[0].call.remote("pid")
        asyncio.get_running_loop().call_later(0.5, os.kill, pid, signal.SIGKILL)
        assert kept(await work.run(delay_s=1.0)) == expected
        [line] = [r.getMessage() for r in caplog.records if "is lost" in r.getMessage()]
        assert "rollout_0 is lost (rollout_0 died); its 6 requests begin again" in line
        assert kept(await work.run()) == expected
        await work.pool.close()
        await work.pool.open()  # waits until Ray has started the worker again
        assert await actors[0].call.remote("pid") != pid
        assert kept(await work.run()) == expected
        await work.pool.close()

    asyncio.run(main())


def test_sub_agents_run_in_workers_as_in_one_process(home: Path, actors: list[Any]):
    tools = "configs/tool_config/delegate_tool.yaml"
    work = Work(
        home, actors, rollout__multi_turn__tool_config_path=tools, data__max_prompt_length=600
    )

    async def run(*, local: bool) -> list[AsyncRolloutRequest]:
        engine = ScriptedEngine(delegate_once, tokenizer=work.setup.tokenizer)
        manager = make_manager(work.config, work.setup, engine, None if local else work.pool.run)
        return await manager.rollout(manager.make_requests(make_prompts(4), manager.train_plan()))

    async def main() -> None:
        await work.pool.open()
        alone, spread = await run(local=True), await run(local=False)
        assert kept(spread) == kept(alone)
        for one, other in zip(alone, spread, strict=True):
            assert [branch.branch_cause for branch in other.branches] == ["delegate"]
            assert kept(other.branches) == kept(one.branches)
            assert other.branches[0].num_tool_calls == 1
        await work.pool.close()

    asyncio.run(main())


def test_a_worker_that_is_stopped_is_replaced(home: Path, actors: list[Any]):
    work = Work(home, actors, call_timeout_s=8.0)

    async def main() -> None:
        await work.pool.open()
        expected = kept(await work.run(local=True))
        pid = await actors[1].call.remote("pid")
        os.kill(pid, signal.SIGSTOP)
        async with asyncio.timeout(60):
            assert kept(await work.run()) == expected
        await work.pool.close()

    asyncio.run(main())


def test_cancelling_ends_requests_in_workers(home: Path, actors: list[Any]):
    work = Work(home, actors)

    async def main() -> None:
        await work.pool.open()
        rollout = asyncio.create_task(work.run(delay_s=60.0))
        await asyncio.sleep(1.0)
        rollout.cancel()
        async with asyncio.timeout(10):
            await asyncio.wait([rollout])
        assert rollout.cancelled()
        assert {r.stop_reason for r in await work.run()} == {StopReason.ANSWERED}
        await work.pool.close()

    asyncio.run(main())
