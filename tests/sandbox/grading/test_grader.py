"""Grading code by tests: what passes, what fails, and code that says it passed."""

import json
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import DataError
from agentrl.sandbox import Sandbox, make_sandbox
from agentrl.sandbox.fusion import FusionSandbox
from agentrl.sandbox.grading import Grade, GradingLimits, grade, read_tests
from tests.fakes.sandbox_fusion import fusion_service

pytestmark = pytest.mark.asyncio(loop_scope="module")

SUM = "print(sum(map(int, input().split())))"
DOUBLE = (
    "import sys\nsay = sys.stdout.write\ndef double(x):\n    say('on the way')\n    return x + x\n"
)
CALLS = {"fn_name": "double", "inputs": [[2], ["a"], [[1]]], "outputs": [4, ["aa"], [1, 1]]}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def sandbox() -> AsyncIterator[Sandbox]:
    made = make_sandbox(SandboxConfig(num_warm=4))
    yield made
    await made.close()


async def graded(code: str, tests: Any, sandbox: Sandbox, **limits: Any) -> Grade:
    return await grade(code, read_tests(tests), sandbox, GradingLimits(**limits))


async def test_a_program_passes_by_what_it_prints(sandbox: Sandbox):
    found = await graded(
        SUM, {"inputs": ["1 2", "3 4", "5 6"], "outputs": ["3", "7.0\n", "12"]}, sandbox
    )
    assert [report.passed for report in found.reports] == [True, True, False]
    failure = found.first_failure
    assert failure is not None
    assert (failure.given, failure.expected, failure.got) == ("5 6", "12", "11")
    assert (found.num_passed, found.num_tests, found.passed_all) == (2, 3, False)


async def test_a_function_passes_by_what_it_returns(sandbox: Sandbox):
    assert (await graded(DOUBLE, json.dumps(CALLS), sandbox)).passed_all
    method = "class Solution:\n    def double(self, x):\n        return 2 * x\n"
    assert (await graded(method, CALLS, sandbox)).passed_all
    found = await graded("def half(x):\n    return x / 2\n", CALLS, sandbox)
    assert found.num_passed == 0
    assert "NameError: name 'double' is not defined" in found.reports[0].got


async def test_a_slow_start_of_an_interpreter_is_not_time_of_the_test(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
):
    moved_s, real = [0.0], time.monotonic

    class Starting:
        """A session of which the interpreter needs an hour to start, by the exchange's clock."""

        def __init__(self, session: Any) -> None:
            self.session, self.close, self.start_s = session, session.close, 3600.0

        async def run(self, source: str, **limits: Any) -> Any:
            moved_s[0], self.start_s = moved_s[0] + self.start_s, 0.0
            return await self.session.run(source, **limits)

    async def open_python() -> Any:
        return Starting(await opened())

    opened = sandbox.open_python
    monkeypatch.setattr(sandbox, "open_python", open_python)
    clock = SimpleNamespace(monotonic=lambda: real() + moved_s[0])
    monkeypatch.setattr("agentrl.sandbox.grading.exchange.time", clock)
    asserts = "def check(candidate):\n    assert candidate(2) == 4\n"
    tests = [CALLS | {"inputs": [[2]], "outputs": [4]}, {"test": asserts, "entry_point": "double"}]
    for one in tests:
        found = await graded(DOUBLE, one, sandbox, test_timeout_s=60.0)
        assert found.passed_all, found
    assert moved_s[0] == 3 * 3600


CLASSES = """
from dataclasses import dataclass

@dataclass
class Point:
    x: int
    y: int = 0

    def moved(self, by):
        return Point(self.x + by, self.y)

class Stack:
    def __init__(self):
        self.items = []
    def push(self, item):
        self.items.append(item)
    def __len__(self):
        return len(self.items)
    def __getitem__(self, index):
        return self.items[index]

def points(n):
    for i in range(n):
        yield Point(i)

def refuse(x):
    raise ValueError(f"no {x}")

CONSTANT = (1, {2}, {"a": b"b"})
"""


