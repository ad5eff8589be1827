"""New weights for the real SGLang: whole or not at all, and nothing left behind."""

import asyncio
import gc
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from agentrl.engines.protocol import Completion, MemoryTag, SamplingParams
from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from agentrl.engines.sglang.weights.buckets import ModelWeights
from agentrl.errors import EngineError
from tests.engines.conformance import PROMPT, TOLERANCE, greedy
from tests.fakes.engines import plain_log_probs, tiny_model
from tests.fakes.sglang_policy import SharedHost

pytestmark = pytest.mark.sglang

ENDLESS = SamplingParams(max_new_tokens=900)
BUCKET = "update_weights_from_tensor"


class FailingHost(SharedHost):
    """A running SGLang that refuses one request: before it sees it, or behind its back."""

    def __init__(self, host: Any, request: str = "", *, after: int = 0) -> None:
        super().__init__(host)
        self.request, self.after = request, after
        self.counts: dict[str, int] = {}
        self.hold: asyncio.Event | None = None
        self.is_held = asyncio.Event()

    async def control(self, request: str, fields: Mapping[str, Any] | None = None) -> None:
        count = self.counts[request] = self.counts.get(request, -1) + 1
        is_the_one = request == self.request and count == self.after
        if is_the_one and self.hold is not None:
            self.is_held.set()
            await self.hold.wait()
        elif is_the_one:
            raise EngineError(f"refuses {request}")
        await super().control(request, fields)


def engine_on(running: SGLangEngine, host: SharedHost) -> SGLangEngine:
    lent: Any = host
    return SGLangEngine(
        lent, running._decode, max_model_len=running.max_model_len, bucket_bytes=20_000,
        weights=running._weights,
    )  # fmt: skip


async def check(engine: SGLangEngine, model: torch.nn.Module, version: int) -> None:
    """Hold the engine against a model: these weights, all of them, under this version."""
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0)
    completion = await engine.generate(PROMPT, sampling, request_id="check")
    assert {span.version for span in completion.weight_versions} == {version}
    expected = plain_log_probs(model, PROMPT, completion, 1.0)
    torch.testing.assert_close(
        torch.tensor(completion.log_probs), expected, atol=TOLERANCE, rtol=TOLERANCE
    )


async def start_endless(engine: SGLangEngine) -> asyncio.Task[Completion]:
    task = asyncio.create_task(engine.generate(PROMPT, ENDLESS, request_id="endless"))
    await engine.generate(PROMPT, greedy(2), request_id="clock")
    assert not task.done()
    return task


@pytest.mark.parametrize(
    ("request_name", "after"),
    [("begin_weight_update", 0), (BUCKET, 1), ("end_weight_update", 0),
     ("update_weight_version", 0), ("update_weight_version", 1)],
)  # fmt: skip
async def test_update_that_fails_ends_running_calls_and_the_next_one_mends_it(
    running: SGLangEngine, request_name: str, after: int
):
    old, new = tiny_model().eval(), tiny_model(seed=1).eval()
    await running.update_weights(old.named_parameters(), version=1)
    engine = engine_on(running, FailingHost(running._host, request_name, after=after))
    call = await start_endless(engine)
    with pytest.raises(EngineError, match=f"refuses {request_name}"):
        await engine.update_weights(new.named_parameters(), version=2)
    assert call.done(), "it does not hang"
    with pytest.raises(EngineError, match="may hold a mixture"):
        await call
    with pytest.raises(EngineError, match="may hold a mixture"):
        await engine.generate(PROMPT, greedy(), request_id="b")
    await engine.update_weights(new.named_parameters(), version=3)
    await check(engine, new, 3)


