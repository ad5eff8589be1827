"""Scores from SGLang's classification route, at servers that can be made to fail."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from agentrl.clients.classify import ClassifyClient
from agentrl.errors import ServiceError


@dataclass
class FakeServer:
    """Answers with the sum of the token ids."""

    status: int = 200
    delay_s: float = 0.0
    body: Any = None
    """Answered instead of a score."""
    asked: list[Any] = field(default_factory=list[Any])
    num_running: int = 0
    most_running: int = 0
    address: str = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        app = web.Application()
        app.add_routes([web.post("/classify", self._answer)])
        runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        fields = await request.json()
        self.asked.append(fields)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(self.delay_s)
        self.num_running -= 1
        if self.status != 200:
            error = {"error": {"message": "no score today"}}
            return web.json_response(error, status=self.status)
        score = {"embedding": [float(sum(fields["input_ids"]))], "meta_info": {}}
        return web.json_response(score if self.body is None else self.body)


ROWS = [[1, 2], [3, 4, 5], [6]]


def classify(
    *servers: FakeServer, rows: list[list[int]] = ROWS, **keys: Any
) -> list[float | Exception]:
    async def main() -> list[float | Exception]:
        async with AsyncExitStack() as stack:
            for server in servers:
                await stack.enter_async_context(server.running())
            keys.setdefault("timeout_s", 5.0)
            keys.setdefault("max_concurrency", 4)
            return await ClassifyClient([s.address for s in servers], **keys).classify(rows)

    return asyncio.run(main())


def test_rows_get_their_scores_in_order():
    server = FakeServer()
    assert classify(server) == [3.0, 12.0, 6.0]
    assert sorted(fields["input_ids"] for fields in server.asked) == sorted(ROWS)


def test_servers_share_the_rows():
    servers = FakeServer(), FakeServer()
    assert classify(*servers, rows=[[n] for n in range(10)]) == [float(n) for n in range(10)]
    assert [len(server.asked) for server in servers] == [5, 5]


@pytest.mark.parametrize("broken", [FakeServer(status=503), FakeServer(delay_s=9)])
def test_another_server_answers_for_one_that_fails_or_is_late(broken: FakeServer):
    assert classify(broken, FakeServer(), timeout_s=0.3) == [3.0, 12.0, 6.0]


def test_a_row_that_no_server_scores_is_an_error_of_its_own():
    found = classify(FakeServer(status=500))
    assert all(isinstance(one, ServiceError) for one in found)
    assert "500" in str(found[0])
    assert "no score today" in str(found[0])


def test_a_refusal_is_not_repeated():
    server = FakeServer(status=400)
    [found] = classify(server, rows=[[1]])
    assert isinstance(found, ServiceError)
    assert len(server.asked) == 1


@pytest.mark.parametrize("body", [{"embedding": [0.1, 0.2]}, {"text": "hello"}, ["odd"]])
def test_an_answer_without_one_score_names_the_cause(body: Any):
    [found] = classify(FakeServer(body=body), rows=[[1]])
    assert isinstance(found, ServiceError)
    assert "--is-embedding" in str(found)


@pytest.mark.parametrize("label", ["high", [0.1]])
def test_a_score_of_another_type_fails_its_row_only(label: Any):
    [found] = classify(FakeServer(body={"embedding": [label]}), rows=[[1]])
    assert isinstance(found, ServiceError)
    assert "as a score" in str(found)


def test_a_score_that_is_no_number_is_nan():
    [found] = classify(FakeServer(body={"embedding": [None]}), rows=[[1]])
    assert found != found


def test_no_more_requests_run_than_allowed():
    server = FakeServer(delay_s=0.02)
    classify(server, rows=[[n] for n in range(12)], max_concurrency=3)
    assert server.most_running == 3


def test_every_server_is_asked_before_the_first_step():
    async def main() -> dict[str, float]:
        one, other = FakeServer(), FakeServer(body={"embedding": [9.0]})
        async with one.running(), other.running():
            client = ClassifyClient([one.address, other.address], timeout_s=5, max_concurrency=1)
            return await client.check([1, 2])

    assert list(asyncio.run(main()).values()) == [3.0, 9.0]
