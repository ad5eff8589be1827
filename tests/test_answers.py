r"""Numbers in every decoration; what is not the number; words, bases and exact numbers."""

from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.answers import extract_gsm8k_answer, is_same_answer, same_number, to_number
from tests.fakes.waiting import assert_linear

NUMBERS = ["18", "-18", "1,000", "0.5", "12345678901234567890", "1000000"]
DECORATIONS = [
    "{}", "**{}**", "*{}*", "__{}__", "`{}`", "${}", "$ {}", r"\${}", "${}$", r"\({}\)", r"\[{}\]",
    r"\boxed{{{}}}", r"$\boxed{{{}}}$", r"\text{{{}}}", r"\mathbf{{{}}}", "**${}**", "({})", "+{}",
    "= {}", "x = {}", r"\textbf{{{}}}", '"{}"', "\u201c{}\u201d", "<b>{}</b>", "***{}***",
    "3 * 4 = {}", "12 - 5 = {}", "\u20ac{}",
]  # fmt: skip
FOLLOWERS = [
    "", ".", ",", "!", ";", ":", "%", "\n", "\n\nDone 3.", " dollars", " dollars per hour", "kg",
    " m",    " - that is all", " (3*6)", "</answer>", " <|im_end|>", "\u00b0", "th", "/hour",
    "\u5143",
]  # fmt: skip
BORDERLESS = [
    "10/0", "10 * 3", "10*3", "10 x 3", r"10\times 3", "10 + 3", "10+3", "10 - 3", "10^3", "10**3",
    "10:30", "10.5.1", "10x", "10k", "10pi", r"10\pi", r"10\sqrt{2}", r"10 \frac{1}{2}", "10 1/2",
    "10 3", "10, 3", "10,3", "10 or 11", "10 and 11", "10 to 11", "10-11", "10\u201311",
    "10\u00b11",    "10(3)", "10_2", "(10, 000)", "10, 000", "[10, 12)", "10 dollars and 25 cents",
    "10\u00bd",    "10 hours 30 minutes", "10/3/2023", "10_000",
    "10 thousand", "10 million", "10-hundred", "10 dozen", "10 and a half", "10\u221a3", "10\u00b2",
    "10'000", "10 mod 3", "10mod3", "10 over 3", "10 times 3", "10 plus 3", "10 minus 3", "10 ** 3",
    "10 < x < 15",
]  # fmt: skip
VALUES = [
    ("10/3", "20/6"), ("10/2", "5"), ("10 / 4", "2.5"), ("5e3", "5000"),
    (r"5 \times 10^{3}", "5000"),
    ("12 - 5 = 7", "7"), ("$-18", "-18"), ("-$18", "-18"), ("\u221218", "-18"), ("\uff0d18", "-18"),
    ("+5", "5"), ("$18.00", "18"), ("10 000", "10000"), ("1{,}000", "1000"), (".5", "0.5"),
    ("a = b = 17", "17"),
]  # fmt: skip


@pytest.mark.parametrize("decoration", DECORATIONS)
@pytest.mark.parametrize("follower", FOLLOWERS)
def test_a_number_is_read_in_every_decoration(decoration: str, follower: str):
    for number in NUMBERS:
        if "+" in decoration and number.startswith("-"):
            continue
        said = f"So 3 + 4 = 7.\n#### {decoration.format(number)}{follower}"
        answer = extract_gsm8k_answer(said)
        assert answer is not None, said
        assert same_number(answer, number), said


@pytest.mark.parametrize("text", BORDERLESS)
def test_a_beginning_is_not_the_number(text: str):
    for said in (text, f"**{text}**", f"${text}"):
        found = extract_gsm8k_answer(f"#### {said}")
        assert found is None or not same_number(found, "10"), said
    flexible = extract_gsm8k_answer(text, "flexible")
    assert flexible is None or not same_number(flexible, "10")


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_a_number_is_read_whole(text: str, value: str):
    for method in ("strict", "flexible"):
        found = extract_gsm8k_answer(f"#### {text}", method)
        assert found is not None
        assert same_number(found, value)


@pytest.mark.parametrize("text", ["nan", "inf", "", " ", "#### 42", "1,00", "1_0", "10/0", "five"])
def test_what_is_no_number_equals_nothing(text: str):
    assert to_number(text) is None
    assert not same_number(text, text)


@given(st.integers(-(10**25), 10**25), st.integers(0, 12), st.integers(-3, 3))
def test_numbers_are_equal_only_exactly(whole: int, places: int, difference: int):
    one, other = (f"{Decimal(n).scaleb(-places):f}" for n in (whole, whole + difference))
    assert same_number(one, other) == (difference == 0)
    assert is_same_answer(one, other) == (difference == 0)


@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_long_texts_take_no_time(method: str):
    parts = ["9", "1 ", "#### ", "*", "#### 1 - ", "$", "1,000", "=", "1/", "\\boxed{", "-", "1 a "]
    for part in parts:
        assert_linear(
            lambda size, part=part: extract_gsm8k_answer("#### " + part * size, method), 500
        )
    assert_linear(lambda size: extract_gsm8k_answer("####" + " " * size + "x", method), 2000)


