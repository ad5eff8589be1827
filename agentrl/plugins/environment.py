"""What plug-ins need of their environment: optional packages, cores, a living parent process."""

import multiprocessing
import os
import signal
import threading
from importlib.metadata import PackageNotFoundError, requires
from importlib.util import find_spec

from packaging.requirements import Requirement

from agentrl.errors import MissingExtraError

DISTRIBUTION = "agentrl-multiturn"
"""The name of this project on the package index. `agentrl` is another project there."""


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra of agentrl.

    It names the packages themselves, so it works in every folder and needs no published agentrl.

    Args:
        extra: As in pyproject.toml.
    """
    try:
        declared = requires(DISTRIBUTION) or []
    except PackageNotFoundError:  # agentrl is imported from a folder that was not installed
        declared = []
    packages = [
        f"{one.name}{'[' + ','.join(sorted(one.extras)) + ']' if one.extras else ''}{one.specifier}"
        for one in map(Requirement, declared)
        if one.marker
        and not one.marker.evaluate({"extra": ""})
        and one.marker.evaluate({"extra": extra})
    ]
    if not packages:
        return f"pip install '.[{extra}]' (in a checkout of agentrl)"
    return "pip install " + " ".join(f"'{package}'" for package in packages)


def require_package(package: str, *, extra: str, what: str) -> None:
    """Check that an optional package is installed, without importing it.

    Args:
        package: As it is imported.
        extra: The extra of agentrl that has the package.
        what: Who needs it, for the error.

    Raises:
        MissingExtraError: saying how to install it.
    """
    if find_spec(package) is None:
        raise MissingExtraError(
            f"{what} needs the package {package!r}, which is not installed",
            install=install_command(extra),
        )


def end_with_parent() -> None:
    """End this process when its parent has ended; if it leads a process group, end the group too.

    Call it in a process that `multiprocessing` started. A thread waits for the parent's end, so
    that Python code that never returns is ended too.
    """
    threading.Thread(target=_await_parent, name="agentrl-parent", daemon=True).start()


def _await_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def num_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
