"""One Python interpreter with one set of names, in a process of its own."""

import _ast
import io
import json
import linecache
import os
import resource
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from types import CodeType, ModuleType
from typing import Any, NoReturn, cast

from frames import HEAD, read_frame, write_frame
from output_reader import TIMED_OUT, OutputReader, output_pipe
from processes import Limits, describe_death, prepare_child

_CHUNK = 65536
_TRACEBACK_CHARS = 8192
_SOURCE = "<code>"
_EXIT_WAIT_S = 0.5
"""Seconds between the end of an interpreter's answers and its exit."""


class Interpreter:
    """The guest's side of an interpreter. Hostile code may have written what it reads from there.

    Args:
        limits: The limits of the interpreter.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.is_alive = True
        self._number = 0
        self._unread = bytearray()
        self._reported: tuple[str, str] | None = None
        out, far_out = output_pipe()
        err, far_err = output_pipe()
        self._outputs = (out, err)
        far_requests, self._requests = os.pipe()
        self._answers, far_answers = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self.close()
            _run_interpreter(limits, far_out, far_err, far_requests, far_answers)
        for descriptor in (far_out, far_err, far_requests, far_answers):
            os.close(descriptor)

    def run(self, request: dict[str, Any], note: str) -> dict[str, Any]:
        """Run code and return the fields of the answer; `note` begins its stderr."""
        self._number += 1
        self._reported = None
        reader = OutputReader(
            self._outputs,
            request["timeout_s"],
            request["max_output_bytes"],
            answers=self._answers,
        )
        with suppress(BrokenPipeError):  # it died between two calls: its answers have ended
            record = {"source": request["source"], "echo": request.get("echo", False)}
            write_frame(self._requests, {"number": self._number, **record})
        reader.read_until(self._has_answered)
        result = reader.result()
        end, text = self._reported or self._died(reader)
        return {**result, "end": end, "stderr": note + result["stderr"] + text}

    def _has_answered(self) -> bool:
        """Read the answer as far as it has come; return whether more can come."""
        while self.is_alive and self._reported is None and self._can_read():
            chunk = os.read(self._answers, _CHUNK)
            self._unread += chunk
            self.is_alive = bool(chunk) and len(self._unread) < 32 * _TRACEBACK_CHARS
            self._take_answer()
        return not self.is_alive or self._reported is not None

    def _can_read(self) -> bool:
        return bool(select.select([self._answers], [], [], 0)[0])

    def _take_answer(self) -> None:
        while self._reported is None and len(self._unread) >= HEAD.size:
            end = HEAD.size + HEAD.unpack(self._unread[: HEAD.size])[0]
            if len(self._unread) < end:
                return
            self._reported = _checked(bytes(self._unread[HEAD.size : end]), self._number)
            del self._unread[:end]

    def _died(self, reader: OutputReader) -> tuple[str, str]:
        has_died, self.is_alive = not self.is_alive, False
        if reader.is_flooded:
            return "killed", ""
        if not has_died:
            return "timeout", TIMED_OUT
        ended = self._wait()
        if ended is None:
            return "killed", "[killed: the code closed or used the interpreter's own descriptors]\n"
        return describe_death(*ended, self._limits)

    def _wait(self) -> tuple[int, resource.struct_rusage] | None:
        """Wait for the exit, which follows the end of the answers; return None if none comes."""
        deadline = time.monotonic() + _EXIT_WAIT_S
        while time.monotonic() < deadline:
            pid, status, usage = os.wait4(self._pid, os.WNOHANG)
            if pid:
                return status, usage
            time.sleep(0.001)
        return None

    def close(self) -> None:
        """Close this side's descriptors. The caller kills the process."""
        for descriptor in (*self._outputs, self._requests, self._answers):
            os.close(descriptor)


def _checked(body: bytes, number: int) -> tuple[str, str] | None:
    """Return the end and the error of an answer; None if it is no answer to this request."""
    try:
        answer = json.loads(body)
        if answer["number"] == number and answer["end"] in ("ok", "error", "memory"):
            return answer["end"], str(answer["error"])[-_TRACEBACK_CHARS:]
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


