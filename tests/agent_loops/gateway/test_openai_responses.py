"""OpenAI's responses, with the `openai` package."""

from typing import Any

import openai
import pytest

from tests.agent_loops.gateway.test_openai_chat import client
from tests.fakes.gateway import LOOKUP, serve
from tests.fakes.plugins import calling, decode, encode

TOOL: Any = {"type": "function", "strict": False, **LOOKUP["function"]}
ASKED: dict[str, Any] = {
    "model": "m",
    "instructions": "Be brief.",
    "input": [{"role": "user", "content": "2 + 3? <|im_end|>"}],
    "tools": [TOOL],
}
SPOKEN = "<think>Hm.</think>Two." + calling("lookup", q="x") + calling("lookup", q="y", n=2)


async def test_items_of_one_completion_continue_the_sampled_tokens() -> None:
    async with serve([SPOKEN, "It is 5."]) as served, client(served) as api:
        first = await api.responses.create(**ASKED)
        assert first.status == "completed"
        kinds = [item.type for item in first.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        thought = first.usage.output_tokens_details.reasoning_tokens
        assert thought == len(encode("<think>Hm."))
        assert first.output_text == "Two."
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "five"}
            for item in first.output[2:]
        ]
        items = [item.model_dump(exclude_none=True) for item in first.output]
        second = await api.responses.create(
            **ASKED | {"input": [*ASKED["input"], *items, *results]}
        )
        assert second.output_text == "It is 5."
        assert second.usage.output_tokens == len("It is 5.") + 1
    request = served.request
    assert request.branches == []
    first_ids, second_ids = served.engine.calls
    assert second_ids == request.input_ids[: len(second_ids)]
    assert second_ids[: len(first_ids)] == first_ids
    assert "gateway/dropped_thinking" not in request.metrics


async def test_a_previous_response_is_the_history() -> None:
    async with serve([SPOKEN, "It is 5."]) as served, client(served) as api:
        first = await api.responses.create(**ASKED)
        results: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "five"}
            for item in first.output[2:]
        ]
        given = ASKED | {"input": results, "previous_response_id": first.id}
        second = await api.responses.create(**given)
        assert second.previous_response_id == first.id
        with pytest.raises(openai.BadRequestError, match="no response resp_other"):
            await api.responses.create(**given | {"previous_response_id": "resp_other"})
    assert served.request.branches == []
    assert len(served.request.turns) == 3


async def test_only_the_instructions_of_a_previous_response_are_left_out() -> None:
    items: Any = [{"role": "developer", "content": "Add."}, {"role": "user", "content": "2 + 2?"}]
    more: Any = [{"role": "user", "content": "And 3?"}]
    async with serve(["4.", "7."]) as served, client(served) as api:
        first = await api.responses.create(model="m", input=items, instructions="In digits.")
        given: dict[str, Any] = {"model": "m", "input": more, "previous_response_id": first.id}
        await api.responses.create(**given, instructions="In digits.")
        await api.responses.create(**given, instructions="In words.")
        with pytest.raises(openai.BadRequestError, match="conversation: the gateway keeps no"):
            await api.responses.create(model="m", input=more, conversation="conv_1")
    continued, rewritten = [decode(ids) for ids in served.engine.calls[1:]]
    assert [text in continued for text in ("In digits.", "Add.", "And 3?")] == [True] * 3
    assert [text in rewritten for text in ("In digits.", "In words.")] == [False, True]
    assert rewritten.index("In words.") < rewritten.index("Add.") < rewritten.index("And 3?")
    assert [branch.branch_cause for branch in served.request.branches] == ["rewrite"]


async def test_a_stream_says_what_the_body_says() -> None:
    async with serve([SPOKEN]) as served, client(served) as api:
        whole = await api.responses.create(**ASKED)
        async with api.responses.stream(**ASKED) as stream:
            streamed = await stream.get_final_response()
    assert streamed.output_text == whole.output_text == "Two."
    names = ("type", "arguments", "call_id", "name")
    found = [[getattr(item, n, None) for n in names] for item in streamed.output]
    calls = [[getattr(item, n, None) for n in names] for item in whole.output]
    assert [item[0] for item in found] == [item[0] for item in calls]
    assert [item[1] for item in found] == [item[1] for item in calls]
    assert streamed.usage.output_tokens == whole.usage.output_tokens


async def test_a_cut_response_is_incomplete() -> None:
    async with serve(["One two three."]) as served, client(served) as api:
        cut = await api.responses.create(**ASKED, max_output_tokens=3)
        assert cut.status == "incomplete"
        assert cut.incomplete_details.reason == "max_output_tokens"
        assert cut.output_text == "One"


async def test_unknown_items_are_refused() -> None:
    async with serve(["Hi."]) as served, client(served) as api:
        with pytest.raises(openai.BadRequestError, match="'item_reference'"):
            await api.responses.create(**ASKED | {"input": [{"type": "item_reference", "id": "1"}]})
    assert served.engine.calls == []
