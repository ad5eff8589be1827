"""Local servers: their ports and devices, and processes that die, fail or are orphaned."""

import asyncio
import os
import signal
import socket
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil
import pytest

from agentrl.engines.sglang.servers import launch
from agentrl.engines.sglang.servers.launch import (
    LocalServers,
    ServeOptions,
    ServerPlan,
    choose_ports,
    run_file_keys,
    serve,
    share_devices,
)
from agentrl.errors import ConfigError, EngineError
from tests.fakes.runs import ROOT
from tests.fakes.sglang_servers import FakeSGLang, until

SERVER = """
import http.server, sys
class Well(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Well).serve_forever()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPlan(ServerPlan):
    """A server that only says that it is well, or whatever script it is given."""

    script: str = SERVER

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.script, f"{self.port}"]


@pytest.fixture
def make_plan() -> Callable[..., PlainPlan]:
    def make(script: str = SERVER) -> PlainPlan:
        port = choose_ports(ServeOptions())[0]
        return PlainPlan(host="127.0.0.1", port=port, arguments={}, script=script)

    return make


# Plans.


def test_free_ports_are_chosen_once_each():
    ports = choose_ports(ServeOptions(num=5))
    assert len(set(ports)) == 5


def test_a_given_port_is_that_of_the_first():
    first = choose_ports(ServeOptions())[0]
    assert choose_ports(ServeOptions(num=1, port=first)) == [first]


def test_a_taken_port_is_refused_before_anything_starts():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 cannot be used"):
            choose_ports(ServeOptions(port=port))


def test_a_host_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 cannot be used"):
        choose_ports(ServeOptions(host="192.0.2.1"))


def test_each_server_sees_its_own_devices(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5,7")
    shares = share_devices({"tp_size": 2}, ServeOptions(num=2))
    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["2,3", "5,7"]
    with pytest.raises(ConfigError, match="3 servers of 2 devices each do not fit on 4"):
        share_devices({"tp_size": 2}, ServeOptions(num=3))


def test_addresses_are_printed_as_a_run_file_takes_them():
    plans = [ServerPlan(host="127.0.0.1", port=port, arguments={}) for port in (30000, 30001)]
    assert run_file_keys(plans) == (
        "rollout.engine.name=sglang_server 'rollout.engine.sglang_server.addresses="
        "[http://127.0.0.1:30000,http://127.0.0.1:30001]'"
    )


def test_servers_that_listen_everywhere_are_printed_with_the_host_name():
    plan = ServerPlan(host="0.0.0.0", port=30000, arguments={})
    assert plan.address == f"http://{socket.gethostname()}:30000"
    assert plan.local_address == "http://127.0.0.1:30000"


# Processes.


def processes_of(plans: Sequence[ServerPlan]) -> list[psutil.Process]:
    """The running servers of plans."""
    ports = {str(plan.port) for plan in plans}
    return [child for child in psutil.Process().children() if ports.intersection(child.cmdline())]


async def test_a_server_that_dies_is_started_again_at_its_port(make_plan: Callable[..., PlainPlan]):
    said: list[str] = []
    plans = [make_plan(), make_plan()]
    supervising = asyncio.create_task(serve(plans, say=said.append, max_restarts=2))
    await until(lambda: len(said) == 2, seconds=20)
    assert said[1] == run_file_keys(plans)
    os.kill(processes_of(plans[:1])[0].pid, signal.SIGKILL)
    await until(lambda: len(said) == 4, seconds=20)
    assert f"{plans[0].address} ended with -9; it is restarted in 1 s (1 of 2)" in said[2]
    assert f"{plans[0].address} is ready again" in said[3]
    supervising.cancel()
    with pytest.raises(asyncio.CancelledError):
        await supervising
    assert not processes_of(plans), "none is left"


async def test_a_server_that_died_too_often_ends_all(make_plan: Callable[..., PlainPlan]):
    plans = [make_plan(), make_plan()]

    async def kill_one() -> None:
        async with LocalServers(plans, say=print, max_restarts=0) as servers:
            os.kill(servers.servers[0].pid or 0, signal.SIGKILL)
            await servers.watch()

    with pytest.raises(EngineError, match=f"{plans[0].address} ended with -9"):
        await kill_one()
    assert not processes_of(plans)


async def test_a_server_that_does_not_start_ends_all_and_says_so(
    make_plan: Callable[..., PlainPlan],
):
    plans = [make_plan(), make_plan("raise SystemExit(3)")]
    with pytest.raises(EngineError, match=r"did not start: its process ended with 3"):
        await serve(plans, say=print, max_restarts=3)
    assert not processes_of(plans)


async def test_a_server_that_does_not_answer_at_first_is_asked_again(
    make_plan: Callable[..., PlainPlan], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launch, "_HEALTH_TIMEOUT", aiohttp.ClientTimeout(total=0.2))
    deaf_at_first = SERVER.replace(
        "    def do_GET(self):\n",
        "    requests = []\n    def do_GET(self):\n        self.requests.append(1)\n"
        "        if len(self.requests) == 1:\n            import time; time.sleep(0.5); return\n",
    )
    server = launch.LocalServer(make_plan(deaf_at_first))
    try:
        await server.start()
    finally:
        await server.end()


# Ports that other processes want between the choice of a port and the server's start.

IP_LOCAL_PORT_RANGE = 51
"""Of Linux 6.3 and later: the ports that the kernel may choose for a socket."""


def choosing_from(port: int) -> socket.socket:
    """A socket for which the kernel may choose this port alone."""
    chooser = socket.socket()
    try:
        chooser.setsockopt(socket.IPPROTO_IP, IP_LOCAL_PORT_RANGE, struct.pack("I", port * 65537))
    except OSError:
        chooser.close()
        pytest.skip("the kernel has no IP_LOCAL_PORT_RANGE")
    return chooser


async def test_no_process_is_given_the_port_of_a_server_that_does_not_listen_yet(
    make_plan: Callable[..., PlainPlan],
):
    plan = make_plan(f"import time; time.sleep(1)\n{SERVER}")
    server = launch.LocalServer(plan, ready_timeout_s=20)
    starting = asyncio.create_task(server.start())
    await until(lambda: server.pid is not None)
    try:
        with choosing_from(plan.port) as other, pytest.raises(OSError, match="in use"):
            other.bind((plan.host, 0))
        with (
            socket.create_server((plan.host, 0)) as far,
            choosing_from(plan.port) as other,
            pytest.raises(OSError, match="Cannot assign"),
        ):
            other.connect(far.getsockname())
        await starting
    finally:
        await server.end()


async def test_a_port_that_was_taken_after_the_choice_is_refused_at_the_start(
    make_plan: Callable[..., PlainPlan],
):
    plan = make_plan()
    server = launch.LocalServer(plan, ready_timeout_s=20)
    with (
        socket.create_server((plan.host, plan.port)),
        pytest.raises(ConfigError, match=f"port {plan.port} of 127.0.0.1 cannot be used"),
    ):
        await server.start()


async def test_another_process_that_answers_at_the_port_is_not_taken_for_the_server(
    make_plan: Callable[..., PlainPlan],
):
    plan = make_plan("import time; time.sleep(60)")
    server = launch.LocalServer(plan, ready_timeout_s=1.5)
    starting = asyncio.create_task(server.start())
    await until(lambda: server.pid is not None)
    # It binds this port by its number, which the reservation cannot refuse.
    other = FakeSGLang(port=plan.port)
    await other.start()
    try:
        with pytest.raises(EngineError, match=r"was not ready after 1\.5 s"):
            await starting
        assert not other.asked
    finally:
        await server.end()
        await other.kill()


FAILING_SGLANG = {
    "launch_server.py": """
        import logging, multiprocessing, sys, time
        def run_server(server_args):
            logging.basicConfig(force=True)
            logging.error(f"api_key={server_args.api_key!r}")
            child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
            child.start()
            print(child.pid, flush=True)
            sys.exit(server_args.port)
    """,
    "srt/plugins.py": "def load_plugins(): pass",
    "srt/server_args.py": """
        class ServerArgs:
            def __init__(self, port, api_key): self.port, self.api_key = port, api_key
    """,
}
"""A package that leaves a process when it fails, as SGLang does if its port is in use."""


def test_a_server_that_fails_leaves_no_process_and_logs_no_key(tmp_path: Path):
    for name, text in FAILING_SGLANG.items():
        file = tmp_path / "sglang" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
    done = subprocess.run(
        [sys.executable, "-m", "agentrl.engines.sglang.processes", str(os.getpid())],
        env=dict(os.environ) | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        input='{"port": 3, "api_key": "k-1f6c0d"}',
        capture_output=True,
        text=True,
        timeout=40,
    )
    assert done.returncode == 3, done.stderr
    assert "api_key='[redacted]'" in done.stderr
    assert not psutil.pid_exists(int(done.stdout))


def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path):
    child = f"""
        import os, sys, time
        from agentrl.engines.sglang.processes import end_with
        end_with(int(sys.argv[1]))
        open({str(tmp_path / "pid")!r}, "w").write(str(os.getpid()) + "\\n")
        time.sleep(60)
    """
    parent = """
        import os, subprocess, sys
        subprocess.run([sys.executable, "-c", sys.argv[1], str(os.getpid())])
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(parent), textwrap.dedent(child)]
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
        assert process.poll() is None
    orphan = psutil.Process(int((tmp_path / "pid").read_text()))
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs([orphan], timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
