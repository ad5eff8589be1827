"""What a turn says, without what its template writes round it."""

import pytest

from agentrl.answers import without_thought
from agentrl.messages import Message
from agentrl.rollout.records import Turn
from agentrl.rollout.templates import ChatTemplate
from agentrl.rollout.templates.check import check_ledger
from agentrl.rollout.tool_calls import CompletedTurn, read_turn
from agentrl.rollout.tool_parsers import get_tool_parser
from tests.fakes.templates import load_template, load_tokenizer, make_template, schema, user

THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
WRAPPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% if m.tool_calls %}<|calls|>{% for c in m.tool_calls %}"
    "<tool_call>\n{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}"
    "\n</tool_call>{% endfor %}<|/calls|>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = '<tool_call>\n{"name": "search", "arguments": {"query": "a"}}\n</tool_call>'
FINAL = "<|channel|>final<|message|>"
ANALYSIS = "<|channel|>analysis<|message|>"


def read(template: ChatTemplate, text: str, *, tools: bool = False) -> CompletedTurn:
    ids = load_tokenizer().encode(text, add_special_tokens=False)
    known = [schema()] if tools else []
    return read_turn([*ids], template, get_tool_parser("hermes"), tools=known)


@pytest.mark.parametrize(
    ("text", "content", "thought"),
    [
        (f"{FINAL}It is 5.<|return|>", "It is 5.", None),
        (
            f"{ANALYSIS}Add.<|end|><|start|>assistant{FINAL}It is 5.<|return|>",
            "It is 5.",
            "Add.",
        ),
        ("It is 5.<|return|>", "It is 5.", None),
        (f"{ANALYSIS}Add.", "", "Add."),
    ],
)
def test_channels_of_gpt_oss_are_no_content(text: str, content: str, thought: str | None) -> None:
    message = read(load_template("gptoss"), text).message
    assert message.content == content
    assert (message.model_extra or {}).get("reasoning_content") == thought


def test_a_thought_that_the_prompt_opened_keeps_its_tag() -> None:
    template = make_template(THINKING)
    assert read(template, "Add.\n</think>\n\n5<|im_end|>").message.content == (
        "<think>\nAdd.\n</think>\n\n5"
    )
    assert read(template, "<|im_end|>").message.content == ""


def test_the_wrapper_of_calls_is_no_content() -> None:
    template = make_template(WRAPPING)
    for said in ("", "Let me see."):
        found = read(template, f"{said}<|calls|>{CALL}{CALL}<|/calls|><|im_end|>", tools=True)
        assert found.message.content == said
        assert len(found.message.tool_calls or []) == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("gptoss", f"{ANALYSIS}Add.<|end|><|start|>assistant{FINAL}It is 5.<|return|>"),
        ("gptoss", f"{FINAL}It is 5.<|return|>"),
        ("qwen2_5", "<|im_end|>"),
        ("qwen2_5", "It is 5.<|im_end|>"),
    ],
)
def test_the_check_finds_nothing_where_the_tokens_are_the_template_s(name: str, text: str) -> None:
    template, asked = load_template(name), [user("2 + 3?")]
    sampled = load_tokenizer().encode(text, add_special_tokens=False)
    message: Message = read(template, text).message
    found = check_ledger(
        template,
        [*asked, message],
        [],
        prompt_ids=template.encode_prompt(asked),
        response_ids=sampled,
        turns=[Turn(index=0, role="assistant", start=0, end=len(sampled))],
        mode="strict",
    )
    assert found == []


HUMMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}"
    "<hm>{{ m.reasoning_content }}</hm>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "opening", "closing"),
    [
        (make_template(HUMMING), "<hm>", "</hm>"),
        (load_template("gptoss"), ANALYSIS, f"<|end|><|start|>assistant{FINAL}"),
        (make_template(THINKING), "", "</think>"),
    ],
    ids=["learned tags", "channels", "opened by the prompt"],
)
def test_a_scorer_sees_no_thought_in_the_template_s_own_tags_cut_anywhere(
    template: ChatTemplate, opening: str, closing: str
) -> None:
    text = f"{opening}It may be #### 4.{closing}It is #### 5"
    for end in range(len(opening), len(text) + 1):
        said = without_thought(read(template, text[:end]).message.text)
        answer = text[len(opening) : end].partition(closing)[2]
        assert said == answer.strip(), text[:end]
