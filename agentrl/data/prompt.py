"""A row of a dataset as the rest of the data's way sees it."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from agentrl.messages import Message


class Prompt(BaseModel):
    """What one row asks for: a conversation to continue, its plug-ins' settings, its truth.

    Example:
        >>> row = {"prompt": [{"role": "user", "content": "2 + 3?"}], "data_source": "sums"}
        >>> Prompt(index=0, messages=row["prompt"], data_source=row["data_source"]).index
        0
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    index: int
    """Place of the row in its files, before any shuffling."""
    messages: list[Message] = Field(min_length=1)
    data_source: str = "unknown"
    """Which scorer applies."""
    ground_truth: Any = None
    """From the row's `reward_model.ground_truth`."""
    extra_info: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The row's `extra_info`, whole."""
    tools_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """From `extra_info.tools_kwargs`."""
    interaction_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """From `extra_info.interaction_kwargs`."""
    tool_selection: list[str] | None = None
    """From `extra_info.tool_selection`: names of tools; None: as
    `rollout.multi_turn.tools_per_row` says."""
    columns: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The row's further columns (`ability`, `agent_name`, ...)."""
