"""The side of the asserts: runs them, and asks for what the code must do. See `guest`."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import math
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue

from agentrl.sandbox.grading.guest import MAX_TEXT, answer_request, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Json = Any
    Answer = dict[str, Any]

_ALIASES = {"np": "numpy", "pd": "pandas"}
sys.set_int_max_str_digits(0)  # for what is shown; the code has Python's own limit
_JUDGES: dict[str, Any] = {"isclose": math.isclose, "isnan": math.isnan, "isinf": math.isinf}
"""Names by which asserts judge, and which they often leave to the code's own imports."""


class UngradableError(Exception):
    """A test that cannot be carried out across two interpreters."""


class Asserter:
    """Runs test code on a thread, which waits wherever it needs something of the graded code."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[Answer] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._last = ""
        self._ungradable = ""

    def begin(self, source: str, entry_point: str | None) -> Answer:
        """Start the tests, and give their first request or their verdict."""
        run = threading.Thread(target=self._run, args=(source, entry_point), daemon=True)
        run.start()
        return self._requests.get()

    def go_on(self, answer: Answer) -> Answer:
        """Hand an answer over, and give the next request or the verdict."""
        self._answers.put(answer)
        return self._requests.get()

    def ask(self, operation: str, *args: Any) -> Any:
        """Have something done in the other interpreter. Called on the tests' thread."""
        found = self._ask({"ask": "do", "operation": operation, "args": self._write(list(args))})
        if operation == "call":
            self._last = f"{_call_text(args)} gave {found!r:.{MAX_TEXT}}"
        return found

    def _run(self, source: str, entry_point: str | None) -> None:
        num_names, error = 0, ""
        try:
            _check_readable(source, entry_point)
            namespace = self._namespace(source, entry_point)
            num_names = len(namespace)
            self._execute(source, entry_point, namespace)
        except UngradableError as broken:
            self._ungradable = str(broken)
        except BaseException as raised:  # noqa: BLE001 - whatever a test raises is its verdict
            error = f"{type(raised).__name__}: {raised}"[:MAX_TEXT].rstrip(": ")
        if not error and not num_names:
            self._ungradable = self._ungradable or "the tests use nothing that the code defines"
        verdict = {"error": error, "last": self._last, "ungradable": self._ungradable}
        self._requests.put({"verdict": not error and not self._ungradable, **verdict})

    def _namespace(self, source: str, entry_point: str | None) -> dict[str, Any]:
        """Fetch those names of the tests that the code defines."""
        wanted = _free_names(source)
        if entry_point is not None:
            wanted.add(entry_point)
        found = self._ask({"ask": "names", "names": sorted(wanted)})
        # Hostile code may give more than it was asked for: its own `set` or `isclose`, say.
        return {name: value for name, value in dict(found).items() if name in wanted}

    def _execute(self, source: str, entry_point: str | None, found: dict[str, Any]) -> None:
        namespace: dict[str, Any] = {"__name__": "tests", **_imported(source), **_JUDGES, **found}
        if entry_point is not None and entry_point not in found:
            raise NameError(f"name {entry_point!r} is not defined")
        before = set(namespace)
        exec(compile(source, "tests.py", "exec"), namespace)
        if entry_point is not None:
            namespace["check"](namespace[entry_point])
        for name in [name for name in namespace if name.startswith("test_")]:
            if name not in before and callable(namespace[name]):
                namespace[name]()

    def _ask(self, request: Answer) -> Any:
        self._requests.put(request)
        answer = self._answers.get()
        if "error" in answer:
            raise _rebuilt(str(answer["error"]), str(answer.get("message", "")))
        return decode(answer["value"], lambda index, kind: Remote(self, index, kind))

    def _write(self, value: Any) -> Json:
        def keep(value: Any) -> Json:
            if isinstance(value, Remote):
                return value.agentrl_handle
            self._ungradable = f"the tests hand over a {type(value).__name__}, which is no data"
            raise UngradableError(self._ungradable)

        return encode(value, keep)


