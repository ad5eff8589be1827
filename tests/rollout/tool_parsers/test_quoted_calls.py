"""What is executed is what a strict reader of the format reads, whatever is cut, nested or quoted.

A call that is only in an argument's text, or only in a thought, is never executed. All own formats
are read to the end by their own grammar, so they need no other check of what was left unread.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.tool_parsers import ParsedTurn, get_tool_parser
from tests.fakes.call_formats import OWN, mistral_named
from tests.fakes.tools import schema

TOOLS = [
    schema("say", text={"type": "string"}),
    schema("wipe", path={"type": "string"}),
    schema("add", a={"type": "integer"}),
]
WIPE, ADD = ("wipe", {"path": "/home"}), ("add", {"a": 1})
WRITERS = [(name, write) for name, write in OWN.items()] + [("mistral", mistral_named)]
IDS = [f"{name}-{write.__name__}" for name, write in WRITERS]
QUOTES = ["{}", "{} or {}", "<think>{}</think>", "```\n{}\n```", "<think>{}", "{}</think>"]
EVERY = [write([(name, arguments)]) for write in dict.fromkeys((*OWN.values(), mistral_named))
         for name, arguments in (WIPE, ("wipe", {}))]  # fmt: skip


def read(name: str, text: str) -> ParsedTurn:
    return get_tool_parser(name).parse(text, tools=TOOLS)


def executed(turn: ParsedTurn) -> list[tuple[str, object]]:
    return [(call.name, call.arguments) for call in turn.calls]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=IDS)
@pytest.mark.parametrize("quote", QUOTES)
def test_a_call_in_an_argument_is_text_wherever_the_turn_is_cut(name: str, write: Any, quote: str):
    for call in (write([WIPE]), write([("wipe", {})])):
        made = [("say", {"text": quote.replace("{}", call)}), ADD]
        text = write(made)
        for end in range(len(text)):
            found = executed(read(name, text[:end]))
            assert found == made[: len(found)], text[:end]
        assert executed(read(name, text)) == made


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=IDS)
@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from([*EVERY, "<think>", "</think>", "`", "\\", "'", '"', "\n", "x"])))
def test_an_argument_is_executed_whole_or_not_at_all(name: str, write: Any, parts: list[str]):
    made = [("say", {"text": "".join(parts)}), ADD]
    turn = read(name, write(made))
    assert all(call in made for call in executed(turn)), turn
    assert turn.malformed or executed(turn) == made


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=IDS)
def test_a_draft_in_a_thought_is_never_executed_wherever_the_turn_is_cut(name: str, write: Any):
    text = f"<think>I could {write([WIPE])}, or\n{write([WIPE])}</think>{write([ADD])}"
    for end in range(len(text)):
        assert executed(read(name, text[:end])) in ([], [ADD])
    assert executed(read(name, text)) == [ADD]


PROSE = ["See [1] and {x}.", "It is {5: 6}, (a) or 'b'.", "\n\nThe function's name is f."]


@pytest.mark.parametrize(("name", "write"), WRITERS, ids=IDS)
@pytest.mark.parametrize("prose", PROSE)
def test_prose_after_a_call_is_no_part_of_it(name: str, write: Any, prose: str):
    turn = read(name, f"{write([WIPE])} {prose}")
    assert (executed(turn), turn.malformed) == ([WIPE], [])
    assert turn.content == prose.strip()


@pytest.mark.parametrize("name", ["hermes", "json", "llama3_json", "mistral"])
@pytest.mark.parametrize(
    "body",
    [
        '{"name": "wipe", "arguments": {}, "path": "/home"}',
        '{"name": "wipe", "arguments": {}, "parameters": {"path": "/home"}}',
        '{"type": "function", "function": {"name": "wipe", "arguments": {}}, "note": "no"}',
        '{"name": "wipe", "function": "add", "arguments": {}}',
    ],
)
def test_a_field_that_a_call_does_not_have_is_not_left_out(name: str, body: str):
    text = {"hermes": f"<tool_call>{body}</tool_call>", "mistral": f"[TOOL_CALLS]{body}"}
    turn = read(name, text.get(name, body))
    assert not turn.calls
    assert turn.malformed


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "<tool_call><function=wipe></function>"),
        ("qwen3_coder", "<tool_call><function=wipe></function><function=add></function>"),
        ("search_r1", "<search>Bern <search>Basel</search>"),
        ("python_block", "```python\nx = 1\nThen:\n```python\nx ="),
        ("json", '{"text": {"name": "wipe", "arguments": {}}}'),
        ("json", '{"text" = {"name": "wipe", "arguments": {}}}'),
    ],
)
def test_a_region_that_is_not_closed_and_an_inner_object_are_not_executed(name: str, text: str):
    assert not read(name, text).calls


def test_two_functions_in_one_tag_are_two_calls():
    inner = "<function=add><parameter=a>1</parameter></function>"
    turn = read("qwen3_coder", f"<tool_call>{inner}\n{inner}</tool_call>")
    assert (executed(turn), turn.content) == ([ADD, ADD], "")