async def test_weights_that_fail_on_the_way_leave_the_engine_out_until_they_come_whole(
    running: SGLangEngine,
):
    new = tiny_model(seed=2).eval()
    weights = list(new.named_parameters())

    def broken() -> Iterator[Any]:
        yield from weights[:-2]
        raise RuntimeError("a rank is gone")

    for spoilt, message in (
        (broken(), "a rank is gone"),
        ([(weights[0][0], weights[0][1][:-1]), *weights[1:]], "of shape"),
        ([*weights[:5], (weights[5][0], torch.zeros(3)), *weights[6:]], "of shape"),
        (weights[:-1], "missing"),
    ):
        engine = engine_on(running, SharedHost(running._host))
        with pytest.raises(Exception, match=message):
            await engine.update_weights(spoilt, version=4)
        with pytest.raises(EngineError, match="may hold a mixture"):
            await engine.generate(PROMPT, greedy(), request_id="b")
        await engine.update_weights(iter(weights), version=5)
        await check(engine, new, 5)


async def test_cancelled_update_leaves_the_engine_out_and_unpaused(running: SGLangEngine):
    new = tiny_model(seed=3).eval()
    host = FailingHost(running._host, BUCKET, after=1)
    host.hold = asyncio.Event()
    engine = engine_on(running, host)
    call = await start_endless(engine)
    update = asyncio.create_task(engine.update_weights(new.named_parameters(), version=6))
    await host.is_held.wait()
    update.cancel()
    await asyncio.sleep(0)
    host.hold.set()
    with pytest.raises(asyncio.CancelledError):
        await update
    with pytest.raises(EngineError, match="may hold a mixture"):
        await call
    # Unpaused: what another one asks of the same SGLang is answered.
    async with asyncio.timeout(30):
        await running.generate(PROMPT, greedy(), request_id="c")
    await engine.update_weights(new.named_parameters(), version=7)
    await check(engine, new, 7)


async def test_running_calls_go_on_through_an_update_and_say_which_weights_sampled_what(
    running: SGLangEngine,
):
    await running.update_weights(tiny_model().named_parameters(), version=8)
    engine = engine_on(running, SharedHost(running._host))
    call = await start_endless(engine)
    figures = await engine.update_weights(tiny_model(seed=4).named_parameters(), version=9)
    await engine.generate(PROMPT, greedy(4), request_id="clock")
    await engine.abort("endless")
    completion = await call
    assert [span.version for span in completion.weight_versions] == [8, 9]
    assert completion.weight_versions[-1].end == len(completion.token_ids)
    assert figures.num_bytes == sum(p.nbytes for p in tiny_model().parameters())
    assert figures.num_buckets > 3


async def test_trainers_own_tensors_stay_where_they_are(running: SGLangEngine):
    model = tiny_model()
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    await running.update_weights(model.named_parameters(), version=10)
    assert not any(p.is_shared() for p in model.parameters())
    assert before == {name: p.data_ptr() for name, p in model.named_parameters()}


async def test_sleep_and_wake_do_nothing_here_and_say_so(
    running: SGLangEngine, caplog: pytest.LogCaptureFixture
):
    engine = engine_on(running, SharedHost(running._host))
    await engine.sleep()
    await engine.wake((MemoryTag.WEIGHTS,))
    await engine.wake((MemoryTag.KV_CACHE,))
    await engine.generate(PROMPT, greedy(), request_id="a")
    assert [r.message for r in caplog.records if "does not sleep" in r.message] == [
        "the SGLang engine cannot release memory: it does not sleep"
    ]


def test_engine_knows_what_it_was_started_with(running: SGLangEngine):
    assert isinstance(running._weights, ModelWeights)


async def test_update_takes_one_bucket_of_shared_memory_and_leaves_none(running: SGLangEngine):
    model = tiny_model()
    most, before = 0, shared_bytes()

    def watched() -> Iterator[Any]:
        nonlocal most
        for named in model.named_parameters():
            yield named
            most = max(most, shared_bytes() - before)

    await running.update_weights(watched(), version=13)
    largest = max(p.nbytes for p in model.parameters())
    assert 0 < most <= max(20_000, largest) + 2 * os.sysconf("SC_PAGESIZE")
    gc.collect()
    assert shared_bytes() <= before
    assert not [p for p in psutil.Process().children() if "torch_shm" in p.name()]


def shared_bytes() -> int:
    """Shared memory that this process has touched, as the kernel counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssShmem:")) * 1024
