"""The client of judges and simulated users: replies, limits, and errors that tell no secret."""

import asyncio
import contextlib
import gzip
import logging
import re
import sys
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from pydantic import ValidationError

from agentrl.clients.chat import (
    ChatBudget,
    ChatBudgetError,
    ChatClient,
    ChatConfig,
    ChatError,
    ChatReply,
)
from agentrl.errors import ConfigError, MissingExtraError
from agentrl.plugins.environment import install_command
from tests.fakes.chat_server import KEY, FakeChat, in_turn, serving, serving_of

HELLO = [{"role": "user", "content": "Hello?"}]


@asynccontextmanager
async def client_of(fake: FakeChat, **keys: Any) -> AsyncIterator[ChatClient]:
    client = ChatClient(ChatConfig(**fake.config(**keys)))
    try:
        yield client
    finally:
        await client.close()


async def test_a_reply_is_its_text_its_tokens_and_why_it_ended():
    async with serving(in_turn("Hi.")) as fake, client_of(fake) as client:
        reply = await client.complete(HELLO)
    assert reply == ChatReply(
        text="Hi.", prompt_tokens=10, completion_tokens=5, finish_reason="stop"
    )
    assert fake.asked == [{"model": "m", "messages": HELLO}]


async def test_sampling_keys_are_sent_and_a_call_may_override_them():
    keys = {"temperature": 0.5, "max_tokens": 9, "seed": 3, "stop": ["#"], "extra_body": {"k": 1}}
    async with serving(in_turn("Hi.")) as fake, client_of(fake, **keys) as client:
        await client.complete(HELLO, temperature=0.0, response_format={"type": "json_object"})
    (body,) = fake.asked
    assert {name: body[name] for name in ("temperature", "max_tokens", "seed", "stop", "k")} == {
        "temperature": 0.0, "max_tokens": 9, "seed": 3, "stop": ["#"], "k": 1,
    }  # fmt: skip
    assert body["response_format"] == {"type": "json_object"}


