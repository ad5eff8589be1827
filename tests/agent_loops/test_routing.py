"""Which agent drives a request, and what happens if there is none of that name."""

import pytest
from pydantic import ValidationError

from agentrl.agent_loops.routing import make_run
from agentrl.config.schema.agent import AgentConfig
from agentrl.config.schema.run import RunConfig
from agentrl.errors import ConfigError
from agentrl.rollout.states import StopReason
from tests.fakes.plugins import make_context, make_engine, make_manager, make_prompts


def run_config(**agent: object) -> RunConfig:
    return RunConfig.model_validate(
        {"data": {}, "model": {"path": "policy"}, "rollout": {"agent": agent}}
    )


async def test_a_row_without_agent_name_is_driven_by_the_state_machine():
    manager = make_manager(make_context(make_engine("Hello.")), n=1)
    manager._run = make_run(run_config(), None)
    (done,) = await manager.rollout(manager.make_requests(make_prompts(1), manager.train_plan()))
    assert done.stop_reason is StopReason.ANSWERED


async def test_an_unknown_agent_name_fails_its_own_request():
    manager = make_manager(make_context(make_engine("Hello.")), n=1)
    manager._run = make_run(run_config(), None)
    prompts = [
        *make_prompts(1),
        *make_prompts(1, columns={"agent_name": "tool_agnt"}),
        *make_prompts(1, columns={"agent_name": "tool_agent"}),
    ]
    requests = manager.make_requests(prompts, manager.train_plan())
    done = await manager.drive(requests)
    reasons = [StopReason.ANSWERED, StopReason.FAILED, StopReason.ANSWERED]
    assert [request.stop_reason for request in done] == reasons
    assert done[1].error is not None
    assert "did you mean 'tool_agent'?" in done[1].error.message


def test_an_unknown_default_agent_is_refused_at_start():
    with pytest.raises(ConfigError, match="did you mean 'tool_agent'"):
        make_run(run_config(default_agent_loop="tool_agnt"), None)


@pytest.mark.parametrize(
    "agent",
    [
        {"command": ["a"], "python": "a:b"},
        {"command": ["a"], "default_agent_loop": "mine"},
    ],
)
def test_a_row_has_one_agent(agent: dict[str, object]):
    with pytest.raises(ValidationError):
        AgentConfig.model_validate(agent)
