"""What graders read and compare: tests of data sets, outputs, values, the code of an answer."""

import json
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.sandbox.grading import AssertTest, CallTest, StdinTest, last_code_block, read_tests
from agentrl.sandbox.grading.compare import same_text, same_value
from agentrl.sandbox.grading.grader import without_fence
from agentrl.sandbox.grading.guest import decode, encode
from tests.fakes.waiting import assert_linear


@pytest.mark.parametrize(
    ("ground_truth", "tests"),
    [
        ({"inputs": [["a", "b"]], "outputs": [["c"]]}, [StdinTest("a\nb", "c")]),
        ({"inputs": [[1, 2]], "outputs": [3], "fn_name": "f"}, [CallTest("f", [1, 2], 3)]),
        (
            {"inputs": ["[1]\n'x'"], "outputs": ["[2]"], "fn_name": "f"},
            [CallTest("f", [[1], "x"], [2])],
        ),
        ('["assert f(1)"]', [AssertTest("assert f(1)")]),
        ("assert f(1)\nassert f(2)", [AssertTest("assert f(1)\nassert f(2)")]),
        (
            {"test_list": ["assert f()"], "test_setup_code": "import re"},
            [AssertTest("import re\nassert f()")],
        ),
        ({"assert_case": ["assert f()"], "fn_name": None}, [AssertTest("assert f()")]),
        ([{"input": "1", "output": "2"}], [StdinTest("1", "2")]),
        ({"test": "def check(c): ...", "entry_point": "f"}, [AssertTest("def check(c): ...", "f")]),
    ],
)
def test_tests_are_read_as_data_sets_write_them(ground_truth: Any, tests: list[Any]):
    assert list(read_tests(ground_truth)) == tests
    if not isinstance(ground_truth, str):
        assert list(read_tests(json.dumps(ground_truth))) == tests


@pytest.mark.parametrize(
    "ground_truth",
    [
        None,
        "",
        "42",
        7,
        [],
        [3],
        {},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
    ],
)
def test_what_holds_no_tests_is_refused(ground_truth: Any):
    with pytest.raises(DataError) as error:
        read_tests(ground_truth)
    assert "asserts" in str(error.value) or "as many" in str(error.value)


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("1\n2 \n\n", "1\n2", True),
        ("1 2", "1\n2", False),
        ("0.3333333333", "0.33333333334", True),
        ("2.50", "2.5", True),
        ("1000000", "1000001", False),
        ("1e3", "1000", True),
        ("YES", "yes", False),
        ("nan", "1", False),
        ("", "", True),
        ("", "0", False),
        ("a  b", "a b", True),
    ],
)
def test_outputs_are_compared_as_contests_do(got: str, expected: str, *, same: bool):
    assert same_text(got, expected) is same


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a"}, {"1": "b"}, False),
        (0.1 + 0.2, 0.3, True),
        ("0.3", 0.3, False),
        (10**400, 1.0, False),
        (None, [], False),
        ([1, 2], [1], False),
    ],
)
def test_values_are_compared_as_data_sets_write_them(got: Any, expected: Any, *, same: bool):
    assert same_value(got, expected) is same


leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.complex_numbers(allow_nan=False),
)
plain = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text() | st.integers(), inner, max_size=4),
        st.frozensets(st.integers() | st.text(), max_size=4),
        st.sets(st.integers(), max_size=4),
    ),
    max_leaves=12,
)


@given(plain)
def test_data_goes_through_whole(value: Any):
    def refuse(value: Any) -> Any:
        raise AssertionError(value)

    written = json.loads(json.dumps(encode(value, refuse)))
    again = decode(written, lambda index, kind: None)
    assert again == value
    assert type(again) is type(value)


def test_values_that_are_no_data_become_handles():
    written = encode([object(), Decimal(1), Fraction(1, 2)], lambda value: {"handle": 3})
    assert decode(written, lambda index, kind: (index, kind)) == [
        (3, "object"),
        Decimal(1),
        Fraction(1, 2),
    ]
    huge = {"Fraction": "1e999999999"}, {"Fraction": ["0x" + "1" * 30_000, "0x1"]}
    for written in (*huge, {"set": [[i * (2**61 - 1)] for i in range(200)]}):
        with pytest.raises((ValueError, TypeError)):
            decode(written, lambda index, kind: None)
    with pytest.raises(ValueError, match="no value"):
        decode({"exec": "1"}, lambda index, kind: None)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```", "x = 1"),
        ("```\na\n```\nand\n```py\nb\n```\nend", "b"),
        ("```python\na\n```\n```json\n{}\n```", "a"),
        ("```python\ncut off", "cut off"),
        ("  ```Python\n  a\n  ```", "  a"),
        ("no code", None),
        ("", None),
    ],
)
def test_the_last_block_of_python_is_the_code(text: str, code: str | None):
    assert last_code_block(text) == code


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("  ```bash\nls\n  ```\n", "ls"),
        ("```\n\n```", ""),
        ("print('```')", "print('```')"),
        ("ls", "ls"),
    ],
)
def test_a_fence_round_an_argument_is_taken_off(text: str, code: str):
    assert without_fence(text) == code


def test_arrays_of_parquet_are_read_as_lists():
    tests = {"inputs": np.array([[1, 2], [3, 4]]), "outputs": np.array([3, 7]), "fn_name": "f"}
    assert list(read_tests(tests)) == [CallTest("f", [1, 2], 3), CallTest("f", [3, 4], 7)]
    assert list(read_tests(np.array(["assert f(1)"]))) == [AssertTest("assert f(1)")]


@pytest.mark.parametrize(
    "text", ["```\n" * 16_000, "```python\n" + "\n" * 64_000, "```" + " " * 64_000 + "\n"]
)
def test_code_is_found_in_linear_time(text: str):
    def find(size: int) -> None:
        cut = text[:size] + text[-1]
        last_code_block(cut)
        without_fence(cut + "x")
        without_fence(cut + "```")

    assert_linear(find, 8000)
