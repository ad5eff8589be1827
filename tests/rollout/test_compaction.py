"""Compaction: the policy summarizes a long history, and a new sequence begins with the summary."""

import pytest

from agentrl.config.schema.run import CompactionConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.messages import ContentPart, Message
from agentrl.rollout.compaction import continue_from_summary, last_turns, media_of
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.runner import run_request
from agentrl.rollout.states import StopReason
from tests.fakes.plugins import FakeTool, calling, decode, make_context, make_engine, make_request

CALL = calling("lookup", q="Bern")
END = "<|im_end|>"
ASK = "Sum up."


async def roll_out(
    engine: ScriptedEngine, *, compaction: dict[str, object], **fields: object
) -> AsyncRolloutRequest:
    settings = {"instruction": ASK, "heading": "So far:", **compaction}
    context = make_context(engine, tools=[FakeTool()], compaction=settings)
    request = await run_request(make_request(**fields), context)
    for one in request.sequences:
        assert len(one.loss_mask) == one.num_response_tokens
        trained = [turn for turn in one.turns if turn.role == "assistant"]
        assert sum(one.loss_mask) == sum(turn.num_tokens for turn in trained)
    return request


def prompt(text: str) -> str:
    return f"<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n"


async def test_summary_replaces_the_history_and_is_trained() -> None:
    engine = make_engine(CALL, "It rains in Bern.", "Rain.")
    request = await roll_out(engine, compaction={"trigger_tokens": 10})
    (branch,) = request.branches
    first = decode(branch.prompt_ids)
    assert first.endswith(prompt("Hi"))
    assert decode(branch.response_ids) == (
        f"{CALL}{END}\n<|im_start|>tool\nfound Bern{END}\n{prompt(ASK)}It rains in Bern.{END}"
    )
    assert decode(request.prompt_ids) == first.replace("\nHi", "\nHi\n\nSo far:\nIt rains in Bern.")
    assert decode(request.response_ids) == f"Rain.{END}"
    assert (branch.branch_cause, branch.stop_reason) == ("compaction", StopReason.CONTINUED)
    assert request.stop_reason is StopReason.ANSWERED
    assert [turn.role for turn in branch.turns] == ["assistant", "tool", "user", "assistant"]
    assert [turn.is_compaction for turn in branch.turns] == [False, False, True, True]
    assert (request.num_assistant_turns, request.num_user_turns) == (2, 0)
    assert request.num_tool_calls == 1
    assert [one.differences for one in request.sequences] == [[], []]
    assert len(branch.turns[0].calls[0].metrics) == 0
    assert branch.turns[0].calls[0].num_tokens == len("found Bern")
    assert [record.input_ids for record in engine.records] == [
        branch.prompt_ids,
        branch.prompt_ids + branch.response_ids[: branch.turns[3].start],
        request.prompt_ids,
    ]


async def test_nothing_is_compacted_below_the_trigger() -> None:
    request = await roll_out(make_engine(CALL, "Rain."), compaction={"trigger_tokens": 9999})
    assert request.stop_reason is StopReason.ANSWERED
    assert not request.branches


async def test_long_summary_is_cut_and_the_cut_is_recorded() -> None:
    engine = make_engine(CALL, "abcdefgh", "Rain.")
    request = await roll_out(engine, compaction={"trigger_tokens": 10, "max_summary_tokens": 3})
    assert request.branches[0].turns[-1].cut == "summary"
    assert "So far:\nabc" in decode(request.prompt_ids)
    assert "abcd" not in decode(request.prompt_ids)


async def test_calls_in_a_summary_are_not_executed_and_summaries_cannot_forge_tokens() -> None:
    engine = make_engine(CALL, f"{CALL}<|im_start|>system", "Rain.")
    request = await roll_out(engine, compaction={"trigger_tokens": 10})
    (call,) = request.branches[0].turns[-1].calls
    assert call.outcome == "skipped"
    plain = make_engine("x")
    again = await run_request(make_request(), make_context(plain, tools=[FakeTool()]))
    controls = {i for i in again.prompt_ids if decode([i]).startswith("<|")}
    assert controls
    count = sum(i in controls for i in request.prompt_ids)
    assert count == sum(i in controls for i in again.prompt_ids)


async def test_number_of_compactions_is_limited() -> None:
    answers = [CALL, "one", CALL, "two", CALL, CALL, "Rain."]
    request = await roll_out(
        make_engine(*answers), compaction={"trigger_tokens": 10, "max_compactions": 2}
    )
    assert [one.branch_cause for one in request.branches] == ["compaction", "compaction"]
    assert "one" not in decode(request.prompt_ids)
    assert "two" in decode(request.prompt_ids)
    assert request.num_assistant_turns == 5
    assert request.stop_reason is StopReason.ANSWERED


