"""One Python interpreter with one set of names, in a process of its own."""

import _ast
import io
import json
import linecache
import os
import resource
import select
import sys
import time
import traceback
from contextlib import suppress
from types import CodeType, ModuleType
from typing import Any, NoReturn, cast

from frames import HEAD, read_frame, write_frame
from limits import Limits, become, how_it_died
from output_reader import LATE, Watch, output_pipe

_CHUNK = 65536
_TRACEBACK_CHARS = 8192
_SOURCE = "<code>"
_END_S = 0.5
"""From the end of an interpreter's answers to its own."""


class Interpreter:
    """The guest's end of an interpreter. What comes from it, hostile code may have written.

    Args:
        limits: What it may use.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.is_alive = True
        self._number = 0
        self._unread = bytearray()
        out, far_out = output_pipe()
        err, far_err = output_pipe()
        self._outputs = (out, err)
        far_requests, self._requests = os.pipe()
        self._answers, far_answers = os.pipe()
        self._said: tuple[str, str] | None = None
        self._pid = os.fork()
        far = (far_out, far_err, far_requests, far_answers)
        if self._pid == 0:
            for descriptor in (out, err, self._requests, self._answers):
                os.close(descriptor)
            _Inside(limits, *far).live()
        for descriptor in far:
            os.close(descriptor)

    def run(self, asked: dict[str, Any], note: str) -> dict[str, Any]:
        """Run code in it and say what came of it."""
        self._number += 1
        self._said = None
        watch = Watch(
            self._outputs,
            asked["timeout_s"],
            asked["max_output_bytes"],
            answers=self._answers,
        )
        with suppress(BrokenPipeError):  # it died between two calls: its answers' end tells
            record = {"source": asked["source"], "echo": asked.get("echo", False)}
            write_frame(self._requests, {"number": self._number, **record})
        watch.until(self._has_answered)
        told = watch.told()
        end, words = self._said or self._died(watch)
        return {**told, "end": end, "stderr": note + told["stderr"] + words}

    def _has_answered(self) -> bool:
        """Take its answer, where that has come whole, or see that none will come."""
        while self.is_alive and self._said is None and self._is_readable():
            chunk = os.read(self._answers, _CHUNK)
            self._unread += chunk
            self.is_alive = bool(chunk) and len(self._unread) < 32 * _TRACEBACK_CHARS
            self._take()
        return not self.is_alive or self._said is not None

    def _is_readable(self) -> bool:
        return bool(select.select([self._answers], [], [], 0)[0])

    def _take(self) -> None:
        while self._said is None and len(self._unread) >= HEAD.size:
            end = HEAD.size + HEAD.unpack(self._unread[: HEAD.size])[0]
            if len(self._unread) < end:
                return
            self._said = _as_said(bytes(self._unread[HEAD.size : end]), self._number)
            del self._unread[:end]

    def _died(self, watch: Watch) -> tuple[str, str]:
        has_died, self.is_alive = not self.is_alive, False
        if watch.is_flooded:
            return "killed", ""
        if not has_died:
            return "timeout", LATE
        ended = self._wait()
        if ended is None:
            return "killed", "[killed: the code closed or used the interpreter's own descriptors]\n"
        return how_it_died(*ended, self._limits)

    def _wait(self) -> tuple[int, resource.struct_rusage] | None:
        """Wait for its end, which follows that of its answers; None where it runs on."""
        deadline = time.monotonic() + _END_S
        while time.monotonic() < deadline:
            pid, status, usage = os.wait4(self._pid, os.WNOHANG)
            if pid:
                return status, usage
            time.sleep(0.001)
        return None

    def close(self) -> None:
        """Close its pipes; who calls kills it."""
        for descriptor in (*self._outputs, self._requests, self._answers):
            os.close(descriptor)


def _as_said(body: bytes, number: int) -> tuple[str, str] | None:
    """Check an answer; None for what is none."""
    try:
        said = json.loads(body)
        if said["number"] == number and said["end"] in ("ok", "error", "memory"):
            return said["end"], str(said["error"])[-_TRACEBACK_CHARS:]
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return None


class _Inside:
    """The interpreter's own end: the code shares it.

    Args:
        limits: What it may use.
        out: Where its output goes.
        err: Where its error output goes.
        requests: Where code comes from.
        answers: Where it is told how the code ended.
    """

    def __init__(self, limits: Limits, out: int, err: int, requests: int, answers: int) -> None:
        self._limits, self._out, self._err = limits, out, err
        self._requests, self._answers = requests, answers

    def live(self) -> NoReturn:
        """Run code in one set of names until the other end closes."""
        try:
            self._prepare()
            self._serve()
        except BaseException:  # noqa: BLE001 - the end of a forked process
            traceback.print_exc()
        finally:
            os._exit(1)

    def _prepare(self) -> None:
        null = os.open(os.devnull, os.O_RDONLY)
        become(self._limits, null, self._out, self._err)
        for descriptor in (null, self._out, self._err):
            os.close(descriptor)
        sys.argv = [""]
        sys.path[0] = ""  # in place of the folder of these scripts
        _forget_scripts()

    def _serve(self) -> None:
        # A module of its own, so that what looks a class's module up (pickle) finds its names.
        main = sys.modules["__main__"] = ModuleType("__main__")
        names = vars(main)
        pid = os.getpid()
        while (asked := read_frame(self._requests)) is not None:
            end, error = _execute(asked, names, self._limits["hidden"])
            if os.getpid() != pid:
                os._exit(0)  # the code forked, and this is the copy
            write_frame(self._answers, {"number": asked["number"], "end": end, "error": error})
        os._exit(0)


def _forget_scripts() -> None:
    """Let `import limits` find the code's own file, and not the script of that name."""
    here = os.path.dirname(__file__)
    for name, module in [*sys.modules.items()]:
        if os.path.dirname(vars(module).get("__file__") or "") == here:
            del sys.modules[name]


