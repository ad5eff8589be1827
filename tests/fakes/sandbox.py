"""A sandbox without walls that runs nothing, for tests of those who wait for one."""

import asyncio
from collections.abc import Mapping, Sequence

from agentrl.plugins.environment import num_cores
from agentrl.sandbox import Execution, ExecutionEnd, Session


class BusySandbox:
    """Says what every program is expected to say; late where there are more of them than cores."""

    def __init__(self, says: str, *, seconds: float = 0.01) -> None:
        self.says, self.seconds = says, seconds
        self.num_running = self.most_running = 0
        self.is_closed = False

    async def open_python(self) -> Session:
        raise NotImplementedError

    async def open_shell(self) -> Session:
        raise NotImplementedError

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
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.num_running -= 1
        if self.most_running > num_cores():
            return Execution(end=ExecutionEnd.TIMEOUT)
        return Execution(end=ExecutionEnd.OK, stdout=self.says, exit_code=0)

    async def close(self) -> None:
        self.is_closed = True
