"""From the text of a call to the tokens that were sampled for it."""

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.rollout.records import Budgets, CallRecord
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.templates.text import TokenSpans
from agentrl.rollout.tool_parsers import get_tool_parser
from tests.fakes.plugins import (
    FakeTool,
    calling,
    decode,
    encode,
    make_context,
    make_engine,
    make_request,
    tiny_template,
)
from tests.fakes.templates import load_template

WORDS = st.sampled_from(["ab ", "é", "日本", "x", "<tool_call>", "🙂", "</tool_call>"])


@settings(deadline=None, max_examples=80)
@given(st.lists(WORDS, min_size=1, max_size=6).map("".join), st.data())
def test_the_tokens_of_a_span_are_those_with_text_in_it(text: str, data: Any):
    ids = encode(text)
    start = data.draw(st.integers(0, len(text) - 1))
    end = data.draw(st.integers(start + 1, len(text)))
    [span] = TokenSpans(decode).locate(ids, text, [(start, end)])
    assert span is not None
    found = decode(ids[slice(*span)])
    assert text[start:end] in found
    assert len(found) <= end - start + len("</tool_call>") * 2 - 2


class ByWord:
    """Decodes word by word; a word at the start of a text has no blank before it."""

    words = ("it", " is", " (", "2", "+", "3", ")", " !")

    def __init__(self) -> None:
        self.num_decoded = 0

    def __call__(self, ids: Any) -> str:
        self.num_decoded += 1
        return "".join(self.words[i] for i in ids).removeprefix(" ")


def test_a_tokenizer_that_writes_a_token_differently_at_the_start_is_asked_for_beginnings():
    decode_words = ByWord()
    ids = list(range(8))
    text = decode_words(ids)
    start = text.index("(")
    pieces = TokenSpans(decode_words)
    assert pieces.locate(ids, text, [(start, text.index(")") + 1), None]) == [(2, 7), None]


@pytest.mark.parametrize("word", [" \U0001fae8", "\U0001fae8" * 40, " ✅ 漢 √ ñ", "é\ufffd"])
def test_split_characters_cost_decodings_of_a_few_tokens_each(word: str):
    template, num_decoded = load_template("qwen2_5"), 0

    def decode_counted(ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return template.decode(ids)

    calls = "<tool_call>" + '{"name": "lookup"}</tool_call>' * 200
    text = f"Hm.{word} {calls}{word}"
    ids = template.encode_policy_text(text)
    spans = [(m.start(), m.end()) for m in re.finditer("lookup", text)]
    found = TokenSpans(decode_counted).locate(ids, text, spans)
    assert {template.decode(ids[slice(*span)]) for span in found if span} == {"lookup"}
    assert num_decoded < 1000 + 20 * len(ids)


def test_bytes_that_are_no_character_cost_linear_time():
    template = load_template("qwen2_5")
    [*_, torn] = template.encode_text(" \U0001fae8")
    ids = [torn] * 20_000 + template.encode_text("end")
    text = template.decode(ids)
    started = time.process_time()
    [span] = template.token_spans.locate(ids, text, [(len(text) - 3, len(text))])
    assert time.process_time() - started < 2
    assert span is not None
    assert template.decode(ids[slice(*span)]).endswith("end")


def test_what_a_token_says_is_decoded_once_in_a_run():
    decode_words = ByWord()
    pieces = TokenSpans(decode_words)
    for _ in range(3):
        assert pieces.locate([0, 3, 4], "it2+", [(2, 3)]) == [(1, 2)]
    assert decode_words.num_decoded == 3


def test_where_no_call_is_nothing_is_decoded():
    decode_words = ByWord()
    assert TokenSpans(decode_words).locate([0, 1], "it is", [None]) == [None]
    assert decode_words.num_decoded == 0


# Through the runner.


async def roll_out(*answers: str, **fields: Any) -> AsyncRolloutRequest:
    engine = make_engine(*answers)
    return await run_request(make_request(**fields), make_context(engine, tools=[FakeTool()]))


def texts_of(request: AsyncRolloutRequest) -> list[str | None]:
    ids = request.response_ids
    calls: list[CallRecord] = [call for turn in request.turns for call in turn.calls]
    return [call.span and decode(ids[slice(*call.span)]) for call in calls]


GOOD, OTHER = calling("lookup", q="日本"), calling("lookup", q="Bern")
BAD = "<tool_call>{oops</tool_call>"


async def test_each_call_knows_its_own_tokens_in_every_turn():
    request = await roll_out(f"So: {GOOD} and {OTHER}", f"é {BAD}{OTHER}!", "Done.")
    assert texts_of(request) == [GOOD, OTHER, BAD, OTHER]
    inside = [
        turn.start <= call.span[0] < call.span[1] <= turn.end
        for turn in request.turns
        for call in turn.calls
        if call.span
    ]
    assert inside == [True] * 4


async def test_a_call_that_is_not_executed_has_its_tokens_too():
    request = await roll_out(f"So: {GOOD}", budgets=Budgets(max_assistant_turns=1))
    assert [call.outcome for call in request.turns[0].calls] == ["skipped"]
    assert texts_of(request) == [GOOD]


async def test_an_unknown_tool_and_wrong_arguments_are_calls_as_well():
    wrong = [calling("nobody"), calling("lookup", q=3)]
    assert texts_of(await roll_out("".join(wrong), "Done.")) == wrong


@pytest.mark.parametrize(
    ("name", "text", "spans"),
    [
        ("hermes", f"a {GOOD}", [(2, 2 + len(GOOD))]),
        ("pythonic", "[f(), g()]", [(0, 10), (0, 10)]),
        ("json", 'x {"name": "f", "arguments": {}} y', [(2, 32)]),
    ],
)
def test_a_format_reports_the_spans_of_its_calls(name: str, text: str, spans: list[Any]):
    assert [call.span for call in get_tool_parser(name).parse(text).calls] == spans


def test_a_span_survives_the_template_s_own_pieces():
    ids = encode(f"a {GOOD}")
    [span] = tiny_template().token_spans.locate(ids, decode(ids), [(2, 2 + len(GOOD))])
    assert span is not None
    assert decode(ids[slice(*span)]) == GOOD
