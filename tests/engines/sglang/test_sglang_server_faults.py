"""Real servers that hang and die under real conversations.

The order of the tests saves starts: the last ones leave fewer servers than they found. Each runs
alone as well.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2ForCausalLM

from agentrl.engines.protocol import Completion, EngineCall, SamplingParams
from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.servers.engine import SGLangServerEngine
from agentrl.engines.sglang.servers.launch import LocalServer, ServeOptions, plan_servers
from agentrl.errors import EngineError, Fault
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState
from tests.fakes.engines import plain_logits, tiny_model
from tests.fakes.fault_runs import saved_steps
from tests.fakes.plugins import (
    FakeUser,
    assert_invariants,
    check_life,
    decode,
    make_context,
    make_manager,
    make_prompts,
    tiny_tokenizer,
)
from tests.fakes.runs import make_home, spawn_agentrl, tiny_run, write_yaml
from tests.fakes.serve_command import Serving, are_gone, connect, kill
from tests.fakes.sglang_servers import until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]
NUM_PROMPTS, NUM_SAMPLES, TURN_TOKENS = 8, 4, 48


@pytest.fixture(scope="session")
def model() -> Qwen2ForCausalLM:
    return tiny_model(vocab_size=len(tiny_tokenizer())).eval()


@pytest.fixture(scope="session")
def serving(model: Qwen2ForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The two servers of this process of tests."""
    folder = tmp_path_factory.mktemp("served") / "policy"
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    serving = Serving(folder)
    yield serving
    serving.end()


@dataclass
class Watched:
    """An engine whose calls are noted."""

    engine: SGLangServerEngine
    records: list[EngineCall] = field(default_factory=list[EngineCall])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        call = EngineCall(input_ids=list(input_ids), sampling=sampling, request_id=request_id)
        self.records.append(call)
        return await self.engine.generate(input_ids, sampling, request_id=request_id)

    def running_on(self, address: str) -> int:
        """Calls that run on a server."""
        found = [m for m in self.engine.pool.servers if m.name == address]
        return len(found[0].calls) if found else 0


@pytest.fixture
async def watched(serving: Serving) -> AsyncIterator[Callable[..., Watched]]:
    opened: list[SGLangServerEngine] = []

    def watch(*addresses: str, **settings: Any) -> Watched:
        opened.append(connect(list(addresses), decode, **settings))
        return Watched(opened[-1])

    yield watch
    for engine in opened:
        await engine.close()


def converse(
    engine: Watched, user: FakeUser
) -> tuple[RolloutManager, asyncio.Task[list[AsyncRolloutRequest]]]:
    """Begin conversations of three answers each."""
    context = make_context(
        engine,  # type: ignore[arg-type]
        interactions=[user],
        tokenization_sanity_check_mode="disable",
        max_tokens_per_turn=TURN_TOKENS,
    )
    manager = make_manager(context, response=512, n=NUM_SAMPLES)
    prompts = make_prompts(NUM_PROMPTS, interaction_kwargs={"name": "fake"})
    requests = manager.make_requests(prompts, manager.train_plan())
    return manager, asyncio.create_task(manager.drive(requests))


def check_ledgers(
    requests: Sequence[AsyncRolloutRequest], engine: Watched, model: Qwen2ForCausalLM
) -> None:
    """Hold what was sampled against the invariants, and against plain forward passes."""
    for request in requests:
        assert_invariants(request, engine)  # type: ignore[arg-type]
        assert request.state is RequestState.COMPLETED, request.error
        logits = plain_logits(model, request.prompt_ids, request.response_ids)
        chosen = torch.tensor(request.response_ids)[:, None]
        expected = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0]
        sampled = torch.tensor(request.loss_mask).bool()
        actual = torch.tensor(request.rollout_log_probs)
        torch.testing.assert_close(actual[sampled], expected[sampled], atol=1e-5, rtol=1e-5)


async def test_a_slow_server_delays_no_other_request(
    serving: Serving, watched: Callable[..., Watched], model: Qwen2ForCausalLM
):
    one, two = serving.start()
    engine, user = watched(one, two, request_timeout_s=6.0), FakeUser("Why?", "And?")
    await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=1), request_id="first")
    frozen = serving.process_of(one).children(recursive=True)
    _, driving = converse(engine, user)
    try:
        await until(lambda: engine.running_on(one) and engine.running_on(two), seconds=60)
        for process in frozen:
            process.suspend()
        requests = await driving
    finally:
        for process in frozen:
            process.resume()
    check_ledgers(requests, engine, model)
    assert len(requests) == NUM_PROMPTS * NUM_SAMPLES
    check_life(user.lives, "start", "finalize")
    trouble = {m.name: m.problem for m in engine.pool.servers}
    assert "has not answered" in str(trouble[one])
    assert trouble[two] is None


