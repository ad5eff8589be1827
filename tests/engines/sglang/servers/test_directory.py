"""Servers of a cluster: clients follow their addresses, and new ones get the run's weights."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from agentrl.config.schema.engine import SGLangServerConfig
from agentrl.engines.protocol import Completion, MemoryTag, SamplingParams
from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.servers.directory import ServerReport
from agentrl.engines.sglang.servers.engine import SGLangServerEngine
from agentrl.engines.sglang.servers.pool import ServerPool
from agentrl.engines.sglang.servers.repair import WeightRepairer
from agentrl.errors import EngineError
from tests.engines.sglang.servers.test_pool import PROMPT, is_exact
from tests.fakes.sglang_servers import FakeSGLang, running, until

NEEDS = SGLangNeeds(model_path="none", max_model_len=500, max_requests=1)
WEIGHTS = [("a", torch.arange(3.0)), ("b", torch.ones(2, 2))]


class RecordingTransport:
    """Notes what is sent to whom."""

    def __init__(self) -> None:
        self.sent: list[tuple[list[str], dict[str, torch.Tensor]]] = []

    async def send(self, participants: Any, named_tensors: Any) -> Any:
        from agentrl.engines.protocol import SyncFigures

        await participants.request("begin_weight_update")
        names = [target.backend.name for target in participants.targets]
        self.sent.append((names, {name: tensor.clone() for name, tensor in named_tensors}))
        await participants.request("end_weight_update")
        return SyncFigures()

    async def close(self) -> None:
        """Nothing is held."""


@dataclass
class FakeDirectory:
    """Reports what the test sets."""

    reports: list[ServerReport]
    shares_devices: bool = False
    started: list[SGLangNeeds] = field(default_factory=list[SGLangNeeds])

    def start(self, needs: SGLangNeeds) -> None:
        self.started.append(needs)

    async def look_up(self) -> Sequence[ServerReport]:
        return list(self.reports)


def at(server: FakeSGLang) -> ServerReport:
    return ServerReport(address=server.address, api_key=server.api_key)


def gone(problem: str = "its process ended with -9", **fields: Any) -> ServerReport:
    return ServerReport(address=None, problem=problem, **fields)


class Clients:
    """Engines on the servers of a directory, which are closed with the test."""

    def __init__(self, directory: Any) -> None:
        self.directory = directory
        self.repairs = RecordingTransport()
        self._engines: list[SGLangServerEngine] = []

    def __call__(self, *, repairs: bool = False, **given: Any) -> SGLangServerEngine:
        short = {
            "start_timeout_s": 20,
            "health_interval_s": 0.1,
            "health_timeout_s": 1,
            "request_timeout_s": 20,
        }
        settings = SGLangServerConfig.model_validate(short | given)
        pool = ServerPool(
            settings,
            max_model_len=500,
            report=lambda _: None,
            directory=self.directory,
            needs=NEEDS,
        )
        engine = SGLangServerEngine(
            settings,
            lambda ids: " ".join(map(str, ids)),
            max_model_len=500,
            transport=RecordingTransport(),
            pool=pool,
            repairer=WeightRepairer(self.directory, NEEDS, settings, self.repairs)
            if repairs
            else None,
        )
        self._engines.append(engine)
        return engine

    async def close(self) -> None:
        for engine in self._engines:
            await engine.close()


@pytest.fixture
async def servers() -> AsyncIterator[tuple[FakeSGLang, FakeSGLang]]:
    one = FakeSGLang(first_version="-1", api_key="key of one")
    two = FakeSGLang(first_version="-1", api_key="key of two")
    async with running(one, two):
        yield one, two


@pytest.fixture
async def clients() -> AsyncIterator[Clients]:
    clients = Clients(FakeDirectory([]))
    yield clients
    await clients.close()


def ask(engine: SGLangServerEngine, request_id: str) -> asyncio.Task[Completion]:
    call = engine.generate(PROMPT, SamplingParams(max_new_tokens=6), request_id=request_id)
    return asyncio.create_task(call)


async def test_a_replaced_server_gets_the_weights_and_then_the_calls_of_all_clients(
    servers: tuple[FakeSGLang, FakeSGLang], clients: Clients
):
    old, new = servers
    clients.directory.reports = [at(old)]
    main, follower, worker = clients(repairs=True), clients(), clients()
    await main.update_weights(WEIGHTS, version=3)
    await follower.follow_update(version=3)
    assert all(
        map(is_exact, await asyncio.gather(*(ask(e, "a") for e in (main, follower, worker))))
    )
    old.is_holding = True
    held = [ask(e, f"b{n}") for n, e in enumerate((main, follower, worker))]
    await until(lambda: old.num_waiting == 3)
    await old.kill()
    clients.directory.reports = [gone()]
    await asyncio.sleep(0.3)
    assert not any(task.done() for task in held), "they wait for the server that comes"
    clients.directory.reports = [at(new)]
    completions = await asyncio.gather(*held)
    assert all(map(is_exact, completions))
    assert {completion.weight_version for completion in completions} == {3}
    [(names, tensors)] = clients.repairs.sent
    assert names == [new.address]
    assert all(torch.equal(tensors[name], tensor) for name, tensor in WEIGHTS)
    routes = [route for route, _ in new.asked]
    assert "generate" not in routes[: routes.index("end_weight_update")]


async def test_the_kept_weights_are_a_copy(
    servers: tuple[FakeSGLang, FakeSGLang], clients: Clients
):
    old, new = servers
    clients.directory.reports = [at(old)]
    main = clients(repairs=True)
    trained = torch.arange(3.0)
    await main.update_weights([("a", trained)], version=1)
    trained += 1
    clients.directory.reports = [at(new)]
    await until(lambda: new.version == "1", seconds=10)
    assert torch.equal(clients.repairs.sent[0][1]["a"], torch.arange(3.0))


async def test_calls_end_with_the_log_when_the_last_server_is_lost(clients: Clients):
    lost = gone(is_lost=True, log_lines=("line 1", "no memory for the weights"))
    clients.directory.reports = [lost]
    with pytest.raises(EngineError, match=r"ended with -9\n  line 1\n  no memory"):
        await ask(clients(max_retries=0), "a")


async def test_calls_wait_no_longer_than_the_limit(clients: Clients):
    clients.directory.reports = [gone("it is starting")]
    begun = asyncio.get_running_loop().time()
    with pytest.raises(EngineError, match="it is starting"):
        await ask(clients(start_timeout_s=0.5), "a")
    assert asyncio.get_running_loop().time() - begun < 10


async def test_a_server_that_was_started_again_is_given_its_needs(clients: Clients):
    clients.directory.reports = [gone("it was not started", has_needs=False)]
    clients().pool.open()
    await until(lambda: clients.directory.started == [NEEDS] or len(clients.directory.started) > 1)


async def test_a_server_that_missed_an_update_gets_no_calls_of_any_client(
    servers: tuple[FakeSGLang, FakeSGLang], clients: Clients
):
    clients.directory.reports = [at(server) for server in servers]
    main, worker = clients(repairs=False), clients()
    await main.update_weights(WEIGHTS, version=1)
    servers[1].failing["begin_weight_update"] = 500
    await main.update_weights(WEIGHTS, version=2)
    completions = await asyncio.gather(*(ask(worker, f"{n}") for n in range(8)))
    assert {completion.weight_version for completion in completions} == {2}
    assert not servers[1].calls()


async def test_a_client_sees_the_calls_of_the_others(
    servers: tuple[FakeSGLang, FakeSGLang], clients: Clients
):
    one, two = servers
    clients.directory.reports = [at(one)]
    first, second = clients(), clients()
    await first.update_weights(WEIGHTS, version=1)
    one.is_holding = two.is_holding = True
    held = [ask(first, f"first {n}") for n in range(6)]
    await until(lambda: one.num_waiting == 6)
    two.version = "1"
    clients.directory.reports = [at(one), at(two)]
    held += [ask(second, f"second {n}") for n in range(4)]
    await until(lambda: one.num_waiting + two.num_waiting == 10)
    assert (one.num_waiting, two.num_waiting) == (6, 4)
    one.release_all()
    two.release_all()
    assert all(map(is_exact, await asyncio.gather(*held)))


async def test_clients_that_start_together_do_not_prefer_the_same_server(clients: Clients):
    fakes = [FakeSGLang(first_version="-1") for _ in range(4)]
    async with running(*fakes):
        clients.directory.reports = [at(fake) for fake in fakes]
        await clients().update_weights(WEIGHTS, version=1)
        engines = [clients() for _ in range(16)]
        calls = (ask(e, f"{n}-{k}") for n, e in enumerate(engines) for k in range(5))
        await asyncio.gather(*calls)
        num_calls = [len(fake.calls()) for fake in fakes]
    assert sum(num_calls) == 80
    assert max(num_calls) <= 26, "16 from each client, and the hash spreads the other 16"


async def test_servers_on_the_devices_of_training_show_all_clients_that_they_sleep(
    servers: tuple[FakeSGLang, FakeSGLang], clients: Clients
):
    for server in servers:
        server.device = "cuda"
    clients.directory.reports = [at(server) for server in servers]
    clients.directory.shares_devices = True
    main, follower = clients(repairs=True), clients()
    await main.update_weights(WEIGHTS, version=1)
    await follower.follow_update(version=1)
    await main.sleep()
    assert {server.version for server in servers} == {"-1"}
    assert all("release_memory_occupation" in server.routes() for server in servers)
    await asyncio.sleep(0.3)
    assert not any(server.is_available for server in follower.pool.servers)
    assert not clients.repairs.sent, "memory that was released takes no weights"
    await main.wake((MemoryTag.WEIGHTS,))
    await main.update_weights(WEIGHTS, version=2)
    await main.wake((MemoryTag.KV_CACHE,))
    await follower.follow_update(version=2)
    assert (await ask(follower, "a")).weight_version == 2
