r"""What is right and what is wrong, in the forms that policies write and users report."""

import subprocess
import sys
import threading
import time

import pytest

from agentrl.answers import is_same_answer, last_boxed, normalize_answer
from agentrl.errors import RewardError
from agentrl.rewards.math_answer import compute_score
from tests.fakes.requests import build_request, said
from tests.fakes.scorers import score

RIGHT = [
    # Numbers.
    ("0.5", r"\frac{1}{2}"), (r"\frac{1}{2}", "0.5"), (r"\frac12", r"\frac{1}{2}"),
    ("1/2", r"\frac{1}{2}"), (r"1\frac{1}{2}", r"\frac{3}{2}"), (r"\dfrac{3}{6}", r"\frac{1}{2}"),
    ("1,000", "1000"), ("1000", "1,000"), ("1{,}000", "1000"), (r"10\,000", "10000"),
    ("10 000", "10000"), ("1,234,567", "1234567"), (r"10\!000", "10000"),
    ("18.00", "18"), ("2.0", "2"), ("42.", "42"), (r"\$18", "18"), ("$18", "18"), ("$18$", "18"),
    (r"\$1,234.50", "1234.5"), ("-3", "-3"), ("\u22123", "-3"), (r"$-\frac{1}{2}$", "-0.5"),
    ("1e3", "1000"), ("1.5e-3", "0.0015"), ("10^3", "1000"), (r"6.02 \times 10^{23}", "6.02e23"),
    (r"2\sqrt{3}", r"\sqrt{12}"), (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    ("5!", "120"), (r"\binom{5}{2}", "10"), ("1+2i", "1+2i"), ("1011_2", "1011_2"),
    ("\\frac{3\u03c0}{4}", r"\frac{3\pi}{4}"),
    # Percent and units.
    (r"50\%", "50"), (r"50\%", "0.5"), ("50", r"50\%"), (r"50\%", r"50\%"), (r"7\%", "0.07"),
    (r"5\text{ cm}", "5"), (r"5 \text{ cm}^2", "5"), ("5 cm", "5"), (r"90^\circ", "90"),
    (r"10 \text{ dollars}", "10"),
    # Words, letters, equations.
    (r"\text{Evelyn}", r"\text{Evelyn}"), ("evelyn", r"\text{Evelyn}"), (r"\text{June}", "June"),
    (r"\text{(B)}", "B"), (r"\textbf{(A)}", "A"), ("x=5", "5"), ("5", "x=5"), (r"\boxed{7}", "7"),
    ("x^2+2x+1", "(x+1)^2"), ("12:30", "12:30"),
    # Sets, tuples, intervals, matrices.
    ("[236,276)", "[236, 276)"), ("(100,200)", "(100, 200)"), (r"\{100,200\}", r"\{200, 100\}"),
    (r"\{1,2\}", r"\{2,1\}"), ("(1,2)", "(1,2)"), ("[0,1)", "[0,1)"), ("3, 5", "5,3"),
    (r"3 \text{ or } 5", "3,5"), (r"\pm 3", "3,-3"), (r"x \le 5", r"(-\infty,5]"),
    (r"1 \leq x \leq 2", "[1,2]"), (r"(-\infty,0)\cup(1,\infty)", r"(-\infty,0)\cup(1,\infty)"),
    (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}"),
]  # fmt: skip
WRONG = [
    ("3", "-3"), ("5%", "50"), ("0.333", r"\frac{1}{3}"), ("0.7071", r"\frac{\sqrt{2}}{2}"),
    ("4 2", "42"), ("300", "3,00"), ("1012_2", "1011_2"), ("12:31", "12:30"), ("x", "y"),
    (r"\text{(C)}", "B"), ("east", r"\text{west}"), (r"\text{east}", r"\text{west}"),
    (r"\{1,3\}", r"\{2,1\}"), ("(2,1)", "(1,2)"), ("(0,1)", "[0,1)"), (r"-\infty", r"\infty"),
    (r"\begin{pmatrix}1&2\\3&5\end{pmatrix}", r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"),
    ("", "3"), (r"\frac{a}{b", "1"), (r"\begin{matrix}", "1"), (r"\text{}", "3"), ("?", "3"),
    ("9" * 2000, "9"), (r"\text{no solution}", r"\emptyset"), (r"33.3\%", r"\frac{1}{3}"),
]  # fmt: skip
MISJUDGED = [
    # A tuple passes for a list, a comma for thousands: what was meant is not to be seen.
    ("(1,2,3)", "1,2,3"), ("100,200", "100200"),
    # Numbers are compared to six decimals.
    ("0.33333333", r"\frac{1}{3}"),
    # Units are not looked at.
    (r"5\text{ cm}", r"5\text{ m}"),
]  # fmt: skip
"""Taken for right, and documented as such."""
HANGING = ["9^{9^{9}}", "9^{9^{9^9}}", "10^{10^{10}}!", "(" * 400 + "1" + ")" * 400]


def boxed(answer, truth, **kwargs):
    return compute_score("math", rf"Thus $\boxed{{{answer}}}$.", truth, **kwargs)["score"]


@pytest.mark.parametrize(("answer", "truth"), RIGHT)
def test_right_answers(answer, truth):
    assert boxed(answer, truth) == 1.0


@pytest.mark.parametrize(("answer", "truth"), WRONG)
def test_wrong_answers(answer, truth):
    assert boxed(answer, truth) == 0.0


@pytest.mark.parametrize(("answer", "truth"), MISJUDGED)
def test_answers_that_pass_though_one_may_doubt_them(answer, truth):
    assert boxed(answer, truth) == 1.0


@pytest.mark.parametrize(
    ("solution", "answer"),
    [(r"\boxed{1} then \boxed{2}", "2"), (r"\boxed{1} then \boxed{2", "1"),
     (r"\boxed{\frac{1}{2}}, which is \$5", r"\frac{1}{2}"), (r"\fbox{7}", "7"),
     (r"\boxed {7}", "7"), (r"\boxed{\boxed{7}}", "7"), (r"\boxed{\{1\}}", r"\{1\}"),
     (r"\boxed{}", ""), ("no box, 7", None), ("", None), (r"\boxed", None), (r"\boxed 7", None),
     ("\\boxed{" * 20_000, None), ("\\boxed{" + "9" * 100_000 + "}", None)],
)  # fmt: skip
def test_the_last_box_that_is_closed_is_the_answer(solution, answer):
    assert last_boxed(solution) == answer


def test_strict_needs_a_box_and_flexible_does_not():
    for solution in ("The answer is 42.", "so $x = 42$", "**42**", "It is\n42"):
        assert compute_score("math", solution, "42")["score"] == 0.0
        assert compute_score("math", solution, "42", method="flexible")["score"] == 1.0
    found = compute_score("math", "What is 2 + 3?", "5", method="flexible")
    assert found["score"] == 0.0


def test_a_wrong_answer_in_a_box_may_earn_for_its_form():
    kwargs = {"format_score": 0.1, "score": 2.0}
    assert boxed("4", "5", **kwargs) == 0.1
    assert boxed("5", "5", **kwargs) == 2.0
    assert compute_score("math", "4", "5", method="flexible", **kwargs)["score"] == 0.0
    assert compute_score("math", "", "5") == {"score": 0.0, "acc": 0.0, "answered": 0.0}


def test_one_of_several_truths_is_enough_and_none_is_an_error():
    assert boxed("5", ["4", "5"]) == 1.0
    assert boxed("5", 5) == 1.0
    for nothing in ("", [], " "):
        with pytest.raises(RewardError, match="ground truth"):
            boxed("5", nothing)


@pytest.mark.parametrize("text", ["x" * 100_000, "1 " * 50_000, "{" * 100_000, "$" * 100_000])
def test_long_solutions_take_no_time(text):
    begun = time.monotonic()
    for method in ("strict", "flexible"):
        compute_score("math", text, "17", method=method)
    assert time.monotonic() - begun < 5.0


def test_equal_texts_are_equal_without_being_parsed():
    assert is_same_answer(r"\foo{\bar", r"\foo{\bar")
    assert not is_same_answer("", "")
    assert normalize_answer(" = 5. ") == "5"


@pytest.mark.slow
def test_answers_that_compute_for_ever_are_wrong_and_cost_seconds():
    from agentrl.config.schema.reward import RewardConfig
    from agentrl.rewards import make_reward_manager

    def ask(answer):
        text = rf"\boxed{{{answer}}}"
        return build_request(said(2, text=text), data_source="math", ground_truth="3")

    requests = [ask(answer) for answer in [*HANGING, "3"]]
    begun = time.monotonic()
    score(make_reward_manager(RewardConfig(num_workers=2)), requests)
    assert [request.reward for request in requests] == [-1.0] * len(HANGING) + [1.0]
    assert time.monotonic() - begun < 40.0


def test_it_can_be_called_on_a_thread_too():
    found = []
    thread = threading.Thread(target=lambda: found.append(boxed("0.5", r"\frac{1}{2}")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_without_the_extra_it_says_what_to_install():
    code = (
        "import sys; sys.modules['math_verify'] = None\n"
        "from agentrl.rewards.math_answer import compute_score\n"
        "assert compute_score('math', r'\\boxed{5}', '5')['score'] == 1.0\n"
        "try: compute_score('math', r'\\boxed{5}', '6')\n"
        "except ImportError as error: assert 'math-verify' in str(error), error\n"
        "else: raise SystemExit('was scored')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
