"""The process that starts sandboxes, so that the trainer with its memory and threads never forks.

It imports the standard library only (and sandlock, if that is the provider), sees nothing of the
trainer's environment, and lives until the trainer dies or closes the socket on descriptor 0. For
each sandbox it receives two sockets: one for the guest, and a control socket. If the trainer closes
the control socket, the sandbox is killed. The spawner forks a supervisor, which makes the private
folder, starts the guest under the provider, watches the memory of the sandbox, and at the end kills
every process and deletes the folder.

As root it gives each sandbox a user of its own, which owns nothing else on the machine. If
namespaces are available (to root, or through a user namespace), each sandbox has its own processes,
network and mounts: the private folder is a file system in memory over /tmp, the interpreter is
bound read-only, and the rest of the machine's files is covered. Otherwise the folder is on the
disk.
"""

import importlib
import json
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

from folders import delete, delete_abandoned, lock, make_folder, random_name
from namespaces import find_namespace_error
from supervisor import Supervisor


def main() -> None:
    """Start sandboxes until the trainer closes its end."""
    settings = json.loads(sys.argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the supervisors
    _choose_namespaces(settings)
    delete_abandoned(settings["folders"])
    folder = make_folder(settings["folders"], 0o711 if os.geteuid() == 0 else 0o700)
    locked = lock(folder)  # held by every process of this spawner
    if settings["provider"] == "sandlock":
        sys.path.append(settings["sandlock_folder"])
        importlib.import_module("sandlock")  # once, and not in every supervisor
    requests = socket.socket(fileno=0)
    null = os.open(os.devnull, os.O_RDWR)
    number = 0
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 1, 2)
        if not message:
            break
        number += 1
        if os.fork() == 0:
            os.dup2(null, requests.fileno())
            guest, control = descriptors
            path = os.path.join(folder, random_name())
            try:
                Supervisor(settings, path, number=number, guest=guest, control=control).run()
            finally:
                os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
    with suppress(ChildProcessError):
        os.wait()  # SIGCHLD is ignored, so this returns when no supervisor is left
    os.close(locked)
    with suppress(OSError):
        delete(folder)


def _choose_namespaces(settings: dict[str, Any]) -> None:
    """Set which namespaces the sandboxes have, or why they have none."""
    settings["has_pids"], reason = False, "it sets limits alone"
    if settings["provider"] != "subprocess":
        settings["has_pids"] = find_namespace_error(has_pids=True) is None
        reason = None if settings["has_pids"] else find_namespace_error(has_pids=False)
        if reason is not None and settings["needs_namespaces"]:
            sys.exit(f"it has no namespaces here: {reason}")
    settings["no_namespaces"] = reason


if __name__ == "__main__":
    main()
