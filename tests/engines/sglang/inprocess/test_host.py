"""SGLang inside this process: how it is called and ended, with a fake in SGLang's place."""

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

from agentrl.engines.sglang import calls
from agentrl.engines.sglang.inprocess import engine as engine_module
from agentrl.engines.sglang.inprocess import host as host_module
from agentrl.engines.sglang.inprocess.engine import InProcessCall
from agentrl.engines.sglang.inprocess.host import SGLangHost
from agentrl.errors import EngineError


class EndlessEngine:
    """A fake `sglang.Engine` whose calls never end and which has no processes."""

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


def close(host: SGLangHost) -> None:
    host._call_soon(host._stop, EngineError("the engine was closed"))


@pytest.mark.parametrize("order", ["running", "queued before the end", "queued after the end"])
@pytest.mark.parametrize(("end", "message"), [(fail, "ended unexpectedly"), (close, "was closed")])
async def test_call_fails_when_the_engine_ends(
    host: SGLangHost, end: Callable[[SGLangHost], None], message: str, order: str
):
    release = threading.Event()
    is_blocked = order != "running"
    if is_blocked:  # the engine's loop can then start nothing
        host._loop.call_soon_threadsafe(release.wait)
    if order == "queued after the end":
        end(host)
    call = asyncio.ensure_future(host.generate({"rid": "a"}))
    await asyncio.sleep(0 if is_blocked else 0.05)
    if order != "queued after the end":
        end(host)
    release.set()
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match=message):
            await call


class AnsweringEngine(EndlessEngine):
    """Answers a call with its fields, and fails the call `fails`."""

    async def async_generate(self, **fields: Any) -> Any:
        await asyncio.sleep(0)
        if fields["rid"] == "fails":
            raise ValueError("refused by the fake")
        return fields


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[SGLangHost]:
    monkeypatch.setattr(host_module, "_engine_class", lambda: AnsweringEngine)
    host = SGLangHost({})
    yield host
    host.close()


async def test_each_of_many_calls_gets_its_own_answer_or_error(answering: SGLangHost):
    names = [*map(str, range(50)), "fails", *map(str, range(50, 100))]
    async with asyncio.timeout(20):
        answers = await asyncio.gather(
            *(answering.generate({"rid": name}) for name in names), return_exceptions=True
        )
    failed = answers.pop(50)
    assert isinstance(failed, EngineError)
    assert "refused by the fake" in str(failed)
    assert answers == [{"rid": str(number)} for number in range(100)]


async def test_calls_of_one_moment_wake_the_engine_once(
    answering: SGLangHost, monkeypatch: pytest.MonkeyPatch
):
    wakes: list[None] = []
    wake = answering._loop.call_soon_threadsafe

    def count(*args: Any, **kwargs: Any) -> Any:
        wakes.append(None)
        return wake(*args, **kwargs)

    release = threading.Event()
    wake(release.wait)  # the engine's loop cannot take calls out of the inbox yet
    monkeypatch.setattr(answering._loop, "call_soon_threadsafe", count)
    calls = [asyncio.ensure_future(answering.generate({"rid": str(n)})) for n in range(20)]
    await asyncio.sleep(0)
    assert len(wakes) == 1
    release.set()
    async with asyncio.timeout(20):
        assert len(await asyncio.gather(*calls)) == 20


