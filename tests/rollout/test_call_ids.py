"""Ids of calls: the policy's own if its format writes them; what is known is not read again."""

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from agentrl.engines.sglang.parsers import DetectedCall, Detection, Once
from agentrl.errors import ConfigError
from agentrl.messages import Message
from agentrl.rollout.context import choose_parser
from agentrl.rollout.templates import probe_template
from agentrl.rollout.tool_calls import CallIds, read_turn
from agentrl.rollout.tool_parsers import DetectorParser, get_tool_parser
from tests.fakes.gateway import LOOKUP, serve
from tests.fakes.plugins import tiny_template
from tests.fakes.templates import call, make_template
from tests.fakes.tools import schema

KIMI = "functions.{name}:{number}"
TOOLS = [schema("lookup", q={"type": "string"})]


class Named:
    """Reads `<c>ID</c>` as a call with this id; it cannot read `<c>?</c>`."""

    openers = ("<c>",)
    pairs: ClassVar = {"<c>": "</c>"}

    def detect(self, text: str, tools: Sequence[Any]) -> Detection:
        ids = [part.partition("</c>")[0] for part in text.split("<c>")[1:]]
        calls = [DetectedCall("lookup", "{}", id) for id in ids if id != "?"]
        return Detection(tuple(calls), "", is_meant=bool(ids), complaint="?" if "?" in ids else "")


def test_an_id_of_the_policy_stays_and_new_ones_have_its_form_and_repeat_none():
    parser = DetectorParser(Named(), KIMI)
    text = "<c>functions.lookup:2</c><c>?</c><c>functions.lookup:2</c>"
    turn = parser.parse(text, tools=TOOLS).numbered(1, {"functions.lookup:3"}, parser.id_form)
    assert [(call.index, call.id) for call in turn.calls] == [
        (0, "functions.lookup:2"),
        (2, "functions.lookup:4"),
    ]
    assert [call.id for call in turn.malformed] == ["functions.unknown:2"]


class Counted(Message):
    """Counts how often its calls are read."""

    reads: ClassVar[list[str]] = []

    def __getattribute__(self, name: str) -> Any:
        if name == "tool_calls":
            Counted.reads.append(name)
        return super().__getattribute__(name)


def test_the_ids_of_a_conversation_are_read_once_for_each_message():
    ids, messages = CallIds(), list[Message]()
    for number in range(9):
        messages.append(Counted(role="assistant", content="", tool_calls=[call(number=number)]))
        Counted.reads.clear()
        assert len(ids.update(messages)) == number + 1
        assert len(Counted.reads) == 1
    assert len(ids.update([*messages[:2]])) == 9


def test_an_object_is_converted_once():
    converted: list[str] = []
    convert = Once(lambda tool: converted.append(tool.name))
    for _ in range(3):
        convert(TOOLS[0])
    assert converted == ["lookup"]


def test_the_control_tokens_of_a_template_are_searched_once():
    template, searches = tiny_template(), list[str]()

    class Watched(dict[str, int]):
        def items(self) -> Any:
            searches.append("")
            return super().items()

    encoder = template.structure.encoder
    encoder.control = Watched(encoder.control)
    ids, end = template.encode_text("Hi"), template.generation_prompt_ids
    counts: list[int] = []
    for _ in range(3):
        read_turn(ids, template, get_tool_parser("hermes"), tools=TOOLS, prompt_end=end)
        counts.append(len(searches))
    assert counts[0] == counts[1] == counts[2]


KIMI_TURN = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.lookup:0"
    '<|tool_call_argument_begin|>{"q": "x"}<|tool_call_end|><|tool_calls_section_end|>'
)
HARMONY_TURN = '<|channel|>commentary to=functions.lookup<|message|>{"q": "x"}<|call|>'
KIMI_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content or '' }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}"
    "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}"
    "<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.sglang
def test_the_template_of_kimi_k2_has_its_own_format_only():
    assert choose_parser("sglang:kimi_k2", probe_template(make_template(KIMI_TEMPLATE)))
    named = KIMI_TEMPLATE.replace("c.id", "'functions.' ~ c.function.name ~ ':' ~ loop.index0")
    report = probe_template(make_template(named))
    assert choose_parser("sglang:kimi_k2", report)
    for name in ("hermes", "sglang:qwen25"):
        with pytest.raises(ConfigError, match="does not read the tool calls"):
            choose_parser(name, report)


@pytest.mark.sglang
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("parser", "turn", "id"),
    [
        ("sglang:kimi_k2", KIMI_TURN, "functions.lookup:0"),
        ("sglang:gpt-oss", HARMONY_TURN, "call00000"),
    ],
)
async def test_the_gateway_sends_calls_and_ids_of_the_policy(
    parser: str, turn: str, id: str, is_stream: bool
):
    openai = pytest.importorskip("openai")
    question: list[Any] = [{"role": "user", "content": "Hi"}]
    async with serve([turn, "Done."], multi_turn={"parser": parser}) as served:
        session = served.session
        api = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.key, max_retries=0)
        ask = api.chat.completions.create
        given: dict[str, Any] = {"model": "m", "tools": [LOOKUP]}
        if is_stream:
            stream = await ask(messages=question, stream=True, **given)
            deltas = [c.choices[0].delta async for chunk in stream for c in [chunk] if c.choices]
            made = [part for delta in deltas for part in delta.tool_calls or []]
            sent = made[0].id, made[0].function.name
        else:
            [made] = (await ask(messages=question, **given)).choices[0].message.tool_calls
            sent = made.id, made.function.name
        assert sent == (id, "lookup")
        function = {"name": "lookup", "arguments": '{"q": "x"}'}
        calls = [{"id": id, "type": "function", "function": function}]
        history = [
            *question,
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": id, "content": "five"},
        ]
        second = await ask(messages=history, **given)
        assert second.choices[0].message.content == "Done."
        await api.close()
    assert served.request.branches == []
    assert [message.tool_call_id for message in served.request.messages][2] == id
