"""How SGLang in a process's keep is asked and ended, with something else in SGLang's place."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from agentrl.engines.sglang.inprocess import calls as own_calls
from agentrl.engines.sglang.inprocess import host as host_module
from agentrl.engines.sglang.inprocess.calls import OwnCall
from agentrl.engines.sglang.inprocess.host import SGLangHost
from agentrl.errors import EngineError


class EndlessEngine:
    """Stands in for `sglang.Engine`: its calls never end, and it has no processes."""

    def __init__(self, **arguments: Any) -> None:
        self.aborted: list[str] = []
        self.send_to_rpc = None
        self.tokenizer_manager = SimpleNamespace(
            _subprocess_watchdog=None,
            rid_to_state={},
            abort_request=self.aborted.append,
            recv_from_detokenizer=None,
            send_to_scheduler=None,
        )

    def get_all_child_pids(self) -> list[int]:
        return []

    def shutdown(self) -> None: ...

    async def async_generate(self, **fields: Any) -> Any:
        await asyncio.Event().wait()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[SGLangHost]:
    monkeypatch.setattr(host_module, "_engine_class", lambda: EndlessEngine)
    host = SGLangHost({})
    yield host
    host.close()


def fail(host: SGLangHost) -> None:
    os.kill(os.getpid(), signal.SIGQUIT)


def close_aside(host: SGLangHost) -> None:
    threading.Thread(target=host.close).start()
    while not host._loop._ready:  # pyright: ignore[reportAttributeAccessIssue]
        time.sleep(0.01)


@pytest.mark.parametrize("is_asked_first", [True, False])
@pytest.mark.parametrize(
    ("end", "told"), [(fail, "ended unexpectedly"), (close_aside, "was closed")]
)
async def test_call_that_is_queued_while_the_engine_ends_fails(
    host: SGLangHost, end: Callable[[SGLangHost], None], told: str, is_asked_first: bool
):
    free = threading.Event()
    host._loop.call_soon_threadsafe(free.wait)
    call = asyncio.ensure_future(host.generate({"rid": "a"}))
    if is_asked_first:
        await asyncio.sleep(0.05)
    end(host)
    await asyncio.sleep(0.05)
    free.set()
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match=told):
            await call


async def test_running_call_fails_when_a_process_does(host: SGLangHost):
    call = asyncio.ensure_future(host.generate({"rid": "a"}))
    await asyncio.sleep(0.05)
    fail(host)
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match="ended unexpectedly"):
            await call


class SlowStart(EndlessEngine):
    """Is interrupted while it waits for its process, and gives up when that has ended."""

    pid = 0

    def __init__(self, **arguments: Any) -> None:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        assert process.pid is not None
        type(self).pid = process.pid
        os.kill(os.getpid(), signal.SIGINT)
        process.join()
        raise RuntimeError("a process has ended")


@pytest.fixture
def heard() -> Iterator[None]:
    """Hear SIGINT, also where a shell has started the tests in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heard")
def test_start_that_is_interrupted_ends_its_processes_and_no_others(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(host_module, "_engine_class", lambda: SlowStart)
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    before = signal.getsignal(signal.SIGQUIT)
    with pytest.raises(KeyboardInterrupt):
        SGLangHost({})
    assert not psutil.pid_exists(SlowStart.pid)
    assert signal.getsignal(signal.SIGQUIT) == before
    assert bystander.poll() is None
    with bystander:
        bystander.kill()


class Forgetful:
    """Hears an abort only once it has taken the call up, as a SGLang that is paused."""

    name = "forgetful"

    def __init__(self) -> None:
        self.has_begun = False
        self.aborts = 0
        self.second_abort = asyncio.Event()
        self._end = asyncio.Event()

    async def generate(self, fields: Any) -> Any:
        await self._end.wait()
        return {"output_ids": [7], "rid": fields["rid"]}

    async def control(self, request: str, fields: Any = None) -> None:
        assert (request, fields) == ("abort_request", {"rid": "a"})
        self.aborts += 1
        if self.aborts == 2:
            self.second_abort.set()
        if self.has_begun:
            self._end.set()


async def test_abort_of_a_call_that_was_gone_on_with_is_told_now_and_then():
    backend = Forgetful()
    backend._end.set()
    call = OwnCall(backend, "conversation")
    await call.generate({"rid": "a"})  # to an end that nobody asked for
    backend._end.clear()
    running = asyncio.ensure_future(call.generate({"rid": "a"}))
    await asyncio.sleep(0)
    aborting = asyncio.ensure_future(call.abort())
    await asyncio.sleep(0.1)
    assert backend.aborts == 1
    backend._end.set()
    await asyncio.gather(running, aborting)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_calls, "ABORT_AGAIN_S", 0.01)
    monkeypatch.setattr(own_calls, "ABORT_PATIENCE_S", 0.05)


@pytest.mark.usefixtures("_impatient")
async def test_abort_ends_a_call_that_waits_for_a_pause_to_end_and_those_that_follow():
    backend = Forgetful()
    call = OwnCall(backend, "conversation")
    running = asyncio.ensure_future(call.generate({"rid": "a"}))
    await asyncio.sleep(0)
    await asyncio.gather(call.abort(), call.abort())
    async with asyncio.timeout(20):
        assert (await running)["output_ids"] == []
        assert (await call.generate({"rid": "b"}))["output_ids"] == []
    await call.abort()


async def test_abort_is_told_again_until_the_call_returns_what_it_sampled(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(own_calls, "ABORT_AGAIN_S", 0.01)
    backend = Forgetful()
    call = OwnCall(backend, "conversation")
    running = asyncio.ensure_future(call.generate({"rid": "a"}))
    aborting = asyncio.ensure_future(call.abort())
    await backend.second_abort.wait()
    backend.has_begun = True
    await aborting
    assert (await running)["output_ids"] == [7]
