"""What a session on a service runs: everything again, silently, and the last source aloud.

The service keeps nothing between two requests, so this text goes before each of them. Standard
library only.
"""

import ast
import linecache
import os
import subprocess
import sys
import traceback
from typing import Any

_NAME = "<code>"


def run_python(sources: list[str], *, echo: bool) -> None:
    """Run Python sources in one set of names; the last one's errors end this process."""
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    with _Silence():
        for source in sources[:-1]:
            try:
                _execute(source, names, echo=False)
            except BaseException:  # noqa: BLE001 - it was shown when it was the last
                continue
    try:
        _execute(sources[-1], names, echo=echo)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - whatever the code raises is shown
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != _NAME:
            trace = trace.tb_next
        sys.stderr.write("".join(traceback.format_exception(type(error), error, trace)))
        sys.exit(1)


def run_shell(sources: list[str]) -> None:
    """Run shell commands in one folder, each in a new shell; exit as the last one does."""
    with _Silence():
        for source in sources[:-1]:
            subprocess.run(["bash", "-c", source], check=False)
    sys.exit(subprocess.run(["bash", "-c", sources[-1]], check=False).returncode)


def run_program(argv: list[str]) -> None:
    """Become a program."""
    program = sys.executable if argv[0] in ("python", "python3") else argv[0]
    os.execvp(program, [program, *argv[1:]])


def _execute(source: str, names: dict[str, Any], *, echo: bool) -> None:
    linecache.cache[_NAME] = (len(source), None, source.splitlines(True), _NAME)
    tree = ast.parse(source, _NAME)
    last = tree.body.pop() if echo and tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, _NAME, "exec"), names)
    if last is not None:
        exec(compile(ast.Interactive([last]), _NAME, "single"), names)


class _Silence:
    """Throws away what is written, by this process and by those that it starts."""

    def __enter__(self) -> None:
        self._kept = [os.dup(1), os.dup(2)]
        null = os.open(os.devnull, os.O_WRONLY)
        for descriptor in (1, 2):
            os.dup2(null, descriptor)
        os.close(null)

    def __exit__(self, *_: object) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor, kept in zip((1, 2), self._kept, strict=True):
            os.dup2(kept, descriptor)
            os.close(kept)
