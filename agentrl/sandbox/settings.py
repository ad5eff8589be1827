"""What a keeper is told: the limits, and what of this machine the code may see."""

import importlib.util
import math
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Literal

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox.syscall_filter import syscall_filter

LocalProvider = Literal["sandlock", "bubblewrap", "subprocess"]
_INSIDE = Path(__file__).with_name("inside").resolve()
KEEPER = _INSIDE / "keeper.py"
_MOST_TIMERS = 256
"""POSIX timers and queued signals of a user: the kernel's memory for them counts for no process."""


def keeper_settings(config: SandboxConfig, provider: LocalProvider) -> dict[str, object]:
    """Say all that a keeper needs to know.

    Raises:
        SandboxError: where the interpreter does not lie where Python says that it is installed, or
            the system calls of this machine are not known.
    """
    home, executable = _interpreter()
    packages = _site_packages() if config.site_packages else []
    return {
        "provider": provider,
        "folders": str(Path(tempfile.gettempdir()).resolve() / f"agentrl-sandbox-{_user()}-"),
        "environment": [str(home), str(_INSIDE), *packages],
        "executable": str(executable),
        "needs_namespaces": provider == "sandlock" and config.provider != "sandlock",
        "limits": _limits(config, provider),
        "memory_bytes": config.memory_bytes,
        "disk_bytes": config.disk_bytes,
        "max_processes": config.max_processes,
        "sandlock_folder": sandlock_folder(),
        "bubblewrap": shutil.which("bwrap"),
    }


def sandlock_folder() -> str | None:
    """Find where the package sandlock is installed, without importing it; None where it is not."""
    try:
        found = importlib.util.find_spec("sandlock")
    except (ImportError, ValueError):  # whoever finds modules here refuses this one
        return None
    return None if found is None or found.origin is None else str(Path(found.origin).parents[1])


def _interpreter() -> tuple[Path, Path]:
    home, executable = Path(sys.base_prefix).resolve(), Path(sys.executable).resolve()
    if not executable.is_relative_to(home):
        raise SandboxError(
            f"the interpreter {executable} does not lie in its own installation",
            expected=f"a path under {home}",
        )
    return home, executable.relative_to(home)


def _site_packages() -> list[str]:
    paths = sysconfig.get_paths()
    return list(dict.fromkeys(str(Path(paths[name]).resolve()) for name in ("purelib", "platlib")))


def _user() -> int:
    return Path("/proc/self").stat().st_uid


def _limits(config: SandboxConfig, provider: LocalProvider) -> dict[str, object]:
    rlimits = {
        "RLIMIT_AS": config.memory_bytes,
        "RLIMIT_CPU": math.ceil(config.cpu_s),
        "RLIMIT_NOFILE": config.max_open_files,
        "RLIMIT_FSIZE": config.disk_bytes,
        "RLIMIT_CORE": 0,
        "RLIMIT_SIGPENDING": _MOST_TIMERS,
    }
    return {
        "rlimits": rlimits,
        "is_alone": provider != "subprocess",
        "syscall_filter": None if provider == "subprocess" else syscall_filter().hex(),
    }
