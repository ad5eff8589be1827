"""Tool parsers: what is a call, what is a broken one, and what is only text."""

import json
import time
import timeit
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import ConfigError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.rollout.argument_schemas import property_types
from agentrl.rollout.tool_parsers import (
    Call,
    ParsedTurn,
    Piece,
    PythonBlockParser,
    ToolParser,
    get_tool_parser,
    register_tool_parser,
    tool_parser_names,
)
from agentrl.rollout.tool_parsers.json_calls import decode_json
from agentrl.rollout.tool_parsers.qwen3_coder import typed
from tests.fakes.tools import schema

TOOLS = [
    schema("add", a={"type": "integer"}, b={"type": "integer"}),
    schema("say", text={"type": "string"}),
]


def parse(name: str, text: str, tools: Any = TOOLS, **kwargs: Any) -> ParsedTurn:
    return get_tool_parser(name).parse(text, tools=tools, **kwargs)


def calls(turn: ParsedTurn) -> list[tuple[str, dict[str, Any]]]:
    assert not turn.malformed, turn.malformed
    return [(call.name, call.arguments) for call in turn.calls]


def reason(turn: ParsedTurn) -> str:
    assert not turn.calls, turn.calls
    [malformed] = turn.malformed
    return malformed.reason


ADD = ("add", {"a": 1, "b": 2})
SAY = ("say", {"text": "hi"})

ONE_CALL = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
    "llama3_json": '{"name": "add", "parameters": {"a": 1, "b": 2}}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]',
    "pythonic": "[add(a=1, b=2)]",
    "json": '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    "python_block": "```python\nadd(1, 2)\n```",
    "search_r1": "<search>add 1 and 2</search>",
}
BUT_WHAT = {
    "python_block": ("code_interpreter", {"code": "add(1, 2)"}),
    "search_r1": ("search", {"query": "add 1 and 2"}),
}


def test_every_format_of_the_issue_is_registered():
    assert set(tool_parser_names()) >= set(ONE_CALL)


@pytest.mark.parametrize("name", ONE_CALL)
def test_a_call_is_read(name: str):
    turn = parse(name, ONE_CALL[name])
    assert calls(turn) == [BUT_WHAT.get(name, ADD)]
    assert turn.content == ""
    assert turn.num_calls == 1


@pytest.mark.parametrize("name", ONE_CALL)
def test_text_without_a_call_is_unchanged_content(name: str):
    text = " The answer is {42}, [x] and `y` < 3.\n"
    assert parse(name, text) == ParsedTurn(text)


@pytest.mark.parametrize("name", ONE_CALL)
def test_calls_inside_a_thought_are_not_calls(name: str):
    thought = f"<think>I could {ONE_CALL[name]}, or not.</think>"
    assert parse(name, thought) == ParsedTurn(thought)
    assert calls(parse(name, thought + ONE_CALL[name])) == [BUT_WHAT.get(name, ADD)]
    assert parse(name, thought + ONE_CALL[name]).content == thought


@pytest.mark.parametrize("name", ONE_CALL)
def test_no_call_is_parsed_after_an_unclosed_thought(name: str):
    text = f"<think>hm. {ONE_CALL[name]}"
    assert parse(name, text) == ParsedTurn(text)
    assert parse(name, ONE_CALL[name], starts_in_thought=True) == ParsedTurn(ONE_CALL[name])