class Remote:
    """Stands in the tests for an object of the graded code that is no data."""

    def __init__(self, asserter: Asserter, index: int, kind: str) -> None:
        # Not by assignment, which is one of an attribute over there.
        own: dict[str, Any] = {"agentrl_ask": asserter.ask, "agentrl_kind": kind}
        self.__dict__.update(own, agentrl_handle={"handle": index})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it over there."""
        return self.agentrl_ask("call", self, list(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        return self.agentrl_ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.agentrl_ask("setattr", self, name, value)

    def __iter__(self) -> Any:
        return iter(self.agentrl_ask("list", self))

    def __next__(self) -> Any:
        try:
            return self.agentrl_ask("next", self)
        except RuntimeError as error:
            if str(error).startswith("StopIteration"):
                raise StopIteration from None
            raise

    def __contains__(self, item: Any) -> bool:
        return item in list(self)  # and not what its class says

    def __len__(self) -> int:
        return int(self.agentrl_ask("len", self))

    def __bool__(self) -> bool:
        return bool(self.agentrl_ask("bool", self))

    def __getitem__(self, index: Any) -> Any:
        return self.agentrl_ask("getitem", self, index)

    def __eq__(self, other: object) -> bool:
        """Equal no data: what its class says counts only between two objects of the code."""
        if not isinstance(other, Remote):
            return False
        return self.agentrl_ask("eq", self, other) is True

    def __hash__(self) -> int:
        return id(self)

    def __str__(self) -> str:
        return str(self.agentrl_ask("str", self))

    def __repr__(self) -> str:
        return f"<{self.agentrl_kind}>"


def _check_readable(source: str, entry_point: str | None) -> None:
    """Tell tests that are wrong in themselves from those that the code does not pass."""
    try:
        body = ast.parse(source).body
    except SyntaxError as error:
        raise UngradableError(f"the tests cannot be read: {error}") from None
    for name in _imports(body):
        if importlib.util.find_spec(name) is None:
            raise UngradableError(f"the tests import {name}, which the sandbox does not have")
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    if entry_point is not None and "check" not in functions:
        raise UngradableError("the tests define no function check")


def _imports(body: list[ast.stmt]) -> set[str]:
    """Collect the packages that tests import themselves."""
    nodes = list(ast.walk(ast.Module(body, type_ignores=[])))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names} - {""}


def _free_names(source: str) -> set[str]:
    """Collect the names that tests read and that neither Python nor a library gives them."""
    read = {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}
    return read - set(dir(builtins)) - set(_JUDGES) - _library_names(source)


def _library_names(source: str) -> set[str]:
    """Collect the modules that tests use, and may leave to the code to import (`math.isclose`).

    Taken from the code, they would be whatever the code says.
    """
    nodes = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return {name for name in names if name in sys.stdlib_module_names or name in _ALIASES}


def _imported(source: str) -> dict[str, Any]:
    """Import the libraries that the tests use; one that is not there is missing in the tests."""
    found: dict[str, Any] = {}
    for name in _library_names(source):
        with suppress(ImportError):
            found[name] = importlib.import_module(_ALIASES.get(name, name))
    return found


def _rebuilt(name: str, message: str) -> Exception:
    """Make the exception anew, where it is one of Python's own."""
    kind = vars(builtins).get(name)
    # One that stops an iteration would end a loop of the tests before they have looked.
    if isinstance(kind, type) and issubclass(kind, Exception) and "Iteration" not in name:
        try:
            return kind(message)
        except TypeError:  # UnicodeDecodeError and the like take more
            return RuntimeError(f"{name}: {message}")
    return RuntimeError(f"{name}: {message}")


def _call_text(args: tuple[Any, ...]) -> str:
    _, positional, named = args
    shown = [repr(value) for value in positional] + [f"{k}={v!r}" for k, v in named.items()]
    return f"the call with ({', '.join(shown)})"[:MAX_TEXT]


_ASSERTER = Asserter()
_ROLES: dict[str, Callable[..., Any]] = {"begin": _ASSERTER.begin, "go_on": _ASSERTER.go_on}


def serve(mark: str, request: str) -> None:
    """Answer one request of the host."""
    answer_request(_ROLES, mark, request)
