"""A service in this process that answers as SandboxFusion does, and can be made to fail."""

import asyncio
import base64
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web


@dataclass(eq=False)
class FakeFusion:
    """Runs the code as it is, with no walls: give it only code of tests."""

    mode: str = "fine"
    """`fine`, `500`, `hang`, `flood`, `nonsense`, `empty`, `sandbox_error` or `no_result`."""
    num_sent_bytes: int = 0
    """Of a flood."""
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    most_at_once: int = 0
    url: str = ""
    _num_at_once: int = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer `POST /run_code`."""
        asked = await request.json()
        self.asked.append(asked)
        self._num_at_once += 1
        self.most_at_once = max(self.most_at_once, self._num_at_once)
        try:
            return await (self._flood(request) if self.mode == "flood" else self._answer(asked))
        finally:
            self._num_at_once -= 1

    async def _flood(self, request: web.Request) -> web.StreamResponse:
        """Answer with what a program printed that never ends."""
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"status": "Success", "run_result": {"stdout": "')
        while True:
            await response.write(b"x" * 65536)
            self.num_sent_bytes += 65536

    async def _answer(self, asked: dict[str, Any]) -> web.Response:
        match self.mode:
            case "500":
                return web.Response(status=500, text="Internal Server Error")
            case "hang":
                await asyncio.sleep(3600)
            case "nonsense":
                return web.Response(text="<html>a proxy's page</html>")
            case "empty":
                return web.json_response({})
            case "sandbox_error":
                return web.json_response({"status": "SandboxError", "message": "no room"})
            case "no_result":
                return web.json_response({"status": "Success", "message": ""})
            case _:
                pass
        result = await _run(asked)
        is_success = result["status"] == "Finished" and result["return_code"] == 0
        status = "Success" if is_success else "Failed"
        return web.json_response(
            {"status": status, "message": "", "compile_result": None, "run_result": result}
        )


async def _run(asked: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for name, content in asked["files"].items():
            (Path(folder) / name).write_bytes(base64.b64decode(content))
        (Path(folder) / "tmp_program.py").write_text(asked["code"])
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-S", "tmp_program.py"),
            cwd=folder,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(asked["run_timeout"]):
                out, err = await process.communicate((asked["stdin"] or "").encode())
        except TimeoutError:
            process.kill()
            await process.wait()
            return {"status": "TimeLimitExceeded", "execution_time": asked["run_timeout"]}
        return {
            "status": "Finished",
            "execution_time": 0.01,
            "return_code": process.returncode,
            "stdout": out.decode(errors="replace"),
            "stderr": err.decode(errors="replace"),
        }


@contextlib.asynccontextmanager
async def fusion_service(mode: str = "fine") -> AsyncIterator[FakeFusion]:
    """Serve at a free port."""
    fake = FakeFusion(mode)
    app = web.Application()
    app.add_routes([web.post("/run_code", fake.answer)])
    runner = web.AppRunner(app, shutdown_timeout=0, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    try:
        yield fake
    finally:
        await runner.cleanup()
