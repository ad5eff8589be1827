"""Run an MCP server, pass its lines on, and end all its processes: `relay.py MAX COMMAND ...`.

The client library buffers a line until it ends, and copies the buffer for each new piece. This
process is between the library and the server: a line of more than MAX bytes ends the server. It
imports only the standard library, so that it starts fast.
"""

import ctypes
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

_PR_SET_CHILD_SUBREAPER = 36
_DRAIN_S = 1.0


def main() -> None:
    """Act as the server for the parent process. The server reads this process's input itself."""
    inherited = {n for n in signal.valid_signals() if signal.getsignal(n) == signal.SIG_IGN}
    for number in inherited - {signal.SIGPIPE, signal.SIGXFSZ}:  # Popen restores these two
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGTERM, _leave)
    if sys.platform == "linux":  # orphans of the server become children of this process
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    server = subprocess.Popen(sys.argv[2:], stdout=subprocess.PIPE)
    lines = threading.Thread(target=_pass_on, args=(server, int(sys.argv[1])), daemon=True)
    lines.start()
    try:
        code = server.wait()
        lines.join(_DRAIN_S)
    finally:
        _end_children()
    sys.stderr.flush()
    os._exit(code if code >= 0 else 128 - code)


def _leave(*_: object) -> None:
    sys.exit(1)


def _pass_on(server: "subprocess.Popen[bytes]", max_bytes: int) -> None:
    assert server.stdout is not None
    while line := server.stdout.readline(max_bytes + 1):
        if len(line) > max_bytes:
            print(f"ended: it wrote a line of more than {max_bytes} bytes", file=sys.stderr)
            server.kill()
            return
        try:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
        except OSError:  # the parent has closed the pipe
            server.kill()
            return


def _end_children() -> None:
    while pids := _children():
        for pid in pids:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _children() -> list[int]:
    """List the children of this process, which include orphans of the server."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # not Linux
        return []


if __name__ == "__main__":
    main()
