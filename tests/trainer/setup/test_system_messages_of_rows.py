"""Rows with a system message, on a template that rewrites turns only after one."""

from typing import Any

import pytest

from agentrl.config import parse_config
from agentrl.data.dataset import PromptDataset
from agentrl.data.rows import Prompt
from agentrl.errors import TemplateError
from agentrl.messages import Message
from agentrl.rewards import make_reward_manager
from agentrl.rollout.templates import ChatTemplate, TemplateNeeds, probe_template
from agentrl.rollout.templates.probe.report import require
from agentrl.trainer.setup.datasets import check_system_messages
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.rollout_setup import template_needs
from tests.fakes.plugins import FakeUser, tiny_tokenizer

MOVES_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rows(*roles: str) -> PromptDataset:
    messages = [Message(role=role, content="Hi") for role in roles]
    return PromptDataset([Prompt(index=0, messages=messages)])


def test_only_rows_with_a_system_message_are_refused():
    report = probe_template(ChatTemplate(tiny_tokenizer(), custom_template=MOVES_SYSTEM))
    needs = TemplateNeeds(interaction=True)
    check_system_messages(rows("user"), report, needs)
    check_system_messages(rows("system", "user"), report, TemplateNeeds())
    with pytest.raises(TemplateError, match="rewrites older turns"):
        check_system_messages(rows("system", "user"), report, needs)


BASE = {"data": {"train_files": ["a.jsonl"]}, "model": {"path": "policy"}}
AGENTS: list[dict[str, Any]] = [
    {"default_agent_loop": "mine"},
    {"command": ["agent"]},
    {"python": "agents:run"},
]


@pytest.mark.parametrize("agent", [*AGENTS, {}, {"default_agent_loop": "single_turn_agent"}])
@pytest.mark.parametrize("serves_agents", [False, True])
def test_agents_may_add_a_system_message(agent: dict[str, Any], serves_agents: bool):
    report = probe_template(ChatTemplate(tiny_tokenizer(), custom_template=MOVES_SYSTEM))
    config = parse_config(BASE | {"rollout": {"agent": agent}})
    needs = template_needs(
        config,
        Plugins([], {"user": FakeUser()}, make_reward_manager(config.reward)),
        serves_agents=serves_agents,
    )
    if agent in AGENTS or serves_agents:
        with pytest.raises(TemplateError, match="rewrites older turns"):
            require(report, needs)
    else:
        require(report, needs)
