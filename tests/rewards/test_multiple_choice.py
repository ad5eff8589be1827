import pytest

from agentrl.errors import RewardError
from agentrl.rewards.multiple_choice import compute_score, find_choice

OPTIONS = {"A": "red", "B": "dark blue", "C": "green", "D": "a shade of red"}


@pytest.mark.parametrize(
    ("solution", "chosen"),
    [("(B)", "B"), ("B", "B"), ("B.", "B"), ("B) dark blue", "B"), ("b", "B"), ("**B**", "B"),
     ("The answer is B", "B"), ("the answer is (B).", "B"), ("The answer is: B", "B"),
     ("Answer: B", "B"), ("answer is **B**.", "B"), ("The correct option is B because ...", None),
     ("The correct option is B, because ...", "B"), ("Final answer: \\text{B}", "B"),
     (r"\boxed{B}", "B"), (r"\boxed{\text{(B)}}", "B"), ("<answer>B</answer>", "B"),
     ("<answer>(A)</answer> no, <answer> (B) </answer>", "B"), ("The answer is $\\boxed{B}$", "B"),
     ("(A) is too small, (C) too large.\nThe answer is (B)", "B"),
     ("The answer is A. Wait, no.\nThe answer is B.", "B"),
     ("The answer is A. Wait, no, the answer is B.", "B"), ("Answer: the answer is (B)", "B"),
     ("The answer is C. Or: the correct choice would be A? No, the answer: **B**", "B"),
     ("The answer is option B", "B"), ("answer is answer is B", "B"), ("I think\n\nOption B", "B"),
     ("The best choice is B", "B"), ("Answer: (b)", "B"), ("[B]", "B"),
     ("A good question. I do not know", None), ("", None), ("I would say blue", None),
     ("(A) or (B)", "A"), ("The answer is neither", None), ("x" * 100_000, None),
     ("A" * 100_000, None), ("The answer is not clear", None), ("A) B) C)", "A")],
)  # fmt: skip
def test_the_letter_is_read_where_it_is_given_as_the_answer(solution, chosen):
    assert find_choice(solution) == chosen


@pytest.mark.parametrize(
    ("solution", "chosen"),
    [("The answer is dark blue.", "B"), (r"\boxed{Dark Blue}", "B"), ("Answer: red", "A"),
     ("a shade of red", "D"), ("E", None), ("The answer is E", None), ("blue", None)],
)  # fmt: skip
def test_with_options_their_texts_are_answers_and_other_letters_none(solution, chosen):
    assert find_choice(solution, OPTIONS) == chosen


@pytest.mark.parametrize("truth", ["B", "(B)", "b", "B.", 1, "dark blue", "Dark  Blue"])
@pytest.mark.parametrize(
    "extra",
    [{"options": OPTIONS}, {"choices": list(OPTIONS.values())},
     {"choices": {"label": list(OPTIONS), "text": list(OPTIONS.values())}}],
)  # fmt: skip
def test_truths_and_options_come_in_many_forms(truth, extra):
    assert compute_score("mmlu", "The answer is B", truth, extra)["score"] == 1.0
    assert compute_score("mmlu", "The answer is C", truth, extra)["score"] == 0.0


def test_what_is_earned():
    found = compute_score("mmlu", "The answer is C", "B", format_score=0.1)
    assert found == {"score": 0.1, "acc": 0.0, "answered": 1.0}
    assert compute_score("mmlu", "no idea", "B", format_score=0.1)["score"] == 0.0


@pytest.mark.parametrize("truth", ["blue", "", None, 40, ["A"]])
def test_a_truth_that_is_no_option_is_an_error(truth):
    with pytest.raises(RewardError, match="ground truth"):
        compute_score("mmlu", "A", truth, {"options": OPTIONS})