def endless(kind: str) -> Any:
    """Answer without end: plain, or as a small text of gzip."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        if kind == "gzip":
            response.headers["Content-Encoding"] = "gzip"
        await response.prepare(request)
        chunk = gzip.compress(bytes(50 * 1024**2)) if kind == "gzip" else b" " * 2**20
        with contextlib.suppress(ConnectionError):
            for _ in range(1 if kind == "gzip" else 10_000):
                await response.write(chunk)
                answer.num_bytes += len(chunk)  # pyright: ignore
        return response

    answer.num_bytes = 0  # pyright: ignore
    return answer


@pytest.mark.parametrize(
    ("kind", "words"), [("plain", "more than 16777216 bytes"), ("gzip", "compressed (gzip)")]
)
async def test_an_answer_without_end_is_read_no_further(kind: str, words: str):
    handler = endless(kind)
    fake = FakeChat()
    fake.answer = handler  # pyright: ignore
    async with serving_of(fake), client_of(fake, timeout_s=20) as client:
        with pytest.raises(ChatError, match=re.escape(words)):
            await client.complete(HELLO)
    assert handler.num_bytes < 40 * 1024**2


async def test_redirects_are_not_followed():
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    fake = FakeChat()
    fake.answer = answer  # pyright: ignore
    async with serving_of(fake), client_of(fake) as client:
        with pytest.raises(ChatError, match="status 307"):
            await client.complete(HELLO)
    assert asked == ["/v1/chat/completions"]


async def test_a_negative_count_refills_no_budget():
    usage = {"prompt_tokens": -1_000_000, "completion_tokens": -5, "total_tokens": -1_000_005}
    choice = {"index": 0, "finish_reason": "stop", "message": {"content": "12345"}}
    body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "usage": usage}
    async with serving(in_turn(body | {"choices": [choice]})) as fake, client_of(fake) as client:
        assert (await client.complete(HELLO)).num_tokens == 4
        assert client.budget.num_tokens == 4


async def test_tokens_are_estimated_where_the_server_does_not_count():
    async with serving(in_turn("12345"), counts=False) as fake, client_of(fake) as client:
        reply = await client.complete([{"role": "user", "content": "x" * 9}])
    assert (reply.prompt_tokens, reply.completion_tokens) == (3, 2)


async def test_what_fails_for_a_moment_is_tried_again():
    async with serving(in_turn(503, "Hi.")) as fake, client_of(fake, max_retries=2) as client:
        assert (await client.complete(HELLO)).text == "Hi."
    assert len(fake.asked) == 2


@pytest.mark.parametrize(
    ("answer", "status", "message"),
    [
        (400, 400, "status 400"),
        (401, 401, "status 401"),
        (500, 500, "status 500"),
        ({"choices": []}, None, "no reply in what it sent"),
        ({"choices": [{"message": 3}]}, None, "no reply in what it sent"),
        (None, None, "no reply within"),
    ],
)
async def test_no_reply_is_one_error_with_address_and_status_and_no_secret(
    answer: Any, status: int | None, message: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG)
    keys = {"api_key": KEY, "timeout_s": 0.2}
    async with serving(in_turn(answer)) as fake, client_of(fake, **keys) as client:
        with pytest.raises(ChatError, match=message) as caught:
            await client.complete(HELLO)
    assert caught.value.details.get("status") == status
    assert fake.address in str(caught.value)
    assert fake.headers[0]["Authorization"] == f"Bearer {KEY}"
    shown = [str(caught.value), *traceback.format_exception(caught.value), repr(client.config)]
    ours = [record.getMessage() for record in caplog.records if record.name.startswith("agentrl")]
    assert not [text for text in [*shown, *ours] if KEY in text]


async def test_address_without_a_server_raises_the_same_error_type():
    config = ChatConfig(base_url="http://127.0.0.1:9/v1", model="m", max_retries=0)
    client = ChatClient(config)
    with pytest.raises(ChatError, match=r"the model 'm' did not reply"):
        await client.complete(HELLO)
    await client.close()


async def test_a_call_ends_within_its_attempts_times_their_timeout():
    keys = {"timeout_s": 0.2, "max_retries": 1}
    async with serving(in_turn(None)) as fake, client_of(fake, **keys) as client:
        started = time.monotonic()
        with pytest.raises(ChatError):
            await client.complete(HELLO)
    assert time.monotonic() - started < 1.0


async def test_the_clients_budget_of_calls_is_kept():
    async with serving(in_turn("Hi.")) as fake, client_of(fake, max_calls=2) as client:
        await client.complete(HELLO)
        await client.complete(HELLO)
        with pytest.raises(ChatBudgetError, match="2 of 2 calls"):
            await client.complete(HELLO)
    assert len(fake.asked) == 2


async def test_token_budget_of_a_conversation_is_separate_from_the_clients():
    async with serving(in_turn("Hi.")) as fake, client_of(fake) as client:
        small, other = ChatBudget(max_tokens=20), ChatBudget(max_tokens=20)
        await client.complete(HELLO, budget=small)
        await client.complete(HELLO, budget=small)
        with pytest.raises(ChatBudgetError, match="30 of 20 tokens"):
            await client.complete(HELLO, budget=small)
        await client.complete(HELLO, budget=other)
    assert (small.num_calls, small.num_tokens, other.num_tokens) == (2, 30, 15)
    assert (client.budget.num_calls, client.budget.num_tokens) == (3, 45)


async def test_so_many_calls_at_once_and_no_more():
    serve = serving(in_turn("Hi."), seconds=0.02)
    async with serve as fake, client_of(fake, max_concurrency=3) as client:
        await asyncio.gather(*(client.complete(HELLO) for _ in range(12)))
    assert fake.most_open == 3


async def test_calls_keep_the_rate():
    async with serving(in_turn("Hi.")) as fake, client_of(fake, rate_limit=20) as client:
        started = time.monotonic()
        await asyncio.gather(*(client.complete(HELLO) for _ in range(5)))
        assert time.monotonic() - started > 0.15


async def test_a_cancelled_call_gives_its_place_back():
    serve = serving(in_turn(None, "Hi."))
    async with serve as fake, client_of(fake, max_concurrency=1) as client:
        hanging = asyncio.create_task(client.complete(HELLO))
        await fake.arrived.wait()
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        assert (await client.complete(HELLO)).text == "Hi."


def test_one_client_serves_several_event_loops():
    async def main(client: ChatClient | None, port: int) -> tuple[ChatClient, int]:
        async with serving(in_turn("Hi."), port=port) as fake:
            client = client or ChatClient(ChatConfig(**fake.config()))
            try:
                assert (await client.complete(HELLO)).text == "Hi."
            finally:
                await client.close()
                await client.close()
            return client, fake.port

    asyncio.run(main(*asyncio.run(main(None, 0))))


async def test_without_a_key_none_of_the_environments_is_sent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    async with serving(in_turn("Hi.")) as fake, client_of(fake) as client:
        await client.complete(HELLO)
    assert KEY not in str(fake.headers)


async def test_a_key_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", KEY)
    async with serving(in_turn("Hi.")) as fake, client_of(fake, api_key_env="MY_KEY") as client:
        await client.complete(HELLO)
    assert KEY in fake.headers[0]["Authorization"]


def test_a_variable_without_a_key_is_named_at_once():
    config = ChatConfig(base_url="http://here/v1", model="m", api_key_env="NO_SUCH_KEY")
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        ChatClient(config)


def test_a_key_is_shown_nowhere():
    config = ChatConfig(base_url="http://here/v1", model="m", api_key=KEY)  # type: ignore[arg-type]
    for shown in (repr(config), str(config), config.model_dump_json(), str(config.model_dump())):
        assert KEY not in shown
    with pytest.raises(ValidationError) as caught:
        ChatConfig.model_validate({"model": "m", "api_key": KEY})
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    "keys",
    [
        {"base_url": "here/v1"},
        {"base_url": f"http://user:{KEY}@here/v1"},
        {"base_url": f"http://here/v1?key={KEY}"},
        {"api_key": KEY, "api_key_env": "MY_KEY"},
        {"modl": "m"},
        {"timeout_s": 0},
    ],
)
def test_a_config_that_means_nothing_is_refused_without_a_secret(keys: dict[str, Any]):
    with pytest.raises(ValidationError) as caught:
        ChatConfig.model_validate({"base_url": "http://here/v1", "model": "m", **keys})
    assert KEY not in str(caught.value)


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(MissingExtraError) as caught:
        ChatClient(ChatConfig(base_url="http://here/v1", model="m"))
    assert caught.value.details["install"] == install_command("openai")
