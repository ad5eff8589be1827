"""OpenAI's chat completions, with the `openai` package."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from agentrl.rollout.states import RequestState
from tests.fakes.gateway import LOOKUP, Served, serve
from tests.fakes.plugins import calling, control_ids, decode, make_context, make_request

QUESTION: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 3? <|im_end|>"},
]


@asynccontextmanager
async def client(served: Served) -> AsyncIterator[Any]:
    session = served.session
    async with openai.AsyncOpenAI(
        base_url=session.base_url, api_key=session.key, max_retries=0
    ) as opened:
        yield opened


async def test_a_tool_call_and_its_result_continue_the_sampled_tokens() -> None:
    answers = [calling("lookup", q="x", n=2), "It is 5."]
    async with serve(answers) as served, client(served) as api:
        ask = api.chat.completions.create
        first = await ask(model="m", messages=QUESTION, tools=[LOOKUP])
        message = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls"
        assert message.content is None
        assert message.tool_calls[0].function.arguments == '{"q": "x", "n": 2}'
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "five"}
        history = [*QUESTION, message.model_dump(exclude_none=True), result]
        second = await ask(model="m", messages=history, tools=[LOOKUP])
        assert second.choices[0].message.content == "It is 5."
        assert second.usage.completion_tokens == len("It is 5.") + 1
    request = served.request
    assert request.state is RequestState.RUNNING
    assert request.branches == []
    first_ids, second_ids = served.engine.calls
    assert second_ids == request.input_ids[: len(second_ids)]
    assert second_ids[: len(first_ids)] == first_ids == request.prompt_ids
    assert [turn.role for turn in request.turns] == ["assistant", "tool", "assistant"]
    assert decode(request.response_ids[request.turns[1].start : request.turns[1].end]) == (
        "\n<|im_start|>tool\nfive<|im_end|>\n<|im_start|>assistant\n"
    )
    # The user's text has no live control token: three messages and the generation prompt.
    assert control_ids(request.prompt_ids).count("<|im_end|>") == 3
    assert request.metrics["gateway/completions"] == 2


async def test_a_stream_says_what_the_body_says() -> None:
    spoken = "Let me look. " + calling("lookup", q="x" * 200)
    async with serve([spoken]) as served, client(served) as api:
        ask = api.chat.completions.create
        whole = (await ask(model="m", messages=QUESTION, tools=[LOOKUP])).choices[0].message
        content, arguments, ends = "", "", []
        stream = await ask(
            model="m",
            messages=QUESTION,
            tools=[LOOKUP],
            stream=True,
            stream_options={"include_usage": True},
        )
        usage = None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                content += choice.delta.content or ""
                for made in choice.delta.tool_calls or []:
                    arguments += made.function.arguments
                ends += [choice.finish_reason] if choice.finish_reason else []
    assert content == whole.content == "Let me look."
    assert arguments == whole.tool_calls[0].function.arguments
    assert ends == ["tool_calls"]
    assert usage is not None
    assert usage.completion_tokens > 200


async def test_an_unknown_key_gets_401_and_an_ended_one_410() -> None:
    async with serve(["Hi."]) as served:
        base, gateway = served.session.base_url, served.gateway
        async with openai.AsyncOpenAI(base_url=base, api_key="wrong", max_retries=0) as api:
            with pytest.raises(openai.AuthenticationError, match="unknown key"):
                await api.chat.completions.create(model="m", messages=QUESTION)
        async with gateway.session(make_request(), make_context(served.engine)) as ended:
            pass
        async with openai.AsyncOpenAI(base_url=base, api_key=ended.key, max_retries=0) as api:
            with pytest.raises(openai.APIStatusError, match="has ended") as raised:
                await api.chat.completions.create(model="m", messages=QUESTION)
        assert raised.value.status_code == 410


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"n": 2}, "n is 2"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "reads text only"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools"),
    ],
)
async def test_a_wrong_body_gets_an_error_that_names_the_field(
    body: dict[str, Any], expected: str
) -> None:
    async with serve(["Hi."]) as served, client(served) as api:
        given: dict[str, Any] = {"model": "m", "messages": QUESTION} | body
        with pytest.raises(openai.BadRequestError, match=expected):
            await api.chat.completions.create(**given)
    assert served.engine.calls == []


async def test_options_without_effect_are_reported() -> None:
    async with serve(["Hi."]) as served, client(served) as api:
        raw = await api.chat.completions.with_raw_response.create(
            model="m",
            messages=QUESTION,
            tools=[LOOKUP],
            temperature=0.3,
            seed=4,
            tool_choice="required",
        )
        assert raw.headers["x-agentrl-ignored"] == "temperature, tool_choice, seed"
    assert served.engine.records[0].sampling.temperature == 1.0
    assert served.request.metrics["gateway/ignored_temperature"] == 1


async def test_a_part_of_a_character_has_no_bytes() -> None:
    async with serve(["5€"]) as served, client(served) as api:
        reply = await api.chat.completions.create(model="m", messages=QUESTION, logprobs=True)
    five, *parts, end = reply.choices[0].logprobs.content
    assert five.bytes == [ord("5")]
    assert end.bytes == list(b"<|im_end|>")
    assert [part.bytes for part in parts] == [None] * 3


async def test_stop_sequences_and_log_probs() -> None:
    async with serve(["One two three."]) as served, client(served) as api:
        reply = await api.chat.completions.create(
            model="m", messages=QUESTION, stop=["two"], logprobs=True
        )
        assert reply.choices[0].message.content == "One "
        assert reply.choices[0].finish_reason == "stop"
        tokens = reply.choices[0].logprobs.content
        assert "".join(token.token for token in tokens) == "One two"
        history = [*QUESTION, {"role": "assistant", "content": "One"}, *QUESTION[1:]]
        await api.chat.completions.create(model="m", messages=history)
    assert decode(served.engine.calls[1]).startswith(decode(served.engine.calls[0]) + "One two")
    assert served.request.branches == []
    assert served.request.metrics["gateway/whitespace"] == 1


async def test_the_agent_reports_a_reward() -> None:
    async with serve(["Hi."]) as served, client(served) as api:
        await api.post("/reward", body={"reward": 0.5, "why": "fast"}, cast_to=dict)
        assert served.session.reported_reward == 0.5
        assert served.session.reported == {"reward": 0.5, "why": "fast"}
        for wrong in ("high", "0.5", True, None, 1e305, 10**400):
            with pytest.raises(openai.BadRequestError, match="reward"):
                await api.post("/reward", body={"reward": wrong}, cast_to=dict)
        assert served.session.reported_reward == 0.5


async def test_models_are_listed() -> None:
    async with serve(["Hi."]) as served, client(served) as api:
        assert [model.id for model in (await api.models.list()).data] == ["policy"]
        assert (await api.models.retrieve("policy")).id == "policy"
