"""Weights in buckets of bounded size, and what becomes of a target whose update fails."""

import asyncio
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from agentrl.engines.protocol import MemoryTag
from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.backend import SleepingBackend
from agentrl.engines.sglang.inprocess.engine import CallBarrier
from agentrl.engines.sglang.weights import buckets
from agentrl.engines.sglang.weights import distributed as distributed_module
from agentrl.engines.sglang.weights import tensor as tensor_module
from agentrl.engines.sglang.weights.buckets import (
    Bucket,
    ModelWeights,
    NamedTensor,
    PlainMemory,
    fill_buckets,
)
from agentrl.engines.sglang.weights.disk import DiskTransport
from agentrl.engines.sglang.weights.distributed import DistributedTransport
from agentrl.engines.sglang.weights.sync import UNFIT_VERSION, Target, update_weights
from agentrl.engines.sglang.weights.tensor import SentMemory, TensorTransport
from agentrl.errors import EngineError
from tests.fakes.engines import tiny_model
from tests.fakes.weights import BUCKET, BucketTransport, RecordingBackend, weights_of

CPU = torch.device("cpu")


def needs_of(folder: Path) -> SGLangNeeds:
    return SGLangNeeds(model_path=str(folder), max_model_len=8, max_requests=1)


BEFORE = ["pause_generation", "update_weight_version", "begin_weight_update"]
AFTER = ["end_weight_update", "update_weight_version", "continue_generation"]
LET_GO = ["update_weight_version", "end_weight_update", "abort_request", "continue_generation"]


