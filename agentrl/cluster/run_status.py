"""The status of a run on Ray, as a file next to its logs. Nothing here needs Ray.

The driver writes the file every few seconds, and `agentrl status` reads it from any machine that
sees the run folder. The file is replaced as a whole, so a reader never sees a part of it.
"""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from pydantic import BaseModel, ConfigDict, ValidationError

from agentrl.atomic_io import atomic_file
from agentrl.cluster.pools import NodeResources, Pool, countable
from agentrl.config.schema.cluster import HostRole
from agentrl.errors import DataError

if TYPE_CHECKING:
    from agentrl.cluster.monitor import Heartbeat, Snapshot

STATUS_FILE = "status.json"
"""Name of the file in the folder of the logs."""
PERIOD_S = 2.0
"""Seconds between two versions of the file."""
SILENT_BEATS = 5
"""A process that has missed so many heartbeats is shown as silent."""

RunState = Literal["starting", "training", "finished", "stopped", "failed"]
ProcessState = Literal["alive", "silent", "ended"]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class PoolStatus(_Record):
    """A pool, as it is reserved."""

    name: str
    nodes: int
    roles: tuple[HostRole, ...]
    resources: dict[str, float]
    """Reserved on each node."""


class ProcessStatus(_Record):
    """A process of the run."""

    name: str
    """Such as `rank_0`, `server_1`, `rollout_3`; its log is `NAME.log`."""
    role: HostRole
    pool: str
    node: str
    """Address of its node."""
    node_id: str
    pid: int
    devices: tuple[str, ...]
    state: ProcessState
    heartbeat_age_s: float
    """Seconds since its last heartbeat, when the file was written."""
    restarts: int
    """How often a process of this name was replaced."""
    cpu_percent: float | None = None
    """100: one core."""
    memory_bytes: int | None = None
    calls: int | None = None
    """Remote calls that run in it."""
    stage: str | None = None
    """What a training rank does, such as `gen of step 3`."""
    reason: str | None = None
    """Why it ended."""


class NodeStatus(_Record):
    """A node of the cluster."""

    node_id: str
    address: str
    is_alive: bool
    """False: the node has left the cluster since the run started."""
    resources: dict[str, float]
    available: dict[str, float]
    """What is not reserved, by this run or by others."""
    cpu_percent: float | None = None
    """Of all its cores; None if no process of the run is there."""
    memory_percent: float | None = None


class DriverStatus(_Record):
    """The process that supervises the run."""

    host: str
    pid: int
    pid_started: float
    """Start time of the process: another process may get the same number later."""


class RunStatus(_Record):
    """All that is known of a run on Ray at one time."""

    run_id: str
    folder: str
    driver: DriverStatus
    state: RunState
    reason: str | None = None
    """Why the run failed or was stopped."""
    started: float
    """Unix time."""
    written: float
    """Unix time of this version."""
    period_s: float = PERIOD_S
    total_steps: int | None = None
    """`trainer.total_training_steps`."""
    pools: tuple[PoolStatus, ...] = ()
    nodes: tuple[NodeStatus, ...] = ()
    processes: tuple[ProcessStatus, ...] = ()


def read_run_status(path: Path) -> RunStatus:
    """Read a status file.

    Raises:
        DataError: if it is not one.
        OSError: if it cannot be read.
    """
    try:
        return RunStatus.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise DataError(
            f"not a status of a run: {error.errors()[0]['msg']}",
            file=path,
            expected="a file that this version of agentrl has written",
        ) from error


def this_driver() -> DriverStatus:
    """Describe this process."""
    started = psutil.Process().create_time()
    return DriverStatus(host=socket.gethostname(), pid=os.getpid(), pid_started=started)


