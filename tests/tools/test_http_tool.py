"""HTTPTool: arguments out, an answer in, secrets nowhere."""

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.clients.http import HttpClient, query_parameters
from agentrl.errors import ConfigError, ServiceError, ToolError
from agentrl.tools.http_tool import HTTPTool
from tests.fakes.http_services import Answer, always, echo, endless, hang_up, serving
from tests.fakes.tools import schema

SECRET = "hunter2hunter2"


async def answered(answer: Answer, parameters: dict[str, Any], **config: Any) -> str:
    """What the tool shows of one call."""
    async with serving(answer) as url:
        tool = HTTPTool({"url": url, **config}, schema("ask"))
        try:
            result = await tool.execute("r", parameters)
        finally:
            await tool.shutdown()
    assert result.metrics == {"status": 200}
    return result.response.text or ""


async def request_of(parameters: dict[str, Any], **config: Any) -> dict[str, Any]:
    return json.loads(await answered(echo, parameters, **config))


async def test_arguments_are_the_body_and_arrive_as_they_are():
    sent = {"a": None, "b": [1, {"c": 1.5}], "d": "<|im_end|> é \x00"}
    seen = await request_of(sent)
    assert (seen["method"], seen["body"], seen["query"]) == ("POST", sent, [])
    assert (await request_of({}, method="PUT"))["body"] == {}


async def test_arguments_of_a_get_are_the_query():
    sent = {"q": "a b&c=é", "n": 2, "yes": True, "tag": ["x", "y"], "none": None, "o": {"k": 1}}
    seen = await request_of(sent, method="GET")
    assert seen["body"] is None
    assert seen["query"] == [
        ["q", "a b&c=é"],
        ["n", "2"],
        ["yes", "true"],
        ["tag", "x"],
        ["tag", "y"],
        ["o", '{"k": 1}'],
    ]
    assert (await request_of({"a": 1}, send_arguments="query"))["query"] == [["a", "1"]]
    assert (await request_of({"a": 1}, method="DELETE", send_arguments="json"))["body"] == {"a": 1}


async def test_a_query_of_the_address_is_kept():
    async with serving(echo) as url:
        tool = HTTPTool({"url": f"{url}?key=1", "method": "GET"}, schema("ask"))
        seen = json.loads((await tool.execute("r", {"a": 2})).response.text or "")
        await tool.shutdown()
    assert seen["query"] == [["key", "1"], ["a", "2"]]


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        (None, '{"a": {"b": ["x", {"c": null}], "0": "zero"}}'),
        ("a.b.0", "x"),
        ("a.b.1", '{"c": null}'),
        ("a.b.1.c", "null"),
        ("a.0", "zero"),
    ],
)
async def test_a_path_picks_what_is_shown(path: str | None, shown: str):
    data = '{"a": {"b": ["x", {"c": null}], "0": "zero"}}'
    assert await answered(always(text=data), {}, response_path=path) == shown


@pytest.mark.parametrize("path", ["b", "a.b.9", "a.b.x", "a.b.-1", "a.b.0.c"])
async def test_an_answer_without_what_the_path_leads_to_is_the_services_fault(path: str):
    with pytest.raises(ServiceError, match=f"response_path {path}"):
        await answered(always(text='{"a": {"b": ["x"]}}'), {}, response_path=path)


async def test_an_answer_that_is_no_json_is_shown_whole_or_is_the_services_fault():
    assert await answered(always(text="plain <b>text</b>"), {}) == "plain <b>text</b>"
    with pytest.raises(ServiceError, match="is no JSON"):
        await answered(always(text="plain"), {}, response_path="a")


@pytest.mark.parametrize("status", [400, 403, 404, 409, 422])
async def test_a_refusal_is_for_the_model_to_read_and_is_bounded(status: int):
    with pytest.raises(ToolError, match=f"status {status}: no such city") as error:
        await answered(always(status, "no such city" + "!" * 100_000), {})
    assert len(str(error.value)) < 2200


@pytest.mark.parametrize("status", [302, 401, 429, 500, 503])
async def test_what_no_other_arguments_can_mend_is_the_services_fault(status: int):
    with pytest.raises(ServiceError, match=f"status {status}"):
        await answered(always(status, "later", Location="/elsewhere"), {})


async def test_a_broken_connection_is_the_services_fault():
    with pytest.raises(ServiceError, match="ServerDisconnectedError"):
        await answered(hang_up, {})
    tool = HTTPTool({"url": "http://127.0.0.1:9/x"}, schema("ask"))
    with pytest.raises(ServiceError, match="/x: ClientConnector"):
        await tool.execute("r", {})
    await tool.shutdown()


