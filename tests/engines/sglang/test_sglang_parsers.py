"""The parsers of the installed SGLang: the same calls as ours read, and no text breaks one."""

import json
import random
from typing import Any

import pytest

from agentrl.engines.sglang.parsers import SGLangDetector, sglang_parser_names
from agentrl.errors import ConfigError
from agentrl.rollout.tool_parsers import ParsedTurn, get_tool_parser
from tests.fakes.call_formats import SGLANG
from tests.fakes.tools import schema

pytestmark = pytest.mark.sglang

TOOLS = [
    schema("add", a={"type": "integer"}, b={"type": "integer"}),
    schema("say", text={"type": "string"}),
]
NEEDS_MORE = {"response_template"}
"""Parsers that need a tokenizer."""


def parse(name: str, text: str, **kwargs: Any) -> ParsedTurn:
    return get_tool_parser(name).parse(text, tools=TOOLS, **kwargs)


def calls(turn: ParsedTurn) -> list[tuple[str, dict[str, Any]]]:
    assert not turn.malformed, turn.malformed
    return [(call.name, call.arguments) for call in turn.calls]


def usable() -> list[str]:
    return [name for name in sglang_parser_names() if name not in NEEDS_MORE]


ADD = ("add", {"a": 1, "b": 2})
SAY = ("say", {"text": "hi <b>"})


def hermes(*made: tuple[str, dict[str, Any]]) -> str:
    bodies = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in made]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def qwen3_coder(*made: tuple[str, dict[str, Any]]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        given = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items()]
        return f"<tool_call>\n<function={name}>\n{''.join(given)}</function>\n</tool_call>"

    return "\n".join(one(*call) for call in made)


def llama3(*made: tuple[str, dict[str, Any]]) -> str:
    bodies = [json.dumps({"name": name, "parameters": arguments}) for name, arguments in made]
    return "<|python_tag|>" + ";".join(bodies)


def pythonic(*made: tuple[str, dict[str, Any]]) -> str:
    bodies = [
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in made
    ]
    return f"[{', '.join(bodies)}]"


PAIRS = [
    ("sglang:hermes", "hermes", hermes),
    ("sglang:qwen25", "hermes", hermes),
    ("sglang:qwen3_coder", "qwen3_coder", qwen3_coder),
    ("sglang:llama3", "llama3_json", llama3),
    ("sglang:pythonic", "pythonic", pythonic),
]


@pytest.mark.parametrize(("theirs", "ours", "write"), PAIRS)
@pytest.mark.parametrize("made", [[ADD], [ADD, SAY], [SAY, ADD, SAY], [("unheard_of", {})]])
def test_the_same_text_holds_the_same_calls_as_by_our_parser(
    theirs: str, ours: str, write: Any, made: list[Any]
):
    text = write(*made)
    assert calls(parse(theirs, text)) == calls(parse(ours, text)) == made


@pytest.mark.parametrize(("theirs", "ours", "write"), PAIRS)
def test_a_thought_is_treated_as_by_our_parser(theirs: str, ours: str, write: Any):
    thought = f"<think>{write(ADD)}</think>"
    for text in (thought, f"{thought}\n\n{write(SAY)}", f"<think>{write(ADD)}"):
        assert parse(theirs, text) == parse(ours, text)
    text = f"hm {write(ADD)}</think>\n\n{write(SAY)}"
    assert calls(parse(theirs, text, starts_in_thought=True)) == [SAY]


def test_what_is_broken_is_malformed_as_by_our_parser():
    broken = "<tool_call>\n{oops}\n</tool_call>"
    for text in (broken, hermes(ADD) + broken + hermes(SAY), broken + hermes(ADD)):
        ours = parse("hermes", text)
        for name in ("sglang:hermes", "sglang:qwen25"):
            theirs = parse(name, text)
            assert theirs.calls == ours.calls
            assert [m.index for m in theirs.malformed] == [m.index for m in ours.malformed]
            assert all(malformed.reason for malformed in theirs.malformed)


