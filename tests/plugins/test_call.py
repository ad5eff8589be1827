"""The boundary round users' code."""

import asyncio
import gc
import signal
import threading
import time
from typing import Any

import pytest

from agentrl.errors import PluginError
from agentrl.plugins.call import (
    CallTimeoutError,
    PerLoop,
    call_bounded,
    call_method,
    in_thread_loop,
    setting_up,
)


async def test_a_timeout_inside_the_plugin_is_distinguished():
    async def raises() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own") as error:
        await call_bounded(raises, timeout_s=1, name="x")
    assert not isinstance(error.value, CallTimeoutError)


async def test_time_for_which_another_call_blocks_the_loop_is_not_counted():
    async def answers() -> str:
        await asyncio.sleep(0.02)
        return "in time"

    async def blocks() -> None:
        time.sleep(0.4)  # noqa: ASYNC251 - that is what it is for

    async def hangs() -> None:
        await asyncio.Event().wait()

    started = time.monotonic()
    answer, _, late = await asyncio.gather(
        call_bounded(answers, timeout_s=0.2, name="x"),
        call_bounded(blocks, timeout_s=0.2, name="x"),
        call_bounded(hangs, timeout_s=0.2, name="x"),
        return_exceptions=True,
    )
    assert answer == "in time"
    assert isinstance(late, CallTimeoutError)
    assert time.monotonic() - started < 2


async def test_a_hang_ends_also_if_the_loop_is_late():
    """The loop is never on time; the time-out is put off once, and not for ever."""
    timeout_s, slice_s = 0.4, 0.1

    async def stays_late() -> None:
        while True:
            time.sleep(slice_s)  # noqa: ASYNC251 - that is what it is for
            await asyncio.sleep(0)

    blocker = asyncio.create_task(stays_late())
    started = time.monotonic()
    try:
        async with asyncio.timeout(20 * timeout_s):
            with pytest.raises(CallTimeoutError):
                await call_bounded(lambda: asyncio.Event().wait(), timeout_s=timeout_s, name="x")
    finally:
        blocker.cancel()
    # Each turn of the loop takes a slice: some to notice, some to clean up.
    assert time.monotonic() - started <= 2 * timeout_s + 8 * slice_s


async def test_one_long_block_puts_a_time_out_off_by_no_more_than_its_own_length():
    async def blocks() -> None:
        time.sleep(0.5)  # noqa: ASYNC251 - that is what it is for

    hang = asyncio.create_task(
        call_bounded(lambda: asyncio.Event().wait(), timeout_s=0.1, name="x")
    )
    started = time.monotonic()
    await asyncio.sleep(0)
    await blocks()
    with pytest.raises(CallTimeoutError):
        await hang
    assert time.monotonic() - started < 0.8


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
async def test_what_would_end_the_run_is_an_error_of_the_plugin(kind: type[BaseException]):
    async def raises() -> None:
        raise kind

    def raises_in_thread() -> None:
        raise kind

    with pytest.raises(RuntimeError, match=f"raised {kind.__name__}"):
        await call_bounded(raises, timeout_s=1, name="x")
    with pytest.raises(RuntimeError, match=f"raised {kind.__name__}"):
        await call_bounded(lambda: call_method(raises_in_thread), timeout_s=1, name="x")


