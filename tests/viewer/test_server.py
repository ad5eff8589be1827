"""The server answers only who has its address."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentrl.viewer.runs import RunReader
from agentrl.viewer.server import SCRIPTS, STATIC, ViewServer
from tests.fakes.viewer_runs import write_view_run


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[ViewServer]:
    server = ViewServer([RunReader(write_view_run(tmp_path / "run", num_steps=1))])
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def get(address: str, **headers: str) -> tuple[int, Any, str]:
    async with aiohttp.ClientSession() as client, client.get(address, headers=headers) as answer:
        is_json = answer.content_type == "application/json"
        body = await answer.json() if is_json else await answer.text()
        return answer.status, body, answer.headers.get("Content-Security-Policy", "")


async def test_the_page_has_a_policy_that_allows_only_its_own_files(server: ViewServer):
    status, _, policy = await get(server.address)
    assert status == 200
    assert policy.startswith("default-src 'self';")
    assert "unsafe" not in policy


async def test_every_script_of_the_page_is_served(server: ViewServer):
    _, page, _ = await get(server.address)
    assert tuple(re.findall(r'<script src="([^"]+)" defer>', page)) == SCRIPTS
    assert {path.name for path in STATIC.glob("*.js")} == {*SCRIPTS}
    for name in SCRIPTS:
        status, text, _ = await get(server.address + name)
        assert (status, '"use strict";' in text) == (200, True)


async def test_without_the_token_or_with_another_host_nothing_is_served(server: ViewServer):
    origin = server.address.rsplit("/", 2)[0]
    assert (await get(f"{origin}/"))[0] == 403
    assert (await get(f"{origin}/wrong/api/runs"))[0] == 403
    assert (await get(f"{server.address}api/runs", Host="example.com"))[0] == 403
    assert (await get(f"{server.address}api/runs"))[0] == 200


@pytest.mark.parametrize(
    "path",
    ["api/none?run=0", "api/runs2", "api/list?run=7", "api/trajectory?run=0&id=../x:1",
     "api/list?run=0&offset=-1", "api/step?run=0", "../../etc/passwd"],
)  # fmt: skip
async def test_what_does_not_exist_is_not_found(server: ViewServer, path: str):
    assert (await get(server.address + path))[0] in (403, 404)


async def test_what_is_not_valid_is_answered_with_the_reason(server: ViewServer):
    for value in ("nan", "inf", "1.5", "x"):
        status, body, _ = await get(f"{server.address}api/list?run=0&offset={value}")
        assert status == 404
        assert f"offset is {value}" in body["error"].replace("'", "")


async def test_an_error_of_the_server_is_answered_with_the_reason(
    server: ViewServer, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise RuntimeError("no luck")

    monkeypatch.setattr("agentrl.viewer.server.describe_step", fail)
    status, body, _ = await get(f"{server.address}api/step?run=0&file=rollouts/step_000001")
    assert status == 500
    assert "no luck" in body["error"]


async def test_a_file_that_cannot_be_indexed_does_not_end_the_others(tmp_path: Path):
    folder = write_view_run(tmp_path / "run", num_steps=3)
    (folder / "rollouts" / "step_000003.tokens.parquet").write_bytes(b"PAR1")
    (folder / "rollouts" / "step_000002.jsonl").unlink()
    (folder / "rollouts" / "step_000002.jsonl").mkdir()
    server = ViewServer([RunReader(folder)])
    await server.start()
    try:
        total = 0
        for _ in range(400):
            total = (await get(f"{server.address}api/list?run=0"))[1]["total"]
            if total == 32:
                break
            await asyncio.sleep(0.05)
        assert total == 32
    finally:
        await server.close()


async def test_lists_are_answered_as_json(server: ViewServer):
    status, body, _ = await get(f"{server.address}api/list?run=0&file=rollouts/step_000001&limit=3")
    assert (status, body["total"], len(body["rows"])) == (200, 16, 3)