OTHERS = {
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}}, '
    '{"name": "say", "arguments": {"text": "hi <b>"}}]',
    "deepseekv3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "b": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>say\n'
    '```json\n{"text": "hi <b>"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseekv31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
    '{"a": 1, "b": 2}<｜tool▁call▁end｜><｜tool▁call▁begin｜>say<｜tool▁sep｜>'
    '{"text": "hi <b>"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n"
    "<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>hi <b></arg_value>\n</tool_call>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    '<|tool_call_argument_begin|>{"a": 1, "b": 2}<|tool_call_end|><|tool_call_begin|>'
    'functions.say:1<|tool_call_argument_begin|>{"text": "hi <b>"}<|tool_call_end|>'
    "<|tool_calls_section_end|>",
    "minimax-m2": '<minimax:tool_call><invoke name="add"><parameter name="a">1</parameter>'
    '<parameter name="b">2</parameter></invoke><invoke name="say"><parameter name="text">'
    "hi <b></parameter></invoke></minimax:tool_call>",
}


@pytest.mark.parametrize("name", OTHERS)
def test_formats_that_only_sglang_has_are_read(name: str):
    turn = parse(f"sglang:{name}", f"Let me see. {OTHERS[name]}")
    assert calls(turn) == [ADD, SAY]
    assert turn.content == "Let me see."
    thought = f"<think>{OTHERS[name]}</think>"
    assert parse(f"sglang:{name}", thought) == ParsedTurn(thought)


@pytest.mark.parametrize("name", ["deepseekv3", "glm45", "kimi_k2"])
def test_a_truncated_call_is_reported(name: str):
    text = OTHERS[name]
    turn = parse(f"sglang:{name}", text[: text.index("hi <b>")])
    assert turn.num_calls == 2, turn
    assert turn.calls[:1] == parse(f"sglang:{name}", text).calls[:1]


