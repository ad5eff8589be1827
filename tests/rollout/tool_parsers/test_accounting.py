"""What was read must be what is written, also of numbers; what is not read is malformed."""

import pytest

from agentrl.rollout.tool_parsers import Call, get_tool_parser
from agentrl.rollout.tool_parsers.accounting import find_unread


@pytest.mark.parametrize(
    ("written", "read", "is_same"),
    [
        ("9007199254740993", 9007199254740993, True),
        ("9007199254740993", 9007199254740992, False),
        ("1.50", 1.5, True),
        ("3", 3.0, True),
        ("-7", 7, False),
        ("1e3", 1000, True),
    ],
)
def test_a_number_is_the_one_that_is_written(written: str, read: float, is_same: bool):
    text = f'{{"name": "f", "arguments": {{"a": {written}}}}}'
    assert (find_unread(text, [Call("f", {"a": read})]) == "") is is_same


def test_a_call_after_an_object_without_an_end_is_reported():
    turn = get_tool_parser("json").parse('{"it\'s} first. {"name": "f", "arguments": {"a": 1}}')
    assert not turn.calls
    assert [call.reason for call in turn.malformed] == ["an object before it is not closed"]


@pytest.mark.parametrize(
    "header",
    ["commentary<|constrain|>json to=functions.f", "commentary <|constrain|>json"],
)
def test_a_header_of_harmony_in_another_order_is_reported(header: str):
    text = f'<|channel|>{header}<|message|>{{"a": 1}}<|call|>'
    turn = get_tool_parser("harmony").parse(text)
    assert not turn.calls
    assert [call.reason for call in turn.malformed] == ["its header cannot be read"]
