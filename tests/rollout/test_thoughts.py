"""A draft in a thought is not a call, whatever the tags; the prompt of a turn decides its start."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.answers import without_thought
from agentrl.messages import THOUGHTS
from agentrl.rollout.tool_parsers import ParsedTurn, get_tool_parser
from agentrl.rollout.tool_parsers.accounting import find_unread
from agentrl.rollout.tool_parsers.base import Call
from tests.fakes.tools import schema

TOOLS = [schema("remove", path={"type": "string"})]


def hermes(path: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'remove', 'arguments': {'path': path}})}</tool_call>"


def llama3(path: str) -> str:
    return json.dumps({"name": "remove", "parameters": {"path": path}})


def qwen3_coder(path: str) -> str:
    return f"<tool_call><function=remove><parameter=path>{path}</parameter></function></tool_call>"


def mistral(path: str) -> str:
    return f"[TOOL_CALLS]{json.dumps([{'name': 'remove', 'arguments': {'path': path}}])}"


def pythonic(path: str) -> str:
    return f"[remove(path={path!r})]"


FORMATS = {
    "hermes": hermes,
    "llama3_json": llama3,
    "json": lambda path: json.dumps({"name": "remove", "arguments": {"path": path}}),
    "qwen3_coder": qwen3_coder,
    "mistral": mistral,
    "pythonic": pythonic,
}
TAGS = [*THOUGHTS.items(), ("<|channel|>analysis<|message|>", "<|end|>"), ("<hm>", "</hm>")]


def read(format: str, tags: tuple[str, str], text: str, **given: Any) -> ParsedTurn:
    parser = get_tool_parser(format).with_thoughts(dict([tags]))
    return parser.parse(text, tools=TOOLS, **given)


@pytest.mark.parametrize("tags", TAGS, ids=lambda tags: tags[0])
@pytest.mark.parametrize("format", FORMATS)
def test_a_draft_in_a_thought_is_not_executed_and_the_call_after_it_is(
    format: str, tags: tuple[str, str]
):
    opening, closing = tags
    write = FORMATS[format]
    thought = f"{write('/home')}{closing}{write('/tmp/a')}"
    for text, is_open in ((f"{opening}{thought}", False), (thought, True)):
        turn = read(format, tags, text, starts_in_thought=is_open)
        assert [call.arguments for call in turn.calls] == [{"path": "/tmp/a"}]
        assert not turn.malformed
    assert not read(format, tags, f"{opening}{write('/home')}").num_calls
    assert not read(format, tags, write("/home"), starts_in_thought=True).num_calls


@pytest.mark.parametrize("format", FORMATS)
def test_a_cut_call_is_executed_only_if_it_is_whole(format: str):
    text = FORMATS[format]("/home/ann/project/build/tmp")
    for end in range(len(text)):
        turn = read(format, ("<think>", "</think>"), text[:end])
        assert all(call.arguments["path"].endswith("/tmp") for call in turn.calls)


@pytest.mark.parametrize(("opening", "closing"), THOUGHTS.items())
def test_a_scorer_does_not_see_thoughts(opening: str, closing: str):
    assert without_thought(f"{opening}5{closing}6") == "6"
    assert without_thought(f"7 {opening}5") == "7"


def test_a_new_id_repeats_none_of_the_conversation():
    turn = read("hermes", ("<think>", "</think>"), hermes("a") + hermes("b"))
    ids = [call.id for call in turn.numbered(1, {"call00001", "call00003"}).calls]
    assert ids == ["call00002", "call00004"]


values = st.recursive(
    st.text(max_size=8) | st.integers(-99, 99) | st.booleans() | st.none(),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.text(min_size=1, max_size=5), inner, max_size=2)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.text(min_size=1, max_size=5), values, max_size=3), st.booleans())
def test_a_call_accounts_for_its_own_text(arguments: dict[str, Any], is_ascii: bool):
    text = json.dumps({"name": "remove", "arguments": arguments}, ensure_ascii=is_ascii)
    assert find_unread(f"<tool_call>{text}</tool_call>", [Call("remove", arguments)]) == ""


SHORTENED = [
    ('<|tool_call>call:bash{cmd:<|"|>ls -la, then pwd<|"|>}<tool_call|>', {"cmd": "ls -la"}),
    ("<tool_call>bash<arg_key>cmd</arg_key><arg_value>grep -r '</arg_value>' .</arg_value>"
     "</tool_call>", {"cmd": "grep -r '"}),
    ('<invoke name="bash"><parameter name="cmd">rm -r build</parameter></invoke>', {"cmd": "rm"}),
    ('<invoke name="bash"><parameter name="cmd">rm</parameter></invoke>', {"cmd": "rm -r build"}),
    ('{"name": "bash", "arguments": {"cmd": "ls", "dir": "/tmp"}}', {"cmd": "ls"}),
    ('{"name": "bash", "arguments": {"cmd": "ls", "n": 25}}', {"cmd": "ls", "n": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "arguments"), SHORTENED)
def test_a_call_that_leaves_out_a_part_of_its_text_is_found(text: str, arguments: dict[str, Any]):
    assert find_unread(text, [Call("bash", arguments)])
