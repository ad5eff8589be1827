"""The agents of `examples/agents` train what the policy sampled, with the client's real package."""

import re
from pathlib import Path

import pytest
import yaml

from agentrl.agent_loops.external import ExternalAgent
from agentrl.agent_loops.gateway import Gateway
from agentrl.config import load_config
from agentrl.config.schema.agent import AgentConfig
from agentrl.rollout.states import StopReason
from tests.fakes.plugins import calling, encode, make_context, make_engine, make_request

AGENT = Path(__file__).resolve().parents[2] / "examples/agents/openai_client/agent.py"
pytest.importorskip("openai")

SAID = (
    calling("calculator", expression="6 * 7"),
    calling("calculator", expression="42 +"),
    "So it is\n#### 42",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"python": f"{AGENT}:run"},
        {"python": f"{AGENT}:run", "isolation": "process"},
        {"command": ["python", str(AGENT), "{row}"]},
    ],
    ids=["function", "process", "command"],
)
async def test_openai_client_trains_exactly_the_sampled_tokens(keys):
    context = make_context(make_engine(*SAID))
    request = make_request("What is 6 * 7?")
    agent = ExternalAgent(AgentConfig(**keys), Gateway())
    try:
        await agent(request, context, context.engine)
    finally:
        await agent.close()
    assert request.stop_reason is StopReason.ANSWERED, (request.error, request.agent_run)
    assert not request.branches
    sampled = [
        token for token, mask in zip(request.response_ids, request.loss_mask, strict=True) if mask
    ]
    assert sampled == encode("".join(f"{text}<|im_end|>" for text in SAID))
    results = [message.text for message in request.messages if message.role == "tool"]
    assert results[0] == "42"
    assert results[1].startswith("Error")
    assert context.engine.calls[-1] == request.input_ids[: len(context.engine.calls[-1])]


PAGE = (Path(__file__).resolve().parents[2] / "docs/agents.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def test_settings_of_the_page_are_valid():
    read = [yaml.safe_load(text)["rollout"]["agent"] for text in blocks("yaml")]
    function, program, isolated, coding = (AgentConfig.model_validate(keys) for keys in read)
    assert function.python == "my_agent.py:solve"
    assert program.on_failure == "score"
    assert isolated.sandbox.provider == "bubblewrap"
    assert coding.gateway.untrained_models == ("small",)


@pytest.mark.slow
async def test_function_of_the_page_runs(tmp_path):
    (source,) = blocks("python")
    (tmp_path / "my_agent.py").write_text(source, encoding="utf-8")
    context = make_context(make_engine("Hello."))
    request = make_request("Hi")
    agent = ExternalAgent(AgentConfig(python=f"{tmp_path}/my_agent.py:solve"), Gateway())
    try:
        await agent(request, context, context.engine)
    finally:
        await agent.close()
    assert request.stop_reason is StopReason.ANSWERED, request.error
    assert request.agent_reward == 1.0
    assert request.num_assistant_turns == 1


def test_run_file_of_the_example_loads():
    agent = load_config(AGENT.with_name("quickstart.yaml")).rollout.agent
    assert agent.python == "examples/agents/openai_client/agent.py:run"