def read(bucket: Bucket[PlainMemory]) -> list[NamedTensor]:
    """What a reader finds in a bucket."""
    return [
        (e.name, bucket.flat[e.start_idx : e.end_idx].view(e.dtype).view(e.shape).clone())
        for e in bucket.entries
    ]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([torch.float32, torch.bfloat16]))),
    bucket_bytes=st.integers(1, 200),
    first=st.integers(1, 64),
)
def test_buckets_hold_every_tensor_once_in_order_and_within_the_bound(
    sizes: list[tuple[int, torch.dtype]], bucket_bytes: int, first: int
):
    tensors = [(f"{i}", torch.randn(size).to(dtype)) for i, (size, dtype) in enumerate(sizes)]
    found: list[NamedTensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "FIRST_BYTES", first)
        for bucket in fill_buckets(tensors, bucket_bytes, PlainMemory):
            assert bucket.num_bytes <= bucket_bytes or len(bucket.entries) == 1
            assert all(e.start_idx % e.dtype.itemsize == 0 for e in bucket.entries)
            ends = [0, *(e.end_idx for e in bucket.entries)]
            assert [e.start_idx for e in bucket.entries] == ends[:-1], "no gap"
            found += read(bucket)
    assert [name for name, _ in found] == [name for name, _ in tensors]
    for (_, one), (_, other) in zip(found, tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


class CountedMemory(PlainMemory):
    """Memory that is counted while it is alive."""

    alive: ClassVar[weakref.WeakSet["CountedMemory"]] = weakref.WeakSet()
    most: ClassVar[int] = 0

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        super().__init__(num_bytes, device)
        self.alive.add(self)
        CountedMemory.most = max(self.most, sum(len(one.flat) for one in self.alive))

    def dumps(self, parts: dict[str, Any]) -> bytes:
        return pickle.dumps(list(parts))


def fresh_weights(*num_elements: int) -> Iterator[NamedTensor]:
    """Weights of which only the last may still be in use."""
    given: list[weakref.ref[torch.Tensor]] = []
    for i, size in enumerate(num_elements):
        tensor = torch.full((size,), float(i))
        assert sum(one() is not None for one in given) <= 1
        given.append(weakref.ref(tensor))
        yield f"w{i}", tensor


@pytest.mark.parametrize("num_buffers", [1, 2])
async def test_update_takes_no_more_memory_than_it_may(
    monkeypatch: pytest.MonkeyPatch, num_buffers: int
):
    monkeypatch.setattr(buckets, "FIRST_BYTES", 128)
    monkeypatch.setattr(CountedMemory, "most", 0)
    monkeypatch.setattr(tensor_module, "require_sglang", lambda: None)
    monkeypatch.setattr(tensor_module, "serialize", lambda bucket: b"")
    report = await update_weights(
        [Target(RecordingBackend())], fresh_weights(*[32] * 50, 400, *[32] * 3, 300, 300),
        version=1, transport=TensorTransport(1024, CountedMemory, num_buffers=num_buffers),
        on_failure=Owner().fail,
    )  # fmt: skip
    assert report.figures.num_bytes == 4 * (32 * 53 + 400 + 600)
    assert CountedMemory.most == 1600, "the largest weight, alone"
    assert not CountedMemory.alive


async def test_growing_buckets_never_take_more_than_the_bound(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buckets, "FIRST_BYTES", 128)
    for num_buffers in (1, 2):
        monkeypatch.setattr(CountedMemory, "most", 0)
        weights = fresh_weights(*[32] * 50)
        for bucket in fill_buckets(weights, 1024, CountedMemory, num_buffers=num_buffers):
            del bucket
        assert CountedMemory.most == 1024


def test_memory_is_not_reused_before_the_next_bucket_is_read():
    buckets_read = fill_buckets(weights_of(*[8] * 6), 64, PlainMemory, num_buffers=2)
    found = [bucket.memory for bucket in buckets_read]
    assert len({id(memory) for memory in found}) == 2
    assert found[0] is found[2] is found[4]
    assert found[1] is found[3] is found[5]


def test_small_model_takes_little_memory_and_a_large_one_soon_whole_buckets(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(buckets, "FIRST_BYTES", 128)
    sizes = [b.num_bytes for b in fill_buckets(weights_of(*[32] * 20), 1024, PlainMemory)]
    assert sizes == [128, 256, 512, 1024, 640]


def test_sent_memory_sends_its_tensors_and_nothing_more():
    memory = SentMemory(1 << 20, CPU)
    memory.flat[:8] = 7
    sent = memory.dumps({"flattened_tensor": memory.flat[:8]})
    assert torch.equal(pickle.loads(sent)["flattened_tensor"], memory.flat[:8])
    assert len(sent) < 2000


# Updates.


class Owner:
    """Takes out who fails, and sees in what state that one was."""

    def __init__(self) -> None:
        self.taken_out: list[tuple[str, bool]] = []
        """(name, whether generation was paused)."""

    async def fail(self, target: Target, error: EngineError) -> None:
        backend: Any = target.backend
        self.taken_out.append((backend.name, backend.is_paused))


def fails_at(request: str, after: int = 0) -> Callable[[str, int], bool]:
    return lambda asked, count: asked == request and count == after


async def update(owner: Owner, *backends: RecordingBackend, weights: Any = None) -> Any:
    return await update_weights(
        [Target(backend) for backend in backends],
        weights_of(8, 8, 8) if weights is None else weights,
        version=5,
        transport=BucketTransport(64),
        on_failure=owner.fail,
    )


async def test_update_asks_in_order_and_tells_the_version():
    one, owner = RecordingBackend(), Owner()
    report = await update(owner, one)
    assert one.requests == [*BEFORE, BUCKET, BUCKET, *AFTER]
    assert one.fields[one.requests.index("pause_generation")] == {"mode": "retract"}
    fields = [f for r, f in zip(one.requests, one.fields, strict=True) if r == AFTER[1]]
    assert fields == [
        {"new_version": version, "abort_all_requests": False} for version in (UNFIT_VERSION, "5")
    ]
    assert (report.figures.num_bytes, report.figures.num_buckets) == (96, 2)
    assert not owner.taken_out


@pytest.mark.parametrize(
    ("request_name", "after"),
    [("pause_generation", 0), ("begin_weight_update", 0), (BUCKET, 1), ("end_weight_update", 0),
     ("update_weight_version", 0), ("update_weight_version", 1)],
)  # fmt: skip
async def test_target_that_fails_is_taken_out_let_go_and_the_others_go_on(
    request_name: str, after: int
):
    good, bad = RecordingBackend("good"), RecordingBackend("bad", fails_at(request_name, after))
    owner = Owner()
    report = await update(owner, good, bad)
    assert good.requests == [*BEFORE, BUCKET, BUCKET, *AFTER]
    assert [(target.backend.name, str(error)) for target, error in report.failures.items()] == [
        ("bad", f"bad refuses {request_name}")
    ]
    was_paused = request_name != "pause_generation"
    assert owner.taken_out == [("bad", was_paused)], "before its generation goes on"
    assert bad.requests[-4:] == LET_GO
    assert not bad.is_paused
    assert not good.is_paused


async def test_update_without_remaining_servers_raises():
    one, other = (RecordingBackend(name, fails_at(BUCKET, 1)) for name in ("one", "other"))
    owner = Owner()
    with pytest.raises(EngineError, match=f"refuses {BUCKET}"):
        await update(owner, one, other)
    assert [name for name, _ in owner.taken_out] == ["one", "other"]
    assert one.requests[-4:] == other.requests[-4:] == LET_GO


async def test_weights_that_fail_take_every_target_out_and_leave_none_paused():
    def broken() -> Iterator[NamedTensor]:
        yield from weights_of(8, 8, 8)
        raise RuntimeError("a rank is gone")

    one, other, owner = RecordingBackend("one"), RecordingBackend("other"), Owner()
    with pytest.raises(RuntimeError, match="a rank is gone"):
        await update(owner, one, other, weights=broken())
    assert owner.taken_out == [("one", True), ("other", True)]
    assert one.requests[-4:] == LET_GO
    assert not one.is_paused
    assert not other.is_paused


async def test_cancelled_update_waits_for_the_reader_of_its_bucket_then_lets_everyone_go():
    one, owner = RecordingBackend(), Owner()
    one.hold = asyncio.Event()
    task = asyncio.create_task(update(owner, one))
    await one.is_reading.wait()
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not task.done(), "the bucket is being read"
    one.hold.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert one.requests == [*BEFORE, BUCKET, "bucket taken", *LET_GO]
    assert owner.taken_out == [("one", True)]
    assert not one.is_paused


async def test_target_that_will_not_be_let_go_does_not_hide_why_it_failed():
    def fails(request: str, count: int) -> bool:
        return request == BUCKET or (count > 0 and request in LET_GO) or request in LET_GO[1:]

    owner = Owner()
    with pytest.raises(EngineError, match=f"refuses {BUCKET}"):
        await update(owner, RecordingBackend(fails=fails))


# Calls, sleep, names, disk.


async def test_closed_gate_ends_running_calls_and_refuses_others_until_it_is_opened():
    gate = CallBarrier()

    async def call() -> None:
        async with gate.call():
            await asyncio.Event().wait()

    calls = [asyncio.create_task(call()) for _ in range(3)]
    await asyncio.sleep(0)
    await gate.close(EngineError("mixed weights"))
    assert all(task.done() for task in calls)
    for task in calls:
        with pytest.raises(EngineError, match="mixed weights"):
            await task
    with pytest.raises(EngineError, match="mixed weights"):
        await call()
    gate.open()
    async with gate.call():
        pass


async def test_cancelled_call_and_a_time_out_of_its_own_pass_through_the_gate():
    gate = CallBarrier()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0), gate.call():
            await asyncio.Event().wait()
    with pytest.raises(TimeoutError, match="a tool's"):
        async with gate.call():
            raise TimeoutError("a tool's")


async def test_sleeping_engine_stays_paused_through_an_update_until_all_is_awake():
    inner = RecordingBackend()
    backend = SleepingBackend(inner, can_sleep=True)
    await backend.sleep(tuple(MemoryTag))
    await backend.sleep(tuple(MemoryTag))
    assert inner.requests == ["pause_generation", "release_memory_occupation"]
    assert inner.fields[-1] == {"tags": ["weights", "kv_cache"]}
    await backend.wake((MemoryTag.WEIGHTS,))
    await update_weights(
        [Target(backend)], weights_of(8), version=1, transport=BucketTransport(64),
        on_failure=Owner().fail,
    )  # fmt: skip
    assert "continue_generation" not in inner.requests
    await backend.wake((MemoryTag.KV_CACHE,))
    assert inner.requests[-2:] == ["resume_memory_occupation", "continue_generation"]
    assert inner.fields[-2] == {"tags": ["kv_cache"]}
    await backend.wake(tuple(MemoryTag))
    assert inner.requests.count("resume_memory_occupation") == 2


async def test_engine_that_cannot_give_memory_back_goes_on_generating():
    inner = RecordingBackend(fails=fails_at("release_memory_occupation"))
    backend = SleepingBackend(inner, can_sleep=True)
    with pytest.raises(EngineError, match="refuses release"):
        await backend.sleep(tuple(MemoryTag))
    assert not inner.is_paused
    await backend.sleep((MemoryTag.KV_CACHE,))
    assert inner.is_paused, "it can be asked again"


async def test_engine_without_memory_to_give_says_so_once(caplog: pytest.LogCaptureFixture):
    inner = RecordingBackend()
    backend = SleepingBackend(inner, can_sleep=False)
    for _ in range(2):
        await backend.sleep(tuple(MemoryTag))
        await backend.wake(tuple(MemoryTag))
    assert inner.requests == []
    assert [record.message for record in caplog.records] == [
        "one cannot release memory: it does not sleep"
    ]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ModelWeights:
    folder = tmp_path_factory.mktemp("dense")
    tiny_model().config.save_pretrained(folder)
    return ModelWeights.of(needs_of(folder))


def test_plain_weights_keep_their_names_and_tied_ones_come_once(dense: ModelWeights):
    model = tiny_model()
    found = dict(dense.for_files(model.named_parameters()))
    assert found.keys() == dict(model.named_parameters()).keys()
    assert "lm_head.weight" not in found


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ws: [(ws[0][0], ws[0][1][:-1]), *ws[1:]], "of shape"),
        (lambda ws: [("model.nonsense", ws[0][1]), *ws[1:]], "nonsense"),
        (lambda ws: ws[:-1], "missing: model.norm.weight"),
        (lambda ws: [*ws, ws[0]], "once"),
    ],
)
def test_weights_of_another_model_are_refused(dense: ModelWeights, spoil: Any, message: str):
    weights = spoil(list(tiny_model().named_parameters()))
    with pytest.raises(EngineError, match=message):
        list(dense.for_files(weights))


