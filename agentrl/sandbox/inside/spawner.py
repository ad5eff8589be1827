"""The process that starts sandboxes, so that the trainer, with its memory and threads, forks none.

It imports nothing but the standard library (and sandlock, where that keeps the code in), sees
nothing of the trainer's environment, and lives until the trainer dies or closes the socket on
descriptor 0. For each sandbox it gets two sockets: the guest's own, and one whose end means "kill
it". It forks a warden, which makes the private folder, starts the guest behind the provider's
walls, looks at the memory of all that runs there, and at the end kills every descendant and deletes
the folder.

As root it gives each sandbox a user of its own, which owns nothing else on the machine. If it may
have namespaces (as root, or by a user namespace), each sandbox has its own processes, network and
mounts: the private folder is a file system in memory over /tmp that nobody else sees, the
interpreter is bound beside it, read-only, and the rest of the machine's files are covered. Else the
folder is on the disk.
"""

import importlib
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from folders import delete, hold, make_folder, random_name, sweep
from namespaces import why_no_namespaces
from supervisor import Supervisor


def main() -> None:
    """Start sandboxes until the trainer closes its end."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for its children
    _find_namespaces(settings)
    sweep(settings["folders"])
    folder = make_folder(settings["folders"], 0o711 if os.geteuid() == 0 else 0o700)
    held = hold(folder)  # by every process of this keeper
    if settings["provider"] == "sandlock":
        sys.path.append(settings["sandlock_folder"])
        importlib.import_module("sandlock")  # once, and not in every warden
    asked = socket.socket(fileno=0)
    nothing = os.open(os.devnull, os.O_RDWR)
    number = 0
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, 1, 2)
        if not message:
            break
        number += 1
        if os.fork() == 0:
            os.dup2(nothing, asked.fileno())
            talk, control = descriptors
            place = os.path.join(folder, random_name())
            try:
                Supervisor(settings, place, number=number, talk=talk, control=control).keep()
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
    _leave(folder, held)


def _find_namespaces(settings: dict[str, Any]) -> None:
    """Set which namespaces the sandboxes have, or why they have none."""
    settings["has_pids"], reason = False, "it sets limits alone"
    if settings["provider"] != "subprocess":
        settings["has_pids"] = why_no_namespaces(has_pids=True) is None
        reason = None if settings["has_pids"] else why_no_namespaces(has_pids=False)
        if reason is not None and settings["needs_namespaces"]:
            sys.exit(f"it has no namespaces here: {reason}")
    settings["no_namespaces"] = reason


def _leave(folder: str, held: int) -> None:
    """Wait for the wardens and delete the folder."""
    with suppress(ChildProcessError):
        os.wait()  # with SIGCHLD ignored: until there are none
    os.close(held)
    with suppress(OSError):
        delete(folder)


if __name__ == "__main__":
    main()
