"""SGLang servers in the processes of a run on Ray: found by their clients, and started again."""

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayError

from agentrl.cluster.handles import RemoteHost
from agentrl.engines.sglang.arguments import DEVICES_VARIABLE, SGLangNeeds
from agentrl.engines.sglang.servers.directory import ServerReport
from agentrl.engines.sglang.servers.worker import Planner, ServerWorker, plan_servers

LOOK_UP_TIMEOUT_S = 10.0
"""Seconds that a server's process has to report."""
LAST_REPORT_S = 3.0
"""Seconds for which a process still reports why its server has ended, before it ends itself."""
MAX_FAILED_STARTS = 3
"""A server that has failed so often in succession without an answer is lost."""


class HostedServer:
    """A `ServerWorker` in a `Host`. When its server ends, it ends its process: Ray starts it again,
    perhaps on another node.

    Args:
        start_timeout_s: Seconds from the start of the server until it must answer.
        first_device: Index of its first device if it shares those of the training ranks; None: it
            has the devices that Ray gives to its process.
        num_devices: Devices that it shares with training ranks.
        plan: Makes the plan of the server.
    """

    def __init__(
        self,
        start_timeout_s: float,
        first_device: int | None = None,
        num_devices: int = 1,
        plan: Planner = plan_servers,
    ) -> None:
        devices: dict[str, str] = {}
        if first_device is not None:
            indices = range(first_device, first_device + num_devices)
            devices = {DEVICES_VARIABLE: ",".join(map(str, indices))}
        self._worker = ServerWorker(
            host=ray.util.get_node_ip_address(),
            devices=devices,
            start_timeout_s=start_timeout_s,
            on_end=_end_process,
            plan=plan,
        )

    def start(self, needs: SGLangNeeds) -> None:
        """Start the server, without a wait until it is ready. Does nothing when repeated."""
        self._worker.start(needs)

    def report(self) -> ServerReport:
        """Return the server's address, or why it has none."""
        return self._worker.report()

    def load(self) -> dict[str, Any]:
        """Return what a heartbeat says of it."""
        report = self._worker.report()
        return {"server": report.address or report.problem}

    def close(self) -> None:
        """End the server and wait for its processes."""
        self._worker.end()


def _end_process(problem: str) -> None:
    print(f"the SGLang server has failed: {problem}", file=sys.stderr, flush=True)
    time.sleep(LAST_REPORT_S)
    os._exit(1)


class RayServers:
    """The directory of a run's servers (see `ServerDirectory`). It can be sent to any process.

    Args:
        hosts: Processes with a `HostedServer`. Their handles stay valid when Ray starts one again.
        shares_devices: Whether servers and training ranks use the same devices.
    """

    def __init__(self, hosts: Sequence[RemoteHost], *, shares_devices: bool = False) -> None:
        self.hosts = tuple(hosts)
        self.shares_devices = shares_devices
        self._last = [ServerReport(address=None, problem="it was not reached yet")] * len(hosts)
        self._num_failed = [0] * len(hosts)

    def start(self, needs: SGLangNeeds) -> None:
        """Start every server that was not started yet. Waits for nothing; `look_up` reports."""
        for host in self.hosts:
            host.actor.control.remote("start", needs)

    async def look_up(self) -> Sequence[ServerReport]:
        """Report on each server, always in the same order, within `LOOK_UP_TIMEOUT_S`."""
        found = await asyncio.gather(*map(self._report, range(len(self.hosts))))
        for index, (before, now) in enumerate(zip(self._last, found, strict=True)):
            self._num_failed[index] += now.has_failed and not before.has_failed
            if now.address is not None:
                self._num_failed[index] = 0
        self._last = [
            replace(report, is_lost=report.is_lost or failed >= MAX_FAILED_STARTS)
            for report, failed in zip(found, self._num_failed, strict=True)
        ]
        return self._last

    async def _report(self, index: int) -> ServerReport:
        try:
            async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                return await self.hosts[index].actor.control.remote("report")
        except TimeoutError:
            problem = f"its process has not answered for {LOOK_UP_TIMEOUT_S:g} s"
        except RayError:
            problem = "its process has ended"
        last = self._last[index]
        # What it reported before it ended says more than its end.
        return last if last.has_failed else ServerReport(address=None, problem=problem)