def _run_interpreter(limits: Limits, out: int, err: int, requests: int, answers: int) -> NoReturn:
    """Run code in one set of names until the other end closes. The code shares this process."""
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        prepare_child(limits, null, out, err)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # as every interpreter of Python does
            signal.signal(number, signal.SIG_IGN)
        for descriptor in (null, out, err):
            os.close(descriptor)
        sys.argv = [""]
        sys.path[0] = ""  # replaces the folder of these scripts
        _forget_scripts()
        _serve(limits, requests, answers)
    except BaseException:  # noqa: BLE001 - the end of a forked process
        traceback.print_exc()
    finally:
        os._exit(1)


def _forget_scripts() -> None:
    """Forget these modules, so that `import program` finds the code's own file of that name."""
    here = os.path.dirname(__file__)
    for name, module in [*sys.modules.items()]:
        if os.path.dirname(vars(module).get("__file__") or "") == here:
            del sys.modules[name]


def _serve(limits: Limits, requests: int, answers: int) -> NoReturn:
    # A module of its own: pickle looks a class up in its module and finds the code's names.
    main = sys.modules["__main__"] = ModuleType("__main__")
    pid = os.getpid()
    while (request := read_frame(requests)) is not None:
        end, error = _execute(request, vars(main), limits["hidden"])
        if os.getpid() != pid:
            os._exit(0)  # the code forked, and this is the copy
        write_frame(answers, {"number": request["number"], "end": end, "error": error})
    os._exit(0)


def _execute(
    request: dict[str, Any], names: dict[str, Any], hidden: list[tuple[str, str]]
) -> tuple[str, str]:
    source = request["source"]
    # Lines for tracebacks: split as the compiler splits them, each with its line end.
    lines = io.StringIO(f"{source}\n", newline=None).readlines()
    linecache.cache[_SOURCE] = (len(source), None, lines, _SOURCE)
    try:
        for code in _compiled(source, echo=request["echo"]):
            exec(code, names)
    except SystemExit as error:
        return ("ok", "") if error.code in (None, 0) else ("error", f"SystemExit: {error.code}\n")
    except BaseException as error:  # noqa: BLE001 - the boundary around the code
        return "memory" if isinstance(error, MemoryError) else "error", _format(error, hidden)
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # the code may have replaced it
                stream.flush()
    return "ok", ""


def _compiled(source: str, *, echo: bool) -> list[CodeType]:
    """Compile a source. With `echo`, compile the last expression so that its value is printed."""
    if not echo:
        return [compile(source, _SOURCE, "exec")]
    tree = cast("_ast.Module", compile(source, _SOURCE, "exec", _ast.PyCF_ONLY_AST))
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], _ast.Expr) else []
    shown = compile(_ast.Interactive(body=last), _SOURCE, "single")
    return [compile(tree, _SOURCE, "exec"), shown]


def _format(error: BaseException, hidden: list[tuple[str, str]]) -> str:
    """Format a traceback that begins at the code's own lines and shows no path of the machine.

    The error's own message and the lines of the code stay as they are.
    """
    own_trace = error.__traceback__
    while own_trace is not None and own_trace.tb_frame.f_code.co_filename != _SOURCE:
        own_trace = own_trace.tb_next
    try:
        formatted = traceback.TracebackException(type(error), error, own_trace)
        _hide_paths(formatted, hidden)
        text = "".join(formatted.format())
    except BaseException as broken:  # noqa: BLE001 - the code made this error
        text = f"{type(error).__name__} (showing it raises {type(broken).__name__})\n"
    return text[-_TRACEBACK_CHARS:]


def _hide_paths(formatted: traceback.TracebackException, hidden: list[tuple[str, str]]) -> None:
    """Shorten the paths in every error of a chain."""
    left: list[traceback.TracebackException | None] = [formatted]
    while left:
        one = left.pop()
        if one is None:
            continue
        for frame in one.stack:
            frame.filename = _shortened(frame.filename, hidden)
        filename = vars(one).get("filename")  # only a SyntaxError has one
        if isinstance(filename, str):
            one.filename = _shortened(filename, hidden)
        left += [one.__cause__, one.__context__, *(one.exceptions or ())]


def _shortened(path: str, hidden: list[tuple[str, str]]) -> str:
    for prefix, name in hidden:
        if path.startswith(prefix):
            return name + path.removeprefix(prefix)
    return path
