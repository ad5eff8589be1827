"""The data sources of rows, held against the scorers of the run before it begins."""

import pytest

from agentrl.config.schema import RewardConfig
from agentrl.data.dataset import PromptDataset
from agentrl.errors import DataError, SandboxError
from agentrl.trainer.datasets import check_sources
from tests.fakes import make_prompts

OWN = {"path": "my_scorers"}


def check(source: str, **reward: object) -> None:
    rows = PromptDataset(make_prompts(1, data_source=source))
    check_sources(rows, RewardConfig.model_validate(reward), file="rows.jsonl")


@pytest.mark.parametrize("source", ["openai/gsm8k", "aime2024", "searchR1_nq"])
def test_a_source_that_has_a_scorer_by_name_or_by_pattern_is_taken(source: str):
    check(source)


def test_a_source_without_scorer_is_named_with_its_row():
    with pytest.raises(DataError, match="did you mean 'openai/gsm8k'") as error:
        check("openai/gsm8")
    assert error.value.details["file"] == "rows.jsonl"
    assert error.value.details["row"] == 0


@pytest.mark.parametrize(
    "reward",
    [
        {"custom_reward_function": OWN},
        {"functions": [{"name": "mine", **OWN}]},
        {"functions": [{"name": "gsm8k"}]},
    ],
)
def test_where_the_source_does_not_say_who_scores_any_will_do(reward: dict[str, object]):
    check("nobody/knows", **reward)


def test_a_source_whose_scorer_runs_code_needs_a_sandbox():
    with pytest.raises(SandboxError, match="trusted") as error:
        check("mbpp", sandbox={"provider": "subprocess"})
    assert error.value.details["key"] == "reward.sandbox"
    check("openai/gsm8k", sandbox={"provider": "subprocess"})
