"""SGLang servers as actors of Ray: found by their actors, started again, gone with them."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ray = pytest.importorskip("ray")

from agentrl.cluster.handles import RemoteHost  # noqa: E402
from agentrl.cluster.host import Host, HostSpec  # noqa: E402
from agentrl.cluster.monitor import Monitor  # noqa: E402
from agentrl.cluster.servers import RayServers  # noqa: E402
from tests.engines.sglang.servers.test_directory import NEEDS, WEIGHTS, Clients, ask  # noqa: E402
from tests.engines.sglang.servers.test_pool import is_exact  # noqa: E402
from tests.fakes.serve_command import are_gone  # noqa: E402
from tests.fakes.sglang_server_process import plan_fakes  # noqa: E402

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes with a server each, besides this process's own."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    store = 80 * 1024**2
    arguments = {"num_cpus": 1, "object_store_memory": store, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=store, resources={"servers": 1})
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    ray.init(cluster.address, runtime_env={"env_vars": {"PYTHONPATH": paths}}, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def make_servers(cluster: Any, tmp_path: Path) -> Iterator[Callable[[int], RayServers]]:
    hosts: list[RemoteHost] = []
    monitor = ray.remote(Monitor).options(num_cpus=0).remote()

    def make(num: int) -> RayServers:
        for index in range(num):
            spec = HostSpec(
                name=f"server_{index}",
                role="engine",
                pool="servers",
                factory="agentrl.cluster.servers:HostedServer",
                arguments=(60.0, None, 1, plan_fakes),
                log_folder=str(tmp_path),
                run_id="test",
            )
            options: dict[str, Any] = {
                "num_cpus": 0,
                "resources": {"servers": 0.5},
                "max_restarts": -1,
            }
            actor = ray.remote(concurrency_groups={"control": 100})(Host).options(**options)
            hosts.append(RemoteHost(spec.name, "engine", "servers", actor.remote(spec, monitor)))
        return RayServers(hosts)

    yield make
    for host in hosts:
        ray.kill(host.actor)


@pytest.fixture
async def clients() -> AsyncIterator[Callable[[RayServers], Clients]]:
    made: list[Clients] = []

    def make(servers: RayServers) -> Clients:
        made.append(Clients(servers))
        return made[-1]

    yield make
    for one in made:
        await one.close()


async def addresses(servers: RayServers) -> list[str | None]:
    return [report.address for report in await servers.look_up()]


async def wait_until_ready(servers: RayServers, *, seconds: float = 300.0) -> list[str]:
    deadline = time.monotonic() + seconds
    while None in (found := await addresses(servers)):
        assert time.monotonic() < deadline, await servers.look_up()
        await asyncio.sleep(0.1)
    return [address for address in found if address is not None]


def process_at(address: str) -> psutil.Process:
    """The process of a fake server, whose parent is the actor's process."""
    port = int(address.rsplit(":", 1)[1])
    for process in psutil.process_iter(["cmdline"]):
        is_fake = any("sglang_server_process" in part for part in process.info["cmdline"] or ())
        if is_fake and any(one.laddr.port == port for one in process.net_connections("tcp")):
            return process
    raise AssertionError(f"no process listens at {address}")


async def test_a_killed_server_and_a_killed_actor_are_replaced_with_the_weights(
    make_servers: Callable[[int], RayServers], clients: Callable[[RayServers], Clients]
):
    servers = make_servers(1)
    client = clients(servers)
    main, worker = client(repairs=True, start_timeout_s=300.0), client(start_timeout_s=300.0)
    servers.start(NEEDS)
    await main.update_weights(WEIGHTS, version=4)
    [address] = await wait_until_ready(servers)
    for kill_actor in (False, True):
        process = process_at(address)
        victim = process.ppid() if kill_actor else process.pid
        os.kill(victim, signal.SIGKILL)
        completions = await asyncio.gather(ask(main, f"{kill_actor}"), ask(worker, "w"))
        assert all(map(is_exact, completions))
        assert {completion.weight_version for completion in completions} == {4}
        assert are_gone([process])
        [address] = await wait_until_ready(servers)


async def test_the_end_of_an_actor_ends_its_server(make_servers: Callable[[int], RayServers]):
    servers = make_servers(2)
    servers.start(NEEDS)
    processes = [process_at(address) for address in await wait_until_ready(servers)]
    for host in servers.hosts:
        ray.kill(host.actor)
    assert are_gone(processes)
    reports = await servers.look_up()
    assert {report.problem for report in reports} == {"its process has ended"}