async def test_a_killed_server_costs_no_request_and_no_token(
    serving: Serving, watched: Callable[..., Watched], model: Qwen2ForCausalLM
):
    one, two = serving.start()
    engine, user = watched(one, two), FakeUser("Why?", "And?")
    _, driving = converse(engine, user)
    half = NUM_PROMPTS * NUM_SAMPLES // 2
    answered = lambda: len(engine.records) > 2 * half + 4 and engine.running_on(one) > 4  # noqa: E731
    await until(answered, seconds=60)
    kill(serving.process_of(one))
    requests = await driving
    check_ledgers(requests, engine, model)
    assert {request.num_assistant_turns for request in requests} <= {1, 2, 3}
    check_life(user.lives, "start", "finalize")
    members = {member.name: member for member in engine.pool.servers}
    assert not members[one].is_available
    assert members[two].num_conversations > half, "conversations have moved"


@contextlib.contextmanager
def training_on(serving: Serving, address: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A run of many steps on one server, in a process of its own, with a checkpoint each."""
    run = tiny_run(
        make_home(folder),
        folder / "run",
        model__path=str(serving.policy),
        data__max_prompt_length=448,
        rollout__multi_turn__tool_config_path=None,
        rollout__multi_turn__format="hermes",
        rollout__engine={"name": "sglang_server", "sglang_server": {"addresses": [address]}},
        trainer__total_training_steps=10_000,
        trainer__save_freq=1,
        trainer__max_ckpt_to_keep=2,
    )
    with spawn_agentrl("train", write_yaml(folder / "run.yaml", run)) as training:
        try:
            yield training
        finally:
            training.kill()


async def test_the_only_server_killed_is_a_clear_error_and_the_checkpoint_is_kept(
    serving: Serving, watched: Callable[..., Watched], tmp_path: Path
):
    only = serving.start()[1]
    engine, user = watched(only), FakeUser("Why?", "And?")
    with training_on(serving, only, tmp_path) as training:
        checkpoints = tmp_path / "run/checkpoints"
        await until(lambda: checkpoints.exists() and saved_steps(tmp_path / "run"), seconds=200)
        _, driving = converse(engine, user)
        await until(lambda: engine.running_on(only) > 4, seconds=60)
        tree = [serving.process_of(only), *serving.process_of(only).children(recursive=True)]
        kill(tree[0])
        async with asyncio.timeout(30):
            requests = await driving
        out, err = await asyncio.to_thread(training.communicate, timeout=60)
    check_failures(requests, engine, only)
    check_life(user.lives, "start", "finalize")
    with pytest.raises(EngineError, match="no SGLang server is available"):
        await engine.generate([1, 2, 3], SamplingParams(max_new_tokens=1), request_id="after")
    assert are_gone(tree), "its processes end with it"
    assert training.returncode == 2, f"{out}\n{err}"
    assert f"{only} has ended" in err
    assert "Traceback" not in out + err
    assert saved_steps(tmp_path / "run")


def check_failures(requests: Sequence[AsyncRolloutRequest], engine: Watched, address: str) -> None:
    """Hold requests whose server died against the invariants; each says what happened."""
    failed = [request for request in requests if request.state is RequestState.FAILED]
    assert failed
    for request in failed:
        assert_invariants(request, engine)  # type: ignore[arg-type]
        assert request.error is not None
        assert request.error.fault is Fault.ENGINE
        assert f"{address} has ended" in request.error.message


def test_ended_supervisor_ends_its_servers(serving: Serving):
    serving.start()
    _, *servers = serving.processes()
    assert serving.supervisor is not None
    os.kill(serving.supervisor.pid, signal.SIGTERM)
    out, err = serving.supervisor.communicate(timeout=60)
    assert serving.supervisor.returncode == 130, f"{out}\n{err}"
    assert are_gone(servers)


async def test_a_server_whose_port_was_taken_meanwhile_ends_at_once(serving: Serving):
    needs = SGLangNeeds(model_path=str(serving.policy), max_model_len=64, max_requests=1)
    [plan] = plan_servers(needs, ServeOptions())
    server = LocalServer(plan)
    starting = asyncio.create_task(server.start())
    await until(lambda: server.pid is not None)
    try:
        # It binds this port by its number, which the reservation cannot refuse.
        with socket.create_server((plan.host, plan.port)):
            async with asyncio.timeout(200):
                with pytest.raises(EngineError, match="did not start: its process ended with"):
                    await starting
    finally:
        await server.end()
