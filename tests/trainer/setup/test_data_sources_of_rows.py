"""Which rows need a bundled scorer, said before a run begins."""

from typing import Any

import pytest

from agentrl.config.schema.reward import RewardConfig
from agentrl.data.dataset import PromptDataset
from agentrl.errors import DataError, SandboxError
from agentrl.rewards import make_reward_manager
from agentrl.trainer.setup.datasets import check_sources, note_missing_truths
from tests.fakes.plugins import make_prompts
from tests.fakes.scorers import answers, score

OWN = {"name": "mine", "path": "tests.fakes.scorers", "function": "misbehave"}
JUDGE = {"name": "judge", "reward_kwargs": {"model": "m", "base_url": "http://x", "rubric": "r"}}


def rows(source: str) -> PromptDataset:
    return PromptDataset(make_prompts(2, data_source=source))


def config(**keys: Any) -> RewardConfig:
    return RewardConfig.model_validate(keys)


@pytest.mark.parametrize(
    "source",
    ["aime24", "amc23", "numina_olympiads", "searchR1_nq", "Idavidrein/gpqa_main", "openai/gsm8k"],
)
def test_sources_that_fit_a_pattern_are_taken(source: str):
    check_sources(rows(source), config(), file="f")


@pytest.mark.parametrize(
    "keys",
    [
        {"custom_reward_function": {"path": "tests.fakes.scorers"}},
        {"functions": [OWN]},
        {"functions": [JUDGE, {"name": "math"}]},
        {"weights": {"trajectory": 0, "interaction": 1}},
    ],
    ids=["custom", "functions", "bundled ones by name", "other rewards"],
)
def test_rows_that_are_scored_otherwise_need_no_bundled_scorer(keys: dict[str, Any]):
    check_sources(rows("mine"), config(**keys), file="f")


@pytest.mark.parametrize("keys", [{}, {"functions": [OWN, {"name": "data_source"}]}])
def test_rows_that_are_scored_by_their_source_need_one(keys: dict[str, Any]):
    with pytest.raises(DataError, match=r"for the data source 'mine'") as caught:
        check_sources(rows("mine"), config(**keys), file="f")
    message = str(caught.value)
    for word in ("aime*", "searchR1_*", "reward.functions", "row: 0", "file: f"):
        assert word in message


def ignores_truth(data_source: str, solution_str: str, ground_truth: Any, **_: Any) -> float:
    return float(solution_str == data_source)


def reads_from_kwargs(**kwargs: Any) -> float:
    return float(kwargs["solution_str"] == kwargs["ground_truth"])


def missing_truths(scorer: Any = None, truth: Any = None, **keys: Any) -> list[str]:
    rewards = make_reward_manager(config(**keys), scorer)
    prompts = make_prompts(2, data_source="openai/gsm8k", ground_truth=truth)
    return list(note_missing_truths(PromptDataset(prompts), config(**keys), rewards, file="f"))


@pytest.mark.parametrize("keys", [{}, {"launch_reward_fn_async": True}])
def test_rows_without_ground_truth_are_reported_if_a_users_scorer_reads_it(keys: dict[str, Any]):
    (note,) = missing_truths(reads_from_kwargs, **keys)
    assert note == "none of the 2 rows of f has reward_model.ground_truth: the scorer gets None"
    assert not missing_truths(reads_from_kwargs, truth="5", **keys)


@pytest.mark.parametrize("functions", [[], [JUDGE, {"name": "math"}], [{"name": "data_source"}]])
def test_rows_without_ground_truth_are_refused_if_a_bundled_scorer_reads_it(functions: list[Any]):
    with pytest.raises(DataError, match=r"none of the 2 rows of f has reward_model.ground_truth"):
        missing_truths(functions=functions)
    assert not missing_truths(truth="5", functions=functions)


@pytest.mark.parametrize(
    ("scorer", "keys"),
    [
        (ignores_truth, {}),
        (None, {"functions": [JUDGE]}),
        (None, {"weights": {"trajectory": 0, "interaction": 1}}),
    ],
    ids=["own scorer", "judge", "other rewards"],
)
def test_rows_without_ground_truth_are_not_reported_if_none_is_read(
    scorer: Any, keys: dict[str, Any]
):
    assert not missing_truths(scorer, **keys)


@pytest.mark.parametrize("keys", [{}, {"functions": [{"name": "data_source"}]}])
def test_its_rows_score_nothing_and_others_are_scored_as_ever(keys: dict[str, Any]):
    reward = config(weights={"trajectory": 0, "interaction": 1}, **keys)
    requests = [*answers("5", data_source="mine"), *answers("5"), *answers("6")]
    score(make_reward_manager(reward), requests)
    assert [request.error for request in requests] == [None, None, None]
    assert [request.reward for request in requests] == [0.0, 1.0, 0.0]


def test_error_of_a_source_without_scorer_names_the_nearest_one():
    with pytest.raises(DataError, match="did you mean 'openai/gsm8k'"):
        check_sources(rows("openai/gsm8"), config(), file="f")


def test_a_source_with_a_scorer_that_runs_code_needs_a_sandbox():
    untrusted = config(sandbox={"provider": "subprocess"})
    with pytest.raises(SandboxError, match="trusted") as error:
        check_sources(rows("mbpp"), untrusted, file="f")
    assert error.value.details["key"] == "reward.sandbox"
    check_sources(rows("openai/gsm8k"), untrusted, file="f")
