"""The providers: each turns a process into one that runs the guest behind its walls."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from filesystem_view import SYSTEM_LINKS, Room, is_system
from limits import Limits

_OWN_PROCESSES = 2
"""Guest and interpreter; bubblewrap's own stand in another user namespace."""
_SUPERVISOR_THREADS = 8
"""Of sandlock, beside one for each core."""
_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True)
class Order:
    """What is to be run, and where."""

    room: Room
    settings: dict[str, Any]
    """As `agentrl.sandbox.spawner_client` makes them."""
    storage: str
    """A folder on the disk, where the room is one."""

    def guest_argv(
        self, folder: str, environment: list[str], most_processes: int | None
    ) -> list[str]:
        """The guest's command line, where folder and interpreter lie as its code sees them."""
        home, scripts, *packages = environment
        library = f"{home}/lib/python{sys.version_info[0]}.{sys.version_info[1]}"
        hidden = [(f"{path}/", "") for path in (*packages, library, folder, home)]
        limits: Limits = self.settings["limits"]
        rlimits = limits["rlimits"]
        if most_processes is not None:
            rlimits = {**rlimits, "RLIMIT_NPROC": most_processes}
        told = json.dumps({**limits, "rlimits": rlimits, "hidden": hidden})
        python = os.path.join(home, self.settings["executable"])
        return [python, "-s", "-S", f"{scripts}/guest.py", told]

    @property
    def most_processes(self) -> int:
        """What the sandbox may have, with the guest's own."""
        return self.settings["max_processes"] + _OWN_PROCESSES


def _names(folder: str, environment: list[str]) -> dict[str, str]:
    """The environment variables: all there are."""
    home, _, *packages = environment
    names = {
        "PATH": f"{home}/bin:/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return {**names, "PYTHONPATH": ":".join(packages)} if packages else names


def behind_sandlock(order: Order) -> None:
    """Run the guest under Landlock and seccomp."""
    sandlock: Any = importlib.import_module("sandlock")
    room = order.room
    most = None
    if room.is_mounted:
        # The kernel's count, threads too: it counts by user and namespace, this sandbox alone.
        most = order.most_processes + _SUPERVISOR_THREADS + (os.cpu_count() or 1)
    readable = ["/usr", *SYSTEM_LINKS, *_FILES, *_DEVICES, "/dev/zero"]
    sandbox = sandlock.Sandbox(
        fs_readable=[path for path in readable if os.path.exists(path)] + room.environment,
        fs_writable=[room.folder, "/dev/null", *(["/dev/shm"] if room.is_mounted else [])],
        cwd=room.folder,
        clean_env=True,
        env=_names(room.folder, room.environment),
        max_processes=order.most_processes,
        **({} if room.is_mounted else _on_disk(order, sandlock)),
    )
    argv = order.guest_argv(room.folder, room.environment, most)
    sandbox.popen(argv, *[sandlock.StdioMode.INHERIT] * 3).wait()


def _on_disk(order: Order, sandlock: Any) -> dict[str, Any]:
    """Let sandlock bound a folder on the disk: it keeps apart what is written."""
    return {
        "workdir": order.room.folder,
        "fs_storage": order.storage,
        "max_disk": order.settings["disk_bytes"],
        "on_exit": sandlock.BranchAction.ABORT,
        "on_error": sandlock.BranchAction.ABORT,
    }


def behind_bubblewrap(order: Order) -> None:
    """Run the guest in namespaces of its own."""
    environment: list[str] = []
    binds: list[str] = []
    for number, path in enumerate(order.room.environment):
        environment.append(path if is_system(path) else f"/mnt/{number}")
        binds += [] if is_system(path) else ["--ro-bind", path, environment[-1]]
    size = ["--size", str(order.settings["disk_bytes"])]
    argv = [
        order.settings["bubblewrap"],
        *("--unshare-all", "--unshare-user", "--disable-userns", "--hostname", "sandbox"),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
        *("--uid", "65534", "--gid", "65534", "--ro-bind", "/usr", "/usr"),
        *(*_system_binds(), *binds, "--proc", "/proc"),
        *(["--bind", "/tmp", "/tmp"] if order.room.is_mounted else [*size, "--tmpfs", "/tmp"]),
        *("--remount-ro", "/", "--chdir", "/tmp", "--"),
        *order.guest_argv("/tmp", environment, order.most_processes),
    ]
    os.execve(argv[0], argv, _names("/tmp", environment))


def _system_binds() -> list[str]:
    binds: list[str] = []
    for path in SYSTEM_LINKS:
        if os.path.islink(path):
            binds += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            binds += ["--ro-bind", path, path]
    for path in _FILES:
        binds += ["--ro-bind-try", path, path]
    for path in _DEVICES:
        binds += ["--dev-bind", path, path]
    # Who may write to /dev/zero can map it shared, which makes memory that nobody counts; to read,
    # /dev/full is the same, and it cannot be mapped.
    binds += ["--dev-bind", "/dev/full", "/dev/zero"]
    return [*binds, "--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp", "/dev/shm"]


def behind_nothing(order: Order) -> None:
    """Run the guest with limits, and with all that this user may do."""
    room = order.room
    argv = order.guest_argv(room.folder, room.environment, None)
    os.execve(argv[0], argv, _names(room.folder, room.environment))


PROVIDERS: dict[str, Callable[[Order], None]] = {
    "sandlock": behind_sandlock,
    "bubblewrap": behind_bubblewrap,
    "subprocess": behind_nothing,
}