@pytest.mark.parametrize("name", ONE_CALL)
def test_a_thought_that_the_prompt_opened_ends_where_it_is_closed(name: str):
    text = f"hm {ONE_CALL[name]}</think>\n\n{ONE_CALL[name]}"
    turn = parse(name, text, starts_in_thought=True)
    assert calls(turn) == [BUT_WHAT.get(name, ADD)]
    assert turn.content == f"hm {ONE_CALL[name]}</think>"


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "json", "python_block", "search_r1"])
def test_several_calls_and_the_text_between_them(name: str):
    text = f"First {ONE_CALL[name]} then {ONE_CALL[name]}\nEnd."
    turn = parse(name, text)
    assert calls(turn) == [BUT_WHAT.get(name, ADD)] * 2
    assert [call.index for call in turn.calls] == [0, 1]
    assert [call.id for call in turn.calls] == ["call00000", "call00001"]
    assert turn.content == "First  then \nEnd."


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("llama3_json", '<|python_tag|>{"name": "say", "parameters": {"text": "hi"}}', [SAY]),
        (
            "llama3_json",
            ' {"name": "add", "parameters": {"a": 1, "b": 2}}; '
            '{"type": "function", "name": "say", "parameters": {"text": "hi"}}<|eom_id|>',
            [ADD, SAY],
        ),
        ("llama3_json", '{"function": {"name": "say", "arguments": {"text": "hi"}}}', [SAY]),
        ("pythonic", '<|python_start|>[say(text="hi"), add(1, b=2)]<|python_end|>', [SAY, ADD]),
        ("pythonic", '[say(text="]) it\'s [")]', [("say", {"text": "]) it's ["})]),
        ("pythonic", "[f(x=[1, (2,)], y={'a': None}, z=-1.5, t=true)]", None),
        (
            "hermes",
            '<tool_call>{"name": "say", "arguments": "{\\"text\\": \\"hi\\"}"}</tool_call>',
            [SAY],
        ),
        ("hermes", '<tool_call>{"name": "say", "arguments": null}</tool_call>', [("say", {})]),
        (
            "hermes",
            '<tool_call>{"name": "say", "arguments": {"text": "</tool_call><think>"}}</tool_call>',
            [("say", {"text": "</tool_call><think>"})],
        ),
        ("qwen3_coder", "<function=say><parameter=text>hi</parameter></function>", [SAY]),
        (
            "qwen3_coder",
            "<tool_call>\n<function=say>\n<parameter=text>\n7\n\n</parameter>\n</function>\n</tool_call>",
            [("say", {"text": "7\n"})],
        ),
        ("json", 'So: {"name": "say", "arguments": {"text": "hi"}} and {"a": 1}', [SAY]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', [ADD]),
        (
            "mistral",
            "[TOOL_CALLS]f[CALL_ID]a1[ARGS]{}[TOOL_CALLS]g[ARGS]{}",
            [("f", {}), ("g", {})],
        ),
        ("mistral", '[THINK][TOOL_CALLS]f[ARGS]{}[/THINK][TOOL_CALLS]{"name": "g"}', [("g", {})]),
        ("python_block", "```python\n```", [("code_interpreter", {"code": ""})]),
        ("python_block", "```py\nx = '```'\n```", [("code_interpreter", {"code": "x = '```'"})]),
    ],
)
def test_variants_that_models_write(name: str, text: str, expected: list[Any] | None):
    if expected is None:
        expected = [("f", {"x": [1, [2]], "y": {"a": None}, "z": -1.5, "t": True})]
    assert calls(parse(name, text)) == expected


PARAMETER_A = "<parameter=a>1</parameter>"