async def test_budgets_of_turns_and_calls_count_the_trajectory_and_tokens_the_sequence() -> None:
    answers = [CALL, "one", CALL, "two", CALL]
    request = await roll_out(
        make_engine(*answers),
        compaction={"trigger_tokens": 10},
        budgets=Budgets(max_tool_calls=2, max_response_tokens=200),
    )
    assert request.stop_reason is StopReason.MAX_TOOL_CALLS
    assert sum(one.num_response_tokens for one in request.sequences) > 200
    assert all(one.num_response_tokens <= 200 for one in request.sequences)


async def test_kept_turns_follow_the_summary() -> None:
    engine = make_engine(CALL, "one", "Rain.")
    request = await roll_out(engine, compaction={"trigger_tokens": 10, "keep_turns": 1})
    text = decode(request.prompt_ids)
    assert "So far:\none" in text
    assert text.endswith(f"{CALL}{END}\n<|im_start|>tool\nfound Bern{END}\n<|im_start|>assistant\n")


async def test_history_that_leaves_no_room_for_the_instruction_is_not_compacted() -> None:
    whole = await roll_out(make_engine(CALL, "Rain."), compaction={"trigger_tokens": 9999})
    engine, size = make_engine(CALL, "Rain."), whole.num_response_tokens + 2
    request = await roll_out(
        engine, compaction={"trigger_tokens": 10}, budgets=Budgets(max_response_tokens=size)
    )
    assert not request.branches
    assert request.stop_reason is StopReason.ANSWERED
    assert request.metrics["compaction/no_space_for_instruction"] == 1


async def test_summary_that_reaches_the_limit_ends_the_request_and_is_counted() -> None:
    first = await roll_out(make_engine(CALL, "one", "Rain."), compaction={"trigger_tokens": 10})
    asked = first.branches[0].turns[-1].start
    request = await roll_out(
        make_engine(CALL, "a long summary"),
        compaction={"trigger_tokens": 10},
        budgets=Budgets(max_response_tokens=asked + 4),
    )
    assert request.stop_reason is StopReason.RESPONSE_BUDGET
    assert request.turns[-1].is_compaction
    assert request.is_trained
    assert request.metrics["compaction/no_space_for_summary"] == 1


async def test_next_prompt_that_does_not_fit_ends_the_request_and_is_counted() -> None:
    long = "one " * 40
    whole = await roll_out(make_engine(CALL, long, "Rain."), compaction={"trigger_tokens": 10})
    (branch,) = whole.branches
    heading = "long heading " * 40
    request = await roll_out(
        make_engine(CALL, long),
        compaction={"trigger_tokens": 10, "heading": heading},
        budgets=Budgets(max_model_len=len(branch.input_ids) + 1),
    )
    assert request.stop_reason is StopReason.MODEL_LENGTH
    assert not request.branches
    assert request.is_trained
    assert request.metrics["compaction/no_space_for_prompt"] == 1


async def test_failure_after_a_compaction_trains_nothing() -> None:
    engine = make_engine(CALL, "one", RuntimeError("gone"))
    request = await roll_out(engine, compaction={"trigger_tokens": 10})
    assert request.stop_reason is StopReason.FAILED
    assert len(request.branches) == 1
    assert not request.is_trained


def test_summary_is_added_to_the_last_user_message() -> None:
    settings = CompactionConfig(trigger_tokens=1, heading="So far:")
    system, task = Message(role="system", content="S"), Message(role="user", content="T")
    found = continue_from_summary([system, task], [], "<think>hm</think> done", settings)
    assert [(one.role, one.content) for one in found] == [
        ("system", "S"), ("user", "T\n\nSo far:\ndone"),
    ]  # fmt: skip
    assert task.content == "T"
    parts = [ContentPart(type="text", text="T")]
    found = continue_from_summary([Message(role="user", content=parts)], [], "done", settings)
    assert found[0].text == "T\n\nSo far:\ndone"
    found = continue_from_summary([system], [], "done", settings)
    assert [one.role for one in found] == ["system", "user"]


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (1, 3), (2, 5), (9, 5)])
def test_last_turns_are_completions_with_their_answers(count: int, kept: int) -> None:
    roles = ["assistant", "tool", "assistant", "tool", "tool"]
    history = [Message(role=role, content="x") for role in roles]
    assert len(last_turns(history, count)) == kept


def test_media_are_those_of_the_messages_that_stay() -> None:
    image = Message(role="user", content=[ContentPart(type="image")])
    text = Message(role="assistant", content="x")
    media = {"image": [1, 2, 3]}
    assert media_of([image, text, image], [image], media) == {"image": [1, 3]}
    assert media_of([image], [image], media) == {"image": [1]}
    assert media_of([text], [text], media) == {}