def test_experts_that_are_one_tensor_here_come_as_the_model_files_have_them(tmp_path: Path):
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, moe_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=3,
        num_experts_per_tok=2,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path)
    weights = ModelWeights.of(needs_of(tmp_path))
    found = dict(weights.for_files((n, p.detach()) for n, p in model.named_parameters()))
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


class DiskReader(RecordingBackend):
    """Reads what it is pointed to, as SGLang would."""

    def __init__(self, fails: Callable[[str, int], bool] = lambda request, count: False) -> None:
        super().__init__("reader", fails)
        self.weights: dict[str, torch.Tensor] = {}
        self.num_files = 0

    async def control(self, request: str, fields: Any = None) -> None:
        if request == "update_weights_from_disk":
            self.read(Path(fields["model_path"]))
        await super().control(request, fields)

    def read(self, folder: Path) -> None:
        files = sorted(folder.iterdir())
        self.num_files = len(files)
        self.weights = {name: w for path in files for name, w in load_file(path).items()}


async def by_disk(folder: Path, reader: RecordingBackend, weights: Any) -> Any:
    return await update_weights(
        [Target(reader)], weights, version=1, transport=DiskTransport(folder, 64),
        on_failure=Owner().fail,
    )  # fmt: skip


async def test_disk_gives_every_weight_and_leaves_nothing(tmp_path: Path):
    folder = tmp_path / "weights"
    (folder / "written").mkdir(parents=True)
    (folder / "written" / "model-00007.safetensors").write_text("of a run that was killed")
    for _ in range(2):
        reader = DiskReader()
        report = await by_disk(folder, reader, weights_of(8, 8, 40))
        assert all(torch.equal(reader.weights[name], w) for name, w in weights_of(8, 8, 40))
        assert reader.num_files == report.figures.num_buckets == 2
        assert list(folder.iterdir()) == []


