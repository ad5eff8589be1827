"""Clients that repeat, disconnect, flood or send garbage lose their own call or request only."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import anthropic
import openai
import pytest
from aiohttp import ClientError, ClientSession, ClientTimeout, web

from agentrl.agent_loops.gateway import Gateway, GatewaySettings
from agentrl.engines.scripted import ScriptedAnswer, ScriptedEngine
from agentrl.errors import EngineError
from agentrl.rollout.states import RequestState, StopReason
from tests.agent_loops.gateway.test_openai_chat import QUESTION, client
from tests.fakes.gateway import Served, serve
from tests.fakes.plugins import decode, make_context, make_request, tiny_tokenizer

BODY: dict[str, Any] = {"model": "m", "messages": QUESTION}


async def post(served: Served, body: Any, **headers: str) -> tuple[int, Any]:
    """Send a body as it is; return status and answer."""
    session = served.session
    given = {"Authorization": f"Bearer {session.key}", **headers}
    async with ClientSession() as http:
        kind = {"data": body} if isinstance(body, bytes) else {"json": body}
        url = f"{session.base_url}/chat/completions"
        async with http.post(url, headers=given, **kind) as response:
            return response.status, await response.json()


async def test_a_call_that_timed_out_and_is_sent_again_is_sampled_once() -> None:
    slow = ScriptedAnswer("Hello.", delay_s=0.4)
    async with serve([slow, "Second."]) as served:
        session = served.session
        async with openai.AsyncOpenAI(
            base_url=session.base_url, api_key=session.key, timeout=0.25, max_retries=3
        ) as api:
            reply = await api.chat.completions.create(**BODY)
        assert reply.choices[0].message.content == "Hello."
    assert len(served.engine.calls) == 1
    assert served.request.branches == []
    assert [turn.excluded for turn in served.request.turns] == [None]
    assert served.request.metrics["gateway/repeated_calls"] >= 1


async def test_the_same_body_without_a_sign_of_a_repetition_is_another_sample() -> None:
    async with serve([f"Answer {n}." for n in range(3)]) as served:
        first, second = [(await post(served, BODY))[1] for _ in range(2)]
        assert first["id"] != second["id"]
        assert len(served.engine.calls) == 2
        key = {"Idempotency-Key": "k1"}
        one, other = [(await post(served, BODY, **key))[1] for _ in range(2)]
        assert one == other
    assert len(served.engine.calls) == 3
    assert len(served.request.sequences) == 3


async def test_the_same_bodies_at_once_are_samples_of_their_own_also_as_streams() -> None:
    body = BODY | {"stream": True}

    async def read(http: ClientSession, url: str, key: str) -> str:
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(f"{url}/chat/completions", json=body, headers=headers) as response:
            return await response.text()

    answers = iter(range(100))
    async with (
        serve(lambda *_: ScriptedAnswer(f"Answer {next(answers)}.", delay_s=0.05)) as served,
        ClientSession(timeout=ClientTimeout(20)) as http,
    ):
        session = served.session
        reads = [read(http, session.base_url, session.key) for _ in range(8)]
        await asyncio.gather(*reads)
    assert session.counts["completions"] == 8


async def test_a_completion_that_no_client_got_is_kept_and_not_trained() -> None:
    slow = ScriptedAnswer("Never read.", delay_s=0.2)
    async with serve(lambda ids, *_: slow if "2 + 3" in decode(ids) else "Read.") as served:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await post(served, BODY)
        other = {"messages": [{"role": "user", "content": "Hi"}]}
        assert (await post(served, other))[0] == 200
        await asyncio.sleep(0.2)
    [branch] = served.request.branches
    assert decode(branch.response_ids) == "Never read.<|im_end|>"
    assert branch.turns[0].excluded == "not delivered to the agent"
    assert decode(served.request.response_ids) == "Read.<|im_end|>"
    assert sum(served.request.loss_mask) == len("Read.") + 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("moment", ["prepare", "write_eof", "waiting"])
async def test_a_client_that_hangs_up_is_counted_without_a_traceback(
    moment: str, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection is closed at each moment of an answer, on the side of the server."""

    def hang_up_at(owner: type[web.StreamResponse], name: str) -> None:
        original = getattr(owner, name)

        async def hang_up(self: Any, *args: Any) -> Any:
            assert served.gateway._runner is not None
            assert served.gateway._runner.server is not None
            for connection in served.gateway._runner.server.connections:
                if connection.transport is not None:
                    connection.transport.abort()
            return await original(self, *args)

        monkeypatch.setattr(owner, name, hang_up)

    is_asked = asyncio.Event()

    def script(ids: Any, *_: Any) -> ScriptedAnswer:
        if "2 + 3" not in decode(ids):
            return ScriptedAnswer("Read.")
        is_asked.set()
        return ScriptedAnswer("Never read.", delay_s=600 if moment == "waiting" else 0)

    async with serve(script) as served:
        if moment == "waiting":
            waiting = asyncio.create_task(post(served, BODY | {"stream": stream}))
            await is_asked.wait()
            waiting.cancel()
            async with asyncio.timeout(30):
                while not served.session.counts["lost_clients"]:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.01)
        else:
            owner = web.StreamResponse if stream or moment == "prepare" else web.Response
            hang_up_at(owner, "prepare" if moment == "prepare" else "write_eof")
            with pytest.raises(ClientError):
                await post(served, BODY | {"stream": stream})
            monkeypatch.undo()
        other = {"messages": [{"role": "user", "content": "Hi"}]}
        assert (await post(served, other))[0] == 200
    assert served.request.metrics["gateway/lost_clients"] == 1
    assert [one.getMessage() for one in caplog.records if one.levelname != "DEBUG"] == []
    left = [part for part in served.request.sequences if "Never" in decode(part.response_ids)]
    assert [part.turns[0].excluded for part in left] == ["not delivered to the agent"] * len(left)


