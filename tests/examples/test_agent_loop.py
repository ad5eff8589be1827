"""The example of an agent loop: its conversation, and that the quick start's task is learned."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl import Trainer, load_config
from agentrl.agent_loops.registry import LoopEntry
from agentrl.agent_loops.runner import AgentLoopRunner
from agentrl.config.schema.run import RunConfig
from agentrl.plugins import load_object
from agentrl.rollout.runner import run_request
from agentrl.tools.calculator_tool import CalculatorTool
from tests.fakes.plugins import make_context, make_engine, make_request, tiny_tokenizer

FOLDER = Path(__file__).parents[2] / "examples/agents/agent_loop"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}</tool_call>'
BAD_CALL = '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>'


async def drive(*answers: str, **data: Any) -> Any:
    loop = load_object(f"{FOLDER}/calculator_loop.py:CalculatorLoop")
    data = {"max_prompt_length": 900, "max_response_length": 600, **data}
    config = RunConfig.model_validate({"data": data, "model": {"path": "policy"}})
    context = make_context(make_engine(*answers), tools=[CalculatorTool({})])
    runner = AgentLoopRunner(LoopEntry("calculator_agent", loop), config, tiny_tokenizer())
    return await runner(make_request(ground_truth="5"), context, context.engine)


async def test_the_loop_makes_the_state_machines_tokens_and_rewards_the_answer():
    answers = (CALL, "It is\n#### 5")
    request = await drive(*answers)
    tools = [CalculatorTool({})]
    own = await run_request(make_request(), make_context(make_engine(*answers), tools=tools))
    assert (request.input_ids, request.loss_mask) == (own.input_ids, own.loss_mask)
    assert request.agent_reward == 1.0
    assert (await drive("It is\n#### 5")).agent_reward == 0.0  # without the calculator


async def test_a_call_that_cannot_be_read_is_shown_to_the_policy():
    request = await drive(BAD_CALL, "#### 5")
    assert "Error" in request.messages[2].text
    assert request.error is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_quick_starts_task_is_learned_by_the_loop(tmp_path: Path):
    config = load_config(
        FOLDER / "run.yaml",
        [
            f"trainer.default_local_dir={tmp_path / 'run'}",
            "trainer.total_training_steps=4",
            "trainer.test_freq=-1",
            "trainer.save_freq=-1",
            "trainer.plot=false",
        ],
    )
    Trainer(config).fit()
    lines = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    scores = [
        step["val/arithmetic/reward/mean"] for step in steps if "val/arithmetic/reward/mean" in step
    ]
    assert scores[-1] > scores[0] + 0.2
