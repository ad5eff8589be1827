import io
import json
import math
import unicodedata
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from agentrl.config.schema.reward import Placement, RewardConfig, RewardWeightsConfig
from agentrl.errors import Fault, ToolLifeError
from agentrl.rewards import combine_rewards
from agentrl.rewards.combination import record_shaping
from agentrl.rollout.failures import describe_failure
from agentrl.rollout.records import CallRecord, TokenDifference
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.trainer.rollouts import transcript as transcript_module
from agentrl.trainer.rollouts.files import read_rollouts, save_rollouts
from agentrl.trainer.rollouts.transcript import (
    TokenStatus,
    decode_pieces,
    find_user_frame,
    plain_transcript,
    print_transcript,
    read_transcript,
    render_transcript,
    token_table,
)
from tests.fakes.finished_requests import (
    append_answer,
    decode_bytes,
    finish_request,
    finished_requests,
    make_tool_request,
    start_request,
)

TOKENIZERS = Path(__file__).resolve().parents[3].parent / "shared/data/tokenizers"


def plain(request):
    return plain_transcript(read_transcript(request, decode_bytes))


def shown(renderable, *, colour=None, width=100):
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=colour is not None, color_system=colour)
    console.print(renderable)
    return out.getvalue()


# Decoding.


def test_the_token_that_completes_a_character_gets_it():
    assert decode_pieces(list("a€b".encode()), decode_bytes) == ["a", "", "", "€", "b"]


def test_half_a_character_at_the_end_of_a_turn_stays_in_it():
    ids = [*b"x", 0xE2, 0x82, *b"yz"]
    assert decode_pieces(ids, decode_bytes, breaks=[3]) == ["x", "", "\ufffd", "y", "z"]
    assert decode_pieces(ids[:3], decode_bytes)[-1] == "\ufffd"


@given(st.text(max_size=20))
def test_pieces_of_valid_text_join_to_the_text(text):
    pieces = decode_pieces(list(text.encode()), decode_bytes)
    assert "".join(pieces) == text


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_turns_are_decoded_as_if_apart(first, second):
    apart = [*decode_pieces(first, decode_bytes), *decode_pieces(second, decode_bytes)]
    assert decode_pieces(first + second, decode_bytes, breaks=[len(first)]) == apart


@given(st.binary(max_size=16))
def test_no_bytes_hold_the_decoding_up(data):
    pieces = decode_pieces(list(data), decode_bytes)
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
        return decode_bytes(ids)

    decode_pieces(list(("word €" * 50).encode()), decode)
    assert longest <= 8


# What is said.


def test_plain_transcript_marks_what_is_trained():
    lines = plain(make_tool_request(reward=1.0)).splitlines()
    assert lines[0].endswith("6 prompt tokens · 12 response tokens · 9 trained (75%)")
    assert "  | 2 + 3?" in lines
    assert "+ | call" in lines
    assert "  | =5↵" in lines
    assert "+ | is 5." in lines
    assert "completed: answered" in lines
    assert "reward: 1, on response token 11" in lines


def test_turn_headers_and_calls_say_what_is_known():
    text = plain(make_tool_request())
    assert "--- turn 0 · assistant · 4 tokens · 0.25 s · finish: stop · weights v0" in text
    assert "--- turn 1 · tool · 3 tokens · 0.50 s" in text
    assert "  > calculator({}) -> ok · 0.500 s · 3 tokens" in text


def test_excluded_turns_and_failed_requests_are_marked():
    request = make_tool_request()
    request.exclude_turn(0, "malformed call")
    assert "- | call" in plain(request).splitlines()
    assert "left out of the loss: malformed call" in plain(request)
    failed = plain(make_tool_request(StopReason.FAILED))
    assert "- | is 5." in failed.splitlines(), "nothing of a failed request is trained"
    assert "fault of the tool in turn 3: OSError" in failed
    assert "0 trained (0%)" in failed


def test_an_unfinished_request_can_be_shown():
    request = start_request()
    append_answer(request, "hm")
    assert "running: not finished" in plain(request)
    assert "+ | hm" in plain(request).splitlines()


