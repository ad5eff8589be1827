"""The providers: each function turns this process into one that runs the guest, isolated."""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from filesystem_view import SYSTEM_LINKS, FilesystemView, is_system
from processes import Limits

_OWN_PROCESSES = 2
"""Guest, and interpreter or relay. bubblewrap's own process is in another user namespace."""
_SUPERVISOR_THREADS = 8
"""Threads of sandlock, plus one for each core."""
_FILES = ("/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")


@dataclass(frozen=True)
class LaunchSpec:
    """What a provider runs, and where."""

    view: FilesystemView
    settings: dict[str, Any]
    """Made by `agentrl.sandbox.spawner_client`."""
    storage: str
    """A folder on the disk, used if the view's folder is on the disk."""

    @property
    def max_processes(self) -> int:
        """Processes of the sandbox, including the guest's own."""
        return self.settings["max_processes"] + _OWN_PROCESSES

    def guest_argv(
        self, folder: str, environment: list[str], max_processes: int | None
    ) -> list[str]:
        """Return the guest's command line, with the paths that its code sees."""
        home, scripts, *packages = environment
        library = f"{home}/lib/python{sys.version_info[0]}.{sys.version_info[1]}"
        hidden = [(f"{path}/", "") for path in (*packages, library, folder, home)]
        limits: Limits = self.settings["limits"]
        rlimits = limits["rlimits"]
        if max_processes is not None:
            rlimits = {**rlimits, "RLIMIT_NPROC": max_processes}
        argument = json.dumps({**limits, "rlimits": rlimits, "hidden": hidden})
        python = os.path.join(home, self.settings["executable"])
        return [python, "-s", "-S", f"{scripts}/guest.py", argument]


def _variables(folder: str, environment: list[str]) -> dict[str, str]:
    """Return all environment variables that the code sees."""
    home, _, *packages = environment
    variables = {
        "PATH": f"{home}/bin:/usr/bin:/bin",
        "HOME": folder,
        "TMPDIR": folder,
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return {**variables, "PYTHONPATH": ":".join(packages)} if packages else variables


def run_sandlock(spec: LaunchSpec) -> None:
    """Run the guest under Landlock and seccomp."""
    sandlock: Any = importlib.import_module("sandlock")
    view = spec.view
    max_threads, on_disk = None, {}
    if view.is_mounted:
        # The kernel counts threads too, by user and namespace, so this sandbox alone.
        max_threads = spec.max_processes + _SUPERVISOR_THREADS + (os.cpu_count() or 1)
    else:  # sandlock bounds a folder on the disk: it keeps what is written apart
        on_disk = {
            "workdir": view.folder,
            "fs_storage": spec.storage,
            "max_disk": spec.settings["disk_bytes"],
            "on_exit": sandlock.BranchAction.ABORT,
            "on_error": sandlock.BranchAction.ABORT,
        }
    readable = ["/usr", *SYSTEM_LINKS, *_FILES, *_DEVICES, "/dev/zero"]
    sandbox = sandlock.Sandbox(
        fs_readable=[path for path in readable if os.path.exists(path)] + view.environment,
        fs_writable=[view.folder, "/dev/null", *(["/dev/shm"] if view.is_mounted else [])],
        cwd=view.folder,
        clean_env=True,
        env=_variables(view.folder, view.environment),
        max_processes=spec.max_processes,
        **on_disk,
    )
    argv = spec.guest_argv(view.folder, view.environment, max_threads)
    sandbox.popen(argv, *[sandlock.StdioMode.INHERIT] * 3).wait()


def run_bubblewrap(spec: LaunchSpec) -> None:
    """Run the guest in namespaces of its own."""
    environment: list[str] = []
    binds: list[str] = []
    for number, path in enumerate(spec.view.environment):
        environment.append(path if is_system(path) else f"/mnt/{number}")
        binds += [] if is_system(path) else ["--ro-bind", path, environment[-1]]
    further: list[str] = []
    for path, source in spec.view.readable.items():
        further += [] if is_system(path) else ["--ro-bind", source, path]
    size = ["--size", str(spec.settings["disk_bytes"])]
    argv = [
        spec.settings["bubblewrap"],
        *("--unshare-all", "--unshare-user", "--disable-userns", "--hostname", "sandbox"),
        *("--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"),
        *("--uid", "65534", "--gid", "65534", "--ro-bind", "/usr", "/usr"),
        *(*_system_binds(), *binds, "--proc", "/proc"),
        *(["--bind", "/tmp", "/tmp"] if spec.view.is_mounted else [*size, "--tmpfs", "/tmp"]),
        *further,
        *("--remount-ro", "/", "--chdir", "/tmp", "--"),
        *spec.guest_argv("/tmp", environment, spec.max_processes),
    ]
    os.execve(argv[0], argv, _variables("/tmp", environment))


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
    # A process that can write to /dev/zero can map it shared: memory that no limit counts. Reading
    # /dev/full gives the same bytes, and it cannot be mapped.
    binds += ["--dev-bind", "/dev/full", "/dev/zero"]
    return [*binds, "--symlink", "/proc/self/fd", "/dev/fd", "--symlink", "/tmp", "/dev/shm"]


def run_unsandboxed(spec: LaunchSpec) -> None:
    """Run the guest with limits alone: the code can do whatever this user can."""
    view = spec.view
    argv = spec.guest_argv(view.folder, view.environment, None)
    os.execve(argv[0], argv, _variables(view.folder, view.environment))


PROVIDERS: dict[str, Callable[[LaunchSpec], None]] = {
    "sandlock": run_sandlock,
    "bubblewrap": run_bubblewrap,
    "subprocess": run_unsandboxed,
}
