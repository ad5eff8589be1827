"""`harmony`: a message to a tool is a call, whatever its channel; all other messages are text."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.rollout.context import choose_parser
from agentrl.rollout.tool_calls import read_turn
from agentrl.rollout.tool_parsers import HarmonyParser, ParsedTurn, get_tool_parser
from tests.fakes.templates import load_report, load_template, load_tokenizer
from tests.fakes.templates import schema as search
from tests.fakes.tools import schema

TOOLS = [schema("say", text={"type": "string"})]
HEADERS = [
    "<|channel|>commentary to=functions.say <|constrain|>json",
    "<|channel|>commentary to=functions.say",
    "<|channel|>analysis to=functions.say code",
    " to=functions.say<|channel|>commentary json",
    " to=functions.say<|channel|>analysis <|constrain|>json",
]
BEFORE = [
    "",
    "<|start|>assistant",
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant",
    "<|channel|>commentary<|message|>I ask.<|end|><|start|>assistant",
]


def parse(text: str) -> ParsedTurn:
    return get_tool_parser("harmony").parse(text, tools=TOOLS)


def write(header: str, **arguments: Any) -> str:
    return f"{header}<|message|>{json.dumps(arguments)}<|call|>"


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("header", HEADERS)
def test_a_call_runs_in_each_form_and_cut_anywhere_only_as_a_whole(header: str, before: str):
    text = before + write(header, text="<|call|> or <|channel|>analysis to=functions.say")
    turn = parse(text)
    assert [(call.name, call.arguments) for call in turn.calls] == [
        ("say", {"text": "<|call|> or <|channel|>analysis to=functions.say"})
    ]
    assert not turn.malformed
    for end in range(len(text)):
        assert not parse(text[:end]).calls, text[:end]
    named = len(before) + header.index("say")
    assert all(parse(text[:end]).malformed for end in range(named, len(text)))


@pytest.mark.parametrize("channel", ["analysis", "commentary", "final"])
@pytest.mark.parametrize("header", HEADERS)
def test_a_message_without_a_recipient_is_text(channel: str, header: str):
    quoted = f"<|channel|>{channel}<|message|>So: {write(header, text='a')}"
    assert parse(quoted) == ParsedTurn(quoted)
    [call] = parse(f"{quoted}<|end|><|start|>assistant{write(header, text='b')}").calls
    assert call.arguments == {"text": "b"}


@pytest.mark.parametrize(
    ("body", "reason"),
    [('{"text": ', "not valid JSON"), ("{} and", "text after"), ("[1]", "not a JSON object")],
)
def test_a_broken_call_is_malformed_by_its_name(body: str, reason: str):
    [broken] = parse(f"{HEADERS[0]}<|message|>{body}<|call|>").malformed
    assert broken.name == "say"
    assert reason in broken.reason


def test_a_call_without_arguments_is_one():
    assert [call.arguments for call in parse(f"{HEADERS[0]}<|message|><|call|>").calls] == [{}]


parts = st.sampled_from([*HEADERS, *BEFORE, "<|message|>", "<|call|>", "<|end|>", "{}", "a <"])


@given(st.lists(parts | st.text(max_size=3), max_size=8).map("".join))
def test_no_text_makes_it_raise_or_lose_text(text: str):
    turn = parse(text)
    assert turn.calls or turn.content == text


def test_the_template_of_gpt_oss_has_this_format_and_keeps_a_thought_before_a_call():
    parser = choose_parser(None, load_report("gptoss"))
    assert isinstance(parser, HarmonyParser)
    text = BEFORE[2] + '<|channel|>commentary to=functions.search<|message|>{"query": "a"}<|call|>'
    ids = load_tokenizer().encode(text, add_special_tokens=False)
    message = read_turn([*ids], load_template("gptoss"), parser, tools=[search()]).message
    assert [call.function.arguments for call in message.tool_calls or []] == [{"query": "a"}]
    assert message.content == ""
    assert "Hm." in (message.model_extra or {}).values()
