"""Tools of MCP servers: named in YAML, discovered whole, called through sessions that may die."""

import asyncio
import contextlib
import json
import logging
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from agentrl.errors import ConfigError, MissingExtraError, ServiceError, ToolError
from agentrl.messages import CallOutcome
from agentrl.plugins.environment import install_command
from agentrl.plugins.keys import read_entries
from agentrl.tools import BaseTool
from agentrl.tools.mcp.servers import HttpServer, McpSection, StdioServer, read_servers
from agentrl.tools.mcp_tool import MCPTool
from agentrl.tools.registry import ToolEntry
from agentrl.tools.runtime.session import ToolSession
from agentrl.tools.runtime.settings import RetrySettings
from tests.fakes.http_services import always, serving
from tests.fakes.mcp import fake, load, servers_alive, yaml_of
from tests.fakes.mcp_server import WHOLE_SCHEMA
from tests.fakes.tools import call


@pytest.fixture(autouse=True)
def asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.tools.mcp.hub.RETRY", RetrySettings(max_attempts=1))


def one(*how: str, **keys: Any) -> dict[str, Any]:
    return {"servers": {"fake": fake(*how or ("fine",))}, **keys}


def refused(folder: Path, *entries: dict[str, Any], **config: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        load(folder, *entries, **config)
    return error.value


async def said(tool: BaseTool, request: str = "r", **arguments: Any) -> Any:
    """Execute a tool; what it shows, decoded."""
    result: Any = await tool.execute(request, arguments)
    return json.loads(result.response.text)


async def shut_down(tools: dict[str, BaseTool]) -> None:
    await asyncio.gather(*(tool.shutdown() for tool in tools.values()))


def test_every_tool_of_a_server_is_one_of_ours_and_its_schema_is_whole(tmp_path: Path):
    tools = load(tmp_path, one())
    assert list(tools)[:2] == ["whole", "echo"]  # of six pages
    assert len(tools) == 11
    parameters = tools["whole"].tool_schema.to_template()["function"]["parameters"]
    assert json.dumps(parameters) == json.dumps(WHOLE_SCHEMA)  # the order of keys too
    assert servers_alive() == 0


async def test_tools_are_discovered_inside_a_running_event_loop(tmp_path: Path):
    assert "echo" in load(tmp_path, one(tool_selected_list=["echo"]))


def test_a_list_selects_tools_and_an_unknown_name_is_reported(tmp_path: Path):
    assert list(load(tmp_path, one(tool_selected_list=["count", "echo"]))) == ["echo", "count"]
    error = refused(tmp_path, one(tool_selected_list=["ecko"]))
    assert "no server has a tool 'ecko'; did you mean 'echo'?" in str(error)
    assert "whole, echo, wait" in str(error.details["expected"])
    assert error.details["key"] == "tools[0].mcp.tool_selected_list"


def test_servers_with_tools_of_one_name_need_a_prefix(tmp_path: Path):
    both = {"servers": {"a": fake("renamed", "look"), "b": fake("renamed", "look")}}
    error = refused(tmp_path, both)
    assert "the servers 'a' and 'b' both have a tool 'look'" in str(error)
    assert "{server}_" in str(error.details["expected"])
    assert list(load(tmp_path, {**both, "prefix": "{server}_"})) == ["a_look", "b_look"]


async def test_a_tool_with_a_prefix_is_called_by_the_name_that_its_server_knows(tmp_path: Path):
    tools = load(tmp_path, one(prefix="my_", tool_selected_list=["echo"]))
    assert await said(tools["my_echo"], x=1) == {"x": 1}
    await shut_down(tools)


def test_two_entries_of_one_name_collide_as_any_tools_do(tmp_path: Path):
    assert "two tools have the name" in str(refused(tmp_path, one(), one()))


def written(folder: Path, data: Any) -> dict[str, Any]:
    """Write a file of servers, and name it as beside the YAML."""
    (folder / "servers.json").write_text(data if isinstance(data, str) else json.dumps(data))
    return {"mcp_servers_config_path": "./servers.json"}


def test_the_file_of_other_programs_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOOK", "look")
    server = fake("renamed", "${LOOK}_${OTHER:-there}${oc.env:LOOK}")
    named = {
        "mine": {**server, "type": "stdio", "alwaysAllow": ["look"]},
        "not_now": {"disabled": True, "command": "nowhere"},
    }
    assert list(load(tmp_path, written(tmp_path, {"mcpServers": named}))) == ["look_therelook"]


@pytest.mark.parametrize(
    ("data", "key", "what"),
    [
        ("{", None, "cannot read the file"),
        ({"servers": {}}, "mcpServers", "has no servers"),
        ({"mcpServers": {}}, "mcpServers", "there is no server"),
        ({"mcpServers": {"a": 3}}, "mcpServers.a", "no object"),
        ({"mcpServers": {"a": {}}}, "mcpServers.a.command", "command is missing"),
        ({"mcpServers": {"a": {"url": "ftp://x"}}}, "mcpServers.a.url", "ftp://x"),
        ({"mcpServers": {"a": {"type": "sse", "url": "http://x"}}}, "mcpServers.a.type", "SSE"),
        ({"mcpServers": {"a": {"command": "${NOT_SET}"}}}, "mcpServers.a.command", "NOT_SET"),
    ],
)
def test_a_mistake_in_the_file_of_servers_is_named(tmp_path: Path, data: Any, key: Any, what: str):
    error = refused(tmp_path, written(tmp_path, data))
    assert what in str(error)
    assert error.details.get("key") == key
    assert str(error.details["file"]).endswith("servers.json")


@pytest.mark.parametrize(
    ("section", "key", "what"),
    [
        ({}, "mcp", "in one way"),
        ({"servers": {}, "mcp_servers_config_path": "x"}, "mcp", "in one way"),
        ({"servers": {}}, "mcp.servers", "no server"),
        ({"mcp_servers_config_path": "nowhere.json"}, "mcp.mcp_servers_config_path", "no file"),
        ({"servers": {"a": {"comand": "x"}}}, "mcp.servers.a.comand", "did you mean 'command'"),
        (one(sesion="shared"), "mcp.sesion", "did you mean 'session'"),
        (one(session="mine"), "mcp.session", "'mine'"),
        (one(tool_selected_list=[]), "mcp.tool_selected_list", "at least 1"),
        (one(connect_timeout_s=0), "mcp.connect_timeout_s", "greater than 0"),
    ],
)
def test_a_mistake_in_the_section_is_named(tmp_path: Path, section: Any, key: str, what: str):
    error = refused(tmp_path, section)
    assert what in str(error)
    assert error.details["key"] == f"tools[0].{key}"
    assert str(error.details["file"]).endswith("tools.yaml")


def test_no_error_contains_a_servers_secrets(tmp_path: Path):
    servers = {"a": {"url": "http://x", "headers": {"Authorization": ["hunter2"]}}}
    error = refused(tmp_path, {"servers": servers})
    assert "hunter2" not in str(error)
    assert "headers" in str(error)


def test_entries_that_mix_the_kinds_are_refused(tmp_path: Path):
    path = yaml_of(tmp_path, one())

    def refusal_of(**changes: Any) -> str:
        entry = json.loads(yaml_of(tmp_path, one()).read_text())["tools"][0] | changes
        path.write_text(json.dumps({"tools": [entry]}))
        with pytest.raises(ConfigError) as error:
            load_again(path)
        return str(error.value)

    assert "names no servers" in refusal_of(config={"type": "mcp"}, mcp=None)
    assert "has no server" in refusal_of(mcp=None)
    schema = {"type": "function", "function": {"name": "f"}}
    assert "provide the schemas" in refusal_of(tool_schema=schema)
    calculator = "agentrl.tools.calculator_tool.CalculatorTool"
    assert "no tool of MCP servers" in refusal_of(class_name=calculator)
    assert "only waits for others" in refusal_of(config={"isolation": "process"})
    assert "unknown key 'retriever'" in refusal_of(config={"retriever": 1})


def load_again(path: Path) -> None:
    from agentrl.tools import initialize_tools_from_config

    initialize_tools_from_config(path)


def test_without_the_library_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("agentrl.plugins.environment.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError) as error:
        load(tmp_path, one())
    assert error.value.details["install"] == install_command("mcp")


def test_verls_names_and_keys_are_read(tmp_path: Path):
    path = yaml_of(tmp_path, one(tool_selected_list=["echo"]), type="mcp", timeout=7)
    path.write_text(path.read_text().replace("agentrl.tools.mcp_tool.MCPTool", VERLS))
    from agentrl.tools import initialize_tools_from_config

    [tool] = initialize_tools_from_config(path)
    assert isinstance(tool, MCPTool)
    assert tool.config == {"type": "mcp", "timeout_s": 7}
    message = refused(tmp_path, one(), timeout=7, timeout_s=8)
    assert "timeout and timeout_s are two names of one key" in str(message)


VERLS = "verl.tools.mcp_search_tool.MCPSearchTool"


def test_a_server_that_does_not_start_is_reported_with_its_last_output(tmp_path: Path):
    error = refused(tmp_path, one("dead"))
    assert "MCP server 'fake': MCPError: Connection closed" in str(error)
    assert str(error.details["last_words"]).endswith("no licence")
    missing = {"servers": {"fake": {"command": "no-such-program"}}}
    assert "FileNotFoundError" in str(refused(tmp_path, missing))


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path):
    started = time.monotonic()
    error = refused(tmp_path, one("mute", connect_timeout_s=0.4))
    assert "no valid answer in time" in str(error)
    assert time.monotonic() - started < 5
    assert servers_alive() == 0


def test_a_server_that_cannot_be_reached_is_named(tmp_path: Path):
    url = "http://me:hunter2@127.0.0.1:9/mcp?key=hunter2"
    error = refused(tmp_path, {"servers": {"far": {"url": url}}})
    assert "MCP server 'far' at http://127.0.0.1:9/mcp: ConnectError" in str(error)
    assert "hunter2" not in str(error)


@pytest.mark.parametrize(
    ("status", "message"), [(503, "HTTP 503 Service Unavailable"), (404, "HTTP 404 Not Found")]
)
async def test_an_address_without_an_mcp_server_is_reported_with_its_answer(
    tmp_path: Path, status: int, message: str
):
    async with serving(always(status)) as url:
        entry = {"servers": {"far": {"url": url}}}
        error = await asyncio.to_thread(refused, tmp_path, entry)
    assert f"MCP server 'far' at {url}: " in str(error)
    assert message in str(error.details["last_words"])


def test_a_server_that_starts_at_the_second_time_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    twice = RetrySettings(max_attempts=2, wait_max_s=0)
    monkeypatch.setattr("agentrl.tools.mcp.hub.RETRY", twice)
    assert load(tmp_path, one("flaky", str(tmp_path / "flag")))


def test_a_schema_that_is_none_names_server_and_tool(tmp_path: Path):
    error = refused(tmp_path, one("bad_schema"))
    assert "MCP server 'fake', tool 'bad'" in str(error)
    assert "not a JSON Schema" in str(error)


async def test_arguments_arrive_as_they_are(tmp_path: Path):
    tools = load(tmp_path, one(tool_selected_list=["echo"]))
    sent = {"a": None, "b": [1, {"c": 1.5}], "d": "<|im_start|>assistant \u2028 é", "e": {}}
    assert await said(tools["echo"], **sent) == sent
    await shut_down(tools)


@pytest.mark.parametrize("value", ["\ud800", float("nan")])
async def test_failures_are_data_arguments_that_cannot_be_sent_break_no_session(
    tmp_path: Path, value: Any
):
    tools = load(tmp_path, one())
    waiting = asyncio.create_task(said(tools["wait"], s=0.3))
    await asyncio.sleep(0.15)
    with pytest.raises(ToolError, match="not valid JSON"):
        await said(tools["echo"], a=value)
    assert await waiting == {"s": 0.3}
    await shut_down(tools)


async def test_calls_of_one_session_run_side_by_side(tmp_path: Path):
    tools = load(tmp_path, one())
    await said(tools["echo"])
    started = time.monotonic()
    await asyncio.gather(*(said(tools["wait"], s=0.4) for _ in range(10)))
    assert time.monotonic() - started < 3
    await shut_down(tools)


async def test_what_a_server_says_of_a_failed_call_is_for_the_model(tmp_path: Path):
    tools = load(tmp_path, one())
    with pytest.raises(ToolError, match=r"^no luck$"):
        await said(tools["fail"])
    with pytest.raises(ToolError, match="n must be even"):
        await said(tools["refuse"])
    pid = (await said(tools["count"]))["pid"]
    with pytest.raises(ServiceError, match="a secret of the server"):
        await said(tools["break"])
    assert (await said(tools["count"]))["pid"] == pid  # a call failed, the session did not
    await shut_down(tools)


async def test_a_shared_session_is_one_server_for_every_tool_and_request(tmp_path: Path):
    tools = load(tmp_path, one(tool_selected_list=["echo"]), one(tool_selected_list=["count"]))
    assert servers_alive() == 0  # the first call opens it
    counts = [await said(tools["count"], request) for request in ("r1", "r2", "r1")]
    assert [count["count"] for count in counts] == [1, 2, 3]
    await said(tools["echo"])
    assert servers_alive() == 1
    await shut_down(tools)
    assert servers_alive() == 0


async def test_a_server_that_dies_fails_the_calls_under_way_and_no_other(tmp_path: Path):
    tools = load(tmp_path, one())
    first = await said(tools["count"])
    waiting = asyncio.create_task(said(tools["wait"], s=30))
    await asyncio.sleep(0.1)
    with pytest.raises(ServiceError, match="Connection closed"):
        await said(tools["die"])
    with pytest.raises(ServiceError, match="Connection closed"):
        await waiting
    second = await said(tools["count"])
    assert second["count"] == 1
    assert second["pid"] != first["pid"]
    await shut_down(tools)
    assert servers_alive() == 0


async def test_a_server_that_dies_between_calls_costs_none(tmp_path: Path):
    import psutil

    tools = load(tmp_path, one())
    psutil.Process((await said(tools["count"]))["pid"]).kill()
    await asyncio.sleep(0.5)
    assert (await said(tools["count"]))["count"] == 1
    await shut_down(tools)


async def test_a_server_that_cannot_start_again_fails_each_call_with_its_last_words(tmp_path: Path):
    flag = tmp_path / "flag"
    flag.touch()
    tools = load(tmp_path, one("flaky", str(flag)))
    flag.unlink()
    with pytest.raises(ServiceError, match="not yet"):
        await said(tools["echo"])
    assert await said(tools["echo"], x=1) == {"x": 1}
    await shut_down(tools)


def session(tools: dict[str, BaseTool], name: str = "r", timeout_s: float = 20.0) -> ToolSession:
    return ToolSession(tools, instance_id=name, timeout_s=timeout_s)


async def test_life_cycle_a_request_with_a_session_of_its_own_gives_it_back(tmp_path: Path):
    tools = load(tmp_path, one(session="per_request", tool_selected_list=["echo", "count"]))
    requests = {name: session(tools, name) for name in ("r1", "r2")}
    pids: dict[str, set[int]] = {}
    for name, request in requests.items():
        await request.create()
        outcomes = await request.execute([call("count"), call("count", 1)])
        counts = [json.loads(outcome.response.text or "") for outcome in outcomes]
        assert {count["count"] for count in counts} == {1, 2}
        pids[name] = {count["pid"] for count in counts}
    assert len(pids["r1"] | pids["r2"]) == 2
    assert servers_alive() == 2
    assert await requests["r1"].release() == []
    assert servers_alive() == 1
    assert await requests["r2"].release() == []
    assert servers_alive() == 0


async def test_life_cycle_a_requests_session_lives_until_the_last_of_its_tools_is_released(
    tmp_path: Path,
):
    tools = load(tmp_path, one(session="per_request", tool_selected_list=["echo", "count"]))
    for tool in tools.values():
        await tool.create("r")
    await said(tools["count"])
    await tools["echo"].release("r")
    assert (await said(tools["count"]))["count"] == 2
    await tools["count"].release("r")
    assert servers_alive() == 0


async def test_life_cycle_a_creation_that_was_cancelled_leaves_no_server(tmp_path: Path):
    tools = load(tmp_path, one(session="per_request"))
    for wait_s in (0.0, 0.03):
        request = session(tools)
        creation = asyncio.create_task(request.create())
        await asyncio.sleep(wait_s)
        creation.cancel()
        await asyncio.wait({creation})
        await request.release()
        assert servers_alive() == 0


async def test_a_call_that_is_late_is_a_timeout_and_its_session_goes_on(tmp_path: Path):
    tools = load(tmp_path, one())
    pid = (await said(tools["count"]))["pid"]
    request = session(tools, timeout_s=0.3)
    [outcome] = await request.execute([call("wait", s=30)])
    assert outcome.outcome is CallOutcome.TIMEOUT
    assert (await said(tools["count"]))["pid"] == pid
    await shut_down(tools)


@pytest.mark.parametrize("scope", ["shared", "per_request"])
async def test_the_start_of_a_server_has_a_time_of_its_own(tmp_path: Path, scope: str):
    server = fake()
    slow = ["-c", 'sleep 1.5; exec "$@"', "bash", server["command"], *server["args"]]
    section = {"servers": {"fake": {"command": "bash", "args": slow}}, "session": scope}
    tools = load(tmp_path, {**section, "tool_selected_list": ["echo"]}, timeout_s=1)
    request = session(tools)
    await request.create()
    [outcome] = await request.execute([call("echo", x=1)])
    assert (outcome.outcome, outcome.response.text) == (CallOutcome.OK, '{"x": 1}')
    await request.release()
    await shut_down(tools)


async def test_a_server_handles_signals_by_default(tmp_path: Path):
    shown, server = tmp_path / "shown", fake()
    start = ["-c", f'trap -p > {shown}; exec "$@"', "bash", server["command"], *server["args"]]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        load(tmp_path, {"servers": {"fake": {"command": "bash", "args": start}}})
    finally:
        signal.signal(signal.SIGHUP, before)
    assert shown.read_text() == ""


async def test_a_dead_server_is_a_crash_and_the_model_does_not_see_the_cause(tmp_path: Path):
    tools = load(tmp_path, one())
    [outcome] = await session(tools).execute([call("break")])
    assert outcome.outcome is CallOutcome.CRASHED
    assert outcome.response.text == "Error executing tool 'break': internal error"
    assert "a secret of the server" in outcome.message
    await shut_down(tools)


def test_an_event_loop_that_ends_without_shutdown_leaves_no_server(tmp_path: Path):
    tools = load(tmp_path, one())
    asyncio.run(said(tools["echo"]))
    assert servers_alive() == 0
    assert asyncio.run(said_and_shut_down(tools))["count"] == 1  # and another loop works as well
    assert servers_alive() == 0


async def said_and_shut_down(tools: dict[str, BaseTool]) -> Any:
    answer = await said(tools["count"])
    await shut_down(tools)
    return answer


async def test_a_line_without_end_ends_its_server_and_no_other_call(tmp_path: Path):
    tools = load(tmp_path, one(tool_selected_list=["endless", "count"]), timeout_s=20)
    started = time.monotonic()
    with pytest.raises(ServiceError, match="more than 8388608 bytes"):
        await said(tools["endless"])
    assert time.monotonic() - started < 5
    assert (await said(tools["count"]))["count"] == 1
    await shut_down(tools)


async def test_a_daemon_of_a_server_ends_with_it(tmp_path: Path):
    tools = load(tmp_path, one(tool_selected_list=["daemon"]))
    pid = (await said(tools["daemon"]))["pid"]
    assert psutil.pid_exists(pid)
    await shut_down(tools)
    assert not psutil.pid_exists(pid)


def test_a_server_of_too_many_tools_is_refused(tmp_path: Path):
    error = refused(tmp_path, one("many"))
    assert "lists more than 1000 tools" in str(error)


async def test_an_answer_over_http_without_end_is_read_no_further(tmp_path: Path):
    num_bytes = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal num_bytes
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while num_bytes < 2**30:
                await response.write(b" " * 2**20)
                num_bytes += 2**20
        return response

    app = web.Application()
    app.add_routes([web.post("/mcp", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/mcp"
    entry = {"servers": {"far": {"url": url}}, "connect_timeout_s": 2}
    try:
        await asyncio.to_thread(refused, tmp_path, entry)
    finally:
        await runner.cleanup()
    assert num_bytes < 100 * 2**20


async def test_a_loud_server_writes_to_the_log_and_not_to_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "agentrl.tools.mcp.stderr")
    tools = load(tmp_path, one(tool_selected_list=["noise"]))
    await said(tools["noise"])
    await shut_down(tools)
    assert capfd.readouterr().err == ""
    assert "fake: server fine starts" in caplog.messages
    assert any("loud loud" in message for message in caplog.messages)
    assert max(map(len, caplog.messages)) < 600


WORDS = ["0123", "1e5", "on", "12_000", "12:30", "1.10", "0x1F", "no"]


@pytest.mark.parametrize("word", WORDS)
def test_texts_of_a_server_are_what_the_yaml_has(tmp_path: Path, word: str):
    file = tmp_path / "tools.yaml"
    file.write_text(
        "tools: [{class_name: agentrl.tools.mcp_tool.MCPTool, config: {type: mcp}, mcp: {servers: {"
        f"a: {{command: run, args: [-p, {word}], env: {{KEY: {word}}}}},"
        f"b: {{url: 'http://x', headers: {{KEY: {word}}}}}}}}}}}]\n",
        encoding="utf-8",
    )
    [entry] = read_entries(file, "tools", ToolEntry)
    assert entry.mcp is not None
    section = McpSection.model_validate(entry.mcp.model_dump(exclude_unset=True))
    one, other = [server.spec for server in read_servers(section, file=file, key="mcp")]
    assert isinstance(one, StdioServer)
    assert isinstance(other, HttpServer)
    assert (one.args, one.env, other.headers) == (("-p", word), {"KEY": word}, {"KEY": word})


def test_numbers_in_a_file_of_servers_are_texts(tmp_path: Path):
    server = '{"command": "run", "args": [8080, 1.10], "env": {"N": 1e5}, "timeout": 3}'
    (tmp_path / "servers.json").write_text(f'{{"mcpServers": {{"a": {server}}}}}')
    section = McpSection(mcp_servers_config_path=Path("servers.json"))
    [read] = read_servers(section, file=tmp_path / "tools.yaml", key="mcp")
    assert isinstance(read.spec, StdioServer)
    assert (read.spec.args, read.spec.env) == (("8080", "1.10"), {"N": "1e5"})
