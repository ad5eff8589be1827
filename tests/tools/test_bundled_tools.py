"""The tools that come with agentrl."""

import math
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrl.answers import extract_gsm8k_answer, same_number
from agentrl.errors import ToolError
from agentrl.tools.calculator_tool import MAX_DIGITS, CalculatorTool, calculate
from agentrl.tools.gsm8k_tool import Gsm8kTool


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("0.1 + 0.2", "0.3"),
        ("7 / 2 * 2", "7"),
        ("1 / 3 * 3", "1"),
        ("1 / 3", "0.333333333333"),
        ("2 ** 0.5", "1.414213562373"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7 % -3", "-2"),
        ("0 * -1", "0"),
        ("0 ** 0", "1"),
        ("2 * 3.50", "7"),
        ("1_000 * 2", "2000"),
        (" 1 +\t2", "3"),
        ("+(-(3))", "-3"),
        ("123456789012345.5", "123456789012345.5"),
        ("10 ** 99", "1" + "0" * 99),
        ("2 ** 200", str(2**200)),
        ("100 - 99.99", "0.01"),
        ("-" * 298 + "1", "1"),
    ],
)
def test_numbers_come_out_plain(expression: str, value: str):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        ("1 / 0", "division by zero"),
        ("1 % 0", "no value"),
        ("x + 1", "'x' is a name"),
        ("__import__('os')", "only numbers"),
        ("(1).real", "only numbers"),
        ("'a' * 3", "only numbers"),
        ("[1] * 9", "only numbers"),
        ("1 if 2 else 3", "only numbers"),
        ("1 < 2", "only numbers"),
        ("3j", "only numbers"),
        ("True", "not a number"),
        ("1,000", "1000, not 1,000"),
        ("2 ^ 3", "with **"),
        ("2 +", "cannot read"),
        ("", "cannot read"),
        ("\x00", "cannot read"),
        ("(" * 250, "cannot read"),
        ("9" * 101, "more than 100 digits"),
        ("10 ** 100", "more than 100 digits"),
        ("9 ** 9 ** 9 ** 9", "more than 100 digits"),
        ("1.0000000001 ** (9 ** 99)", "more than 100 digits"),
        ("1e400", "more than 100 digits"),
        ("(-8) ** 0.5", "no value"),
        ("1+" * 200 + "1", "longer than 300"),
    ],
)
def test_what_cannot_be_computed_is_said_in_helpful_words(expression: str, text: str):
    with pytest.raises(ToolError, match=r"^Error: ") as error:
        calculate(expression)
    assert text in str(error.value)


@given(st.text(alphabet="0123456789.+-*/%() e_", max_size=60) | st.text(max_size=60))
@settings(max_examples=300, deadline=1000)
def test_any_text_gives_a_bounded_number_or_a_tool_error(text: str):
    try:
        value = calculate(text)
    except ToolError:
        return
    assert len(value) <= 3 * MAX_DIGITS
    assert set(value) <= set("0123456789.-")
    assert value == "0" or not value.endswith(".0")


numbers = st.integers(-9999, 9999) | st.decimals(-999, 999, places=2).map(str)
expressions = st.recursive(
    numbers.map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*", "/"]), inner).map(
        lambda parts: f"({parts[0]}) {parts[1]} ({parts[2]})"
    ),
    max_leaves=6,
)


@given(expressions)
@settings(max_examples=150, deadline=1000)
def test_values_agree_with_exact_fractions(expression: str):
    try:
        value = calculate(expression)
    except ToolError:
        assume("/ (" in expression)  # only a division can fail
        return
    exact = eval(_as_fractions(expression), {"F": Fraction})
    assert math.isclose(Fraction(value), exact, rel_tol=1e-11, abs_tol=1e-11)


def _as_fractions(expression: str) -> str:
    return re.sub(r"\d+(?:\.\d+)?", lambda number: f"F('{number[0]}')", expression)


async def test_the_calculator_answers_a_call():
    tool = CalculatorTool({})
    assert tool.name == "calculator"
    assert (await tool.execute("r", {"expression": "2 * 21"})).response.text == "42"


async def scored(*answers: str, truth: Any = "1,200") -> tuple[list[float | None], float]:
    tool = Gsm8kTool({"type": "native"})
    await tool.create("r", ground_truth=truth)
    rewards = [(await tool.execute("r", {"answer": answer})).reward for answer in answers]
    final = await tool.calc_reward("r")
    await tool.release("r")
    assert vars(tool)["_truths"] == vars(tool)["_scores"] == {}
    return rewards, final


async def test_the_gsm8k_tool_rewards_the_last_answer_and_punishes_no_progress():
    assert await scored("7", "1200", "$1,200.00") == ([-0.05, 0.0, -0.05], 1.0)
    assert await scored("#### 1200 apples", "none at all") == ([0.0, -0.05], 0.0)
    assert await scored(truth=42) == ([], 0.0)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("It is 12.\n#### 1,200", "1200", "1200"),
        ("#### $5 or\n####-7.50 apples, 3 left", "-7.50", "3"),
        ("The answer is 42.", None, "42"),
        ("no number, - nor $.", None, None),
        ("#### .5", ".5", ".5"),
        ("", None, None),
    ],
)
def test_answers_are_read_strictly_and_flexibly(
    text: str, strict: str | None, flexible: str | None
):
    assert extract_gsm8k_answer(text) == strict
    assert extract_gsm8k_answer(text, "flexible") == flexible


@given(st.text(max_size=80))
def test_any_text_is_read_without_raising(text: str):
    for method in ("strict", "flexible"):
        found = extract_gsm8k_answer(text, method)
        assert found is None or same_number(found, found)
    assert same_number(text, "1") in (True, False)


def test_numbers_are_compared_and_not_texts():
    assert same_number("$1,200", "1200.00")
    assert not same_number("12", "1200")
    assert not same_number("", "")
    assert not same_number("nan", "nan")
