"""Run code on a SandboxFusion service.

Source: https://github.com/bytedance/SandboxFusion, `POST /run_code`: one request runs one program.

The service keeps nothing between two requests. A session therefore sends all earlier sources again
with each call. They run again without output before the new source, so names and files come back if
the code is deterministic, and the n-th call costs as much as the first n together. A call that was
killed is not repeated: it ends the session's state, as in every sandbox.
"""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.clients.http import read_body
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import ConfigError, SandboxError
from agentrl.sandbox.base import Execution, ExecutionEnd, Session

if TYPE_CHECKING:
    import aiohttp

MARGIN_S = 15.0
"""Seconds beyond the code's own that a request may take: the service may queue it."""
_MAX_SHOWN = 300
_FLOOD_FACTOR = 256
"""An answer this many times as long as the kept output is a flood, as in the other sandboxes."""
_SIGKILLED = {-9, 137}
_NOTES = {
    ExecutionEnd.TIMEOUT: "[killed: its time was up]\n",
    ExecutionEnd.KILLED: "[killed by SIGKILL]\n",
}
_STATE_IS_GONE = "[begun anew: names and files of earlier calls are gone]\n"


class _CommandResult(BaseModel):
    model_config = ConfigDict(extra="ignore")

    status: Literal["Finished", "Error", "TimeLimitExceeded"]
    execution_time: float | None = None
    return_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None

    def end(self) -> ExecutionEnd:
        if self.status == "TimeLimitExceeded":
            return ExecutionEnd.TIMEOUT
        if self.return_code in _SIGKILLED:
            return ExecutionEnd.KILLED
        if self.return_code:
            is_memory = (self.stderr or "").rstrip().endswith("MemoryError")
            return ExecutionEnd.MEMORY if is_memory else ExecutionEnd.ERROR
        return ExecutionEnd.OK


class _Reply(BaseModel):
    model_config = ConfigDict(extra="ignore")

    status: Literal["Success", "Failed", "SandboxError"]
    message: str | None = ""
    compile_result: _CommandResult | None = None
    run_result: _CommandResult | None = None


