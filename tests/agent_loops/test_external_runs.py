"""External agents in whole rollouts: in order, in workers, tried again, from the command line."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.agent_loops.external import ExternalAgent
from agentrl.agent_loops.gateway import Gateway
from agentrl.config.schema.agent import AgentConfig
from agentrl.config.schema.run import FailureConfig
from agentrl.engines.protocol import SamplingParams
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from tests.fakes.plugins import make_prompts, make_scripted
from tests.fakes.rollout_workers import WorkerSetup, hurry
from tests.fakes.runs import run_agentrl, scripted, tiny_run, write_yaml

TALK = """
import asyncio, random
from openai import AsyncOpenAI

async def talk(record):
    history = list(record.row["prompt"])
    async with AsyncOpenAI(**record.openai) as client:
        for number in range(3):
            await asyncio.sleep(random.random() / 50)
            reply = await client.chat.completions.create(model="m", messages=history)
            said = {"role": "assistant", "content": reply.choices[0].message.content}
            history += [said, {"role": "user", "content": f"Go on, {number}."}]
    return {"reward": 0.5}

async def fail_first(record):
    if "~" not in record.request_id:
        raise RuntimeError("the first try breaks")
    return await talk(record)
"""


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


def make_agent(folder: Path, function: str = "talk") -> ExternalAgent:
    (folder / "talker.py").write_text(TALK, encoding="utf-8")
    return ExternalAgent(AgentConfig(python=f"{folder}/talker.py:{function}"), Gateway())


def words_of_seed(ids: Sequence[int], sampling: SamplingParams, request_id: str, turn: int) -> str:
    """An answer that depends on all tokens before it and on the call's seed."""
    return f"{sum(ids) % 1009} {(sampling.seed or 0) % 1009}"


def sampled(requests: Sequence[AsyncRolloutRequest]) -> list[Any]:
    names = ("request_id", "stop_reason", "agent_reward", "prompt_ids", "response_ids")
    names += ("loss_mask", "rollout_log_probs")
    return [[getattr(one, name) for name in names] for one in requests]


async def roll_out(setup: WorkerSetup, num_workers: int = 0) -> list[AsyncRolloutRequest]:
    engine = make_scripted(words_of_seed)
    if not num_workers:
        manager = setup.local_manager(engine)
        return await manager.rollout(manager.make_requests(make_prompts(2), manager.train_plan()))
    pool = setup.make_pool(setup.connect(num_workers))
    await pool.open()
    try:
        manager = setup.pool_manager(pool, engine)
        return await manager.rollout(manager.make_requests(make_prompts(2), manager.train_plan()))
    finally:
        await pool.close()


@pytest.mark.parametrize("deterministic", [False, True])
async def test_agents_in_workers_train_what_agents_of_one_process_train(
    deterministic: bool, tmp_path: Path
) -> None:
    agent = make_agent(tmp_path)
    try:
        setup = WorkerSetup(run=agent, n=3, deterministic=deterministic)
        expected = sampled(await roll_out(setup))
        again = sampled(await roll_out(setup))
        in_workers = sampled(await roll_out(setup, num_workers=2))
    finally:
        await agent.close()
    assert len(expected) == 6
    assert all(reason is StopReason.ANSWERED for _, reason, *_ in expected)
    assert again == expected
    assert in_workers == expected


async def test_an_agent_that_breaks_is_tried_again(tmp_path: Path) -> None:
    agent = make_agent(tmp_path, "fail_first")
    try:
        failure = FailureConfig(policy="retry")
        finished = await roll_out(WorkerSetup(run=agent, n=2, failure=failure), num_workers=2)
    finally:
        await agent.close()
    assert [one.attempt for one in finished] == [1, 1, 1, 1]
    assert [one.num_assistant_turns for one in finished] == [3, 3, 3, 3]
    assert {one.stop_reason for one in finished} == {StopReason.ANSWERED}


def test_the_command_rollout_runs_the_agent_of_the_run_file(
    tiny_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "talker.py").write_text(TALK, encoding="utf-8")
    content = tiny_run(
        tiny_home,
        tmp_path / "run",
        rollout__agent={"python": f"{tmp_path}/talker.py:talk"},
        rollout__engine=scripted("One.", "Two.", "Three."),
        rollout__multi_turn={"max_assistant_turns": 3},
        data__max_response_length=200,
    )
    out = tmp_path / "out.jsonl"
    file = write_yaml(tmp_path / "run.yaml", content)
    output = run_agentrl(capsys, "rollout", file, "--num", 2, "--out", out)
    assert output.code == 0, output
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        assert line["request"]["stop_reason"] == "answered", line
        spoken = [m["content"] for m in line["request"]["messages"] if m["role"] == "assistant"]
        assert spoken == ["One.", "Two.", "Three."]
        assert line["request"]["agent_reward"] == 0.5