WORDS = [
    ("BAC", "ABC"), ("listen", "silent"), ("act", "cat"), ("XIV", "XVI"), (r"\text{god}", "dog"),
    ("listen up", "silent up"), ("no solution", "solution no"), ("A B C", "B A C"), ("xy", "yx"),
    ("(AB, CD)", "(BA, DC)"), ("AB, C", "BA, C"), ("B < A < C", "A < B < C"), ("ab-cd", "ba-cd"),
    (r"\textit{tea}", r"\mathrm{eat}"), ("East", "Seat"), ("Room A", "Aroom B"),
    (r"\angle ABC", r"\angle BAC"), (r"\angle{ABC}", r"\angle ACB"), ("B1A", "A1B"), ("2AB", "2BA"),
    (r"\angle ABC = 30", r"\angle BAC = 30"), (r"\square ABCD", r"\square ACBD"), ("AB=5", "BA=5"),
    (r"\triangle ABC \cong \triangle DEF", r"\triangle ABC \cong \triangle FED"),
    (r"\overline{AB} \parallel \overline{CD}", r"\overline{AB} \parallel \overline{DC}"),
    (r"\frac{AB}{CD}", r"\frac{AB}{DC}"), (r"\cos AB", r"\cos BA"), ("(AB, 2)", "(BA, 2)"),
]  # fmt: skip
BASES = [
    ("1010_3", "1010_2"), ("2516_9", "2516_8"), ("10_{10}", "1010_2"), ("1A_{16}", "A1_{16}"),
    ("1010_{3}", "1010_2"), (r"1010_{\text{three}}", r"1010_{\text{two}}"), ("(1010)_3", "1010_2"),
    ("1010 base 3", "1010 base 2"), (r"1010 \text{ base } 3", "1010_2"), ("3_7, 4_7", "3_8, 4_8"),
    ("10.1_3", "10.1_2"),
]  # fmt: skip
EXACT = [
    ("12345678901234567890", "12345678901234567891"), ("3.14159265", "3.14159266"),
    ("0.0000001", "0.0000002"), ("1.5e-8", "1.6e-8"), ("1,000", "(1, 000)"), ("0", "0.0000004"),
    (r"\frac{12345678901234567890}{7}", r"\frac{12345678901234567891}{7}"), ("(1,2)", "(2,1)"),
    (r"10^{20}", r"10^{20}+1"),
]  # fmt: skip
SAME = [
    ("evelyn", r"\text{Evelyn}"), ("New  York", r"\text{New York}"), ("xy", r"x \cdot y"),
    ("blue, red", "red, blue"), ("Alice and Bob", "Bob, Alice"), ("1010_{2}", "1010_2"),
    ("(1010)_2", "1010_2"), ("1010 base 2", "1010_2"), (r"1010_{\text{two}}", "1010_2"),
    ("1010", "1010_2"), ("1a_{16}", "1A_{16}"),
    ("infinity", r"\infty"), ("(A, B)", "(A,B)"), ("2x_1", r"x_1 \cdot 2"), ("3xy", "3yx"),
    ("**18**", "18"), ("+5", "5"), ("1.50", "1.5"), ("1.5e3", "1500"),
    ("0.33333333", r"\frac{1}{3}"),
    (r"\angle ABC", r"\angle CBA"), (r"\triangle{ABC}", r"\triangle ABC"), ("AB+CD", "CD+AB"),
    ("2AB", r"2A \cdot B"), (r"\frac{AB}{2}", r"\frac{1}{2}AB"), ("USD 5", "5 USD"),
    (r"\angle ABC=30^\circ", "30"), (r"\{AB, CD\}", r"\{CD, AB\}"), ("A1, B2", "B2, A1"),
    (r"\{red, blue\}", r"\{blue, red\}"), ("5 cm", "5"), ("$-18", "-18"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "truth"), [*WORDS, *BASES, *EXACT])
def test_what_differs_is_not_the_same_answer(answer: str, truth: str):
    assert not is_same_answer(answer, truth)
    assert not is_same_answer(truth, answer)
    assert is_same_answer(truth, truth)


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_what_is_written_otherwise_is_the_same_answer(answer: str, truth: str):
    assert is_same_answer(answer, truth)
    assert is_same_answer(truth, answer)


SIGNS = [r"\angle ", r"\measuredangle ", r"\triangle ", r"\square ", r"\Delta ", r"\odot ", "2",
         r"\overline{AB} + ", r"x = ", r"\frac12 "]  # fmt: skip


@given(st.permutations("PQRST"), st.integers(2, 5), st.sampled_from(SIGNS))
def test_names_of_points_are_texts(points: list[str], size: int, sign: str):
    name, other = "".join(points[:size]), "".join(sorted(points[:size]))
    same = {other, other[::-1]} if "angle" in sign and "tri" not in sign and size == 3 else {other}
    assert is_same_answer(sign + name, sign + other) == (name in same)


@given(st.text("abcxyzABC", min_size=2, max_size=6), st.randoms(use_true_random=False))
def test_letters_in_another_order_are_another_text(word: str, random):
    letters = list(word)
    random.shuffle(letters)
    other = "".join(letters)
    assert is_same_answer(other, word) == (other.casefold() == word.casefold())


GSM8K = Path(__file__).parents[1].parent / "shared/data/gsm8k"


@pytest.mark.parametrize("rest", ["and a proof follows.", "and an apple."])
def test_words_after_a_number_do_not_hide_it(rest: str):
    assert extract_gsm8k_answer(f"The answer is 42 {rest}", "flexible") == "42"
