"""The limits of bodies: the same in every dialect, and far above what agents send."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientSession
from hypothesis import given
from hypothesis import strategies as st

from agentrl.agent_loops.gateway import GatewaySettings
from agentrl.agent_loops.gateway.calls import CallError
from agentrl.agent_loops.gateway.limits import LIMITS, count_values
from agentrl.agent_loops.gateway.server import DIALECTS
from tests.fakes.gateway import serve

CHAT, RESPONSES, MESSAGES = DIALECTS
USER: dict[str, Any] = {"role": "user", "content": "Hi"}


def deep(levels: int) -> Any:
    return {"a": deep(levels - 1)} if levels else {}


def body_of(path: str, **fields: Any) -> dict[str, Any]:
    """Make a valid body of a dialect, with further fields."""
    return {"input" if path == RESPONSES else "messages": [USER]} | fields


def tool_of(path: str, name: str = "f", **schema: Any) -> dict[str, Any]:
    parameters = {"type": "object", **schema}
    if path == MESSAGES:
        return {"name": name, "input_schema": parameters}
    function = {"name": name, "parameters": parameters}
    inner = function if path == RESPONSES else {"function": function}
    return {"type": "function", **inner}


def calls_of(path: str, number: int, arguments: Any = "{}", id: str = "c") -> dict[str, Any]:
    """Make a body with an assistant's calls."""
    if path == RESPONSES:
        call = {"type": "function_call", "call_id": id, "name": "f", "arguments": arguments}
        return {"input": [USER, *[call] * number]}
    if path == CHAT:
        function = {"name": "f", "arguments": arguments}
        made: dict[str, Any] = {"content": None}
        made["tool_calls"] = [{"id": id, "type": "function", "function": function}] * number
    else:
        block = {"type": "tool_use", "id": id, "name": "f", "input": json.loads(arguments)}
        made = {"content": [block] * number}
    return {"messages": [USER, {"role": "assistant", **made}, USER]}


def floods(path: str) -> dict[str, tuple[dict[str, Any], str]]:
    """Return bodies above one limit, each with the field that the error names."""
    history = "input" if path == RESPONSES else "messages"
    small = [{}] * (LIMITS.values + 1)
    few = {f"p{n}": {} for n in range(500)}
    found: dict[str, tuple[dict[str, Any], str]] = {
        "messages": ({history: [USER] * 4097}, history),
        "parts": ({history: [{"role": "user", "content": [{"type": "text"}] * 1025}]}, "content"),
        "calls": (calls_of(path, 4097), "input" if path == RESPONSES else "calls"),
        "ids": (calls_of(path, 1, id="c" * 1025), "id"),
        "tools": (body_of(path, tools=[tool_of(path)] * 513), "tools"),
        "names": (body_of(path, tools=[tool_of(path, "f" * 1025)]), "name"),
        "properties": (
            body_of(path, tools=[tool_of(path, properties=few | {f"q{n}": {} for n in range(13)})]),
            "properties",
        ),
        "schemas": (body_of(path, tools=[tool_of(path, properties=few)] * 20), "tools"),
        "texts of tools": (body_of(path, tools=[tool_of(path, title="x" * (1 << 20))]), "tools"),
        "depth": (body_of(path, tools=[tool_of(path, properties=deep(48))]), "tools"),
        "model": (body_of(path, model="m" * 1025), "model"),
        "values": (body_of(path, metadata=small), "the body"),
        "keys": (body_of(path, **{"k" * 1025: 1}), "characters of a key"),
    }
    if path == MESSAGES:
        found["calls"] = (calls_of(path, 1025), "content")
    else:
        found["arguments"] = (calls_of(path, 1, json.dumps({"a": "x" * (1 << 20)})), "arguments")
        nested = json.dumps({"a": [{}] * 60_000})
        found["values of arguments"] = (calls_of(path, 2, nested), "arguments")
    if path != RESPONSES:
        stop = "stop" if path == CHAT else "stop_sequences"
        found["stops"] = (body_of(path, **{stop: ["x"] * 65}), stop)
        found["a stop"] = (body_of(path, **{stop: ["x" * 1025]}), stop)
    return found


CASES = [(path, name) for path in DIALECTS for name in floods(path)]


@pytest.mark.parametrize(("path", "name"), CASES)
def test_a_body_above_a_limit_is_refused_with_its_field_and_the_limit(path: str, name: str):
    body, field = floods(path)[name]
    with pytest.raises(CallError, match=r"at most [0-9]+") as caught:
        DIALECTS[path].read(json.dumps(body).encode())
    assert caught.value.status == 413
    assert caught.value.code == "limit_exceeded"
    assert field in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize("path", DIALECTS)
def test_bodies_of_large_honest_agents_are_read(path: str):
    """Eighty tools, a thousand messages, and megabytes of output full of JSON."""
    output = json.dumps([{"a": [1, 2], "b": '\\"x\\"'}] * 100_000)
    properties = {f"p{n}": {"type": "string", "description": "What."} for n in range(12)}
    tools = [tool_of(path, f"f{n}", properties=properties) for n in range(80)]
    history = [{"role": "user", "content": [{"type": "text", "text": "Go on."}]}] * 1000
    history.append({"role": "user", "content": output})
    key = "input" if path == RESPONSES else "messages"
    call = DIALECTS[path].read(json.dumps({key: history, "tools": tools}).encode())
    assert call.messages[-1].text == output
    assert (len(call.messages), len(call.tools)) == (1001, 80)