@dataclass(slots=True)
class StatusWriter:
    """Writes the status of a run every few seconds, from a thread of the driver.

    A version that cannot be written (a full disk) is left out; the run goes on.
    """

    path: Path
    run_id: str
    folder: Path
    pools: Sequence[Pool]
    total_steps: int | None
    heartbeat_s: float
    snapshot: "Callable[[], Snapshot | None]"
    """Asks the monitor; None if it does not answer."""
    list_nodes: Callable[[], Sequence[NodeResources]]
    started: float = field(default_factory=time.time)
    period_s: float = PERIOD_S
    _driver: DriverStatus = field(default_factory=this_driver)
    _nodes: dict[str, NodeResources] = field(default_factory=dict[str, NodeResources])
    _pids: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """The process of each name, and how often it was replaced."""
    _last: RunStatus | None = None
    _ended: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write versions during the block, and at its end how the run ended."""
        self.write()
        thread = threading.Thread(target=self._run, name="agentrl-status", daemon=True)
        thread.start()
        state, reason = "finished", None
        try:
            yield
        except (KeyboardInterrupt, GeneratorExit):
            state, reason = "stopped", "Ctrl-C or SIGTERM"
            raise
        except BaseException as error:
            state, reason = "failed", str(error).partition("\n")[0] or type(error).__name__
            raise
        finally:
            self._ended.set()
            thread.join()
            self._write_end(state, reason)

    def write(self) -> None:
        """Write a version now."""
        alive: set[str] = set()
        with suppress(Exception):  # Ray's control process does not answer: show what was known
            nodes = self.list_nodes()
            alive = {node.node_id for node in nodes}
            self._nodes |= {node.node_id: node for node in nodes}
        self._save(self._describe(self.snapshot(), alive))

    def _write_end(self, state: RunState, reason: str | None) -> None:
        assert self._last is not None
        ended = tuple(
            one.model_copy(update={"state": "ended", "cpu_percent": None, "calls": None})
            for one in self._last.processes
        )
        changes = {"state": state, "reason": reason, "written": time.time(), "processes": ended}
        self._save(self._last.model_copy(update=changes))

    def _run(self) -> None:
        while not self._ended.wait(self.period_s):
            self.write()

    def _save(self, status: RunStatus) -> None:
        self._last = status
        with suppress(OSError), atomic_file(self.path) as draft:
            draft.write_text(status.model_dump_json(indent=1) + "\n", encoding="utf-8")

    def _describe(self, snapshot: "Snapshot | None", alive: set[str]) -> RunStatus:
        before, now = self._last, time.time()
        state: RunState = "starting" if before is None else before.state
        processes = () if before is None else _older(before.processes, now - before.written)
        if snapshot is not None:
            state = snapshot.run.get("state", "starting")
            processes = self._processes(snapshot)
        beats = {} if snapshot is None else snapshot.beats
        load = {beat.info.node_id: beat.load for beat in beats.values()}
        pools = [
            PoolStatus(
                name=pool.name, nodes=pool.nodes, roles=pool.roles, resources=dict(pool.bundle)
            )
            for pool in self.pools
        ]
        nodes = [
            NodeStatus(
                node_id=node.node_id,
                address=node.address,
                is_alive=node.node_id in alive,
                resources=countable(node.total),
                available=countable(node.available),
                cpu_percent=load.get(node.node_id, {}).get("node_cpu_percent"),
                memory_percent=load.get(node.node_id, {}).get("node_memory_percent"),
            )
            for node in self._nodes.values()
        ]
        return RunStatus(
            run_id=self.run_id,
            folder=str(self.folder),
            driver=self._driver,
            state=state,
            started=self.started,
            written=now,
            period_s=self.period_s,
            total_steps=self.total_steps,
            pools=tuple(pools),
            nodes=tuple(nodes),
            processes=processes,
        )

    def _processes(self, snapshot: "Snapshot") -> tuple[ProcessStatus, ...]:
        found = [self._process(beat, snapshot) for beat in snapshot.beats.values()]
        shown = {one.name for one in found}
        for before in () if self._last is None else self._last.processes:
            if before.name in snapshot.ended and before.name not in shown:
                reason = snapshot.ended[before.name]
                found.append(before.model_copy(update={"state": "ended", "reason": reason}))
        return tuple(sorted(found, key=_by_role_and_number))

    def _process(self, beat: "Heartbeat", snapshot: "Snapshot") -> ProcessStatus:
        info, load = beat.info, beat.load
        pid, restarts = self._pids.get(info.name, (info.process, 0))
        if pid != info.process:
            restarts += 1
        self._pids[info.name] = (info.process, restarts)
        age_s = snapshot.now - beat.received
        return ProcessStatus(
            name=info.name,
            role=info.role,
            pool=info.pool,
            node=info.address,
            node_id=info.node_id,
            pid=info.process,
            devices=info.devices,
            state="silent" if age_s > SILENT_BEATS * self.heartbeat_s else "alive",
            heartbeat_age_s=max(0.0, age_s),
            restarts=restarts,
            cpu_percent=load.get("cpu_percent"),
            memory_bytes=load.get("memory_bytes"),
            calls=load.get("calls"),
            stage=load.get("stage"),
        )


def _by_role_and_number(process: ProcessStatus) -> tuple[int, int]:
    number = process.name.rpartition("_")[2]
    order = ("train", "engine", "rollout", "plugin").index(process.role)
    return order, int(number) if number.isdecimal() else 0


def _older(processes: Sequence[ProcessStatus], seconds: float) -> tuple[ProcessStatus, ...]:
    """Return processes of which nothing was heard for so many more seconds."""
    return tuple(
        one.model_copy(update={"heartbeat_age_s": one.heartbeat_age_s + seconds})
        for one in processes
    )
