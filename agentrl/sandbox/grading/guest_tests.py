# pyright: reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false
"""Run test code, and choose the names that it takes from the graded code. See `guest`.

A name that judges must not come from the code that is judged. Names that the tests define (`def`,
`class`, an assignment, an import) never come from the code. Names of Python and its library
(`Counter`, `sqrt`) do only if the tests use no other name that the code could define.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import math
import symtable
import sys
from contextlib import suppress
from types import CoroutineType, FunctionType

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_ALIASES = {"np": "numpy", "pd": "pandas"}
_WELL_KNOWN = {
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "copy": "copy deepcopy",
    "datetime": "date datetime timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "cmp_to_key partial reduce",
    "itertools": "accumulate chain combinations combinations_with_replacement groupby islice "
    "pairwise permutations product zip_longest",
    "math": " ".join(name for name in dir(math) if not name.startswith("_")),
    "random": "choice randint shuffle",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "typing": "Any Callable Dict Iterable List Optional Sequence Set Tuple Union",
}
_MODULE_OF = {name: module for module, names in _WELL_KNOWN.items() for name in names.split()}
"""Names that tests often use without importing them."""


class UngradableError(Exception):
    """A test that cannot run across two interpreters, or that tests nothing."""


class TestSource:
    """Test code that can be run.

    Args:
        source: The code.
        entry_point: An expression for the argument of its `check`; None if it has no `check`.

    Raises:
        UngradableError: If it cannot be run.
    """

    __test__ = False  # pytest would collect it

    def __init__(self, source: str, entry_point: str | None) -> None:
        try:
            self._code = compile(source, "tests.py", "exec")
            self._entry = entry_point and compile(entry_point, "entry_point", "eval")
        except (SyntaxError, ValueError) as error:
            raise UngradableError(f"the tests cannot be read: {error}") from None
        self._tree = ast.parse(source)
        self._own, read = _defined_and_read_names(symtable.symtable(source, "tests.py", "exec"))
        _check_imports(self._tree)
        if self._entry is not None and "check" not in self._own:
            raise UngradableError("the tests define no function check")
        self.given = _library(self._tree, read - self._own)
        """Names that Python's library provides."""
        entries = set(self._entry.co_names) if self._entry else set()
        self._wanted = read - self._own - set(self.given) - set(dir(builtins)) | entries
        self._free = read - self._own

    def candidates(self) -> Iterator[set[str]]:
        """Yield sets of names to ask the code for, the best set first.

        The further sets are for a test of a function named `gcd` or `sum`: it uses only names that
        Python defines.
        """
        if self._wanted:
            yield self._wanted
            return
        library = {name: self.given[name] for name in self._free & set(_MODULE_OF)}
        python = {name: vars(builtins)[name] for name in self._free & set(dir(builtins))}
        for known in (library, python):
            yield {name for name, value in known.items() if not isinstance(value, type)}
        yield {name for name, value in library.items() if isinstance(value, type)}

    def shows(self, names: set[str]) -> bool:
        """Whether an assert at module level, which is sure to run, reads one of the names."""
        asserts = [node.test for node in self._tree.body if isinstance(node, ast.Assert)]
        for nodes in (list(ast.walk(test)) for test in asserts):
            is_plain = not any(isinstance(node, ast.GeneratorExp | ast.Lambda) for node in nodes)
            if is_plain and any(isinstance(n, ast.Name) and n.id in names for n in nodes):
                return True
        return False

    def run(self, found: dict[str, Any]) -> None:
        """Run the test code with the names of the graded code. An error is the verdict."""
        # Code for `python tests.py` runs too. Classes of unittest run below.
        namespace: dict[str, Any] = {"__name__": "__main__", **self.given, **found}
        _adapt_library(self._own | set(self.given))
        self._run_module(namespace)
        if self._entry is not None:
            _finish(namespace["check"](eval(self._entry, dict(found))))
        for name in [name for name in namespace if name in self._own]:
            value = namespace[name]
            if isinstance(value, type) and value.__module__ == "__main__":
                _run_class(name, value)
            elif name.startswith("test_") and callable(value):
                self._run_function(name, value)

    def _run_module(self, namespace: dict[str, Any]) -> None:
        try:
            exec(self._code, namespace)
        except SystemExit as left:
            if left.code not in (None, 0, False):
                raise

    def _run_function(self, name: str, function: Callable[..., Any]) -> None:
        if not _needs_arguments(function, 0):
            _finish(function())
        elif not any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(self._tree)):
            raise UngradableError(f"{name} takes arguments, and the tests do not call it")


