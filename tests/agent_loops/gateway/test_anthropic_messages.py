"""Anthropic's messages, with the `anthropic` package."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import pytest

from agentrl.agent_loops.gateway import GatewaySettings
from tests.fakes.gateway import LOOKUP, Served, serve
from tests.fakes.plugins import calling, control_ids

TOOL: Any = {
    "name": "lookup",
    "description": "Look something up.",
    "input_schema": LOOKUP["function"]["parameters"],
}
ASKED: dict[str, Any] = {
    "model": "m",
    "max_tokens": 4000,
    "system": "Be brief.",
    "messages": [{"role": "user", "content": "2 + 3? <|im_end|>"}],
    "tools": [TOOL],
}


@asynccontextmanager
async def client(served: Served) -> AsyncIterator[anthropic.AsyncAnthropic]:
    session = served.session
    async with anthropic.AsyncAnthropic(
        base_url=session.anthropic_base_url, api_key=session.key, max_retries=0
    ) as opened:
        yield opened


def answer_calls(reply: anthropic.types.Message, *texts: str) -> list[Any]:
    """The history with a reply and the results of its calls, as parts."""
    calls = [block for block in reply.content if block.type == "tool_use"]
    results = [
        {
            "type": "tool_result",
            "tool_use_id": call.id,
            "content": [{"type": "text", "text": text}],
        }
        for call, text in zip(calls, texts, strict=True)
    ]
    said = {"role": "assistant", "content": reply.content}
    return [*ASKED["messages"], said, {"role": "user", "content": results}]


async def test_parallel_calls_and_their_results_continue_the_sampled_tokens() -> None:
    spoken = "<think>Hm.</think>Two." + calling("lookup", q="x") + calling("lookup", q="y", n=2)
    async with serve([spoken, "It is 5."]) as served, client(served) as api:
        first = await api.messages.create(**ASKED)
        assert first.stop_reason == "tool_use"
        assert [block.type for block in first.content] == [
            "thinking",
            "text",
            "tool_use",
            "tool_use",
        ]
        history = answer_calls(first, "five", "six<|im_start|>")
        second = await api.messages.create(**ASKED | {"messages": history})
        assert second.stop_reason == "end_turn"
        assert second.content[0].text == "It is 5."  # type: ignore[union-attr]
        assert second.usage.output_tokens == len("It is 5.") + 1
    request = served.request
    assert request.branches == []
    first_ids, second_ids = served.engine.calls
    assert second_ids == request.input_ids[: len(second_ids)]
    assert second_ids[: len(first_ids)] == first_ids
    observed = request.response_ids[request.turns[1].start : request.turns[1].end]
    assert control_ids(observed) == [*["<|im_start|>", "<|im_end|>"] * 2, "<|im_start|>"]
    assert [name for name in request.metrics if "think" in name or "arg" in name] == []
    assert "gateway/sequences_rewrite" not in request.metrics


async def test_a_stream_says_what_the_body_says() -> None:
    spoken = "<think>Hm.</think>Let me look. " + calling("lookup", q="x" * 200)
    async with serve([spoken]) as served, client(served) as api:
        whole = await api.messages.create(**ASKED)
        async with api.messages.stream(**ASKED) as stream:
            streamed = await stream.get_final_message()
    assert streamed.stop_reason == whole.stop_reason
    assert len(streamed.content) == len(whole.content) == 3
    for one, other in zip(streamed.content, whole.content, strict=True):
        given, expected = one.model_dump(), other.model_dump()
        names = ("type", "thinking", "signature", "text", "name", "input")
        assert [given.get(n) for n in names] == [expected.get(n) for n in names]
    assert streamed.usage.output_tokens == whole.usage.output_tokens


async def test_stop_sequences_and_max_tokens() -> None:
    async with serve(["One two three."]) as served, client(served) as api:
        stopped = await api.messages.create(**ASKED, stop_sequences=["two"])
        assert stopped.stop_reason == "stop_sequence"
        assert stopped.stop_sequence == "two"
        assert stopped.content[0].text == "One "  # type: ignore[union-attr]
        cut = await api.messages.create(**ASKED | {"max_tokens": 3})
        assert cut.stop_reason == "max_tokens"
        assert cut.content[0].text == "One"  # type: ignore[union-attr]
    assert served.request.metrics["gateway/cut_max_tokens"] == 1


async def test_errors_are_in_the_format_of_anthropic() -> None:
    async with serve(["Hi."]) as served, client(served) as api:
        forced = [*ASKED["messages"], {"role": "assistant", "content": "It is"}]
        with pytest.raises(anthropic.BadRequestError, match="last one is the assistant's"):
            await api.messages.create(**ASKED | {"messages": forced})
        image: Any = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        shown = [{"role": "user", "content": [image]}]
        with pytest.raises(anthropic.BadRequestError, match="reads text only"):
            await api.messages.create(**ASKED | {"messages": shown})
        with pytest.raises(anthropic.AuthenticationError, match="unknown key"):
            await api.with_options(api_key="wrong").messages.create(**ASKED)
    assert served.engine.calls == []


async def test_options_without_effect_are_reported() -> None:
    async with serve([calling("lookup", q="x") * 2]) as served, client(served) as api:
        choice: Any = {"type": "auto", "disable_parallel_tool_use": True}
        raw = await api.messages.with_raw_response.create(
            **ASKED, extra_body={"temperature": 0.2}, tool_choice=choice
        )
        assert raw.headers["x-agentrl-ignored"] == "temperature, parallel_tool_calls"


async def test_counting_tokens_is_one_of_the_calls_of_the_key() -> None:
    limited = GatewaySettings(max_calls=2)
    async with serve(["Hello."], settings=limited) as served, client(served) as api:
        given: dict[str, Any] = {k: v for k, v in ASKED.items() if k != "max_tokens"}
        await api.messages.count_tokens(**given)
        await api.messages.create(**ASKED)
        with pytest.raises(anthropic.PermissionDeniedError, match="all its 2 calls"):
            await api.messages.count_tokens(**given)
    assert served.request.metrics["gateway/refused_calls"] == 1


async def test_tokens_are_counted_without_a_call() -> None:
    async with serve(["Hello."]) as served, client(served) as api:
        given: dict[str, Any] = {k: v for k, v in ASKED.items() if k != "max_tokens"}
        counted = await api.messages.count_tokens(**given)
        assert served.engine.calls == []
        reply = await api.messages.create(**ASKED)
        assert counted.input_tokens == reply.usage.input_tokens == len(served.engine.calls[0])
        with pytest.raises(anthropic.BadRequestError, match="messages"):
            await api.messages.count_tokens(model="m", messages=[])
    assert served.request.metrics["gateway/completions"] == 1
