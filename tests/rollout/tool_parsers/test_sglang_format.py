"""`sglang:NAME`: a detector that knows no thoughts and drops what it cannot read, held to rules."""

import json
import re
import signal
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engines.sglang.parsers import DetectedCall, Detection, OutOfTimeError, limited
from agentrl.errors import ConfigError, MissingExtraError
from agentrl.rollout.tool_parsers import DetectorParser, ParsedTurn, get_tool_parser
from tests.fakes.tools import schema

TOOLS = [schema("add", a={"type": "integer"}), schema("say", text={"type": "string"})]


class TagDetector:
    """Reads `<call>{...}</call>` as SGLang's detectors do: what is broken it drops, what stands
    behind the first call it forgets.
    """

    openers = ("<calls>", "<call>")
    pairs: ClassVar = {"<calls>": "</calls>", "<call>": "</call>"}

    def detect(self, text: str, tools: Sequence[Any]) -> Detection:
        found, complaint = [], ""
        for body in re.findall(r"<call>(.*?)</call>", text, re.DOTALL):
            try:
                fields = json.loads(body)
                found.append(DetectedCall(fields["name"], json.dumps(fields["arguments"])))
            except (ValueError, KeyError) as error:
                complaint = f"no JSON: {error}"
        rest = text.partition("<call>")[0] if found else text
        return Detection(tuple(found), rest, is_meant="<call>" in text, complaint=complaint)


class BareDetector:
    """Takes every text that begins with a bracket for a call, and reads none."""

    openers = ()
    pairs: ClassVar = {}

    def detect(self, text: str, tools: Sequence[Any]) -> Detection:
        return Detection((), text, is_meant=text.startswith("["))


def call(name: str = "add", **arguments: Any) -> str:
    return f"<call>{json.dumps({'name': name, 'arguments': arguments})}</call>"


def parse(text: str, *, tools: Any = TOOLS, **kwargs: Any) -> ParsedTurn:
    return DetectorParser(TagDetector()).parse(text, tools=tools, **kwargs)


def calls(turn: ParsedTurn) -> list[tuple[str, dict[str, Any]]]:
    assert not turn.malformed, turn.malformed
    return [(found.name, found.arguments) for found in turn.calls]


def test_calls_are_read_in_their_order_and_the_text_before_them_is_kept():
    turn = parse(f"Well: {call(a=1)} and {call('say', text='x')}")
    assert calls(turn) == [("add", {"a": 1}), ("say", {"text": "x"})]
    assert [found.id for found in turn.calls] == ["call00000", "call00001"]
    assert turn.content == "Well:"


def test_a_text_without_a_call_stays_as_it_is():
    assert parse(" Just {text}.\n") == ParsedTurn(" Just {text}.\n")


def test_nothing_in_a_thought_is_a_call():
    thought = f"<think>Or {call(a=1)}?</think>"
    assert parse(thought) == ParsedTurn(thought)
    turn = parse(f"A {thought}{call(a=2)}{thought}")
    assert calls(turn) == [("add", {"a": 2})]
    assert turn.content == f"A {thought}{thought}"
    assert parse(f"hm {call(a=1)}", starts_in_thought=True).num_calls == 0
    assert calls(parse(f"hm</think>{call(a=1)}", starts_in_thought=True)) == [("add", {"a": 1})]


def test_a_thoughts_tag_in_an_argument_begins_no_thought():
    text = call("say", text="<think> or <think>") + call(a=1)
    assert calls(parse(text)) == [("say", {"text": "<think> or <think>"}), ("add", {"a": 1})]


def test_an_argument_that_quotes_a_call_is_one_call():
    assert calls(parse(call("say", text="<call> and <calls>"))) == [
        ("say", {"text": "<call> and <calls>"})
    ]


def test_what_the_detector_drops_is_malformed_in_its_place():
    turn = parse(f"<calls>{call(a=1)}<call>oops</call>{call(a=2)}</calls>")
    assert [(found.arguments, found.index) for found in turn.calls] == [
        ({"a": 1}, 0),
        ({"a": 2}, 2),
    ]
    [broken] = turn.malformed
    assert broken.index == 1
    assert "no JSON" in broken.reason


def test_a_call_that_is_cut_off_is_malformed_and_hides_no_other():
    turn = parse(f'{call(a=1)}<call>{{"name": "add"')
    assert [found.arguments for found in turn.calls] == [{"a": 1}]
    assert [(found.index, found.reason) for found in turn.malformed] == [
        (1, "it is not closed by </call>")
    ]


def test_a_broken_call_before_a_thought_takes_no_call_out_of_it():
    text = f"<call>oops <think>{call(a=1)}</think>{call(a=2)}"
    turn = parse(text)
    assert [found.arguments for found in turn.calls] == [{"a": 2}]
    assert [found.index for found in turn.malformed] == [0]


def test_what_is_meant_as_a_call_and_has_no_fixed_beginning_is_malformed():
    parser = DetectorParser(BareDetector())
    assert parser.parse("[add(", tools=TOOLS).malformed[0].text == "[add("
    assert parser.parse("add(", tools=TOOLS) == ParsedTurn("add(")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [("[1]", "not a JSON object"), ("{", "not valid JSON"), ("{} {", "after the JSON object")],
)
def test_arguments_that_are_no_object_are_malformed_by_name(arguments: str, why: str):
    class Given(TagDetector):
        def detect(self, text: str, tools: Sequence[Any]) -> Detection:
            return Detection((DetectedCall("add", arguments),), "", is_meant=True)

    [broken] = DetectorParser(Given()).parse("<call></call>", tools=TOOLS).malformed
    assert why in broken.reason
    assert broken.name == "add"


def test_many_broken_calls_cost_one_reading_and_none_is_executed():
    turn = parse(call(a=1) + "<call>" * 500)
    assert (len(turn.calls), len(turn.malformed)) == (0, 1)


pieces = st.sampled_from(
    [call(a=1), call("say", text="<think>"), "<call>", "</call>", "<calls>", "<think>", "</think>"]
)
texts = st.lists(pieces | st.text(max_size=4), max_size=10).map("".join)


@given(texts, st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_text_makes_it_raise_or_lose_count(text: str, starts_in_thought: bool):
    turn = parse(text, starts_in_thought=starts_in_thought)
    indices = sorted(found.index for found in (*turn.calls, *turn.malformed))
    assert indices == list(range(turn.num_calls))
    assert turn.calls or turn.content == text


@given(texts)
@settings(max_examples=100, deadline=None)
def test_nothing_inside_a_thought_is_a_call_whatever_it_is(text: str):
    thought = text.replace("</think>", "")
    assert parse(thought, starts_in_thought=True).num_calls == 0
    assert parse(f"<think>{thought}</think>So.").num_calls == 0


def test_without_tools_nothing_is_a_call():
    assert parse(call(a=1), tools=()) == ParsedTurn(call(a=1))


def test_without_sglang_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.engines.sglang.parsers.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'sglang==")):
        get_tool_parser("sglang:deepseekv3")


def work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_text_that_takes_too_long_is_given_up():
    with pytest.raises(OutOfTimeError), limited(0.05):
        work(2.0)


def test_what_other_threads_compute_meanwhile_is_not_counted():
    with limited(60.0):
        # The timer of the process, run down by the others.
        signal.raise_signal(signal.SIGVTALRM)


def test_error_of_an_unknown_format_names_the_family():
    with pytest.raises(ConfigError, match="sglang:NAME"):
        get_tool_parser("deepseekv3")