@pytest.mark.parametrize("path", DIALECTS)
def test_the_policy_chooses_the_names_of_arguments(path: str):
    written = {"name": "n" * 5000, "stop": ["x"] * 500, "messages": [1] * 5000, "k" * 2000: {}}
    call = DIALECTS[path].read(json.dumps(calls_of(path, 1, json.dumps(written))).encode())
    assert [c.arguments for m in call.messages for c in m.calls] == [written]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\,{[é\n'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\,{['), inner),
    max_leaves=30,
)


@given(JSON)
def test_values_are_counted_without_marks_in_strings(value: Any):
    def count(one: Any) -> int:
        inner = list(one.values()) if isinstance(one, dict) else one
        if not isinstance(inner, list):
            return 0
        return 1 + max(len(inner) - 1, 0) + sum(map(count, inner))

    bracket = [{}] * (LIMITS.values + 1)
    text = json.dumps([value, bracket]).encode()
    assert count_values(text) == count([value, bracket])


@pytest.mark.parametrize("path", DIALECTS)
def test_names_of_fields_become_metrics_only_if_they_are_names(path: str):
    unknown = {"seed": 1, "val/acc 1\nx": 1, "X-Evil: 1": 1, "é": 2, "a" * 60: 1}
    many = {f"field_{n}": 1 for n in range(200)}
    named = DIALECTS[path].read(json.dumps(body_of(path, **unknown)).encode()).ignored
    assert named == ("other", "seed")
    assert len(DIALECTS[path].read(json.dumps(body_of(path, **many)).encode()).ignored) <= 32


async def test_an_agent_cannot_make_metrics_without_end():
    async with serve(["Hi."]) as served, ClientSession() as http:
        head = {"Authorization": f"Bearer {served.session.key}"}
        for start in range(0, 300, 30):
            body = body_of(CHAT, **{f"f{n}": 1 for n in range(start, start + 30)})
            url = f"{served.session.base_url}/chat/completions"
            async with http.post(url, json=body, headers=head) as response:
                assert response.status == 200
                await response.read()
    assert len(served.request.metrics) < 150
    assert served.request.metrics["gateway/ignored_other"] > 100


@pytest.mark.parametrize("route", [*(path[3:] for path in DIALECTS), "/messages/count_tokens"])
async def test_requests_and_bytes_of_one_agent_are_bounded_before_they_are_read(route: str):
    limits = GatewaySettings(max_concurrent_calls=2, max_body_bytes=1000)
    async with serve(["Hi."], settings=limits) as served:
        host, port = served.gateway.address.removeprefix("http://").split(":")
        head = f"POST /v1{route} HTTP/1.1\r\nHost: x\r\nx-api-key: {served.session.key}\r\n"

        async def ask(rest: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write((head + rest).encode())
            return reader, writer

        async def status(rest: str) -> bytes:
            reader, writer = await ask(rest)
            line = await reader.readline()
            writer.close()
            return line.split()[1]

        assert await status("Content-Length: 1001\r\n\r\n") == b"413"
        chunk = f"{900:x}\r\n{'x' * 900}\r\n"
        chunked = "Transfer-Encoding: chunked\r\n\r\n"
        assert await status(chunked + chunk * 2) == b"413"
        assert await status(chunked + "zz\r\n") == b"400"
        slow = [await ask(chunked + chunk) for _ in range(2)]
        while served.session._num_bytes < 1800:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        assert await status(chunked + chunk) == b"429"
        slow += [await ask("Content-Length: 5\r\n\r\n") for _ in range(6)]
        while served.session._num_open < 8:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        assert await status("Content-Length: 5\r\n\r\n") == b"429"
        for _, writer in slow:
            writer.close()
        while served.session._num_open:  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)
        assert served.session._num_bytes == 0
    assert served.request.metrics["gateway/refused_calls"] == 2
    assert served.request.metrics["gateway/lost_clients"] == 8


async def test_a_refused_prompt_and_an_answered_call_leave_no_messages():
    async with serve(["Hi."]) as served, ClientSession() as http:
        head = {"Authorization": f"Bearer {served.session.key}"}
        url = f"{served.session.base_url}/chat/completions"
        for number in range(3):
            body = {"messages": [{"role": "user", "content": f"{number} " + "word " * 200_000}]}
            async with http.post(url, json=body, headers=head) as response:
                assert (await response.json())["error"]["code"] == "context_length_exceeded"
        trajectory = served.session._trajectory
        [(root, _)] = trajectory._tree._roots.values()
        assert root.children == []
        assert trajectory._opened == {}
        assert not any(served.session._calls.values())
        async with http.post(url, json={"messages": [USER]}, headers=head) as response:
            assert response.status == 200
    assert len(served.request.sequences) == 1