def test_a_canceled_call_is_aborted(host: SGLangHost):
    async def cancel() -> None:
        call = asyncio.ensure_future(host.generate({"rid": "a"}))
        await asyncio.sleep(0.05)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancel())
    deadline = time.monotonic() + 20
    while host._engine.aborted != ["a"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert host._engine.aborted == ["a"]


def test_calls_from_one_event_loop_after_another(answering: SGLangHost):
    for number in range(2):
        fields = {"rid": str(number)}
        assert asyncio.run(answering.generate(fields)) == fields


class SlowStart(EndlessEngine):
    """A start that waits for its process, is interrupted, and fails when the process has ended."""

    process: multiprocessing.process.BaseProcess

    def __init__(self, **arguments: Any) -> None:
        process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        process.start()
        type(self).process = process
        os.kill(os.getpid(), signal.SIGINT)
        process.join()
        raise RuntimeError("a process has ended")


class InterruptedThread(threading.Thread):
    """A thread whose `start` is interrupted before it returns, as under heavy load."""

    def start(self) -> None:
        super().start()
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            time.sleep(0.01)


@pytest.fixture
def slow_start(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """Replace SGLang by `SlowStart`, and run a process that must survive."""
    monkeypatch.setattr(host_module, "_engine_class", lambda: SlowStart)
    # SIGINT is ignored if a shell has started the tests in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        yield other
    finally:
        signal.signal(signal.SIGINT, before)
        with other:
            other.kill()
        SlowStart.process.kill()
        SlowStart.process.join()


@pytest.mark.parametrize("thread", [threading.Thread, InterruptedThread])
def test_start_that_is_interrupted_ends_its_processes_and_no_others(
    monkeypatch: pytest.MonkeyPatch, slow_start: subprocess.Popen[bytes], thread: type
):
    monkeypatch.setattr(host_module.threading, "Thread", thread)
    before = signal.getsignal(signal.SIGQUIT)
    with pytest.raises(KeyboardInterrupt):
        SGLangHost({})
    assert SlowStart.process.pid is not None
    assert not psutil.pid_exists(SlowStart.process.pid)
    assert signal.getsignal(signal.SIGQUIT) == before
    assert slow_start.poll() is None


class PausedBackend:
    """A SGLang that ignores aborts until it has started the call, as during a pause."""

    name = "paused"

    def __init__(self) -> None:
        self.has_started = False
        self.num_aborts = 0
        self.second_abort = asyncio.Event()
        self.end = asyncio.Event()

    async def generate(self, fields: Any) -> Any:
        await self.end.wait()
        return {"output_ids": [7], "rid": fields["rid"]}

    async def control(self, request: str, fields: Any = None) -> None:
        assert (request, fields) == ("abort_request", {"rid": "a"})
        self.num_aborts += 1
        if self.num_aborts == 2:
            self.second_abort.set()
        if self.has_started:
            self.end.set()


async def test_abort_of_a_call_in_its_second_request_waits_between_two_aborts():
    backend = PausedBackend()
    backend.end.set()
    call = InProcessCall(backend, "conversation")
    await call.generate({"rid": "a"})
    backend.end.clear()
    running = asyncio.ensure_future(call.generate({"rid": "a"}))
    await asyncio.sleep(0)
    aborting = asyncio.ensure_future(call.abort())
    await asyncio.sleep(0.1)
    assert backend.num_aborts == 1
    backend.end.set()
    await asyncio.gather(running, aborting)


async def test_abort_ends_a_call_that_waits_for_the_end_of_a_pause_and_later_calls(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(calls, "ABORT_AGAIN_S", 0.01)
    monkeypatch.setattr(engine_module, "ABORT_PATIENCE_S", 0.05)
    backend = PausedBackend()
    call = InProcessCall(backend, "conversation")
    running = asyncio.ensure_future(call.generate({"rid": "a"}))
    await asyncio.sleep(0)
    await asyncio.gather(call.abort(), call.abort())
    async with asyncio.timeout(20):
        assert (await running)["output_ids"] == []
        assert (await call.generate({"rid": "b"}))["output_ids"] == []
    await call.abort()


async def test_abort_is_repeated_until_the_call_returns_what_it_sampled(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(calls, "ABORT_AGAIN_S", 0.01)
    backend = PausedBackend()
    call = InProcessCall(backend, "conversation")
    running = asyncio.ensure_future(call.generate({"rid": "a"}))
    await asyncio.sleep(0)
    aborting = asyncio.ensure_future(call.abort())
    await backend.second_abort.wait()
    backend.has_started = True
    await aborting
    assert (await running)["output_ids"] == [7]
