"""From calls to observations: checked, executed, answered in order, cut in tokens."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.rollout.fitting import FittedText, as_unicode, clip_text, cut_observation
from agentrl.rollout.tool_calls import ToolCaller, check_calls, describe_malformed, skip_calls
from agentrl.rollout.tool_parsers import MalformedCall, ParsedCall, ParsedTurn, get_tool_parser
from agentrl.tools import BaseTool, ToolResponse, ToolResult
from agentrl.tools.runtime.session import ToolSession
from tests.fakes.tools import FlakyTool, schema

STRICT = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "book",
            "parameters": {
                "type": "object",
                "properties": {
                    "seats": {"type": "integer", "minimum": 1},
                    "guests": {"type": "array", "items": {"$ref": "#/$defs/guest"}},
                },
                "required": ["seats"],
                "additionalProperties": False,
                "$defs": {"guest": {"type": "object", "required": ["name"]}},
            },
        },
    }
)


def objection(name: str = "book", **arguments: Any) -> str | None:
    checked = check_calls(ParsedTurn("", [ParsedCall(name, arguments)]), [STRICT])
    assert len(checked.calls) + len(checked.malformed) == 1
    return checked.malformed[0].reason if checked.malformed else None


def test_arguments_are_checked_against_the_whole_schema():
    assert objection(seats=2, guests=[{"name": "Ada"}]) is None
    assert objection() == "arguments: 'seats' is a required property"
    assert objection(seats="2") == "arguments['seats']: '2' is not of type 'integer'"
    assert objection(seats=0) == "arguments['seats']: 0 is less than the minimum of 1"
    assert (
        objection(seats=1, guests=[{}]) == "arguments['guests'][0]: 'name' is a required property"
    )
    assert "Additional properties" in (objection(seats=1, x=1) or "")


def test_a_schema_is_read_by_the_draft_that_it_names():
    pair = {"type": "array", "items": [{"type": "integer"}, {"type": "string"}]}
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"pair": pair},
    }
    function = {"name": "old", "parameters": parameters}
    old = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    def reasons(value: Any) -> list[str]:
        checked = check_calls(ParsedTurn("", [ParsedCall("old", {"pair": value})]), [old])
        return [call.reason for call in checked.malformed]

    assert reasons([1, "a"]) == []
    assert reasons([1, 2]) == ["arguments['pair'][1]: 2 is not of type 'string'"]
    del parameters["$schema"]
    with pytest.raises(ValueError, match="not a JSON Schema"):  # the newest has no such `items`
        OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})


def test_an_unknown_tool_is_answered_with_those_there_are():
    assert objection("boook", seats=1) == "there is no tool 'boook'; the tools are: book"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_schema_fetches_nothing_from_outside_itself(tmp_path: Path):
    outside = tmp_path / "schema.json"
    outside.write_text('{"type": "integer"}')
    remote = schema("remote", x={"$ref": outside.as_uri()})
    checked = check_calls(ParsedTurn("", [ParsedCall("remote", {"x": 1})]), [remote])
    assert "cannot be checked" in checked.malformed[0].reason


def test_a_reason_does_not_repeat_a_megabyte():
    assert len(objection(seats="9" * 2**20) or "") < 600


class Echo(BaseTool):
    """Answers with its number; ends the request where it is told to."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
        text = str(parameters["number"])
        return ToolResult(ToolResponse(text=text), 0.5, {"n": 1}, parameters["number"] == 7)


ECHO = Echo({}, schema("echo", number={"type": "integer"}))


def echo(number: Any) -> str:
    body = json.dumps({"name": "echo", "arguments": {"number": number}})
    return f"<tool_call>{body}</tool_call>"


def fit(text: str) -> FittedText:
    """Keep a dozen characters."""
    return (
        FittedText(text[:12], len(text) - len(text[:12]))
        if "long" in text
        else FittedText(as_unicode(text), 0)
    )


async def answers(text: str, tool: BaseTool = ECHO, parser: str = "hermes", **limits: Any) -> Any:
    format_ = get_tool_parser(parser)
    session = ToolSession({tool.name: tool}, instance_id="r", **limits)
    parsed = format_.parse(text, tools=[tool.tool_schema])
    caller = ToolCaller(format_, fit)
    return await caller.answer(check_calls(parsed, [tool.tool_schema]), session)


async def test_every_call_is_answered_in_the_order_of_the_calls():
    observations = await answers(
        echo(1) + "<tool_call>oops</tool_call>" + echo("two") + echo(3) + "<tool_call>{"
    )
    assert [o.record.outcome for o in observations] == [
        "ok",
        "malformed",
        "malformed",
        "ok",
        "malformed",
    ]
    texts = [o.message.text for o in observations]
    assert (texts[0], texts[3]) == ("1", "3")
    assert texts[1].startswith("Error: the tool call was not executed: it is not valid JSON")
    assert texts[2] == (
        "Error: the call of 'echo' was not executed: arguments['number']: 'two' is not of type "
        "'integer'"
    )
    assert [o.message.tool_call_id for o in observations] == [f"call{i:05d}" for i in range(5)]
    assert all(o.message.role == "tool" for o in observations)


