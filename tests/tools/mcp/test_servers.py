"""MCP tools against a server that nobody here wrote: the reference server of the protocol.

It is installed by npm, once, into `AGENTRL_TEST_CACHE` (`~/.cache/agentrl`).
"""

import asyncio
import base64
import json
import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ServiceError, ToolError
from agentrl.tools import BaseTool, initialize_tools_from_config
from tests.fakes.mcp import load, servers_alive

PACKAGE = "@modelcontextprotocol/server-everything"
VERSION = "2026.8.31"
CONFIG = Path(__file__).resolve().parents[3] / "configs/tool_config/mcp_tool.yaml"


@pytest.fixture(scope="session")
def everything() -> str:
    """The path of the server's program."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("npm and node are not installed")
    cache = Path(os.environ.get("AGENTRL_TEST_CACHE", "~/.cache/agentrl")).expanduser()
    home = cache / "npm" / f"server-everything-{VERSION}"
    program = home / "node_modules" / PACKAGE / "dist/index.js"
    if not program.exists():
        install(home)
    return str(program)


def install(home: Path) -> None:
    """Install the server whole, or skip: without a network there is no telling how it behaves."""
    draft = home.with_name(f"{home.name}.{os.getpid()}")
    draft.mkdir(parents=True)
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(draft)]
    try:
        done = subprocess.run(
            [*command, f"{PACKAGE}@{VERSION}"], capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            pytest.skip(f"npm cannot install {PACKAGE}: {done.stderr[-300:]}")
        draft.rename(home)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install {PACKAGE} within 120 s")
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def stdio(program: str, **keys: Any) -> dict[str, Any]:
    return {"servers": {"everything": {"command": "node", "args": [program, "stdio"]}}, **keys}


@contextmanager
def over_http(program: str, port: int) -> Iterator[str]:
    """Run the server on a port, until the block ends."""
    process = subprocess.Popen(
        ["node", program, "streamableHttp"],
        env={**os.environ, "PORT": str(port)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for_port(port)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise AssertionError(f"nothing listens on {port}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def raw_list(program: str) -> list[dict[str, Any]]:
    """The list of tools as the server sends it, read with no library between."""
    process = subprocess.Popen(
        ["node", program, "stdio"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    client = {"name": "raw", "version": "1"}
    greeting = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": client}
    messages = [
        {"id": 1, "method": "initialize", "params": greeting},
        {"method": "notifications/initialized"},
        {"id": 2, "method": "tools/list", "params": {}},
    ]
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        for message in messages:
            process.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
            process.stdin.flush()
        for line in process.stdout:
            if (answer := json.loads(line)).get("id") == 2:
                process.kill()
                return answer["result"]["tools"]
    raise AssertionError("no list")


async def shut_down(tools: dict[str, BaseTool]) -> None:
    await asyncio.gather(*(tool.shutdown() for tool in tools.values()))


async def shown(tool: BaseTool, **arguments: Any) -> Any:
    result: Any = await tool.execute("r", arguments)
    return result.response


def test_schemas_are_those_that_the_server_sent(everything: str, tmp_path: Path):
    raw = {tool["name"]: tool for tool in raw_list(everything)}
    tools = load(tmp_path, stdio(everything))
    assert list(tools) == list(raw)
    assert len(raw) > 10
    for name, tool in tools.items():
        function = tool.tool_schema.to_template()["function"]
        assert json.dumps(function["parameters"]) == json.dumps(raw[name]["inputSchema"])
        assert function["description"] == raw[name]["description"]


async def test_a_call_over_stdio_shows_texts_images_and_errors(everything: str, tmp_path: Path):
    tools = load(tmp_path, stdio(everything))
    assert (await shown(tools["echo"], message="hi")).text == "Echo: hi"
    assert "is 5" in (await shown(tools["get-sum"], a=2, b=3)).text
    picture = await shown(tools["get-tiny-image"])
    [image] = picture.image
    assert image["type"] == "image"
    assert image["mimeType"] == "image/png"
    assert base64.b64decode(image["data"]).startswith(b"\x89PNG")
    assert picture.text.startswith("Here's the image")
    assert "demo://resource" in (await shown(tools["get-resource-reference"])).text
    assert "[link to" in (await shown(tools["get-resource-links"])).text
    weather = await shown(tools["get-structured-content"], location="Chicago")
    assert json.loads(weather.text)["temperature"]
    with pytest.raises(ToolError, match="expected number, received string"):
        await shown(tools["get-sum"], a="x", b=3)
    await shut_down(tools)
    assert servers_alive() == 0


@pytest.mark.slow
async def test_calls_of_a_slow_tool_run_side_by_side_and_tell_how_far_they_are(
    everything: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.DEBUG, "agentrl.tools.mcp")
    tools = load(tmp_path, stdio(everything, tool_selected_list=["trigger-long-running-operation"]))
    [slow] = tools.values()
    started = time.monotonic()
    await asyncio.gather(*(shown(slow, duration=1, steps=2) for _ in range(5)))
    assert time.monotonic() - started < 4
    assert any(": 1 of 2" in message for message in caplog.messages)
    await shut_down(tools)


async def test_a_server_over_http_is_called_and_may_go_and_come_back(
    everything: str, tmp_path: Path
):
    port = free_port()
    with over_http(everything, port) as url:
        tools = load(tmp_path, {"servers": {"web": {"url": url, "headers": {"X-Key": "secret"}}}})
        assert (await shown(tools["echo"], message="hi")).text == "Echo: hi"
        assert (await shown(tools["get-tiny-image"])).image
    with pytest.raises(ServiceError) as error:
        await shown(tools["echo"], message="gone")
    assert "secret" not in str(error.value)
    with over_http(everything, port):
        assert (await shown(tools["echo"], message="back")).text == "Echo: back"
        await shut_down(tools)


@pytest.mark.slow
async def test_a_server_over_http_that_forgot_the_session_costs_one_call(
    everything: str, tmp_path: Path
):
    port = free_port()
    with over_http(everything, port) as url:
        tools = load(tmp_path, {"servers": {"web": {"url": url}}, "tool_selected_list": ["echo"]})
        await shown(tools["echo"], message="hi")
    with over_http(everything, port):
        with suppress(ServiceError):
            await shown(tools["echo"], message="lost")
        assert (await shown(tools["echo"], message="back")).text == "Echo: back"
        await shut_down(tools)


def test_the_config_that_we_ship_names_this_server(
    everything: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    npx = tmp_path / "npx"  # as npx would run it, without asking the registry
    npx.write_text(f'#!/bin/sh\n[ "$2" = "{PACKAGE}@{VERSION}" ] && exec node {everything} $3\n')
    npx.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert [tool.name for tool in initialize_tools_from_config(CONFIG)] == ["echo", "get-sum"]
