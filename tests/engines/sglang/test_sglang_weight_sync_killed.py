"""Weight syncs to real servers during which the trainer or a server is killed; a killed supervisor.

The order of the tests saves starts: each test leaves fewer servers for the next one.
"""

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from agentrl.engines.protocol import SamplingParams
from agentrl.engines.sglang.servers.engine import SGLangServerEngine
from agentrl.errors import EngineError
from tests.engines.conformance import PROMPT, TOLERANCE
from tests.fakes.engines import plain_log_probs, tiny_model
from tests.fakes.runs import ROOT
from tests.fakes.serve_command import Serving, are_gone, connect, kill
from tests.fakes.sglang_policy import letter_tokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

DYING_TRAINER = """
import asyncio, os, signal, sys

from tests.fakes.engines import tiny_model
from tests.fakes.serve_command import connect


def halves():
    weights = list(tiny_model(seed=1).named_parameters())
    yield from weights[: len(weights) // 2]
    os.kill(os.getpid(), signal.SIGKILL)


async def main(addresses):
    await connect(addresses, str).update_weights(halves(), version=1)


asyncio.run(main(sys.argv[1:]))
"""


def open_engine(addresses: Sequence[str]) -> SGLangServerEngine:
    tokenizer = letter_tokenizer()

    def decode(token_ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

    return connect(list(addresses), decode, max_retries=1)


def weights_of(
    model: torch.nn.Module, *, half_way: Callable[[], None] = lambda: None
) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's weights; something happens when half of them are on their way."""
    weights = [(name, weight.detach()) for name, weight in model.named_parameters()]
    for number, weight in enumerate(weights):
        if number == len(weights) // 2:
            half_way()
        yield weight


async def check(engine: SGLangServerEngine, model: torch.nn.Module, version: int) -> None:
    """Hold every server that is in against a model: these weights alone, under this version."""
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0)
    calls = [engine.generate(PROMPT, sampling, request_id=f"{version}-{i}") for i in range(8)]
    for completion in await asyncio.gather(*calls):
        assert {span.version for span in completion.weight_versions} == {version}
        expected = plain_log_probs(model, PROMPT, completion, 1.0)
        actual = torch.tensor(completion.log_probs)
        torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=0)


async def test_trainer_killed_in_mid_sync_leaves_no_server_that_answers_until_the_next_sync(
    serving: Serving,
):
    addresses = serving.start()
    arguments: list[Any] = [sys.executable, "-c", DYING_TRAINER, *addresses]
    died = await asyncio.to_thread(subprocess.run, arguments, cwd=ROOT, timeout=200)
    assert died.returncode == -signal.SIGKILL

    engine = open_engine(addresses)
    try:
        async with asyncio.timeout(60):
            with pytest.raises(EngineError, match="no SGLang server is available") as error:
                await engine.generate(PROMPT, SamplingParams(max_new_tokens=1), request_id="a")
            assert str(error.value).count("is incomplete") == len(addresses)
            model = tiny_model(seed=2)
            await engine.update_weights(weights_of(model), version=2)
            await check(engine, model, 2)
        assert all(member.is_available for member in engine.pool.servers)
    finally:
        await engine.close()


async def test_server_killed_in_mid_sync_costs_the_other_nothing(serving: Serving):
    one, two = serving.start()
    tree = [serving.process_of(one), *serving.process_of(one).children(recursive=True)]
    engine, model = open_engine([one, two]), tiny_model(seed=3)
    before = tiny_model(seed=4)
    try:
        async with asyncio.timeout(120):
            await engine.update_weights(weights_of(before), version=3)
            await engine.update_weights(
                weights_of(model, half_way=lambda: kill(tree[0])), version=4
            )
            members = {member.name: member for member in engine.pool.servers}
            assert (members[one].is_available, members[two].is_available) == (False, True)
            await check(engine, model, 4)
            assert members[two].num_conversations == 8
    finally:
        await engine.close()
    assert are_gone(tree)


def test_killed_supervisor_leaves_no_process_and_no_port(serving: Serving):
    addresses = serving.start()
    supervisor, *servers = serving.processes()
    assert len(servers) >= 3, "each server has a scheduler and a detokenizer"
    kill(supervisor)
    assert serving.supervisor is not None
    serving.supervisor.communicate(timeout=20)
    assert are_gone(servers)
    for address in addresses:
        with socket.socket() as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(("127.0.0.1", int(address.rsplit(":", 1)[1])))
