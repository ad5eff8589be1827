"""The ways by which weights come to a real server that this process has not started."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from agentrl.engines.protocol import SamplingParams
from agentrl.engines.sglang.servers.engine import SGLangServerEngine
from agentrl.engines.sglang.weights.disk import DiskTransport
from agentrl.engines.sglang.weights.distributed import DistributedTransport
from agentrl.engines.sglang.weights.sync import Target, Transport, update_weights
from agentrl.engines.sglang.weights.tensor import TensorTransport
from agentrl.errors import EngineError
from agentrl.workers.distributed import start_world, stop_world
from tests.engines.conformance import PROMPT, TOLERANCE
from tests.fakes.engines import plain_log_probs, tiny_model
from tests.fakes.serve_command import Serving, connect
from tests.fakes.sglang_policy import letter_tokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

CPU = torch.device("cpu")
WAYS = ("tensor", "distributed", "disk")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """The process group of one rank."""
    start_world("cpu", timeout_s=60)
    yield
    stop_world()


def make_transport(way: str, folder: Path) -> Transport:
    match way:
        case "tensor":
            return TensorTransport.to_servers(CPU, 20_000)
        case "distributed":
            return DistributedTransport(
                "127.0.0.1", backend="gloo", device=CPU, bucket_bytes=20_000, timeout_s=30
            )
        case _:
            return DiskTransport(folder / "weights", 20_000)


@pytest.fixture(params=WAYS)
async def engine(
    request: pytest.FixtureRequest, serving: Serving, tmp_path: Path
) -> AsyncIterator[SGLangServerEngine]:
    tokenizer = letter_tokenizer()

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    engine = connect(serving.start(), decode)
    engine._transport = make_transport(request.param, tmp_path)
    yield engine
    await engine.close()


async def check(engine: SGLangServerEngine, model: torch.nn.Module, version: int) -> None:
    """Hold every server against a model: these weights, all of them, under this version."""
    calls = (
        engine.generate(
            PROMPT, SamplingParams(max_new_tokens=12, temperature=1.0), request_id=f"{i}"
        )
        for i in range(8)
    )
    for completion in await asyncio.gather(*calls):
        assert {span.version for span in completion.weight_versions} == {version}
        expected = plain_log_probs(model, PROMPT, completion, 1.0)
        torch.testing.assert_close(
            torch.tensor(completion.log_probs), expected, atol=TOLERANCE, rtol=TOLERANCE
        )


async def test_both_servers_get_every_weight_again_and_again(engine: SGLangServerEngine):
    for version in (1, 2, 3):
        model = tiny_model(seed=version).eval()
        figures = await engine.update_weights(model.named_parameters(), version=version)
        assert figures.num_bytes == sum(p.nbytes for p in model.parameters())
        assert figures.num_buckets > 3
        await check(engine, model, version)


async def test_weights_that_fail_on_the_way_are_mended_by_the_next_update(
    engine: SGLangServerEngine,
):
    model = tiny_model(seed=9).eval()

    def broken() -> Iterator[Any]:
        yield from list(model.named_parameters())[:-2]
        raise RuntimeError("a rank is gone")

    async with asyncio.timeout(120):
        with pytest.raises(RuntimeError, match="a rank is gone"):
            await engine.update_weights(broken(), version=4)
        await engine.update_weights(model.named_parameters(), version=5)
        await check(engine, model, 5)


async def test_nothing_is_left_when_the_engine_is_closed(
    engine: SGLangServerEngine, tmp_path: Path
):
    await engine.update_weights(tiny_model().named_parameters(), version=6)
    await engine.close()
    folder = tmp_path / "weights"
    assert not folder.exists() or list(folder.iterdir()) == []
    assert not [p for p in psutil.Process().children() if "torch_shm" in p.name()]


class Refusing:
    """A server that does not take part when it should."""

    def __init__(self, server: Any, request: str) -> None:
        self.name = server.name
        self._server, self._request = server, request

    async def generate(self, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._server.generate(fields)

    async def control(self, request: str, fields: Mapping[str, Any] | None = None) -> None:
        if request == self._request:
            self._request = ""
            raise EngineError(f"refuses {request}")
        await self._server.control(request, fields)


@pytest.mark.parametrize("engine", ["distributed"], indirect=True)
@pytest.mark.parametrize(
    "request_name", ["init_weights_update_group", "update_weights_from_distributed"]
)
async def test_member_that_does_not_join_breaks_the_group_without_a_hang(
    engine: SGLangServerEngine, request_name: str, tmp_path: Path
):
    model = tiny_model(seed=10).eval()
    await engine.update_weights(model.named_parameters(), version=7)
    servers = [member.backend for member in engine.pool.servers]
    transport = make_transport("distributed", tmp_path)

    async def nothing(target: Target, error: EngineError) -> None:
        pass

    async def send(*backends: Any) -> Any:
        return await update_weights(
            [Target(backend) for backend in backends], model.named_parameters(), version=8,
            transport=transport, on_failure=nothing,
        )  # fmt: skip

    refusing = Refusing(servers[1], request_name)
    async with asyncio.timeout(100):
        with pytest.raises(EngineError, match=r"left the group|cannot be sent|refuses"):
            await send(servers[0], refusing)
        report = await send(servers[0], refusing)
        assert not report.failures
        await transport.close()
        await engine.update_weights(model.named_parameters(), version=9)
        await check(engine, model, 9)