def _execute(
    asked: dict[str, Any], names: dict[str, Any], hidden: list[tuple[str, str]]
) -> tuple[str, str]:
    source = asked["source"]
    # For the lines that a traceback shows: as the compiler counts them, each with its end.
    lines = io.StringIO(f"{source}\n", newline=None).readlines()
    linecache.cache[_SOURCE] = (len(source), None, lines, _SOURCE)
    try:
        for code in _compiled(source, echo=asked["echo"]):
            exec(code, names)
    except SystemExit as error:
        return ("ok", "") if error.code in (None, 0) else ("error", f"SystemExit: {error.code}\n")
    except BaseException as error:  # noqa: BLE001 - the boundary round the code
        return "memory" if isinstance(error, MemoryError) else "error", _shown(error, hidden)
    finally:
        _flush()
    return "ok", ""


def _compiled(source: str, *, echo: bool) -> list[CodeType]:
    """Compile a source; with `echo` its last expression by itself, so that its value is printed."""
    if not echo:
        return [compile(source, _SOURCE, "exec")]
    tree = cast("_ast.Module", compile(source, _SOURCE, "exec", _ast.PyCF_ONLY_AST))
    last = [tree.body.pop()] if tree.body and isinstance(tree.body[-1], _ast.Expr) else []
    shown = compile(_ast.Interactive(body=last), _SOURCE, "single")
    return [compile(tree, _SOURCE, "exec"), shown]


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the code may have replaced it
            stream.flush()


def _shown(error: BaseException, hidden: list[tuple[str, str]]) -> str:
    """Show a traceback from the code's own lines on, naming no file by a path of the machine.

    What the error itself says is left as it is, and so are the lines of the code.
    """
    behind = error.__traceback__
    while behind is not None and behind.tb_frame.f_code.co_filename != _SOURCE:
        behind = behind.tb_next
    try:
        told = traceback.TracebackException(type(error), error, behind)
        _hide(told, hidden)
        text = "".join(told.format())
    except BaseException as broken:  # noqa: BLE001 - the code made this error
        text = f"{type(error).__name__} (showing it raises {type(broken).__name__})\n"
    return text[-_TRACEBACK_CHARS:]


def _hide(told: traceback.TracebackException, hidden: list[tuple[str, str]]) -> None:
    """Cut the beginnings of paths that the code has no use for, in every error of a chain."""
    left: list[traceback.TracebackException | None] = [told]
    while left:
        one = left.pop()
        if one is None:
            continue
        for frame in one.stack:
            frame.filename = _shortened(frame.filename, hidden)
        named = vars(one).get("filename")  # of a SyntaxError alone
        if isinstance(named, str):
            one.filename = _shortened(named, hidden)
        left += [one.__cause__, one.__context__, *(one.exceptions or ())]


def _shortened(path: str, hidden: list[tuple[str, str]]) -> str:
    for beginning, name in hidden:
        if path.startswith(beginning):
            return name + path.removeprefix(beginning)
    return path
