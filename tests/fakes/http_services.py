"""HTTP services for tools to talk to, on the test's own event loop."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    """Answer every request with `answer`, until the block ends; yields the address."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}/api"
    finally:
        await runner.cleanup()


async def echo(request: web.Request) -> web.StreamResponse:
    """Tell the request back, headers too."""
    body = await request.text()
    answer = {
        "method": request.method,
        "query": [list(pair) for pair in request.query.items()],
        "body": json.loads(body) if body else None,
        "headers": dict(request.headers),
    }
    return web.json_response(answer)


def always(status: int = 200, text: str = "", **headers: str) -> Answer:
    """Answer always the same."""

    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text=text, headers=headers)

    return answer


def endless(sent: list[int]) -> Answer:
    """Send as long as anybody listens; adds the bytes to `sent[0]`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"x" * 65536)
            sent[0] += 65536
            await asyncio.sleep(0)

    return answer


async def hang_up(request: web.Request) -> web.StreamResponse:
    """Close the connection without a word."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


def retriever(found: Callable[[str], list[Any]]) -> Answer:
    """A service in the convention of Search-R1."""

    async def answer(request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        assert asked["return_scores"] is True
        result = [found(query)[: asked["topk"]] for query in asked["queries"]]
        return web.json_response({"result": result})

    return answer
