"""The actor in which every process of a run on Ray lives, and the process's log and heartbeat.

A `Host` makes an object of a plain class and calls its methods. It writes everything that its
process prints to one file of the run folder (through the monitor if the node does not share the
folder), sends heartbeats to the monitor, and leaves no child process when it ends, however it ends.
"""

import asyncio
import contextlib
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, Any

import psutil
import ray

from agentrl.cluster import reaper
from agentrl.cluster.inputs import Shipment
from agentrl.config.schema.cluster import HostRole

MAX_CALLS = 20_000
"""Most calls of one host at the same time."""
MAX_THREADS = 256
"""Most calls of methods without `async` at the same time."""
LOG_MARK = ".agentrl-run"
"""File in the folder of the logs by which a node recognizes the driver's own folder."""
LAST_LOG_S = 5.0
"""Seconds in which a process that is about to be ended sends the end of its log."""
_SHIP_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """What a host runs, and where it writes its log."""

    name: str
    """Such as `rank_0`: the name of its log, and of the process in reports."""
    role: HostRole
    pool: str
    factory: str
    """The class of the object, `module:name`. It is imported in the process."""
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environment: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Environment variables; they are set before the class is imported."""
    directory: str | None = None
    """The working directory, if the node has it."""
    shipment: Shipment = field(default_factory=Shipment)
    """Inputs that the node needs before the object is made."""
    fetch_timeout_s: float = 120.0
    """Seconds that the driver's machine may take for a piece of an input."""
    log_folder: str = ""
    run_id: str = ""
    heartbeat_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInfo:
    """Where a host runs."""

    name: str
    role: HostRole
    pool: str
    node_id: str
    address: str
    process: int
    devices: tuple[str, ...]
    """Ids of the accelerators that Ray gave to the process, as in CUDA_VISIBLE_DEVICES."""
    num_starts: int
    """1 for the first process of this name, 2 after a restart."""

    def __str__(self) -> str:
        return f"{self.name} (process {self.process} on node {self.address})"