async def test_the_record_has_the_call_and_its_outcome():
    [observation] = await answers(echo(7))
    record = observation.record
    assert (record.name, record.arguments, record.reward) == ("echo", {"number": 7}, 0.5)
    assert (record.metrics, record.message, record.call_id) == ({"n": 1}, "", "call00000")
    assert observation.should_stop
    assert observation.message.name == "echo"


async def test_the_record_of_a_refused_call_holds_what_was_asked():
    unknown = '<tool_call>{"name": "now", "arguments": {"wat": 1}}</tool_call>'
    observations = await answers(echo("two") + unknown + "<tool_call>oops</tool_call>")
    records = [observation.record for observation in observations]
    assert {record.outcome for record in records} == {"malformed"}
    assert [record.arguments for record in records] == [{"number": "two"}, {"wat": 1}, {}]
    skipped = skip_calls(check_calls(get_tool_parser("hermes").parse(unknown), []))
    assert [record.arguments for record in skipped] == [{"wat": 1}]


@pytest.mark.parametrize(
    ("behaviour", "outcome"),
    [("tool_error", "tool_error"), ("raise", "crashed"), ("hang", "timeout"), ("none", "crashed")],
)
async def test_failures_are_observations_with_their_kind(behaviour: str, outcome: str):
    text = '<tool_call>{"name": "flaky", "arguments": {}}</tool_call>'
    [observation] = await answers(text, FlakyTool(execute=behaviour), timeout_s=0.05)
    assert observation.record.outcome == outcome
    assert observation.message.text
    assert "secret" not in observation.message.text
    assert bool(observation.record.traceback) == (outcome == "crashed")


async def test_a_parser_words_its_results():
    class Search(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> str:
            return f"found {parameters['query']}"

    tool = Search({}, schema("search", query={"type": "string"}))
    [observation] = await answers("<search>Bern</search>", tool, "search_r1")
    assert observation.message.role == "user"
    assert observation.message.content == "<information>found Bern</information>"
    [cut] = await answers("<search>a long story</search>", tool, "search_r1")
    assert cut.message.content == "<information>found a long</information>"
    assert cut.record.num_cut_tokens == 6


async def test_what_no_tokenizer_can_encode_is_replaced():
    class Odd(Echo):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> Any:
            return "half \ud800 pair"

    [observation] = await answers(echo(1), Odd({}, ECHO.tool_schema))
    assert observation.message.text == "half ? pair"
    assert as_unicode("whole 😀") == "whole 😀"


def test_calls_of_the_last_turn_are_recorded_as_skipped():
    parser = get_tool_parser("hermes")
    parsed = parser.parse(echo(1) + "<tool_call>oops</tool_call>" + echo(2) + echo("three"))
    records = skip_calls(check_calls(parsed, [ECHO.tool_schema]))
    outcomes = [record.outcome for record in records]
    assert outcomes == ["skipped", "malformed", "skipped", "malformed"]
    assert records[2].arguments == {"number": 2}


def test_an_error_names_the_tool_where_it_is_known():
    assert "the call of 'f' " in describe_malformed(MalformedCall("x", "y", "f"))
    assert "the tool call " in describe_malformed(MalformedCall("x", "y"))


def test_sides_are_named_as_verl_names_them():
    ids = [1, 2, 3, 4, 5, 6, 7]
    assert cut_observation(ids, 4, "left", marker_ids=[0]) == ([1, 2, 3, 0], 4)
    assert cut_observation(ids, 4, "right", marker_ids=[0]) == ([0, 5, 6, 7], 4)
    assert cut_observation(ids, 4, "middle", marker_ids=[0]) == ([1, 2, 0, 7], 4)
    assert cut_observation(ids, 7) == (ids, 0)


@given(
    ids=st.lists(st.integers(1, 99), max_size=60),
    max_tokens=st.integers(0, 60),
    side=st.sampled_from(["left", "middle", "right"]),
    num_marker=st.integers(0, 8),
)
def test_budgets_an_observation_keeps_to_its_budget_and_the_cut_is_counted(
    ids: list[int], max_tokens: int, side: Any, num_marker: int
):
    cut = cut_observation(ids, max_tokens, side, marker_ids=[0] * num_marker)
    kept = [i for i in cut.ids if i != 0]
    assert len(cut.ids) <= max_tokens
    assert len(kept) + cut.num_cut == len(ids)
    assert cut.num_cut > 0 or cut.ids == ids
    head = {"left": len(kept), "middle": (len(kept) + 1) // 2, "right": 0}[side]
    assert kept == ids[:head] + ids[len(ids) - (len(kept) - head) :]
    assert len(cut.ids) == min(len(ids), max_tokens)


@given(st.text(max_size=50), st.integers(0, 50), st.sampled_from(["left", "middle", "right"]))
def test_a_clipped_text_keeps_the_same_ends(text: str, most: int, side: Any):
    clipped = clip_text(text, most, side)
    assert len(clipped) == min(len(text), most)
    if side == "left":
        assert text.startswith(clipped)
    if side == "right":
        assert text.endswith(clipped)


def test_checking_a_call_is_cheap():
    parsed = ParsedTurn("", [ParsedCall("book", {"seats": 2}, i) for i in range(200)])
    started = time.process_time()
    check_calls(parsed, [STRICT])
    assert (time.process_time() - started) / 200 < 2e-3