WRITTEN = OTHERS | {
    "hermes": hermes(ADD, SAY),
    "qwen25": hermes(ADD, SAY),
    "qwen3_coder": qwen3_coder(ADD, SAY),
    "step3p5": qwen3_coder(ADD, SAY),
    "pythonic": pythonic(ADD, SAY),
    "llama3": llama3(ADD, SAY),
    "gemma4": "<|tool_call>call:add{a:1,b:2}<tool_call|>"
    '<|tool_call>call:say{text:<|"|>hi <b><|"|>}<tool_call|>',
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_text_that_is_cut_anywhere_executes_whole_calls_only(name: str):
    text = WRITTEN[name]
    parser = get_tool_parser(f"sglang:{name}")
    for end in range(len(text) + 1):
        turn = parser.parse(text[:end], tools=TOOLS)
        found = [(call.name, call.arguments) for call in turn.calls]
        assert found == [ADD, SAY][: len(found)], text[:end]
    assert calls(parser.parse(text, tools=TOOLS)) == [ADD, SAY]


SHORTENED = {
    "gemma4": '<|tool_call>call:say{text:<|"|>ls -la, then pwd<|"|>}<tool_call|>',
    "glm45": "<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>grep -r '</arg_value>' ."
    "</arg_value>\n</tool_call>",
    "minimax-m2": '<minimax:tool_call><invoke name="say"><parameter name="text">rm -r build\n'
    "</minimax:tool_call>",
}
TEXTS = ["ls -la, then pwd", "grep -r '</arg_value>' .", "rm -r build"]


@pytest.mark.parametrize("name", SHORTENED)
def test_an_argument_of_which_a_part_is_lost_is_not_executed(name: str):
    turn = parse(f"sglang:{name}", SHORTENED[name])
    assert all(call.arguments["text"] in TEXTS[:2] for call in turn.calls)


WIPE = ("wipe", {"path": "/home"})


@pytest.mark.parametrize("name", SGLANG)
@pytest.mark.parametrize("quote", ["no: {} ok", "<think>{}</think>", "{}"])
def test_a_call_in_an_argument_is_never_executed(name: str, quote: str):
    """It is text of the argument, or the call is malformed; the same wherever the turn is cut."""
    write, parser = SGLANG[name], get_tool_parser(f"sglang:{name}")
    tools = [*TOOLS, schema("wipe", path={"type": "string"})]
    made = [("say", {"text": quote.replace("{}", write([WIPE]))}), ADD]
    text = write(made)
    for end in [*range(1, len(text), 7), len(text)]:
        turn = parser.parse(text[:end], tools=tools)
        assert all((c.name, c.arguments) in made for c in turn.calls), (text[:end], turn)
    # A thought's tag ends a text for SGLang's `pythonic`, which sees no call in the part before it.
    assert turn.num_calls or (name, quote[0]) == ("pythonic", "<")


@pytest.mark.parametrize("name", SGLANG)
@pytest.mark.parametrize("prose", ["See [1] and {x}.", "\n\nThe function's name is (f)."])
def test_prose_next_to_a_call_is_no_part_of_it(name: str, prose: str):
    assert calls(parse(f"sglang:{name}", f"Well: {SGLANG[name]([ADD])} {prose}")) == [ADD]


@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_a_call_that_is_left_out_after_others_is_not_prose(name: str):
    text = SGLANG[name]([ADD]) + ', {"name": "say", "parameters": {"text": oops}}'
    assert parse(f"sglang:{name}", text).malformed


def test_a_text_behind_a_reference_stays_a_text():
    tool = schema("say", text={"$ref": "#/$defs/Year"})
    tool.function.parameters["$defs"] = {"Year": {"type": "string"}}
    parser = get_tool_parser("sglang:qwen3_coder")
    [call] = parser.parse(qwen3_coder(("say", {"text": "2024"})), tools=[tool]).calls
    assert call.arguments == {"text": "2024"}


def test_a_text_without_calls_stays_as_it_is():
    text = " The answer is 42, `x` < 3 and it's {so}.\n"
    turns = {name: parse(f"sglang:{name}", text) for name in usable()}
    assert {name: turn for name, turn in turns.items() if turn != ParsedTurn(text)} == {}


def fragments() -> list[str]:
    """What calls of all formats are made of."""
    found = [hermes(ADD), qwen3_coder(SAY), llama3(ADD), pythonic(ADD), *OTHERS.values()]
    for name in usable():
        found += SGLangDetector(name).openers
    found += [part for text in OTHERS.values() for part in text.split("add")]
    return [*dict.fromkeys(found), "<think>", "</think>", '{"name": ', "}", "[f(", "\ud800", "\x00"]


def test_no_text_makes_a_parser_raise():
    draws, parts = random.Random(0), fragments()
    texts = ["".join(draws.choices(parts, k=draws.randint(1, 8))) for _ in range(40)]
    for name in usable():
        parser = get_tool_parser(f"sglang:{name}")
        for text in texts:
            turn = parser.parse(text, tools=TOOLS)
            indices = sorted(call.index for call in (*turn.calls, *turn.malformed))
            assert indices == list(range(turn.num_calls)), (name, text)
            assert turn.calls or turn.content == text, (name, text)
            for call in turn.calls:
                json.dumps(call.arguments, allow_nan=False)
            inside = text.replace("</think>", "")
            assert parser.parse(f"<think>{inside}</think>", tools=TOOLS).num_calls == 0


@pytest.mark.timeout(60)
def test_a_text_that_would_be_searched_for_hours_is_malformed():
    [malformed] = parse("sglang:pythonic", "[f(a=1), " * 2000).malformed
    assert "longer than" in malformed.reason


def test_no_detectors_log_reaches_the_runs_output(caplog: pytest.LogCaptureFixture):
    parse("sglang:hermes", "<tool_call>{oops}</tool_call>")
    assert "oops" not in caplog.text


def test_an_unknown_parser_names_those_near_it():
    with pytest.raises(ConfigError, match="'deepseekv3'") as caught:
        get_tool_parser("sglang:deepseek3")
    assert "kimi_k2" in str(caught.value)


def test_a_parser_that_needs_a_tokenizer_is_refused_at_the_start():
    with pytest.raises(ConfigError, match="cannot be used on a text alone"):
        get_tool_parser("sglang:response_template")