async def test_cancelling_lets_the_plugin_clean_up_first():
    cleaned = False

    async def careful() -> None:
        nonlocal cleaned
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            cleaned = True

    task = asyncio.create_task(call_bounded(careful, timeout_s=5, name="x"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned


@pytest.mark.parametrize("num_steps", range(4))
async def test_cancelling_at_any_step_leaves_no_coroutine_unawaited(num_steps: int):
    task = asyncio.create_task(
        call_bounded(lambda: asyncio.sleep(60), timeout_s=60, name="x")  # warnings are errors
    )
    for _ in range(num_steps):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gc.collect()


async def test_stop_iteration_on_a_thread_is_an_error_and_no_hang():
    def stops() -> None:
        raise StopIteration

    with pytest.raises(RuntimeError):
        await call_bounded(lambda: call_method(stops), timeout_s=1, name="x")


def test_an_abandoned_thread_does_not_disturb_a_closed_loop():
    release = threading.Event()

    async def main() -> None:
        with pytest.raises(CallTimeoutError):
            await call_bounded(lambda: call_method(release.wait), timeout_s=0.02, name="x")

    asyncio.run(main())
    release.set()
    time.sleep(0.02)


async def test_a_loop_of_its_own_is_cancelled_even_before_it_runs():
    ran = threading.Event()

    async def call() -> None:
        await asyncio.sleep(5)
        ran.set()

    task = asyncio.create_task(in_thread_loop(call))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.05)
    assert threading.active_count() < 50
    assert not ran.is_set()


def test_a_lock_for_each_loop_serves_loops_one_after_the_other():
    locks, order = PerLoop(asyncio.Lock), list[str]()

    async def hold(name: str) -> None:
        async with locks.get():
            order.append(f"{name} begins")
            await asyncio.sleep(0)
            order.append(f"{name} ends")

    async def both() -> None:
        await asyncio.gather(hold("a"), hold("b"))

    for _ in range(2):
        asyncio.run(both())
    assert order == ["a begins", "a ends", "b begins", "b ends"] * 2


def test_an_object_of_a_closed_loop_is_dropped():
    made = PerLoop(object)

    async def get() -> object:
        return made.get()

    first, second = asyncio.run(get()), asyncio.run(get())
    assert first is not second
    assert len(made._by_loop) == 1


def sets_an_alarm() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def parses_mathematics() -> None:
    import math_verify

    math_verify.parse("$1$")


@pytest.mark.parametrize("method", [sets_an_alarm, parses_mathematics])
async def test_code_that_needs_the_main_thread_is_told_how_to_get_it(method: Any):
    with pytest.raises(PluginError, match=r"(?s)main thread.*reward\.manager: prime.*isolation"):
        await call_bounded(lambda: call_method(method), timeout_s=60, name="x")
    with pytest.raises(ValueError, match="of main thread"):
        await call_method(lambda: _raise(ValueError("of main thread")))


def _raise(error: Exception) -> None:
    raise error


class Clock:
    """Moves the clock of a loop, so that no test waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop = asyncio.get_running_loop()
        self._moved_s, real = 0.0, self.loop.time
        monkeypatch.setattr(self.loop, "time", lambda: real() + self._moved_s)

    async def move(self, seconds: float) -> None:
        """Handle what is due, move the clock, and handle what is due then. From any loop."""
        for moved in (0.0, seconds):
            self._moved_s += moved
            turns = asyncio.run_coroutine_threadsafe(self._turn(), self.loop)
            await asyncio.wrap_future(turns)

    async def _turn(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


RUNS: list[Any] = [lambda call: call(), in_thread_loop]


@pytest.mark.parametrize("run", RUNS, ids=["loop", "thread"])
@pytest.mark.parametrize("is_late", [False, True])
async def test_time_of_set_up_is_not_counted_and_the_rest_is(
    run: Any, is_late: bool, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock(monkeypatch)

    async def sets_up() -> None:
        with setting_up():
            await clock.move(200)

    async def works() -> str:
        await clock.move(50)
        await asyncio.gather(sets_up(), sets_up())
        with setting_up():
            await sets_up()
        if is_late:  # a loop that was late is given the same time again, once
            await clock.move(80)
            await clock.move(80)
            await asyncio.Event().wait()
        return "done"

    bounded = call_bounded(lambda: run(works), timeout_s=100, name="x")
    if is_late:
        with pytest.raises(CallTimeoutError, match="no answer within 100 s"):
            await bounded
    else:
        assert await bounded == "done"


@pytest.mark.parametrize("run", RUNS, ids=["loop", "thread"])
@pytest.mark.parametrize("inner_s", [None, 5.0])
async def test_a_set_up_has_a_limit_of_its_own(
    run: Any, inner_s: float | None, monkeypatch: pytest.MonkeyPatch
):
    clock = Clock(monkeypatch)

    async def works() -> None:
        with setting_up():  # an earlier set-up has no effect on a later one
            await clock.move(60)
        with setting_up(70), setting_up() if inner_s is None else setting_up(inner_s):
            await clock.move(60)
            await clock.move(20)
            await asyncio.Event().wait()

    with pytest.raises(CallTimeoutError, match="the set-up did not end within 70 s"):
        await call_bounded(lambda: run(works), timeout_s=10, name="x")


async def test_set_up_needs_no_bounded_call():
    with setting_up():
        await asyncio.sleep(0)