def test_rewards_and_differences_are_shown():
    request = make_tool_request(reward=0.5, tool_rewards={"calculator": 0.25})
    request.reward_extra_info = {"acc": True}
    request.differences = [TokenDifference(turn=1, kind="whitespace", expected="\n", actual="")]
    text = plain(request)
    for line in ("reward of tool calculator: 0.25", "acc: True"):
        assert line in text.splitlines()
    assert (
        r"tokens differ from the rendering in turn 1 (whitespace): expected '\n', have ''" in text
    )


def with_scores() -> AsyncRolloutRequest:
    """The scorer gave nothing, the call (tokens 0 to 3) 0.5, and the answer was scored 0.25."""
    request = make_tool_request(reward=0.0)
    request.turns[0].calls[0].reward, request.turns[2].reward = 0.5, 0.25
    return request


COMBINED = RewardConfig(
    weights=RewardWeightsConfig(trajectory=0, interaction=1, tool_call=1),
    tool_call_bonus=0.25,
    placement="tool_call_tokens",
)


def test_the_end_tells_what_is_trained_and_what_it_is_made_of():
    text = plain_transcript(read_transcript(with_scores(), decode_bytes, COMBINED))
    end = text.partition("--- end\n")[2].splitlines()
    assert end == [
        "completed: answered",
        "reward: 1, on 5 tokens, the last is response token 11",
        "  interaction_reward: 0.25",
        "  tool_call_reward: 0.5",
        "  tool_call_bonus: 0.25",
        "  scorer: 0",
    ]


def test_turns_and_tokens_tell_what_lands_on_them():
    transcript = read_transcript(with_scores(), decode_bytes, COMBINED)
    text = plain_transcript(transcript)
    assert "weights v0 · reward 0.75" in text
    assert "weights v0 · scored 0.25 · reward 0.25" in text
    assert "3 tokens · scored 0.5" in text
    rows = shown(token_table(transcript)).splitlines()
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows if "│" in row]
    rewards = {row[0]: row[-1] for row in cells if row[0] and row[-1]}
    assert rewards == dict.fromkeys("0123", "0.1875") | {"11": "0.25"}


def test_a_saved_request_is_shown_as_it_was(tmp_path: Path):
    request = with_scores()
    record_shaping(request, COMBINED)
    path = tmp_path / "step_000001.jsonl"
    save_rollouts(path, [request], step=1)
    (saved,) = read_rollouts(path)
    texts = [
        plain_transcript(read_transcript(one, decode_bytes, COMBINED)) for one in (request, saved)
    ]
    assert texts[0] == texts[1]
    assert texts[0].count("tool_call_bonus") == 1


@pytest.mark.parametrize("placement", get_args(Placement))
@settings(max_examples=20, deadline=None)
@given(request=finished_requests())
def test_rewards_on_trained_tokens_shown_rewards_sum_to_the_combined_one(placement, request):
    config = COMBINED.model_copy(update={"placement": placement})
    transcript = read_transcript(request, decode_bytes, config)
    tokens = [token for section in transcript.sections for token in section.tokens]
    placed = math.fsum(token.reward for token in tokens if token.reward is not None)
    total = combine_rewards(request, config).total
    assert placed == pytest.approx(
        total
        if request.is_trained and any(token.status is TokenStatus.TRAINED for token in tokens)
        else 0.0,
        abs=1e-5,
    )
    assert all(token.reward is None or token.status is TokenStatus.TRAINED for token in tokens)


def test_a_failure_is_described_with_the_users_own_line():
    request = start_request()
    append_answer(request, "go")
    failure = describe_failure(_raised_at_home(), Fault.TOOL, turn=1)
    request.finish(StopReason.FAILED, failure)
    lines = plain(request).partition("--- end\n")[2].splitlines()
    assert lines == [
        "failed: failed",
        "fault of the tool in turn 1: KeyError: 'no such item' (at my_tools.py:2)",
        "  at /home/me/my_tools.py:2, in execute",
        "reward: not scored",
    ]
    assert "Traceback" in request.error.traceback, "the saved record has the whole of it"


