import pytest

from agentrl.errors import RewardError
from agentrl.rewards.math_dapo import compute_score


@pytest.mark.parametrize(
    ("solution", "truth", "score", "answer"),
    [
        ("so\nAnswer: 34", "34", 1.0, "34"),
        ("Answer: 3\nno.\nanswer: $34$", "34", 1.0, "34"),
        (r"Answer: \\boxed{34}", "34", 1.0, "34"),
        (r"It is \\boxed{34}.", "34", 1.0, "34"),
        ("Answer: 35", "34", -1.0, "35"),
        ("It is 34.", "34", -1.0, ""),
        ("Answer: 34" + " and so on" * 40, "34", -1.0, ""),
        ("<think>Answer: 34</think> I do not know.", "34", -1.0, ""),
    ],
)
def test_the_last_answer_of_the_tail_is_right_or_wrong(solution, truth, score, answer):
    found = compute_score("math_dapo", solution.replace("\\\\", "\\"), truth)
    assert (found["score"], found["pred"]) == (score, answer)
    assert found["acc"] == found["success"] == float(score > 0)


def test_a_box_alone_counts_if_it_is_wanted():
    assert compute_score("", "Answer: 34", "34", strict_box_verify=True)["score"] == -1.0
    assert compute_score("", r"\boxed{34}", "34", strict_box_verify=True)["score"] == 1.0


def test_an_empty_ground_truth_is_an_error():
    with pytest.raises(RewardError):
        compute_score("", "Answer: 34", "")
