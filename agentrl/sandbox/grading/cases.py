"""Read the tests of a programming problem in the formats of data sets."""

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from agentrl.errors import DataError

EXPECTED = (
    "inputs and outputs (and fn_name), or assert_case, test_list or test with entry_point, as "
    "JSON or a mapping; or a list of asserts"
)


@dataclass(frozen=True, slots=True)
class StdinTest:
    """Passes if the program, given `stdin`, prints `expected`."""

    stdin: str
    expected: str


@dataclass(frozen=True, slots=True)
class CallTest:
    """Passes if the function (or method of a class `Solution`) returns `expected`."""

    function: str
    arguments: Sequence[Any]
    expected: Any


@dataclass(frozen=True, slots=True)
class AssertTest:
    """Passes if the test code raises nothing."""

    source: str
    entry_point: str | None = None
    """Expression for the argument of the test code's own `check(candidate)`."""


TestCase = StdinTest | CallTest | AssertTest


def read_tests(ground_truth: Any) -> tuple[TestCase, ...]:
    """Read the tests of a row.

    Args:
        ground_truth: JSON text or its value: `{inputs, outputs}` (programs that read standard
            input), with `fn_name` for functions (APPS, TACO, CodeContests); `{assert_case}` or
            `{test_list, test_setup_code}` (MBPP); `{test, entry_point}` (HumanEval); a list of
            asserts or of `{input, output}`; or the text of test code.

    Raises:
        DataError: If it has another format or contains no test.

    Example:
        >>> read_tests('{"inputs": ["1 2"], "outputs": ["3"]}')
        (StdinTest(stdin='1 2', expected='3'),)
    """
    tests = tuple(_read(_decoded(ground_truth)))
    if not tests:
        raise DataError(f"there is no test in {ground_truth!r:.200}", expected=EXPECTED)
    return tests


def _decoded(value: Any) -> Any:
    if not isinstance(value, str):
        return _plain(value)
    try:
        return json.loads(value)
    except ValueError:
        return [value] if "assert" in value else None


def _plain(value: Any) -> Any:
    """Replace arrays, which Parquet files give, by lists."""
    if isinstance(value, Mapping):
        return {key: _plain(held) for key, held in cast("Mapping[str, Any]", value).items()}
    if type(value).__module__ == "numpy":
        value = value.tolist()
    return [_plain(item) for item in cast("list[Any]", value)] if _is_list(value) else value


def _read(tests: Any) -> Iterator[TestCase]:
    match tests:
        case list() | tuple():
            for test in cast("Sequence[Any]", tests):
                yield _read_item(test)
        case {"inputs": inputs, "outputs": outputs}:
            if len(inputs) != len(outputs):
                raise DataError(
                    f"{len(inputs)} inputs and {len(outputs)} outputs",
                    expected="as many outputs as inputs",
                )
            for given, expected in zip(inputs, outputs, strict=True):
                yield _case(given, expected, tests.get("fn_name") or None)
        case {"assert_case": asserts} | {"test_list": asserts}:
            for source in [asserts] if isinstance(asserts, str) else asserts:
                yield AssertTest(_with_setup(tests, str(source)))
        case {"test": str(source)}:
            yield AssertTest(_with_setup(tests, source), tests.get("entry_point"))
        case {}:
            raise DataError(f"unknown tests, of the keys {list(tests)}", expected=EXPECTED)
        case _:
            raise DataError(f"these are no tests: {tests!r:.200}", expected=EXPECTED)


def _with_setup(tests: Mapping[str, Any], source: str) -> str:
    setup = str(tests.get("test_setup_code") or tests.get("setup") or "")
    return f"{setup}\n{source}" if setup else source


def _read_item(test: Any) -> TestCase:
    match test:
        case str():
            return AssertTest(test)
        case {"input": given, "output": expected}:
            return _case(given, expected, test.get("fn_name") or None)
        case _:
            raise DataError(f"this is no test: {test!r:.200}", expected=EXPECTED)


def _case(given: Any, expected: Any, function: str | None) -> TestCase:
    if function is not None:
        return CallTest(function, _arguments(given), _value(expected))
    return StdinTest(_text(given), _text(expected))


def _text(value: Any) -> str:
    """Return a text, which some data sets store as a list of lines."""
    if isinstance(value, str):
        return value
    return "\n".join(map(str, cast("list[Any]", value))) if _is_list(value) else str(value)


def _arguments(given: Any) -> Sequence[Any]:
    """Return the arguments of one call. A text has one argument on each line."""
    if isinstance(given, str):
        return [_value(line) for line in given.splitlines() if line.strip()]
    return list(cast("list[Any]", given)) if _is_list(given) else [given]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _value(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    for read in (json.loads, ast.literal_eval):
        try:
            return read(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
    return value
