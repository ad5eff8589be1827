"""The guest: the process inside a sandbox that starts interpreters, shells and programs.

It reads requests from descriptor 0 and writes one answer each to descriptor 1. It runs one request
at a time in a process of its own, keeps the first part of its output, and kills it when its time is
up.

The code never holds these descriptors, and cannot trace the guest or read its memory. The guest
learns from the kernel how a program ended. What a Python session reports about itself (that the
code raised, and the traceback) comes from the interpreter that the code shares, so the code can
forge it.
"""

import json
import os
import signal
import socket
import sys
from typing import Any

import kernel
from frames import read_frame, write_frame
from interpreter import Interpreter
from output_reader import OutputReader
from processes import Limits, descendants, kill
from program import Program, describe, write_files

_SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
"""Models write scripts for bash."""
_NEW_INTERPRETER = "[a new interpreter: names are gone, files are still there]\n"


def main() -> None:
    """Answer requests until the other end closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    limits: Limits = json.loads(sys.argv[1])
    if limits["syscall_filter"] is not None:
        kernel.filter_system_calls(bytes.fromhex(limits["syscall_filter"]))
    guest = Guest(limits)
    write_frame(1, {"ready": True})
    while (request := read_frame(0)) is not None:
        write_frame(1, guest.answer(request))
    guest.kill_all()


class Guest:
    """Holds the interpreter of a session and runs one request at a time.

    Args:
        limits: The limits of the code.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._interpreter: Interpreter | None = Interpreter(limits)
        self._was_lost = False

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a request and return its answer."""
        if request["op"] == "python":
            return self._run_python(request)
        if request["op"] == "shell":
            argv = [_SHELL, "-c", request["source"], os.path.basename(_SHELL)]
            request = {**request, "argv": argv}
        answer = self._run_program(request)
        return {**answer, "stderr": request.get("note", "") + answer["stderr"]}

    def _run_program(self, request: dict[str, Any]) -> dict[str, Any]:
        self._drop_interpreter()
        argv = request["argv"]
        try:
            write_files(request.get("files", {}))
            env = request.get("env", {})
            if self._limits["relay"] is not None:
                _start_relay(*self._limits["relay"])
            program = Program(argv, request.get("stdin", ""), self._limits, env=env)
        except (OSError, ValueError) as error:
            return {"end": "error", "stderr": f"{argv[0]}: {describe(error)}\n", "exit_code": 127}
        limit = request["max_output_bytes"]
        # The last line of a program can be its result.
        num_end = limit // 2 if request["op"] == "program" else 0
        reader = OutputReader(program.outputs, request["timeout_s"], limit, max_end_bytes=num_end)
        reader.read_until(program.has_ended)
        self.kill_all()
        return program.result(reader)

    def _run_python(self, request: dict[str, Any]) -> dict[str, Any]:
        note = request.get("note", "") + (_NEW_INTERPRETER if self._was_lost else "")
        self._interpreter = self._interpreter or Interpreter(self._limits)
        self._signal_all(signal.SIGCONT)
        answer = self._interpreter.run(request, note)
        # What a call leaves running uses no processor until the next call.
        self._signal_all(signal.SIGSTOP)
        self._was_lost = not self._interpreter.is_alive
        if self._was_lost:
            self._drop_interpreter()
        return answer

    def _drop_interpreter(self) -> None:
        if self._interpreter is not None:
            self._interpreter.close()
            self._interpreter = None
            self.kill_all()

    def _signal_all(self, number: int) -> None:
        """Send a signal to every process of the sandbox except this one."""
        for pid in [-1] if self._limits["is_isolated"] else descendants():
            kill(pid, number)

    def kill_all(self) -> None:
        """Kill every process of the sandbox except this one, and wait for their ends."""
        while True:
            self._signal_all(signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


def _start_relay(path: str, port: int) -> None:
    """Start the relay. It holds none of this process's descriptors, and `kill_all` ends it."""
    with socket.create_server(("127.0.0.1", port), backlog=128) as listening:
        if os.fork():
            return
        try:
            null = os.open(os.devnull, os.O_RDWR)
            for number, descriptor in enumerate((listening.fileno(), null, null)):
                os.dup2(descriptor, number)
            os.closerange(3, 256)
            script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "relay.py")
            os.execv(sys.executable, [sys.executable, "-s", "-S", script, path])
        finally:
            os._exit(127)


if __name__ == "__main__":
    main()