@pytest.mark.parametrize(
    "test",
    [
        "assert Point(1, 2) == Point(1, 2)\nassert Point(1) != Point(2)",
        "assert Point(1).moved(by=2).x == 3",
        "p = Point(1)\np.y = 7\nassert p.moved(0).y == 7",
        "assert [p.x for p in points(3)] == [0, 1, 2]",
        "s = Stack()\ns.push('a')\ns.push(Point(5))\nassert len(s) == 2 and s[1].x == 5 and s",
        "assert not Stack()",
        "it = points(1)\nassert next(it).x == 0 and next(it, None) is None",
        "assert CONSTANT == (1, {2}, {'a': b'b'})",
        "try:\n    refuse(3)\n    1 / 0\nexcept ValueError as e:\n    assert str(e) == 'no 3'",
        "def test_it():\n    assert Point(1).x == 1",
        "assert math.isclose(Point(0.1).x * 3, 0.3)",
        "assert 'Point(x=1, y=0)' == str(Point(1))",
    ],
)
async def test_asserts_reach_whatever_the_code_defines(sandbox: Sandbox, test: str):
    found = await graded(CLASSES, [test], sandbox)
    assert found.passed_all, found.first_failure


@pytest.mark.parametrize(
    ("test", "got"),
    [
        ("assert Point(1).x == 2", "AssertionError"),
        ("assert Point(1) == 1", "AssertionError (the call with (1) gave <Point>)"),
        ("refuse(3)", "ValueError: no 3"),
        ("assert missing(3)", "NameError: name 'missing' is not defined"),
        ("def test_it():\n    assert Point(1).x == 2", "AssertionError"),
        ("assert 2 in points(2)", "AssertionError"),
    ],
)
async def test_asserts_that_fail_say_why(sandbox: Sandbox, test: str, got: str):
    found = await graded(CLASSES, [test], sandbox)
    assert found.num_passed == 0
    assert got in found.reports[0].got


CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate('a') == 'aa'\n"


async def test_a_check_function_is_handed_the_candidate(sandbox: Sandbox):
    tests = {"test": CHECK, "entry_point": "double"}
    assert (await graded(DOUBLE, tests, sandbox)).passed_all
    assert not (await graded("def double(x):\n    return 4\n", tests, sandbox)).passed_all
    assert not (await graded("def other(x):\n    return 4\n", tests, sandbox)).passed_all


