"""The sandbox of a SandboxFusion service, somewhere else.

The service keeps nothing between two requests. A session therefore sends everything again that ran
before, which runs once more, silently, ahead of what is new: names and files come back, as far as
the code does the same twice, and the n-th call costs as much as the first n together. What was
stopped is not repeated: it took the state with it, as it does in every sandbox.
"""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Literal

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import ConfigError
from agentrl.sandbox.base import Session
from agentrl.sandbox.fusion_client import FusionClient
from agentrl.sandbox.records import Execution, ExecutionEnd

_STATE_IS_GONE = "[begun anew: names and files of earlier calls are gone]\n"


class FusionSandbox:
    """Runs code on a service; what keeps the code in there is the service's business.

    Of the keys of the sandbox it reads `url`, `timeout_s`, `memory_bytes` and `max_output_bytes`;
    the service has limits of its own for the rest.

    Raises:
        ConfigError: where there is no `url`.
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
        """Open a session of Python; nothing is sent before the first run."""
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
        timeout_s: float | None = None,
        max_output_bytes: int | None = None,
    ) -> Execution:
        """Run one program there; see `Sandbox.run_program`."""
        code = _call("run_program", list(argv))
        timeout_s = timeout_s or self._timeout_s
        return await self.client.run(
            code, timeout_s=timeout_s, stdin=stdin, files=files, max_output_bytes=max_output_bytes
        )

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()


class FusionSession:
    """One request's code, of which all is sent with each call."""

    def __init__(
        self,
        client: FusionClient,
        function: Literal["run_python", "run_shell"],
        *,
        timeout_s: float,
    ) -> None:
        self._client = client
        self._function = function
        self._timeout_s = timeout_s
        self._turn = asyncio.Lock()
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
        """Run a source behind the others; see `Session.run`."""
        options = {"echo": echo} if self._function == "run_python" else {}
        async with self._turn:
            code = _call(self._function, [*self._sources, source], **options)
            execution = await self._client.run(
                code, timeout_s=timeout_s or self._timeout_s, max_output_bytes=max_output_bytes
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
    """Write code that calls a function of the guest."""
    asked = base64.b64encode(json.dumps([argument, options]).encode()).decode()
    return (
        f"{_guest()}\n\nimport base64, json\n"
        f"_asked = json.loads(base64.b64decode({asked!r}))\n"
        f"{function}(_asked[0], **_asked[1])\n"
    )


@cache
def _guest() -> str:
    return (Path(__file__).parent / "fusion_guest.py").read_text(encoding="utf-8")
