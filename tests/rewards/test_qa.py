import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import RewardError
from agentrl.rewards.qa import compute_f1, compute_score, find_answer, normalize


def answer(text, truth, **kwargs):
    return compute_score("searchR1_nq", f"<answer>{text}</answer>", truth, **kwargs)


@pytest.mark.parametrize(
    ("text", "truth"),
    [("Paris", "Paris"), (" paris. ", "Paris"), ("The Eiffel Tower", "eiffel tower"),
     ("Barack Obama", ["Obama", "Barack Obama"]), ("1,000", "1000"), ("U.S.", "US"),
     ("it\u2019s", "it's"), ("yes", "Yes"), ("Paris", {"target": ["Paris", "Lutetia"]}),
     ("Paris", {"target": np.array(["Paris"])}), ("7", 7), ("The The", "The The")],
)  # fmt: skip
def test_exact_matches(text, truth):
    assert answer(text, truth)["score"] == 1.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [("Rome", "Paris"), ("Paris, France", "Paris"), ("", "Paris"), ("the", "Paris"),
     ("", "The The"), ("a", "The The"), ("no", "yes"), ("x" * 100_000, "x")],
)  # fmt: skip
def test_no_exact_matches(text, truth):
    assert answer(text, truth)["score"] == 0.0


@pytest.mark.parametrize(
    ("solution", "found"),
    [("<answer>Paris</answer>", "Paris"), ("<answer>Rome</answer><answer>Paris</answer>", "Paris"),
     ("<answer>a <answer>Paris</answer>", "Paris"), ("<answer>\nParis\n</answer> so", "Paris"),
     ("Paris", None), ("<answer>Paris", None), ("", None), ("<answer>" * 5000, None)],
)  # fmt: skip
def test_the_last_tagged_answer_counts(solution, found):
    assert find_answer(solution) == found


def test_tags_may_be_left_out_where_that_is_allowed():
    assert find_answer(" Paris ", require_tags=False) == "Paris"
    assert compute_score("nq", "Paris", "Paris", require_tags=False)["score"] == 1.0
    said = {"score": 0.0, "acc": 0.0, "em": 0.0, "f1": 0.0, "answered": 0.0}
    assert compute_score("nq", "Paris", "Paris", format_score=0.1) == said


def test_measures():
    found = answer("Barack Obama", "Barack Hussein Obama", metric="f1")
    assert found == {"score": 0.8, "acc": 0.0, "em": 0.0, "f1": 0.8, "answered": 1.0}
    assert answer("in Paris, of course", "Paris", metric="contains")["score"] == 1.0
    assert answer("Parisian", "Paris", metric="contains")["score"] == 0.0
    assert answer("Rome", "Paris", format_score=0.1)["score"] == 0.1
    assert answer("yes it is", "yes", metric="f1")["score"] == 0.0


@given(st.text(max_size=40), st.text(max_size=40))
def test_f1_is_symmetric_between_0_and_1_and_best_for_the_same(left, right):
    found = compute_f1(left, right)
    assert 0.0 <= found <= 1.0
    assert found == pytest.approx(compute_f1(right, left))
    assert compute_f1(left, left) == 1.0
    assert normalize(normalize(left)) == normalize(left)


@pytest.mark.parametrize("truth", [None, "", [], {}, {"target": []}, [" "]])
def test_a_truth_without_an_answer_is_an_error(truth):
    with pytest.raises(RewardError, match="ground truth"):
        answer("Paris", truth)