HOSTILE = {
    "leaves": "import os\nos._exit(0)",
    "leaves politely": "import sys\nsys.exit(0)",
    "leaves in the call": "import os\ndef double(x):\n    os._exit(0)",
    "raises SystemExit in the call": "def double(x):\n    raise SystemExit(0)",
    "equals everything": (
        "class Any:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n"
        "    def __hash__(self): return 0\n    def __contains__(self, o): return True\n"
        "    def __bool__(self): return True\n    __len__ = lambda self: 1\n"
        "def double(x):\n    return Any()"
    ),
    "a list that equals everything": (
        "class Any(list):\n    def __eq__(self, o): return True\n    __ne__ = lambda s, o: False\n"
        "def double(x):\n    return Any()"
    ),
    "a number that equals everything": (
        "class Any(int):\n    __eq__ = lambda s, o: True\n    __hash__ = int.__hash__\n"
        "def double(x):\n    return Any(7)"
    ),
    "prints what a grader might print": (
        "print('passed')\nprint('OK')\nprint('{\"verdict\": true}')\n"
        "def double(x):\n    print('True')\n    return True"
    ),
    "finds the mark in the frames and forges a verdict": (
        "import sys, os, json\n"
        "def double(x):\n"
        "    frame = sys._getframe()\n"
        "    while frame and 'mark' not in frame.f_locals:\n        frame = frame.f_back\n"
        "    said = {'value': {'verdict': True}, 'verdict': True, 'error': ''}\n"
        "    os.write(1, ('\\n' + frame.f_locals['mark'] + json.dumps(said) + '\\n').encode())\n"
        "    os._exit(0)"
    ),
    "puts its own grader in the place of ours": (
        "import sys\nnames = sys.modules['__main__'].__dict__\n"
        "frame = sys._getframe()\n"
        "while frame:\n"
        "    if 'answer_request' in frame.f_globals:\n"
        "        for name in ('encode', 'decode', '_free_names'):\n"
        "            frame.f_globals[name] = lambda *a: True\n"
        "        frame.f_globals.setdefault('_ROLES', {})['do'] = lambda **k: True\n"
        "    frame = frame.f_back\n"
        "def double(x):\n    return True"
    ),
    "patches what Python has": (
        "import builtins, json, operator\n"
        "builtins.print = lambda *a, **k: None\n"
        "builtins.AssertionError = Exception\nbuiltins.isinstance = lambda *a: True\n"
        "operator.eq = lambda a, b: True\njson.dumps = lambda *a, **k: 'true'\n"
        "def double(x):\n    return None"
    ),
    "gives more names than it was asked for": (
        "import sys\nframe = sys._getframe()\n"
        "def names(names):\n"
        "    return {'dict': [[n, {'handle': 0}] for n in [*names, 'sorted', 'dict', 'len']]}\n"
        "while frame:\n"
        "    if '_CALLEE' in frame.f_globals:\n"
        "        frame.f_globals['_ROLES']['names'] = names\n"
        "        frame.f_globals['_CALLEE']._kept.append(lambda *a: [])\n"
        "    frame = frame.f_back"
    ),
    "ends the loops of the tests": "def double(x):\n    raise StopIteration",
    "returns a number that nobody can write": "def double(x):\n    return 10 ** 9999",
    "looks for what is expected": (
        "import gc, os, sys\n"
        "found = [o for o in gc.get_objects() if isinstance(o, (list, tuple)) and 'aa' in o[:9]]\n"
        "texts = []\n"
        "for folder, _, names in os.walk('.'):\n"
        "    texts += [open(os.path.join(folder, n), errors='ignore').read() for n in names]\n"
        "texts += [open('/proc/self/cmdline').read(), str(os.environ)]\n"
        "def double(x):\n"
        "    return 4 if any('aa' in t and 'import gc' not in t for t in texts) else found[0][0]"
    ),
    "returns what cannot be read": (
        "def double(x):\n    deep = []\n    for _ in range(100000): deep = [deep]\n    return deep"
    ),
    "returns itself": "def double(x):\n    a = []\n    a.append(a)\n    return a",
    "returns far too much": "def double(x):\n    return list(range(10**5))",
    "raises AssertionError without text": "def double(x):\n    raise AssertionError",
    "is no code": "I would double it.",
    "is nothing": "",
}
JUDGED_BY_THE_CODE = "def isclose(*a, **k):\n    return True\nclass math:\n    isclose = isclose\n"
LOOP = "for got, want in zip(map(double, [1, 2]), [2, 4]):\n    assert sorted([got]) == [want]"
SORTED = "assert sorted([double(2)]) == sorted([4])"
TESTS: dict[str, Any] = {
    "calls": CALLS,
    "asserts": [
        "assert double(2) == 4",
        "assert double('a') == 'aa'",
        "assert 'aa' in [double('a')]",
    ],
    "check": {"test": CHECK, "entry_point": "double"},
    "stdin": {"inputs": ["2"], "outputs": ["4"]},
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_code_passes_by_saying_so(sandbox: Sandbox, name: str):
    found = await graded(HOSTILE[name], [LOOP], sandbox, test_timeout_s=2)
    assert found.num_passed == 0, found.reports


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("gives more names than it was asked for", [SORTED]),
        ("returns a number that nobody can write", CALLS),
        ("leaves politely", TESTS["stdin"]),
        ("equals everything", CALLS),
        ("leaves in the call", TESTS["check"]),
    ],
)
async def test_no_code_passes_the_tests_that_it_was_made_for(
    sandbox: Sandbox, name: str, tests: Any
):
    found = await graded(HOSTILE[name], tests, sandbox, stops_at_failure=True)
    assert found.num_passed == 0, found.reports


@pytest.mark.slow
@pytest.mark.parametrize("kind", TESTS)
@pytest.mark.parametrize("name", HOSTILE)
async def test_no_code_passes_any_kind_of_test_by_saying_so(sandbox: Sandbox, name: str, kind: str):
    hangs = name == "patches what Python has"  # it never answers: do not wait long
    found = await graded(HOSTILE[name], TESTS[kind], sandbox, test_timeout_s=2 if hangs else 10)
    assert found.num_passed == 0, found.reports


@pytest.mark.parametrize("test", ["assert math.isclose(f(1), 2)", "assert isclose(f(1), 2)"])
async def test_what_judges_is_never_taken_from_the_code(sandbox: Sandbox, test: str):
    code = JUDGED_BY_THE_CODE + "def f(x):\n    return x + {}\n"
    assert (await graded(code.format(1), [test], sandbox)).passed_all
    assert not (await graded(code.format(5), [test], sandbox)).passed_all


