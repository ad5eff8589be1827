"""Several nodes of a Ray cluster on this machine, and the processes of a run on them."""

import ctypes
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.fakes.runs import ROOT

STORE_BYTES = 80 * 1024**2
MARK = "AGENTRL_TEST_CLUSTER"
CLONE_FS, CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x200, 0x20000, 0x4000, 0x40000
"""Of Linux."""
POOLS = [
    {
        "name": "train",
        "nodes": 2,
        "devices_per_node": 1,
        "roles": ["train"],
        "resources": {"train_node": 0.1},
    }
]
SERVERS = {
    "name": "serve",
    "nodes": 1,
    "devices_per_node": 1,
    "roles": ["engine"],
    "resources": {"serve_node": 0.1},
}


@dataclass
class Nodes:
    """A cluster. The first node runs nothing of a run; Ray's control process is on it."""

    cluster: Any
    mark: str
    added: list[Any] = field(default_factory=list[Any])

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, resource: str) -> Any:
        """Add a node with two CPUs and a resource of its own."""
        node = self.cluster.add_node(
            num_cpus=2, object_store_memory=STORE_BYTES, resources={resource: 1}
        )
        self.added.append(node)
        return node

    def add_with_own_folder(self, resource: str, folder: Path) -> None:
        """Add a node that has an empty folder of its own at the path of an existing one.

        Raises:
            OSError: if this process may not mount.
        """
        with own_mount(folder):
            self.add(resource)

    def processes(self) -> list[psutil.Process]:
        """What runs belong to: every process that a host of this cluster has started."""
        return self.find("ray::Host", "sglang::", "engines.sglang")

    def find(self, *names: str) -> list[psutil.Process]:
        """Return the processes of this cluster with one of the names in their command."""
        wanted = f"{MARK}={self.mark}".encode()
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with suppress(OSError, psutil.Error):
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if wanted not in environment or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                command = " ".join(process.cmdline())
                if any(name in command for name in names):
                    found.append(process)
        return found


@contextmanager
def own_mount(folder: Path) -> Iterator[None]:
    """Mount an empty folder for what this thread starts in the block."""
    libc, here = ctypes.CDLL(None, use_errno=True), Path.cwd()

    def check(result: int) -> None:
        if result:
            raise OSError(ctypes.get_errno(), f"cannot mount over {folder}")

    with open("/proc/thread-self/ns/mnt") as before:
        check(libc.unshare(CLONE_NEWNS))
        try:
            check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
            check(libc.mount(b"none", bytes(folder), b"tmpfs", 0, None))
            yield
        finally:
            check(libc.unshare(CLONE_FS))  # threads that were started in the block share it
            check(libc.setns(before.fileno(), CLONE_NEWNS))
            os.chdir(here)


@contextmanager
def ray_nodes(*resources: str) -> Iterator[Nodes]:
    """Start a cluster with a node for each name, each with an object store of its own."""
    from ray.cluster_utils import Cluster

    mark = uuid.uuid4().hex
    os.environ |= {
        MARK: mark,
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    head = {"num_cpus": 1, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    nodes = Nodes(Cluster(initialize_head=True, head_node_args=head), mark)
    try:
        for resource in resources:
            nodes.add(resource)
        yield nodes
    finally:
        nodes.cluster.shutdown()


def process_with_log(log: Path) -> psutil.Process | None:
    """Return the host that writes a log of the run folder."""
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            is_log = os.readlink(f"/proc/{process.pid}/fd/1") == str(log)
            if is_log and "ray::" in " ".join(process.cmdline()):
                return process
    return None


def wait_until(condition: Callable[[], Any], *, seconds: float) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.05)
    return found