def hermes(arguments: str) -> str:
    return f'<tool_call>{{"name": "say", "arguments": {arguments}}}</tool_call>'


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("hermes", '<tool_call>{"name": "add"', "not closed by </tool_call>"),
        ("hermes", '<tool_call>{"name": "add"}', "not closed by </tool_call>"),
        ("hermes", "<tool_call>{add}</tool_call>", "not valid JSON"),
        ("hermes", '<tool_call>{"name": "a"} {"name": "b"}</tool_call>', "text after"),
        ("hermes", "<tool_call>[]</tool_call>", "not a JSON object"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>', "not a JSON object"),
        ("hermes", '<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN is not"),
        (
            "hermes",
            '<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>',
            "surrogate",
        ),
        ("hermes", hermes('"rm -rf"'), "not valid JSON"),
        ("hermes", hermes('"{broken"'), "not valid JSON"),
        ("hermes", hermes(r'"{\"x\": 1} and more"'), "text after"),
        ("hermes", hermes(r'"{\"x\": \"\\ud83d\"}"'), "surrogate"),
        ("hermes", hermes('"[1]"'), "not a JSON object"),
        ("hermes", hermes('{"x": 1e999}'), "1e999 is too large"),
        ("hermes", hermes('{"x": [-1e999]}'), "too large"),
        ("hermes", hermes('{"x": -Infinity}'), "-Infinity is not JSON"),
        ("hermes", hermes('{"x": 1, "x": 2}'), "'x' is there twice"),
        ("hermes", hermes(r'"{\"x\": 1, \"x\": 2}"'), "'x' is there twice"),
        ("llama3_json", '{"name": "a", "parameters": "oops"}', "not valid JSON"),
        ("json", '{"name": "a", "name": "b", "arguments": {}}', "'name' is there twice"),
        ("qwen3_coder", f"<function=add>{PARAMETER_A * 2}</function>", "a is there twice"),
        ("pythonic", "[add(a={'x': 1, 'x': 2})]", "argument a is not a literal"),
        ("hermes", f"<tool_call>{'[' * 99999}</tool_call>", "nested too deeply"),
        ("hermes", f'<tool_call>{{"name": {"9" * 5000}}}</tool_call>', "not valid JSON"),
        ("qwen3_coder", "<tool_call>add(1)</tool_call>", "no <function=NAME>"),
        ("qwen3_coder", "<function=add><parameter=a>1", "parameter a is not closed"),
        ("qwen3_coder", "<function=add><parameter=a>1</parameter>", "not closed by </function>"),
        ("llama3_json", '{"name": "add", "parameters": {"a": 1', "not valid JSON"),
        ("llama3_json", "<|python_tag|>print(1)", "no call after"),
        ("mistral", "[TOOL_CALLS] add(1)", "no list of calls and no NAME[ARGS]"),
        ("mistral", '[TOOL_CALLS][{"name": "add"', "not valid JSON"),
        ("mistral", "[TOOL_CALLS][]", "the list of calls is empty"),
        ("mistral", "[TOOL_CALLS]add[ARGS]{oops", "its arguments: it is not valid JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS][1]", "not a JSON object"),
        ("pythonic", "[add(a=1, b=2)", "not closed by ]"),
        ("pythonic", "[add(a=1 b=2)]", "not a Python list of calls"),
        ("pythonic", "[add(a=open('x'))]", "argument a is not a literal"),
        ("pythonic", "[add(a={1, 2})]", "argument a is not a literal"),
        ("pythonic", "[add(a=1e999)]", "argument a is not a literal"),
        ("pythonic", "[add(1, 2, 3)]", "no name"),
        ("pythonic", "[add(1, a=2)]", "twice"),
        ("pythonic", "[add(**{'a': 1})]", "twice, or as"),
        ("json", '{"name": "add", "arguments": {"a": 1', "not valid JSON"),
        ("python_block", "```python\nprint(1)", "not closed by ```"),
        ("search_r1", "<search>swiss capital", "not closed by </search>"),
        ("search_r1", "<search>  </search>", "empty"),
    ],
)
def test_a_broken_call_is_recorded_with_its_reason_and_stays_in_the_text(
    name: str, text: str, why: str
):
    turn = parse(name, text)
    assert why in reason(turn)
    assert turn.content == text
    assert turn.malformed[0].text == text


@pytest.mark.parametrize("arguments", ["null", '""', '" "', '"null"', "{}", '"{}"'])
def test_a_call_may_be_written_without_arguments(arguments: str):
    assert calls(parse("hermes", hermes(arguments))) == [("say", {})]


