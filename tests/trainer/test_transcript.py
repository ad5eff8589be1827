import io
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from agentrl.errors import ToolLifeError
from agentrl.rollout.records import CallRecord, TokenDifference
from agentrl.rollout.states import StopReason
from agentrl.trainer.transcript import (
    Mark,
    decode_pieces,
    plain_transcript,
    print_transcript,
    read_transcript,
    render_transcript,
    token_table,
)
from tests.fakes_seeing import byte_decode, finish, finished_requests, sample, started, tool_story

TOKENIZERS = Path(__file__).resolve().parents[2].parent / "shared/data/tokenizers"


def plain(request):
    return plain_transcript(read_transcript(request, byte_decode))


def shown(renderable, *, colour=None, width=100):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour is not None, color_system=colour)
    console.print(renderable)
    return out.getvalue()


# Decoding.


def test_the_token_that_completes_a_character_gets_it():
    assert decode_pieces(list("a€b".encode()), byte_decode) == ["a", "", "", "€", "b"]


def test_half_a_character_at_the_end_of_a_turn_stays_in_it():
    ids = [*b"x", 0xE2, 0x82, *b"yz"]
    assert decode_pieces(ids, byte_decode, breaks=[3]) == ["x", "", "\ufffd", "y", "z"]
    assert decode_pieces(ids[:3], byte_decode)[-1] == "\ufffd"


@given(st.text(max_size=20))
def test_pieces_of_valid_text_join_to_the_text(text):
    pieces = decode_pieces(list(text.encode()), byte_decode)
    assert "".join(pieces) == text


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_turns_are_decoded_as_if_apart(first, second):
    apart = [*decode_pieces(first, byte_decode), *decode_pieces(second, byte_decode)]
    assert decode_pieces(first + second, byte_decode, breaks=[len(first)]) == apart


@given(st.binary(max_size=16))
def test_no_bytes_hold_the_decoding_up(data):
    pieces = decode_pieces(list(data), byte_decode)
    waiting = 0
    for piece in pieces:
        waiting = 0 if piece else waiting + 1
        assert waiting < 4
    assert not pieces or pieces[-1] or data[-1] >= 0x80


def test_real_tokenizer_pieces_join_to_the_text():
    transformers = pytest.importorskip("transformers")
    if not TOKENIZERS.is_dir():
        pytest.skip("the shared tokenizers are not on this machine")
    tokenizer = transformers.AutoTokenizer.from_pretrained(next(TOKENIZERS.iterdir()))
    text = "<|im_start|>user\nπ ≈ 3, 你好 🧮👨‍👩‍👧 naïve\t…<|im_end|>\n"
    ids = tokenizer.encode(text)
    pieces = decode_pieces(ids, tokenizer.decode)
    assert "".join(pieces) == text
    assert pieces[0] == "<|im_start|>"
    assert "" in pieces, "some character here is split between tokens"