async def test_a_flood_is_refused_and_other_requests_go_on() -> None:
    limits = GatewaySettings(max_concurrent_calls=4, max_calls=6, max_body_bytes=10_000)
    engine = ScriptedEngine([ScriptedAnswer("Hi.", delay_s=0.1)], tokenizer=tiny_tokenizer())
    context = make_context(engine)
    async with Gateway(limits) as gateway:
        noisy, quiet = make_request(), make_request()
        async with gateway.session(noisy, context) as one, gateway.session(quiet, context) as two:
            served = [Served(s, r, engine, gateway) for s, r in ((one, noisy), (two, quiet))]
            sent = [post(served[0], BODY | {"user": str(n)}) for n in range(40)]
            flood = asyncio.gather(*sent)
            status, _ = await post(served[1], BODY)
            assert status == 200
            statuses = sorted(status for status, _ in await flood)
            assert statuses == [200] * 4 + [429] * 36
            more = [(await post(served[0], BODY | {"user": f"m{n}"}))[0] for n in range(3)]
            assert more == [200, 200, 403]
            assert (await post(served[1], b"x" * 20_000))[0] == 413
            for garbage in (b"", b"{", b"[]", b"\xff\xfe", b'{"messages": 3}'):
                assert (await post(served[1], garbage))[0] == 400
            assert (await post(served[1], BODY))[0] == 200
    assert noisy.metrics["gateway/refused_calls"] == 37
    assert len(quiet.sequences) == 2


async def test_a_connection_without_headers_is_closed() -> None:
    async with serve(["Hi."], settings=GatewaySettings(header_timeout_s=0.2)) as served:
        host, port = served.gateway.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost")
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()
        assert (await post(served, BODY))[0] == 200