def test_a_call_has_the_id_that_the_policy_wrote_if_it_is_new_and_has_nine_characters():
    texts = ["f[CALL_ID]abcDEF123", "f[CALL_ID]abcDEF123", "f[CALL_ID]short", "f"]
    text = "".join(f"[TOOL_CALLS]{name}[ARGS]{{}}" for name in texts)
    turn = parse("mistral", text).numbered(7)
    assert [call.id for call in turn.calls] == ["abcDEF123", "call00008", "call00009", "call00010"]
    listed = parse("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "D681PevKs"}]')
    assert [call.tool_call.id for call in listed.calls] == ["D681PevKs"]


def test_a_broken_call_hides_no_other():
    good = ONE_CALL["hermes"]
    turn = parse("hermes", f"{good}<tool_call>oops</tool_call>{good}")
    assert [call.index for call in turn.calls] == [0, 2]
    assert [call.index for call in turn.malformed] == [1]
    assert turn.content == "<tool_call>oops</tool_call>"


def test_a_parameter_that_is_not_closed_takes_no_other_call_with_it():
    good = ONE_CALL["qwen3_coder"]
    turn = parse("qwen3_coder", f"<tool_call><function=say><parameter=text>hi</tool_call>{good}")
    assert [(call.name, call.arguments) for call in turn.calls] == [ADD]
    assert [(call.name, call.reason) for call in turn.malformed] == [
        ("say", "the parameter text is not closed by </parameter>")
    ]


def test_a_bare_object_that_is_an_answer_is_no_call():
    for name in ("json", "llama3_json"):
        for text in ('{"name": "Bob", "age": 3}', '{"result": 5}', "{not json}"):
            assert parse(name, text) == ParsedTurn(text)


def test_the_code_goes_to_the_runs_only_tool_and_its_only_parameter():
    only = [schema("run", source={"type": "string"})]
    assert calls(parse("python_block", "```python\nx\n```", only)) == [("run", {"source": "x"})]
    own = PythonBlockParser(tool="say", parameter="text")
    assert calls(own.parse("```python\nx\n```", tools=TOOLS)) == [("say", {"text": "x"})]


@pytest.mark.parametrize(
    ("raw", "json_schema", "value"),
    [
        ("42", {"type": "string"}, "42"),
        ("42", {"type": "integer"}, 42),
        ("4.5", {"type": "number"}, 4.5),
        ("x", {"type": "integer"}, "x"),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("[1, 2]", {"type": "array"}, [1, 2]),
        ('{"a": 1}', {"type": "object"}, {"a": 1}),
        ("None", {"anyOf": [{"type": "string"}, {"type": "null"}]}, None),
        ("7", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "7"),
        ("7", {"type": ["string", "integer"]}, 7),
        ("true", {"type": ["string", "integer"]}, "true"),
        ("7", {"enum": ["7", "8"]}, "7"),
        ("7", {"const": "7"}, "7"),
        ("7", {"type": "number", "enum": [7, 8]}, 7),
        ("2024", {"$ref": "#/$defs/Year"}, "2024"),
        ("2024", {"anyOf": [{"$ref": "#/$defs/Year"}, {"type": "null"}]}, "2024"),
        ("null", {"anyOf": [{"$ref": "#/$defs/Year"}, {"type": "null"}]}, None),
        ("2024", {"oneOf": [{"$ref": "#/$defs/Year"}]}, "2024"),
        ("2024", {"allOf": [{"$ref": "#/$defs/Year"}, {"description": "A year."}]}, "2024"),
        ("2024", {"$ref": "#/$defs/Alias"}, "2024"),
        ("2024", {"$ref": "#/$defs/Endless"}, 2024),
        ("2024", {"$ref": "#/$defs/Missing"}, 2024),
        ("2024", {"$ref": "https://example.org/year"}, 2024),
        ("7", {}, 7),
        ("seven", {}, "seven"),
        ("7", True, 7),
    ],
)
def test_values_are_typed_by_the_schema(raw: str, json_schema: Any, value: Any):
    defs = {
        "Year": {"type": "string", "enum": ["2024"]},
        "Alias": {"$ref": "#/$defs/Year"},
        "Endless": {"$ref": "#/$defs/Endless"},
    }
    found = typed(raw, property_types({"$defs": defs, "properties": {"x": json_schema}})["x"])
    assert (found, type(found)) == (value, type(value))


UNCLOSED = [
    "<parameter=path>\nnotes.txt\n<parameter=content>\nhello\n</parameter>",
    "<parameter=path>\nnotes.txt\n</path>\n<parameter=content>\nhello\n</parameter>",
    "<parameter=path>\nnotes.txt\n</parameter\n<parameter=content>\nhello\n</parameter>",
    "<parameter=path>\nnotes.txt <parameter=content>hello</parameter>",
    "<parameter=path>\nnotes.txt\n</function>\n<function=write>\n<parameter=path>\nb\n</parameter>",
    "<parameter=path>\nnotes.txt\n</path>",
]


@pytest.mark.parametrize("inner", UNCLOSED)
@pytest.mark.parametrize("wrapper", ["<tool_call>\n{}\n</tool_call>", "{}"])
def test_a_value_that_is_not_closed_takes_no_other_parameter(inner: str, wrapper: str):
    tool = schema("write", path={"type": "string"}, content={"type": "string"})
    text = wrapper.format(f"<function=write>\n{inner}\n</function>")
    turn = get_tool_parser("qwen3_coder").parse(text, tools=[tool])
    assert not turn.calls
    assert turn.malformed[0].name == "write"


def test_search_results_are_worded_as_information():
    parser = get_tool_parser("search_r1")
    assert parser.render_result("Bern") == "<information>Bern</information>"
    assert (parser.result_role, get_tool_parser("hermes").result_role) == ("user", "tool")


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'hermes'"):
        get_tool_parser("hermess")


def test_a_parser_of_the_users_own_is_registered_once():
    class Shout(ToolParser):
        opener = "CALL "

        def read(self, text: str, start: int, body: int, tools: Any) -> Piece:
            return Piece(len(text), (Call(text[body:], {}),))

    register_tool_parser("test_shout")(Shout)
    assert calls(parse("test_shout", "now CALL me")) == [("me", {})]
    other = type("Other", (Shout,), {})
    with pytest.raises(ConfigError, match="already"):
        register_tool_parser("test_shout")(other)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
some_calls = st.lists(
    st.tuples(st.text(min_size=1), st.dictionaries(st.text(), json_values, max_size=3)), max_size=4
)


@given(some_calls, st.booleans())
@settings(max_examples=75, deadline=None)
def test_rendered_hermes_calls_come_back(made: list[tuple[str, dict[str, Any]]], ascii_only: bool):
    text = "Let me see.\n" + "\n".join(
        "<tool_call>\n"
        + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=ascii_only)
        + "\n</tool_call>"
        for name, arguments in made
    )
    turn = parse("hermes", text)
    assert calls(turn) == made
    assert turn.content.strip() == "Let me see."