def test_a_failure_of_agentrls_own_names_no_place():
    assert find_user_frame(f'  File "{transcript_module.__file__}", line 3, in f\n') is None
    assert find_user_frame(f'  File "{json.__file__}", line 3, in f\n') is None
    assert find_user_frame("") is None


def _raised_at_home() -> Exception:
    there: dict[str, Any] = {}
    code = "def execute():\n    raise KeyError('no such item')\n"
    exec(compile(code, "/home/me/my_tools.py", "exec"), there)
    try:
        there["execute"]()
    except KeyError as error:
        return error
    raise AssertionError


# What is shown.


def test_colours_tell_trained_from_observed():
    text = shown(
        render_transcript(read_transcript(make_tool_request(), decode_bytes)), colour="standard"
    )
    assert "\x1b[4;32mc" in text, "trained: underlined green"
    assert "\x1b[90m=" in text, "observed: grey"


def test_a_log_file_gets_the_plain_form_unwrapped():
    out = io.StringIO()
    transcript = read_transcript(make_tool_request(prompt="x" * 300), decode_bytes)
    print_transcript(Console(file=out, width=40), transcript)
    assert out.getvalue().rstrip("\n") == plain_transcript(transcript).rstrip("\n")
    colour = io.StringIO()
    print_transcript(Console(file=colour, force_terminal=True, color_system="standard"), transcript)
    assert "\x1b[" in colour.getvalue()


def test_the_table_lists_every_response_token():
    request = start_request()
    append_answer(request, "a €")
    finish_request(request, StopReason.ANSWERED)
    rows = shown(token_table(read_transcript(request, decode_bytes))).splitlines()
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows if "│" in row]
    assert cells[0][2] == "turn 0 · assistant"
    assert cells[1] == ["0", "97", "a", "+", "-0.5000", "0.607", ""]
    assert [row[2] for row in cells[2:]] == ["␣", "…", "…", "€"]


def test_a_calls_error_is_on_one_line_with_its_details():
    request = start_request()
    message = str(ToolLifeError("it died", exit_code=-9, reason="killed"))
    append_answer(request, "go", calls=[CallRecord(name="f", outcome="crashed", message=message)])
    finish_request(request, StopReason.ANSWERED)
    text = plain_transcript(read_transcript(request, decode_bytes))
    assert "it died · exit_code: -9 · reason: killed\n" in text
    assert "\\n" not in text


def test_a_tool_cannot_write_to_the_terminal():
    evil = "\x1b]0;owned\x07\x1b[2J[bold red]\u202e\r\x9b31m\n+ | forged"
    request = start_request()
    append_answer(
        request, "go", calls=[CallRecord(name=evil, arguments={evil: evil}, message=evil)]
    )
    request.append_observed(list(evil.encode()), role="tool")
    finish_request(request, StopReason.ANSWERED)
    request.reward_extra_info = {evil: evil}
    transcript = read_transcript(request, decode_bytes)
    table = shown(token_table(transcript))
    for text in (plain_transcript(transcript), shown(render_transcript(transcript)), table):
        assert not {c for c in text if unicodedata.category(c) in ("Cc", "Cf")} - {"\n"}
    text = plain_transcript(transcript)
    assert r"\x1b[2J[bold red]\u202e\r\x9b31m\n+ | forged(" in text, "shown, not acted on"
    assert [line for line in text.splitlines() if line.startswith("+")] == ["+ | go"]


@settings(max_examples=40, deadline=None)
@given(finished_requests())
def test_any_request_can_be_shown_and_every_token_has_its_place(request):
    transcript = read_transcript(request, decode_bytes)
    tokens = [token for section in transcript.sections for token in section.tokens]
    assert [token.token_id for token in tokens] == request.input_ids
    response = tokens[request.num_prompt_tokens :]
    mask = request.loss_mask if request.is_trained else [0] * len(response)
    assert [int(token.status is TokenStatus.TRAINED) for token in response] == mask
    text = plain_transcript(transcript)
    assert not {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs")} - {"\n"}
    assert shown(render_transcript(transcript))
    assert shown(token_table(transcript))
