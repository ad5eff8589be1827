"""Rows with a system message, on a template that rewrites turns only after one."""

import pytest

from agentrl.data.dataset import PromptDataset
from agentrl.data.rows import Prompt
from agentrl.errors import TemplateError
from agentrl.messages import Message
from agentrl.rollout.templates import ChatTemplate, TemplateNeeds, probe_template
from agentrl.trainer.setup.datasets import check_system_messages
from tests.fakes.plugins import tiny_tokenizer

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