def test_decoding_looks_at_a_few_tokens_only():
    longest = 0

    def decode(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return byte_decode(ids)

    decode_pieces(list(("word €" * 50).encode()), decode)
    assert longest <= 8


# What is said.


def test_plain_transcript_marks_what_is_trained():
    lines = plain(tool_story(reward=1.0)).splitlines()
    assert lines[0].endswith("6 prompt tokens · 12 response tokens · 9 trained (75%)")
    assert "  | 2 + 3?" in lines
    assert "+ | call" in lines
    assert "  | =5↵" in lines
    assert "+ | is 5." in lines
    assert "completed: answered" in lines
    assert "reward: 1, on response token 11" in lines


def test_turn_headers_and_calls_say_what_is_known():
    text = plain(tool_story())
    assert "--- turn 0 · assistant · 4 tokens · 0.25 s · finish: stop · weights v0" in text
    assert "--- turn 1 · tool · 3 tokens · 0.50 s" in text
    assert "  > calculator({}) -> ok · 0.500 s · 3 tokens" in text


def test_excluded_turns_and_failed_requests_are_marked():
    request = tool_story()
    request.exclude_turn(0, "malformed call")
    assert "- | call" in plain(request).splitlines()
    assert "left out of the loss: malformed call" in plain(request)
    failed = plain(tool_story(StopReason.FAILED))
    assert "- | is 5." in failed.splitlines(), "nothing of a failed request is trained"
    assert "fault of the tool in turn 3: OSError" in failed
    assert "0 trained (0%)" in failed


def test_an_unfinished_request_can_be_shown():
    request = started()
    sample(request, "hm")
    assert "running: not finished" in plain(request)
    assert "+ | hm" in plain(request).splitlines()


def test_rewards_and_differences_are_told():
    request = tool_story(reward=0.5, tool_rewards={"calculator": 0.25})
    request.reward_extra_info = {"acc": True}
    request.differences = [TokenDifference(turn=1, kind="whitespace", expected="\n", actual="")]
    text = plain(request)
    for line in ("reward of tool calculator: 0.25", "acc: True"):
        assert line in text.splitlines()
    assert (
        r"tokens differ from the rendering in turn 1 (whitespace): expected '\n', have ''" in text
    )


# What is shown.


def test_colours_tell_trained_from_observed():
    text = shown(render_transcript(read_transcript(tool_story(), byte_decode)), colour="standard")
    assert "\x1b[4;32mc" in text, "trained: underlined green"
    assert "\x1b[90m=" in text, "observed: grey"


def test_a_log_file_gets_the_plain_form_unwrapped():
    out = io.StringIO()
    transcript = read_transcript(tool_story(prompt="x" * 300), byte_decode)
    print_transcript(Console(file=out, width=40), transcript)
    assert out.getvalue().rstrip("\n") == plain_transcript(transcript).rstrip("\n")
    colour = io.StringIO()
    print_transcript(Console(file=colour, force_terminal=True, color_system="standard"), transcript)
    assert "\x1b[" in colour.getvalue()


def test_the_table_lists_every_response_token():
    request = started()
    sample(request, "a €")
    finish(request, StopReason.ANSWERED)
    rows = shown(token_table(read_transcript(request, byte_decode))).splitlines()
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows if "│" in row]
    assert cells[0][2] == "turn 0 · assistant"
    assert cells[1] == ["0", "97", "a", "+", "-0.5000", "0.607"]
    assert [row[2] for row in cells[2:]] == ["␣", "…", "…", "€"]


def test_a_calls_error_stands_on_one_line_with_its_details():
    request = started()
    message = str(ToolLifeError("it died", exit_code=-9, reason="killed"))
    sample(request, "go", calls=[CallRecord(name="f", outcome="crashed", message=message)])
    finish(request, StopReason.ANSWERED)
    text = plain_transcript(read_transcript(request, byte_decode))
    assert "it died · exit_code: -9 · reason: killed\n" in text
    assert "\\n" not in text


def test_a_tool_cannot_write_to_the_terminal():
    evil = "\x1b]0;owned\x07\x1b[2J[bold red]\u202e\r\x9b31m\n+ | forged"
    request = started()
    sample(request, "go", calls=[CallRecord(name=evil, arguments={evil: evil}, message=evil)])
    request.append_observed(list(evil.encode()), role="tool")
    finish(request, StopReason.ANSWERED)
    request.reward_extra_info = {evil: evil}
    transcript = read_transcript(request, byte_decode)
    table = shown(token_table(transcript))
    for text in (plain_transcript(transcript), shown(render_transcript(transcript)), table):
        assert not {c for c in text if unicodedata.category(c) in ("Cc", "Cf")} - {"\n"}
    text = plain_transcript(transcript)
    assert r"\x1b[2J[bold red]\u202e\r\x9b31m\n+ | forged(" in text, "shown, not acted on"
    assert [line for line in text.splitlines() if line.startswith("+")] == ["+ | go"]


@settings(max_examples=40, deadline=None)
@given(finished_requests())
def test_any_request_can_be_shown_and_every_token_has_its_place(request):
    transcript = read_transcript(request, byte_decode)
    tokens = [token for section in transcript.sections for token in section.tokens]
    assert [token.token_id for token in tokens] == request.input_ids
    response = tokens[request.num_prompt_tokens :]
    mask = request.loss_mask if request.is_trained else [0] * len(response)
    assert [int(token.mark is Mark.TRAINED) for token in response] == mask
    text = plain_transcript(transcript)
    assert not {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs")} - {"\n"}
    assert shown(render_transcript(transcript))
    assert shown(token_table(transcript))
