"""Rows that name their agent, before a run begins."""

import pytest

from agentrl.data.dataset import PromptDataset
from agentrl.errors import DataError
from agentrl.trainer.setup.datasets import check_agent_names
from tests.fakes.plugins import make_prompts


def rows(*names: str | None) -> PromptDataset:
    return PromptDataset(
        prompt for name in names for prompt in make_prompts(1, columns={"agent_name": name})
    )


def test_rows_may_name_an_agent_or_none():
    check_agent_names(rows("search", None, ""), ["search", "tool_agent"], file="train.parquet")


def test_an_unknown_agent_is_refused_with_its_row():
    with pytest.raises(DataError, match="did you mean 'search'") as caught:
        check_agent_names(rows("search", "serch"), ["search", "tool_agent"], file="train.parquet")
    assert caught.value.details["file"] == "train.parquet"
    assert caught.value.details["expected"] == "one of search, tool_agent"
    assert "row" in caught.value.details