@given(some_calls.filter(bool))
@settings(max_examples=40, deadline=None)
def test_rendered_json_calls_come_back(made: list[tuple[str, dict[str, Any]]]):
    objects = [json.dumps({"name": name, "parameters": args}) for name, args in made]
    assert calls(parse("llama3_json", ";".join(objects))) == made
    assert calls(parse("json", " ".join(objects))) == made


identifiers = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(
    lambda name: not __import__("keyword").iskeyword(name)
)


@given(
    st.lists(
        st.tuples(identifiers, st.dictionaries(identifiers, json_values, max_size=3)),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=40, deadline=None)
def test_rendered_pythonic_calls_come_back(made: list[tuple[str, dict[str, Any]]]):
    rendered = [
        f"{name}({', '.join(f'{k}={v!r}' for k, v in args.items())})" for name, args in made
    ]
    assert calls(parse("pythonic", f"[{', '.join(rendered)}]")) == made


fragments = st.sampled_from(
    [
        *ONE_CALL.values(),
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "</function>"),
        *("<parameter=x>", "</parameter>", "<|python_tag|>", "```python\n", "\n```", "<search>"),
        *(
            "</search>",
            '{"name": ',
            '"arguments": {',
            "}",
            "[f(",
            ")]",
            "'",
            '"""',
            "\\",
            ";",
            "\ud800",
        ),
        "\x00",
    ]
)
texts = st.lists(fragments | st.text(max_size=5), max_size=12).map("".join)