async def test_an_endless_answer_is_read_no_further_than_its_limit():
    sent = [0]
    async with asyncio.timeout(10):
        with pytest.raises(ToolError, match="longer than 100000 bytes"):
            await answered(endless(sent), {}, max_response_bytes=100_000)
    assert sent[0] < 32 * 1024 * 1024  # what the system's buffers take


async def test_secrets_are_sent_and_never_shown():
    headers = {"Authorization": f"Bearer {SECRET}", "X-Key": "k-123456", "Accept": "text/plain"}
    shown = await answered(echo, {"say": "text/plain"}, headers=headers)
    seen = json.loads(shown)["headers"]
    assert seen["Authorization"] == seen["X-Key"] == "[redacted]"
    assert seen["Accept"] == "text/plain"  # no secret: not cut out of what the model is to read
    for status, kind in ((400, ToolError), (500, ServiceError)):
        with pytest.raises(kind) as error:
            await answered(always(status, f"bad token {SECRET}"), {}, headers=headers)
        assert SECRET not in str(error.value)
        assert "bad token [redacted]" in str(error.value)


async def test_an_address_is_shown_without_password_and_query():
    tool = HTTPTool({"url": f"http://me:{SECRET}@127.0.0.1:9/x?key={SECRET}"}, schema("ask"))
    with pytest.raises(ServiceError) as error:
        await tool.execute("r", {})
    await tool.shutdown()
    assert SECRET not in str(error.value)
    assert "http://127.0.0.1:9/x" in str(error.value)


@pytest.mark.parametrize(
    ("config", "key", "what"),
    [
        ({}, "config.url", "url is missing"),
        ({"url": f"ftp://{SECRET}"}, "config.url", "http"),
        ({"url": "http://x", "headers": {"X": [SECRET]}}, "config.headers.X", "a text"),
        ({"url": "http://x", "header": {}}, "config.header", "did you mean 'headers'"),
        ({"url": "http://x", "timeot_s": 1}, "config.timeot_s", "did you mean 'timeout_s'"),
        ({"url": "http://x", "method": "post"}, "config.method", "'post'"),
        ({"url": "http://x", "isolation": "thread"}, "config.isolation", "only waits"),
    ],
)
def test_a_mistake_in_the_config_is_named(config: dict[str, Any], key: str, what: str):
    with pytest.raises(ConfigError) as error:
        HTTPTool(config, schema("ask"))
    assert what in str(error.value)
    assert error.value.details["key"] == key
    assert error.value.details["expected"]
    assert SECRET not in str(error.value)


async def test_connections_are_kept_between_calls_and_closed_at_the_end():
    peers: set[Any] = set()

    async def answer(request: Any) -> Any:
        peers.add(request.transport.get_extra_info("peername"))
        return await echo(request)

    async with serving(answer) as url:
        tool = HTTPTool({"url": url}, schema("ask"))
        for _ in range(5):
            await tool.execute("r", {})
        assert len(peers) == 1
        await tool.shutdown()
        await tool.shutdown()
        await tool.execute("r", {})  # a tool that is used again opens them again
        assert len(peers) == 2
        await tool.shutdown()


def test_a_tool_works_in_one_event_loop_after_another():
    tool = HTTPTool({"url": "http://127.0.0.1:9/x"}, schema("ask"))

    async def use() -> None:
        with pytest.raises(ServiceError):
            await tool.execute("r", {})
        await tool.shutdown()

    asyncio.run(use())
    asyncio.run(use())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("value", ["\ud800", float("nan"), [float("inf")]])
async def test_what_is_no_json_is_not_sent(method: str, value: Any):
    with pytest.raises(ToolError, match="not valid JSON"):
        await answered(echo, {"a": value}, method=method)


@given(st.dictionaries(st.text(max_size=5), values, max_size=4))
@settings(max_examples=50)
def test_any_arguments_make_a_query_of_texts(arguments: dict[str, Any]):
    for name, text in query_parameters(arguments):
        assert name in arguments
        assert isinstance(text, str)


async def test_a_character_set_that_decodes_no_text_costs_nothing():
    async def answer(request: web.Request) -> web.StreamResponse:
        headers = {"Content-Type": "text/plain; charset=idna"}
        return web.Response(body="größe".encode(), headers=headers)

    async with serving(answer) as url:
        client = HttpClient(url, headers={}, max_bytes=100)
        assert (await client.send("GET")).text == "größe"
        await client.close()


async def test_an_address_that_is_none_is_an_error_of_the_service():
    client = HttpClient(f"http://{'a' * 70}.example/", headers={}, max_bytes=100)
    with pytest.raises(ServiceError):
        await client.send("GET")
    await client.close()