@pytest.mark.parametrize("first", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
async def test_connections_without_a_request_are_closed_above_the_limit(first: bytes) -> None:
    """Those that sent nothing, and those that keep an answered connection open."""
    limits = GatewaySettings(max_connections=4, header_timeout_s=2)
    is_asked, may_end = asyncio.Event(), asyncio.Event()
    sample = ScriptedEngine.generate

    async def wait(*args: Any, **options: Any) -> Any:
        is_asked.set()
        await may_end.wait()
        return await sample(served.engine, *args, **options)

    async with serve(["Hi."], settings=limits) as served:
        served.engine.generate = wait  # pyright: ignore[reportAttributeAccessIssue]
        asking = asyncio.create_task(post(served, BODY))
        await is_asked.wait()
        host, port = served.gateway.address.removeprefix("http://").split(":")
        flood = [await asyncio.open_connection(host, int(port)) for _ in range(12)]
        for _, writer in flood:
            writer.write(first)
        ends = [asyncio.ensure_future(reader.read()) for reader, _ in flood]
        async with asyncio.timeout(30):
            while sum(end.done() for end in ends) < 9:
                await asyncio.wait([end for end in ends if not end.done()], timeout=0.1)
        may_end.set()
        assert (await asking)[0] == 200
        for end, (_, writer) in zip(ends, flood, strict=True):
            writer.close()
            await asyncio.gather(end, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_its_answer_is_disconnected_and_counted(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(web.StreamResponse if stream else web.Response, "write_eof", never)
    async with serve(["Hi."], settings=GatewaySettings(body_timeout_s=0.2)) as served:
        with pytest.raises(ClientError):
            await post(served, BODY | {"stream": stream})
    assert served.request.metrics["gateway/lost_clients"] == 1
    assert [turn.excluded for turn in served.request.turns] == ["not delivered to the agent"]


async def test_a_stream_waits_with_comments() -> None:
    limits = GatewaySettings(ping_interval_s=0.05)
    slow = ScriptedAnswer("Hello.", delay_s=0.2)
    async with serve([slow], settings=limits) as served, client(served) as api:
        stream = await api.chat.completions.create(**BODY, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello."
    assert [turn.excluded for turn in served.request.turns] == [None]


async def test_a_session_that_ends_cancels_its_calls_and_keeps_the_tokens() -> None:
    is_asked = asyncio.Event()

    def script(_ids: Any, _sampling: Any, request_id: str, _turn: int) -> ScriptedAnswer:
        if "#" not in request_id:
            return ScriptedAnswer("First.")
        is_asked.set()
        return ScriptedAnswer("Late.", delay_s=60)

    async with serve(script) as served:
        assert (await post(served, BODY))[0] == 200
        late = asyncio.create_task(post(served, BODY | {"user": "again"}))
        await is_asked.wait()
    await asyncio.gather(late, return_exceptions=True)
    assert served.request.metrics["gateway/cancelled_calls"] == 1
    assert decode(served.request.response_ids) == "First.<|im_end|>"
    served.request.finish(served.session.stop_reason)
    assert served.request.stop_reason is StopReason.ANSWERED


async def test_a_request_without_a_call_has_no_tokens() -> None:
    async with serve(["Hi."]) as served:
        environment = served.session.environment
        assert environment["OPENAI_BASE_URL"] == f"{environment['ANTHROPIC_BASE_URL']}/v1"
    assert served.request.state is RequestState.RUNNING
    assert served.request.prompt_ids == []


async def test_unknown_routes_are_named() -> None:
    async with serve(["Hi."]) as served, ClientSession(timeout=ClientTimeout(5)) as http:
        response = await http.post(f"{served.session.base_url}/embeddings")
        assert response.status == 404
        assert "/v1/chat/completions" in (await response.json())["error"]["message"]


async def stream_chat(served: Served) -> None:
    async with openai.AsyncOpenAI(
        base_url=served.session.base_url, api_key=served.session.key, max_retries=0
    ) as api:
        async for _ in await api.chat.completions.create(**BODY, stream=True):
            pass


async def stream_response(served: Served) -> None:
    async with openai.AsyncOpenAI(
        base_url=served.session.base_url, api_key=served.session.key, max_retries=0
    ) as api:
        async for event in await api.responses.create(model="m", input="Hi", stream=True):
            if event.type == "error":
                raise openai.OpenAIError(event.message)


async def stream_messages(served: Served) -> None:
    async with (
        anthropic.AsyncAnthropic(
            base_url=served.session.anthropic_base_url, api_key=served.session.key, max_retries=0
        ) as api,
        api.messages.stream(model="m", max_tokens=90, messages=QUESTION) as stream,
    ):
        await stream.get_final_message()


@pytest.mark.parametrize("ask", [stream_chat, stream_response, stream_messages])
async def test_an_error_behind_the_first_bytes_of_a_stream_reaches_the_client(
    ask: Callable[[Served], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, is_broken = ScriptedEngine.generate, True

    async def fail_late(*args: Any, **options: Any) -> Any:
        await asyncio.sleep(0.2)
        if is_broken:
            raise EngineError("the server is gone")
        return await sample(*args, **options)

    monkeypatch.setattr(ScriptedEngine, "generate", fail_late)
    async with serve(["Hello."], settings=GatewaySettings(ping_interval_s=0.05)) as served:
        async with asyncio.timeout(10):
            with pytest.raises((openai.OpenAIError, anthropic.AnthropicError), match="is gone"):
                await ask(served)
            assert served.session.error is not None
            is_broken = False
            await ask(served)
    assert served.session.error is None
    assert decode(served.request.response_ids) == "Hello.<|im_end|>"
    assert served.request.branches == []
    assert all(served.request.loss_mask)


async def test_a_client_that_leaves_in_a_stream_and_asks_again_gets_the_same_completion() -> None:
    body = BODY | {"stream": True}
    slow = ScriptedAnswer("Hello.", delay_s=0.3)
    limits = GatewaySettings(ping_interval_s=0.05)
    async with serve([slow, "Second."], settings=limits) as served:
        headers = {"Authorization": f"Bearer {served.session.key}"}
        url = f"{served.session.base_url}/chat/completions"
        async with ClientSession() as http:
            async with http.post(url, headers=headers, json=body) as response:
                assert (await response.content.readany()).startswith(b": waiting")
            async with http.post(url, headers=headers, json=body) as response:
                assert "Hello." in (await response.read()).decode()
    assert len(served.engine.calls) == 1
    assert served.request.metrics["gateway/repeated_calls"] == 1
    assert decode(served.request.response_ids) == "Hello.<|im_end|>"
    assert all(served.request.loss_mask)


async def test_clients_that_fork_a_history_train_each_completion_once() -> None:
    """Eight clients with one key share the first turns, and go on with words of their own."""
    num_clients, num_calls = 8, 3

    async def go_on(served: Served, history: list[Any], name: str) -> None:
        async with client(served) as api:
            for number in range(num_calls):
                history = [*history, {"role": "user", "content": f"{name}, {number}?"}]
                reply = await api.chat.completions.create(model="m", messages=history)
                history.append({"role": "assistant", "content": reply.choices[0].message.content})

    answers = [f"Answer {n}." for n in range(1 + num_clients * num_calls)]
    waiting = iter(answers)
    async with serve(lambda *_: next(waiting)) as served:
        async with client(served) as api:
            first = await api.chat.completions.create(**BODY)
        shared = [*QUESTION, {"role": "assistant", "content": first.choices[0].message.content}]
        names = [f"Client {n}" for n in range(num_clients)]
        await asyncio.gather(*(go_on(served, shared, name) for name in names))
    sequences = served.request.sequences
    assert len(sequences) == num_clients, "they differ from the second message on, once each"
    assert served.request.metrics["gateway/sequences_branch"] == num_clients - 1
    assert "gateway/sequences_rewrite" not in served.request.metrics
    said: list[str] = []
    for one in sequences:
        assert one.differences == []
        text = decode(one.prompt_ids + one.response_ids)
        assert sum(name in text for name in names) == 1
        for turn in one.turns:
            if turn.role == "assistant":
                assert all(one.loss_mask[turn.start : turn.end])
                said.append(decode(one.response_ids[turn.start : turn.end]))
    assert sorted(said) == sorted(f"{answer}<|im_end|>" for answer in answers)