class FusionClient:
    """Runs code on a service. It belongs to one event loop; call `close` at the end.

    Args:
        url: The service's address, with or without `/run_code`.
        memory_limit_mb: Megabytes that the code may use; -1 for the service's own limit.
        max_output_bytes: Bytes of output to keep. At most 256 times as much is read.
    """

    def __init__(
        self, url: str, *, memory_limit_mb: int = -1, max_output_bytes: int = 64 * 1024
    ) -> None:
        self.url = f"{url.rstrip('/').removesuffix('/run_code')}/run_code"
        self._memory_limit_mb = memory_limit_mb
        self._max_output_bytes = max_output_bytes
        self._http: aiohttp.ClientSession | None = None

    async def run(
        self,
        code: str,
        *,
        timeout_s: float,
        language: str = "python",
        stdin: str = "",
        files: Mapping[str, str] | None = None,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run code and return its result. Cancelling abandons the request.

        If the answer never ends, the code printed it: the result ends as `killed`.

        Raises:
            SandboxError: If the service cannot be reached, fails, or sends an invalid answer.
        """
        texts = (files or {}).items()
        request = {
            "code": code,
            "language": language,
            "run_timeout": timeout_s,
            "compile_timeout": timeout_s,
            "memory_limit_MB": self._memory_limit_mb,
            "stdin": stdin,
            "files": {name: base64.b64encode(text.encode()).decode() for name, text in texts},
        }
        limit = max_output_bytes or self._max_output_bytes
        max_body_bytes = _FLOOD_FACTOR * limit
        body = await self._post(request, 2 * timeout_s + MARGIN_S, max_body_bytes)
        if len(body) > max_body_bytes:
            note = f"[given up: the answer has more than {max_body_bytes} bytes]\n"
            return Execution(end=ExecutionEnd.KILLED, stderr=note, num_cut_bytes=len(body))
        try:
            return self._read(_Reply.model_validate_json(body), limit)
        except ValidationError as error:
            reason = f"it answered {body[:_MAX_SHOWN]!r}: {error.errors()[0]['msg']}"
            raise self._failure(reason) from error

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        http, self._http = self._http, None
        if http is not None:
            await http.close()

    async def _post(
        self, request: Mapping[str, Any], timeout_s: float, max_body_bytes: int
    ) -> bytes:
        """Send a request and return the answer; stop reading once it is too long."""
        import aiohttp

        self._http = self._http or aiohttp.ClientSession()
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._http.post(self.url, json=request) as answer,
            ):
                body = await read_body(answer, max_body_bytes)
                if answer.status != 200:
                    raise self._failure(f"it answered {answer.status}: {body[:_MAX_SHOWN]!r}")
                return body
        except TimeoutError as error:
            raise self._failure(f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise self._failure(f"{type(error).__name__}: {error}") from error

    def _read(self, reply: _Reply, limit: int) -> Execution:
        if reply.status == "SandboxError":
            raise self._failure(f"it failed itself: {(reply.message or '')[:_MAX_SHOWN]}")
        result = reply.run_result or reply.compile_result
        if result is None or result.status == "Error":
            raise self._failure("it answered without a result")
        stdout, stderr = (result.stdout or "").encode(), (result.stderr or "").encode()
        kept_stdout, kept_stderr = stdout[:limit], stderr[: max(0, limit - len(stdout))]
        end = result.end()
        return Execution(
            end=end,
            stdout=kept_stdout.decode(errors="replace"),
            stderr=kept_stderr.decode(errors="replace") + _NOTES.get(end, ""),
            exit_code=result.return_code,
            seconds=result.execution_time or 0.0,
            num_cut_bytes=len(stdout) + len(stderr) - len(kept_stdout) - len(kept_stderr),
        )

    def _failure(self, reason: str) -> SandboxError:
        return SandboxError(
            f"the service at {self.url}: {reason}",
            provider="sandbox_fusion",
            expected="a SandboxFusion service at this address",
        )


class FusionSandbox:
    """Runs code on a service. How the service isolates the code is its own concern.

    It reads the keys `url`, `timeout_s`, `memory_bytes` and `max_output_bytes`. The service has its
    own limits for the rest.

    Raises:
        ConfigError: If there is no `url`.
    """

    def __init__(self, config: SandboxConfig) -> None:
        if not config.url:
            raise ConfigError("sandbox_fusion has no url", key="url", expected="http://host:port")
        self._timeout_s = config.timeout_s
        self.client = FusionClient(
            config.url,
            memory_limit_mb=config.memory_bytes // 1024**2,
            max_output_bytes=config.max_output_bytes,
        )

    async def open_python(self) -> Session:
        """Open a session of Python. It sends nothing before the first run."""
        return FusionSession(self.client, "run_python", timeout_s=self._timeout_s)

    async def open_shell(self) -> Session:
        """Open a session of a shell."""
        return FusionSession(self.client, "run_shell", timeout_s=self._timeout_s)

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run one program on the service; see `Sandbox.run_program`."""
        return await self.client.run(
            _call("run_program", list(argv), env={**(env or {})}),
            timeout_s=timeout_s or self._timeout_s,
            stdin=stdin,
            files=files,
            max_output_bytes=max_output_bytes,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()


class FusionSession:
    """The sources of one request. Each call sends all of them."""

    def __init__(
        self,
        client: FusionClient,
        function: Literal["run_python", "run_shell"],
        *,
        timeout_s: float,
    ) -> None:
        self._client, self._function, self._timeout_s = client, function, timeout_s
        self._lock = asyncio.Lock()
        self._sources: list[str] = []
        self._note = ""

    async def run(
        self,
        source: str,
        *,
        timeout_s: float | None = None,
        echo: bool = False,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run a source after the earlier ones; see `Session.run`."""
        options = {"echo": echo} if self._function == "run_python" else {}
        async with self._lock:
            execution = await self._client.run(
                _call(self._function, [*self._sources, source], **options),
                timeout_s=timeout_s or self._timeout_s,
                max_output_bytes=max_output_bytes,
            )
            note, self._note = self._note, ""
            if execution.end in (ExecutionEnd.TIMEOUT, ExecutionEnd.KILLED):
                self._sources, self._note = [], _STATE_IS_GONE
            else:
                self._sources.append(source)
        return replace(execution, stderr=note + execution.stderr)

    async def close(self) -> None:
        """Forget the sources."""
        self._sources.clear()


def _call(function: str, argument: list[str], **options: object) -> str:
    """Return a program that calls a function of `fusion_guest.py`."""
    encoded = base64.b64encode(json.dumps([argument, options]).encode()).decode()
    return (
        f"{_guest()}\n\nimport base64, json\n"
        f"_arguments = json.loads(base64.b64decode({encoded!r}))\n"
        f"{function}(_arguments[0], **_arguments[1])\n"
    )


@cache
def _guest() -> str:
    return (Path(__file__).parent / "fusion_guest.py").read_text(encoding="utf-8")
