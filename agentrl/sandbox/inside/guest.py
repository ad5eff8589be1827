"""What runs inside a sandbox, ahead of the code: it starts interpreters, shells and programs there.

It reads requests from descriptor 0, runs one at a time in a process of its own, reads what that
writes, cuts it, kills it when its time is up, and writes one answer to descriptor 1.

The code never holds these descriptors, and may neither trace this process nor look into it: how a
program ended is what the kernel told this process. What a Python session says of itself (that the
code raised, and what) comes from the interpreter that the code shares, and is the code's word.
"""

import json
import os
import signal
import sys
from typing import Any

import kernel
from frames import read_frame, write_frame
from interpreter import Interpreter
from limits import Limits
from output_reader import Watch
from processes import descendants, kill
from program import Program, told, write_files

_SHELL = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
"""What models write is written for bash."""
_SHELL_NAME = os.path.basename(_SHELL)
"""As it names itself in its errors."""
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
    while (asked := read_frame(0)) is not None:
        write_frame(1, guest.answer(asked))
    guest.kill_all()


class Guest:
    """Holds the interpreter of a session, and runs one request at a time.

    Args:
        limits: What the code may use.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._interpreter: Interpreter | None = Interpreter(limits)
        self._was_lost = False

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do what is asked."""
        if asked["op"] == "python":
            return self._run_python(asked)
        if asked["op"] == "shell":
            argv = [_SHELL, "-c", asked["source"], _SHELL_NAME]
            answer = self._run_program({**asked, "argv": argv})
        else:
            answer = self._run_program(asked)
        return {**answer, "stderr": asked.get("note", "") + answer["stderr"]}

    def _run_program(self, asked: dict[str, Any]) -> dict[str, Any]:
        self._drop_interpreter()
        argv = asked["argv"]
        try:
            write_files(asked.get("files", {}))
            program = Program(argv, asked.get("stdin", ""), self._limits)
        except (OSError, ValueError) as error:
            return {"end": "error", "stderr": f"{argv[0]}: {told(error)}\n", "exit_code": 127}
        watch = Watch(program.outputs, asked["timeout_s"], asked["max_output_bytes"])
        watch.until(program.has_ended)
        self.kill_all()
        return program.answer(watch)

    def _run_python(self, asked: dict[str, Any]) -> dict[str, Any]:
        note = asked.get("note", "") + (_NEW_INTERPRETER if self._was_lost else "")
        self._interpreter = self._interpreter or Interpreter(self._limits)
        self._signal_all(signal.SIGCONT)
        answer = self._interpreter.run(asked, note)
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
        """Signal all that runs here but this process."""
        for pid in [-1] if self._limits["is_alone"] else descendants():
            kill(pid, number)

    def kill_all(self) -> None:
        """Kill all that runs here but this process, and wait for it."""
        while True:
            self._signal_all(signal.SIGKILL)
            try:
                os.waitpid(-1, 0)
            except ChildProcessError:
                return


if __name__ == "__main__":
    main()
