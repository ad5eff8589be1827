"""A program that runs an agent's command in bubblewrap, with the gateway as its only network.

    isolated.py SOCKET PORT [READABLE ...] -- COMMAND ...

The command sees the working folder, the readable files and folders, the system's programs, and no
other file or process. In its network is one address, 127.0.0.1:PORT: what connects to it reaches
the gateway through the Unix socket SOCKET. It imports nothing of agentrl, so that it starts fast.
"""

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress

SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/group",
    "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/etc/passwd",
    "/etc/ssl",
)  # fmt: skip
_INSIDE = "--inside"


def bubblewrap_command(
    gateway: str, port: str, readable: list[str], command: list[str]
) -> list[str]:
    """Return the command that isolates another one in the current folder."""
    folder = os.getcwd()
    own = [sys.prefix, sys.base_prefix, os.path.abspath(__file__)]
    # A new session, so that nothing is typed into the terminal of the run.
    options = ["--unshare-all", "--die-with-parent", "--new-session"]
    options += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for path in (*SYSTEM, *dict.fromkeys([*own, *readable])):
        options += ["--ro-bind-try", path, path]
    options += ["--bind", gateway, gateway, "--bind", folder, folder, "--chdir", folder]
    inside = [sys.executable, os.path.abspath(__file__), _INSIDE, gateway, port, "--"]
    return ["bwrap", *options, *inside, *command]


def run_inside(gateway: str, port: int, command: list[str]) -> int:
    """Run a command, and pass on what it sends to the port; return its exit code."""
    server = socket.create_server(("127.0.0.1", port), backlog=128)
    threading.Thread(target=_accept, args=(server, gateway), daemon=True).start()
    code = subprocess.run(command, check=False).returncode
    return code if code >= 0 else 128 - code


def _accept(server: socket.socket, gateway: str) -> None:
    while True:
        client, _ = server.accept()
        upstream = socket.socket(socket.AF_UNIX)
        try:
            upstream.connect(gateway)
        except OSError:  # the gateway has ended
            client.close()
            continue
        for source, target in ((client, upstream), (upstream, client)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def main(arguments: list[str]) -> None:
    """Isolate the command, or run it if this process is inside already."""
    split = arguments.index("--")
    given, command = arguments[:split], arguments[split + 1 :]
    if given[0] == _INSIDE:
        sys.exit(run_inside(given[1], int(given[2]), command))
    gateway, port, *readable = given
    isolated = bubblewrap_command(gateway, port, readable, command)
    os.execvp(isolated[0], isolated)


if __name__ == "__main__":
    main(sys.argv[1:])
