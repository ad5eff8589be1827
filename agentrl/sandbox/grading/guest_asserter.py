"""The guest with the asserts: runs them and requests what they need of the code. See `guest`."""

from __future__ import annotations

import builtins
import sys
import threading
from queue import SimpleQueue

from agentrl.sandbox.grading.guest import MAX_TEXT, answer_request, decode, encode
from agentrl.sandbox.grading.guest_tests import TestSource, UngradableError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Json = Any
    Answer = dict[str, Any]

sys.set_int_max_str_digits(0)  # for messages; the interpreter with the code keeps the limit


class Asserter:
    """Runs test code on a thread, which waits whenever it needs the graded code."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[Answer] = SimpleQueue()
        self._answers: SimpleQueue[Answer] = SimpleQueue()
        self._last = ""
        self._ungradable = ""
        self._has_reached_code = False

    def begin(self, source: str, entry_point: str | None) -> Answer:
        """Start the tests; return their first request or their verdict."""
        run = threading.Thread(target=self._run, args=(source, entry_point), daemon=True)
        run.start()
        return self._requests.get()

    def resume(self, answer: Answer) -> Answer:
        """Pass an answer to the tests; return their next request or their verdict."""
        self._answers.put(answer)
        return self._requests.get()

    def ask(self, operation: str, *args: Any) -> Any:
        """Run an operation in the other interpreter. The tests' thread calls this."""
        # Truth and identity of a function show nothing about what it does.
        self._has_reached_code |= operation not in ("bool", "eq")
        found = self._ask({"ask": "do", "operation": operation, "args": self._write(list(args))})
        if operation == "call":
            self._last = f"{_call_text(args)} gave {found!r:.{MAX_TEXT}}"
        return found

    def _run(self, source: str, entry_point: str | None) -> None:
        error = ""
        try:
            tests = TestSource(source, entry_point)
            found = self._fetch(tests)
            tests.run(found)
        except UngradableError as broken:
            self._ungradable = str(broken)
        except BaseException as raised:  # noqa: BLE001 - an error is a verdict
            error = f"{type(raised).__name__}: {raised}"[:MAX_TEXT].rstrip(": ")
        else:
            data = {name for name, value in found.items() if not isinstance(value, Remote)}
            if not self._has_reached_code and not tests.shows(data):
                self._ungradable = self._ungradable or "the tests call nothing of the code"
        verdict = {"error": error, "last": self._last, "ungradable": self._ungradable}
        self._requests.put({"verdict": not error and not self._ungradable, **verdict})

    def _fetch(self, tests: TestSource) -> dict[str, Any]:
        """Fetch the names that the tests use and the code defines."""
        candidates = [names for names in tests.candidates() if names]
        if not candidates:
            raise UngradableError("the tests use nothing that the code defines")
        for wanted in candidates:
            found = self._ask({"ask": "names", "names": sorted(wanted)})
            # Hostile code may return more names, for example its own `set` or `isclose`.
            chosen = {name: value for name, value in dict(found).items() if name in wanted}
            if chosen:
                return chosen
        raise NameError(f"name {min(candidates[0])!r} is not defined")

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
    """Represents in the tests an object of the graded code that is no data."""

    def __init__(self, asserter: Asserter, index: int, kind: str) -> None:
        # Not by assignment: that would set an attribute in the other interpreter.
        own: dict[str, Any] = {"agentrl_ask": asserter.ask, "agentrl_kind": kind}
        self.__dict__.update(own, agentrl_handle={"handle": index})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the object in the other interpreter."""
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

    def __await__(self) -> Any:
        return self.agentrl_ask("await", self)
        yield

    def __contains__(self, item: Any) -> bool:
        return item in list(self)  # ignores its class's own `__contains__`

    def __len__(self) -> int:
        return int(self.agentrl_ask("len", self))

    def __bool__(self) -> bool:
        return bool(self.agentrl_ask("bool", self))

    def __getitem__(self, index: Any) -> Any:
        return self.agentrl_ask("getitem", self, index)

    def __eq__(self, other: object) -> bool:
        """Equal no data. The class's own `__eq__` counts only between two objects of the code."""
        if not isinstance(other, Remote):
            return False
        return self.agentrl_ask("eq", self, other) is True

    def __hash__(self) -> int:
        return id(self)

    def __str__(self) -> str:
        return str(self.agentrl_ask("str", self))

    def __repr__(self) -> str:
        return f"<{self.agentrl_kind}>"


def _rebuilt(name: str, message: str) -> Exception:
    """Rebuild an exception of Python; replace any other one by a RuntimeError."""
    kind = vars(builtins).get(name)
    # One that stops an iteration would end a loop of the tests before its asserts run.
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
_ROLES: dict[str, Callable[..., Any]] = {"begin": _ASSERTER.begin, "resume": _ASSERTER.resume}


def serve(mark: str, request: str) -> None:
    """Answer one request of the host."""
    answer_request(_ROLES, mark, request)