# The code computes `double`, and forges whatever else a test may take from it.
FORGED = (
    "class Counter(dict):\n    __eq__ = lambda s, o: True\n"
    "sqrt = test_a = test_double = TestDouble = lambda *a, **k: 1\n"
    "def double(x):\n    return x + {}\n"
)
JUDGING = [
    "from unittest import TestCase\nclass Tests(TestCase):\n"
    "    def test_it(self):\n        self.assertEqual(double(2), 4)",
    "import unittest\nclass Tests(unittest.TestCase):\n    def setUp(self):\n        self.x = 2\n"
    "    def test_it(self):\n        self.assertEqual(double(self.x), 4)\n"
    "if __name__ == '__main__':\n    unittest.main()",
    "class TestDouble:\n    def setup_method(self, method):\n        self.x = 2\n"
    "    def test_it(self):\n        assert double(self.x) == 4",
    "async def test_double():\n    assert double(2) == 4",
    "def test_double():\n    assert double(2) == 4\nif __name__ == '__main__':\n    test_double()",
    "def run(candidate):\n    assert candidate(2) == 4\n"
    "if __name__ == '__main__':\n    run(double)",
    "assert Counter([double(2)]) == Counter([4])",
    "assert sqrt(double(2)) == 2",
]


@pytest.mark.parametrize("test", JUDGING)
async def test_tests_of_any_style_run_and_judge_by_names_of_their_own(sandbox: Sandbox, test: str):
    found = await graded(FORGED.format("x"), [test], sandbox)
    assert found.passed_all, found.first_failure
    assert not (await graded(FORGED.format("x + 1"), [test], sandbox)).passed_all


ASYNC = "async def double(x):\n    return x + x\n"


@pytest.mark.parametrize(
    "test",
    [
        "async def test_double():\n    assert await double(2) == 4",
        "import asyncio\nassert asyncio.run(double(2)) == 4",
        "import unittest\nclass Tests(unittest.IsolatedAsyncioTestCase):\n"
        "    async def test_it(self):\n        self.assertEqual(await double(2), 4)",
    ],
)
async def test_coroutines_of_the_code_can_be_awaited(sandbox: Sandbox, test: str):
    assert (await graded(ASYNC, [test], sandbox)).passed_all
    assert not (await graded(ASYNC.replace("x + x", "x"), [test], sandbox)).passed_all


@pytest.mark.parametrize(
    ("name", "test"),
    [
        ("gcd", "assert gcd(12, 18) == 6"),
        ("sum", "assert sum(12, 18) == 6"),
        ("product", "assert product(12, 18) == 6"),
        ("Solution", {"test": "def check(f):\n    assert f(12, 18) == 6",
                      "entry_point": "Solution().gcd"}),
    ],
)  # fmt: skip
async def test_the_code_under_test_may_have_a_name_of_pythons(
    sandbox: Sandbox, name: str, test: Any
):
    code = f"import math\ndef {name}(a, b):\n    return math.gcd(a, b)\n"
    if name == "Solution":
        code = (
            "import math\nclass Solution:\n    def gcd(self, a, b):\n        return math.gcd(a, b)"
        )
    tests = test if isinstance(test, dict) else [test]
    assert (await graded(code, tests, sandbox)).passed_all
    assert not (await graded(code.replace("gcd(a, b)", "gcd(a, a)"), tests, sandbox)).passed_all
    assert not (await graded("", tests, sandbox)).passed_all


HUGE_FRACTION = """
class Fraction:
    numerator = 1
    denominator = 1
    def __str__(self):
        return "1e999999999"
Fraction.__module__ = "fractions"
"""
UNCOMPARABLE = {
    "a fraction of a billion digits": HUGE_FRACTION + "def f():\n    return Fraction()",
    "a signaling NaN": "import decimal\ndef f():\n    return decimal.Decimal('sNaN')",
    "a key of 5,000 digits": "def f():\n    return {10**5000: 1}",
    "keys of one hash": "def f():\n    return {i * (2**61 - 1): i for i in range(2000)}",
}


