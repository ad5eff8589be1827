"""The program that a session sends to a SandboxFusion service.

The service keeps nothing between two requests. So this program runs all earlier sources again
without output, and then the last source. It uses the standard library only.
"""

import ast
import linecache
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any

_NAME = "<code>"


def run_python(sources: list[str], *, echo: bool) -> None:
    """Run Python sources in one set of names. An error in the last one ends this process."""
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    with _silence():
        for source in sources[:-1]:
            with suppress(BaseException):  # it was reported when this source was the last
                _execute(source, names, echo=False)
    try:
        _execute(sources[-1], names, echo=echo)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - every error of the code is reported
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != _NAME:
            trace = trace.tb_next
        sys.stderr.write("".join(traceback.format_exception(type(error), error, trace)))
        sys.exit(1)


def run_shell(sources: list[str]) -> None:
    """Run shell scripts in one folder, each in a new shell; exit as the last one does."""
    with _silence():
        for source in sources[:-1]:
            subprocess.run(["bash", "-c", source], check=False)
    sys.exit(subprocess.run(["bash", "-c", sources[-1]], check=False).returncode)


def run_program(argv: list[str], *, env: dict[str, str]) -> None:
    """Replace this process by a program, with further environment variables."""
    for number in (
        signal.SIGPIPE,
        signal.SIGXFSZ,
    ):  # Python ignores them, and programs inherit that
        signal.signal(number, signal.SIG_DFL)
    program = sys.executable if argv[0] in ("python", "python3") else argv[0]
    os.execvpe(program, [program, *argv[1:]], {**os.environ, **env})


def _execute(source: str, names: dict[str, Any], *, echo: bool) -> None:
    linecache.cache[_NAME] = (len(source), None, source.splitlines(True), _NAME)
    tree = ast.parse(source, _NAME)
    last = tree.body.pop() if echo and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _NAME, "exec"), names)
    if last is not None:
        exec(compile(ast.Interactive([last]), _NAME, "single"), names)


@contextmanager
def _silence() -> Generator[None]:
    """Throw away what this process and its children write."""
    kept = [os.dup(1), os.dup(2)]
    with open(os.devnull, "w") as null:
        for descriptor in (1, 2):
            os.dup2(null.fileno(), descriptor)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, old in zip((1, 2), kept, strict=True):
            os.dup2(old, descriptor)
            os.close(old)
