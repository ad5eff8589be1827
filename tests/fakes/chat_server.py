"""A server that speaks OpenAI's chat route, in this process, and can be made to fail."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

KEY = "sk-very-secret"

Answer = str | int | dict[str, Any] | None
"""What a call gets: a text, a status, a whole body, or, for None, nothing at all."""


@dataclass(eq=False)
class FakeChat:
    """One server; `reply` says what each call gets."""

    reply: Callable[[dict[str, Any]], Answer] = lambda body: "Yes."
    counts: bool = True
    """Whether it counts tokens: 10 for every prompt, 5 for every reply."""
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    """Bodies, in order."""
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    seconds: float = 0.0
    """What each answer takes."""
    num_open: int = 0
    most_open: int = 0
    """Calls at once, at most."""
    port: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first call."""
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no call is under way."""

    def __post_init__(self) -> None:
        self.is_idle.set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def config(self, **keys: Any) -> dict[str, Any]:
        """Of a client that asks it, quickly."""
        return {"base_url": self.address, "model": "m", "timeout_s": 2.0, "max_retries": 0} | keys

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        self.headers.append(dict(request.headers))
        self.arrived.set()
        self.num_open += 1
        self.is_idle.clear()
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(self.seconds)
            return await self._respond(self.reply(self.asked[-1]))
        finally:
            self.num_open -= 1
            if not self.num_open:
                self.is_idle.set()

    async def _respond(self, said: Answer) -> web.Response:
        match said:
            case None:
                await asyncio.Event().wait()
            case int():
                return web.json_response({"error": {"message": f"bad key {KEY}"}}, status=said)
            case dict():
                return web.json_response(said)
            case _:
                pass
        choice = {"index": 0, "finish_reason": "stop"}
        choice["message"] = {"role": "assistant", "content": said}
        usage = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
        body = {"id": "1", "object": "chat.completion", "created": 0, "model": "m"}
        return web.json_response(
            body | {"choices": [choice]} | ({"usage": usage} if self.counts else {})
        )


@contextlib.asynccontextmanager
async def serving(
    reply: Callable[[dict[str, Any]], Answer], **fields: Any
) -> AsyncIterator[FakeChat]:
    """A server for the block."""
    async with serving_of(FakeChat(reply, **fields)) as fake:
        yield fake


@contextlib.asynccontextmanager
async def serving_of(fake: FakeChat) -> AsyncIterator[FakeChat]:
    """This server for the block."""
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", fake.answer)])
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", fake.port, reuse_address=True).start()
    fake.port = runner.addresses[0][1]
    try:
        yield fake
    finally:
        await runner.cleanup()


def in_turn(*answers: Answer) -> Callable[[dict[str, Any]], Answer]:
    """Answer by one after the other, and by the last again."""
    left = list(answers)
    return lambda body: left.pop(0) if len(left) > 1 else left[0]
