"""What is said of rows and interactions before a run begins."""

from typing import Any

import pytest

from agentrl.data.dataset import PromptDataset
from agentrl.errors import DataError
from agentrl.interactions import BaseInteraction
from agentrl.trainer.setup.datasets import check_interactions, is_answered
from tests.fakes.plugins import make_prompts


def users(*names: str) -> dict[str, BaseInteraction]:
    there = {name: BaseInteraction({"name": name}) for name in names}
    there[names[0]].data_sources = ("mine",)
    return there


def test_rows_that_a_source_selects_are_answered():
    assert is_answered(PromptDataset(make_prompts(2, data_source="mine")), users("a", "b"))
    assert not is_answered(PromptDataset(make_prompts(2, data_source="other")), users("a", "b"))
    skipped = make_prompts(2, data_source="mine", interaction_kwargs={"name": "none"})
    assert not is_answered(PromptDataset(skipped), users("a", "b"))


def test_a_row_that_leaves_open_which_is_named_unless_its_source_says():
    kwargs: dict[str, Any] = {"interaction_kwargs": {"ground_truth": "5"}}
    check_interactions(
        PromptDataset(make_prompts(1, data_source="mine", **kwargs)), users("a", "b"), file="f"
    )
    rows = PromptDataset(make_prompts(1, data_source="other", **kwargs))
    with pytest.raises(DataError, match="one of a, b") as caught:
        check_interactions(rows, users("a", "b"), file="f")
    assert (caught.value.details["file"], caught.value.details["row"]) == ("f", 0)


@pytest.mark.parametrize("kwargs", [{"name": "gsm8k"}, {"ground_truth": "5"}])
def test_a_row_that_asks_for_an_interaction_is_refused_by_a_run_that_has_none(
    kwargs: dict[str, Any],
):
    rows = PromptDataset([*make_prompts(1), *make_prompts(1, interaction_kwargs=kwargs)])
    with pytest.raises(DataError, match="and the run has none") as caught:
        check_interactions(rows, {}, file="f")
    assert caught.value.details["key"] == "rollout.multi_turn.interaction_config_path"
    check_interactions(rows, {}, file="f", is_strict=False)


def test_a_row_that_wants_no_interaction_fits_a_run_that_has_none():
    skipped = make_prompts(1, interaction_kwargs={"name": "none"})
    check_interactions(PromptDataset([*make_prompts(1), *skipped]), {}, file="f")