@given(texts, st.sampled_from(sorted(ONE_CALL)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_text_makes_a_parser_raise(text: str, name: str, starts_in_thought: bool):
    turn = parse(name, text, starts_in_thought=starts_in_thought)
    indices = sorted([call.index for call in (*turn.calls, *turn.malformed)])
    assert indices == list(range(turn.num_calls))
    assert all(call.text in text and call.reason for call in turn.malformed)
    assert turn.calls or turn.content == text
    for call in turn.calls:
        json.dumps(call.arguments, allow_nan=False)


@given(texts, st.sampled_from(sorted(ONE_CALL)))
@settings(max_examples=75, deadline=None)
def test_nothing_inside_a_thought_is_a_call_whatever_it_is(text: str, name: str):
    thought = text.replace("</think>", "")
    assert parse(name, thought, starts_in_thought=True).num_calls == 0
    assert parse(name, f"<think>{thought}</think>So.").num_calls == 0


@pytest.mark.parametrize("name", sorted(ONE_CALL))
@pytest.mark.parametrize(
    "piece",
    [
        "<tool_call>",
        '{"name":',
        "[f(",
        "<function=f>",
        "```python\n",
        "<search>",
        "<think></think>",
    ],
)
def test_long_hostile_texts_are_read_in_linear_time(name: str, piece: str):
    # A quadratic reader takes 64 times as long; `timeit` keeps the collector out of it.
    def seconds(num: int) -> float:
        return min(
            timeit.repeat(
                lambda: parse(name, piece * num), timer=time.process_time, number=1, repeat=3
            )
        )

    assert seconds(8000) < 40 * max(seconds(1000), 1e-3)


@pytest.mark.parametrize(
    ("name", "piece", "end"),
    [
        ("qwen3_coder", "<function=a><parameter=b></tool_call>", "</parameter>"),
        ("qwen3_coder", "<function=a><parameter=b></tool_call>", ""),
        ("hermes", "<tool_call></tool_call>", ""),
        ("hermes", '<tool_call>{"a"</tool_call>', ""),
        ("hermes", '<tool_call>{"a": "</tool_call>', ""),
    ],
)
def test_many_broken_calls_are_read_in_linear_time(name: str, piece: str, end: str):
    # A ratio, not seconds: sixteen times the text may take five times sixteen as long.
    def seconds(num: int) -> float:
        text = piece * num + end
        return min(
            timeit.repeat(lambda: parse(name, text), timer=time.process_time, number=1, repeat=3)
        )

    assert seconds(16000) < 80 * max(seconds(1000), 1e-3)


@given(json_values, st.integers(0, 3), st.text(max_size=40))
@settings(max_examples=50, deadline=None)
def test_long_json_is_read_whatever_window_it_is_cut_at(value: Any, blanks: int, behind: str):
    written = json.dumps([value, "x" * 3000, value], indent=blanks)
    for text in (written, written + " ,", json.dumps(written) + behind):
        found = decode_json(text)
        expected, end = json.JSONDecoder().raw_decode(text)
        assert (found.value, found.end, found.reason) == (expected, end, None)
    cut = decode_json(written[:-1])
    assert cut.reason is not None


def test_schemas_are_only_read():
    before = [tool.model_dump() for tool in TOOLS]
    for name, text in ONE_CALL.items():
        parse(name, text)
    assert [OpenAIFunctionToolSchema.model_validate(tool) for tool in before] == TOOLS