async def test_disk_leaves_nothing_where_the_reader_or_the_weights_fail(tmp_path: Path):
    folder = tmp_path / "weights"

    def broken() -> Iterator[NamedTensor]:
        yield from weights_of(40, 40)
        raise RuntimeError("a rank is gone")

    with pytest.raises(EngineError, match="refuses"):
        await by_disk(folder, DiskReader(fails_at("update_weights_from_disk")), weights_of(8))
    with pytest.raises(RuntimeError, match="a rank is gone"):
        await by_disk(folder, DiskReader(), broken())
    assert list(folder.iterdir()) == []


async def test_disk_that_takes_nothing_is_an_error_that_names_the_key(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match="cannot be written") as caught:
        await by_disk(tmp_path / "file" / "weights", DiskReader(), weights_of(8))
    assert caught.value.key == "weight_sync.folder"


class NeverDone:
    """A broadcast that one member does not take."""

    def is_completed(self) -> bool:
        return False


async def test_every_member_leaves_a_broken_group_without_a_hang(
    monkeypatch: pytest.MonkeyPatch,
):
    left: list[object] = []
    monkeypatch.setattr(distributed_module, "require_sglang", lambda: None)
    monkeypatch.setattr(distributed_module.dist, "broadcast", lambda *_, **__: NeverDone())
    monkeypatch.setattr(distributed_module.dist, "destroy_process_group", left.append)
    transport = DistributedTransport("127.0.0.1", backend="gloo", device=CPU, timeout_s=0.05)
    group = object()
    monkeypatch.setattr(transport, "_open", lambda *_: setattr(transport, "_group", group))
    one, other = RecordingBackend("one"), RecordingBackend("other")
    async with asyncio.timeout(20):
        with pytest.raises(EngineError, match="not received by every member in time"):
            await update_weights(
                [Target(one), Target(other)], weights_of(8), version=1, transport=transport,
                on_failure=Owner().fail,
            )  # fmt: skip
    assert left == [group]
    for backend in (one, other):
        joined = backend.fields[backend.requests.index("init_weights_update_group")]
        fields = backend.fields[backend.requests.index("destroy_weights_update_group")]
        assert fields == {"group_name": joined["group_name"]}