def _defined_and_read_names(table: symtable.SymbolTable) -> tuple[set[str], set[str]]:
    """Collect the names that a module defines and the global names that it reads."""
    own: set[str] = set()
    read: set[str] = set()
    is_module = table.get_type() == "module"
    for symbol in table.get_symbols():
        if not (is_module or symbol.is_global()):
            continue
        if symbol.is_assigned() or symbol.is_imported():
            own.add(symbol.get_name())
        if symbol.is_referenced() and not symbol.get_name().startswith("__"):
            read.add(symbol.get_name())
    for child in table.get_children():
        child_own, child_read = _defined_and_read_names(child)
        own |= child_own
        read |= child_read
    return own, read


def _check_imports(tree: ast.Module) -> None:
    nodes = list(ast.walk(tree))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    for name in {name.partition(".")[0] for name in names} - {""}:
        if importlib.util.find_spec(name) is None:
            raise UngradableError(f"the tests import {name}, which the sandbox does not have")


def _library(tree: ast.Module, free: set[str]) -> dict[str, Any]:
    """Import the names of Python's library that the tests use without importing them."""
    given: dict[str, Any] = {}
    for name in free & set(_MODULE_OF):
        given[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in attributes:
        name = node.value.id if isinstance(node.value, ast.Name) else ""
        if name in free and (name in sys.stdlib_module_names or name in _ALIASES):
            with suppress(ImportError):  # then the tests lack it
                module = importlib.import_module(_ALIASES.get(name, name))
                if name not in given or hasattr(module, node.attr):  # `datetime` is both
                    given[name] = module
    return given


def _adapt_library(used: set[str]) -> None:
    """Adapt two functions of the library to this interpreter."""
    if "unittest" in used:
        import unittest

        unittest.main = lambda *args, **kwargs: None  # pyright: ignore # its classes run below
    if "asyncio" in used:
        import asyncio

        run = asyncio.run

        async def wait(awaitable: Any) -> Any:
            return await awaitable

        # It takes coroutines only. Those of the code are objects in the other interpreter.
        def run_awaitable(main: Any, *, debug: bool | None = None) -> Any:
            return run(wait(main), debug=debug)

        asyncio.run = run_awaitable


def _run_class(name: str, kind: type) -> None:
    """Run a class of tests, as unittest and pytest do."""
    if "unittest" in sys.modules:
        from unittest import SkipTest, TestCase, defaultTestLoader

        if issubclass(kind, TestCase):
            with suppress(SkipTest):
                defaultTestLoader.loadTestsFromTestCase(kind).debug()
            return
    tests = [test for test in dir(kind) if test.startswith("test_")]
    if not name.startswith("Test") or not tests:
        return
    if any(_needs_arguments(getattr(kind, test), 1) for test in tests) or "__init__" in vars(kind):
        raise UngradableError(f"the class {name} needs pytest, which the sandbox does not have")
    _call_if_there(kind, "setup_class")
    for test in tests:
        instance = kind()
        _call_if_there(instance, "setup_method", getattr(instance, test))
        _finish(getattr(instance, test)())
        _call_if_there(instance, "teardown_method", getattr(instance, test))
    _call_if_there(kind, "teardown_class")


def _call_if_there(owner: Any, name: str, *args: Any) -> None:
    method = getattr(owner, name, None)
    if method is not None:
        num_args = method.__code__.co_argcount - 1
        method(*args[:num_args])


def _needs_arguments(function: Any, num_given: int) -> bool:
    if not isinstance(function, FunctionType):
        return False
    num_optional = len(function.__defaults__ or ())
    return function.__code__.co_argcount - num_optional > num_given


def _finish(result: Any) -> None:
    """Run the coroutine that an `async def` returned."""
    if isinstance(result, CoroutineType):
        import asyncio

        asyncio.run(result)