class Host:
    """One process of a run; `ray.remote` makes an actor of it.

    Args:
        spec: The description of the process.
        monitor: The actor that gets heartbeats and logs.

    Raises:
        Exception: an error of the object's constructor, which ends the process.
    """

    def __init__(self, spec: HostSpec, monitor: Any) -> None:
        os.environ.update(spec.environment)
        os.environ["AGENTRL_HOST"] = token = f"{spec.run_id}.{spec.name}.{os.getpid()}"
        self._reaper = reaper.start(token)
        self._directory = enter_directory(spec.directory)
        self._monitor = monitor
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix=f"agentrl-{spec.name}")
        context: Any = ray.get_runtime_context()
        devices = context.get_accelerator_ids().get("GPU", [])
        self.info = HostInfo(
            name=spec.name,
            role=spec.role,
            pool=spec.pool,
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            process=os.getpid(),
            devices=tuple(map(str, devices)),
            num_starts=1 + int(context.was_current_actor_reconstructed),
        )
        name_interface(self.info.address)
        log = open_log(spec)
        print(f"--- {self.info}, {time.strftime('%Y-%m-%d %H:%M:%S')}", flush=True)
        self._object: Any = None
        self._calls = 0
        self._ended = threading.Event()
        beating = threading.Thread(
            target=self._beat, args=(spec.heartbeat_s,), name="agentrl-heartbeat", daemon=True
        )
        beating.start()
        self._shipping: threading.Thread | None = None
        if log is not None:
            self._shipping = threading.Thread(
                target=self._ship, args=(log,), name="agentrl-log", daemon=True
            )
            self._shipping.start()
        try:
            spec.shipment.fetch(timeout_s=spec.fetch_timeout_s)
            self._object = load_class(spec.factory)(*spec.arguments, **spec.keywords)
        except BaseException:
            logging.getLogger(__name__).exception("%s cannot start", spec.name)
            raise

    async def call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        """Call a method of the object: on the event loop if it is `async`, else on a thread."""
        self._calls += 1
        try:
            function = getattr(self._object, method)
            if inspect.iscoroutinefunction(function):
                return await function(*arguments, **keywords)
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(
                self._threads, lambda: function(*arguments, **keywords)
            )
        finally:
            self._calls -= 1

    @ray.method(concurrency_group="control")
    async def describe(self) -> HostInfo:
        """Return where this host runs; the answer comes when the object has been made."""
        return self.info

    @ray.method(concurrency_group="control")
    async def control(self, method: str, *arguments: Any) -> Any:
        """Call a short method of the object, also while its other calls use all capacity."""
        function = getattr(self._object, method)
        if inspect.iscoroutinefunction(function):
            return await function(*arguments)
        return await asyncio.to_thread(function, *arguments)

    @ray.method(concurrency_group="control")
    async def close(self) -> None:
        """Close the object, if it has `close`, and send the end of its log, before the process is
        ended.
        """
        if (close := getattr(self._object, "close", None)) is not None:
            result = close() if inspect.iscoroutinefunction(close) else asyncio.to_thread(close)
            await result
        self._ended.set()
        if self._shipping is not None:
            await asyncio.to_thread(self._shipping.join)

    def _beat(self, interval_s: float) -> None:
        process = psutil.Process()
        process.cpu_percent()
        psutil.cpu_percent()  # measured from one call to the next
        raylet = os.getppid()
        while not self._ended.wait(interval_s):
            if os.getppid() != raylet:  # Ray itself leaves some processes of a killed raylet
                os._exit(1)
            load: dict[str, Any] = {
                "cpu_percent": process.cpu_percent(),
                "memory_bytes": process.memory_info().rss,
                "node_load": os.getloadavg()[0],
                "node_cpu_percent": psutil.cpu_percent(),
                "node_memory_percent": psutil.virtual_memory().percent,
                "calls": self._calls,
            }
            with contextlib.suppress(Exception):
                if (own := getattr(self._object, "load", None)) is not None:
                    load |= own()
            with contextlib.suppress(Exception):
                self._monitor.beat.remote(self.info, load)

    def _ship(self, log: IO[bytes]) -> None:
        """Send new bytes of the local log to the monitor."""
        sent: Any = None
        while True:
            is_last = self._ended.wait(_SHIP_S)
            while part := log.read(1 << 20):
                with contextlib.suppress(Exception):
                    sent = self._monitor.append_log.remote(self.info.name, part)
            if is_last:
                with contextlib.suppress(Exception):
                    ray.get(sent, timeout=LAST_LOG_S)  # the earlier parts arrived before it
                return


def load_class(path: str) -> Any:
    """Import `module:name`."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def enter_directory(directory: str | None) -> str:
    """Change to the driver's working directory if this node has it; return the current one."""
    if directory is not None and Path(directory).is_dir():
        os.chdir(directory)
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    return here


def open_log(spec: HostSpec) -> IO[bytes] | None:
    """Write what the process prints and logs to its file in the run folder.

    Returns:
        None; or, if this node does not share the run folder, a reader of the local file.
    """
    folder = Path(spec.log_folder)
    mark = folder / LOG_MARK
    reader: IO[bytes] | None = None
    if mark.is_file() and mark.read_text(encoding="utf-8") == spec.run_id:
        target = os.open(folder / f"{spec.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.close(target)
    else:
        # Ray's own log of this process: it is removed with Ray's other logs.
        reader = open(os.path.realpath("/proc/self/fd/1"), "rb")  # noqa: SIM115 - read by a thread
        reader.seek(0, os.SEEK_END)
    os.dup2(1, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", closefd=False)
    logging.basicConfig(
        format=f"{spec.name}: %(message)s", stream=sys.stderr, level=logging.WARNING, force=True
    )
    return reader


def name_interface(address: str) -> None:
    """Let gloo use the interface of this node's address; a host name may mean the loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address == address for one in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