@pytest.mark.parametrize("name", UNCOMPARABLE)
async def test_values_that_are_hard_to_read_are_wrong_answers(sandbox: Sandbox, name: str):
    for expected in ([7], [{"7": 7}]):
        tests = {"fn_name": "f", "inputs": [[]], "outputs": [expected]}
        found = await graded(UNCOMPARABLE[name], tests, sandbox)
        assert found.num_passed == 0


async def test_as_much_output_is_read_as_is_expected(sandbox: Sandbox):
    numbers = list(range(20_000))
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [[numbers]]}
    assert (await graded("def f():\n    return list(range(20_000))", tests, sandbox)).passed_all
    lines = "\n".join(map(str, numbers))
    tests = {"inputs": ["1"], "outputs": [lines]}
    assert (await graded("for i in range(20_000): print(i)", tests, sandbox)).passed_all
    test = "assert f(list(range(50_000))) == list(range(50_000))"
    assert (await graded("def f(x):\n    return x", [test], sandbox)).passed_all


async def test_more_output_than_can_be_read_is_the_rows_fault(sandbox: Sandbox):
    with pytest.raises(DataError, match="expects 5000000 characters"):
        await graded(
            "print('x' * 5_000_000)", {"inputs": [""], "outputs": ["x" * 5_000_000]}, sandbox
        )
    with pytest.raises(DataError, match="hands over too much"):
        await graded("def f(x):\n    return 1", ["assert f('x' * 9_000_000) == 1"], sandbox)


async def test_slow_code_is_given_up_and_the_rest_counts_as_failed(sandbox: Sandbox):
    tests = {"inputs": ["1 2"] * 9, "outputs": ["3"] * 9}
    slow = "while True: pass"
    found = await graded(slow, tests, sandbox, test_timeout_s=0.3, max_timeouts=2)
    assert [report.is_late for report in found.reports] == [True, True]
    assert (found.num_tests, found.passed_frac) == (9, 0.0)
    assert "in time" in found.reports[0].got
    hung = "def double(x):\n    while True: pass"
    found = await graded(hung, CALLS, sandbox, test_timeout_s=0.5, total_timeout_s=0.6)
    assert found.reports[0].is_late
    assert len(found.reports) < 3


async def test_limits_say_how_many_tests_are_run(sandbox: Sandbox):
    tests = {"inputs": ["1 2"] * 5, "outputs": ["4", "3", "3", "3", "3"]}
    found = await graded(SUM, tests, sandbox, max_tests=3)
    assert (found.num_tests, found.num_passed) == (3, 2)
    found = await graded(SUM, tests, sandbox, stops_at_failure=True)
    assert (len(found.reports), found.num_tests, found.num_passed) == (1, 5, 0)


@pytest.mark.parametrize(
    "tests",
    [
        "assert 1 + 1 == 2",
        ["assert double(lambda x: x) == 1"],
        ["assert double(2 ="],
        {"test": "assert double(2) == 4", "entry_point": "double"},
        "import pytest\nassert double(1) == 2",
        "class TestIt:\n    def test_it(self):\n        assert True",
        "def test_it():\n    def inner():\n        assert double(2) == 4",
        {
            "test": "def check(f):\n    def inner():\n        assert f(2) == 4",
            "entry_point": "double",
        },
        "assert (double(x) == 4 for x in [2])",
        "assert double",
        "def check(f):\n    assert f(2) == 4\nCODE = double",
        "def test_it(tmp_path):\n    assert double(2) == 4",
        "class TestIt:\n    def test_it(self, tmp_path):\n        assert double(2) == 4",
        "assert double(2) == 4\nreturn",
    ],
)
async def test_tests_that_grade_nothing_are_the_rows_fault(sandbox: Sandbox, tests: Any):
    with pytest.raises(DataError):
        await graded(DOUBLE, tests, sandbox)


async def test_a_service_grades_too():
    async with fusion_service() as service:
        remote = FusionSandbox(SandboxConfig(provider="sandbox_fusion", url=service.url))
        one = {"fn_name": "double", "inputs": [[2]], "outputs": [4]}
        for tests in (one, ["assert double(1) == 2"]):
            assert (await graded(DOUBLE, tests, remote)).passed_all
        assert not (await graded(DOUBLE, ["assert double(1) == 3"], remote)).passed_all
        await remote.close()
