"""What of a request anybody may read and write: who it is, what it was made from, what came of it.

No invariant binds these fields to one another. Those that invariants bind (tokens, turns, state)
are the request's own, behind its doors: `agentrl.rollout.request`.
"""

import uuid
from typing import Any

from pydantic import Field

from agentrl.engines.protocol import SamplingParams
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.records import Budgets, Record, TokenDifference


def _new_id() -> str:
    return uuid.uuid4().hex


class PublicHalf(Record):
    """The fields of an `AsyncRolloutRequest`."""

    # Identity.
    request_id: str = Field(default_factory=_new_id)
    """Unique to this attempt: a retry has a new one."""
    batch_data_id: int = 0
    """Place of the prompt in its batch."""
    rollout_offset: int = 0
    """Place of the sample in its group."""
    uid: str = Field(default_factory=_new_id)
    """The group: samples of one prompt share it."""
    attempt: int = 0
    """0, or how many attempts failed before this one."""

    # What it was made from.
    messages: list[Message]
    """The conversation so far; assistant messages hold what the parser read in sampled tokens."""
    multi_modal_data: dict[str, list[Any]] = Field(default_factory=dict[str, list[Any]])
    """Images and videos of the conversation, by kind (`image`, `video`): one for each part of that
    type in `messages`, in their order."""
    tool_schemas: list[OpenAIFunctionToolSchema] = Field(
        default_factory=list[OpenAIFunctionToolSchema]
    )
    tools_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """By tool: `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`, `release_kwargs`."""
    interaction_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """`name` of the interaction, and what it is started and asked with."""
    tool_selection: list[str] | None = None
    """Names of the tools that this row may use; None: all."""
    data_source: str = "unknown"
    ground_truth: Any = None
    extra_info: dict[str, Any] = Field(default_factory=dict[str, Any])
    columns: dict[str, Any] = Field(default_factory=dict[str, Any])
    """The row's own further columns, carried through."""
    sampling: SamplingParams = SamplingParams(max_new_tokens=1 << 30)
    """How its turns are sampled; each turn's token limit is derived from the budgets."""
    budgets: Budgets = Budgets()
    seed: int = 0
    """Seed of the request's own draws."""

    # What came of it.
    reward: float | None = None
    """The scorer's number for the finished request; None where it was not scored."""
    reward_extra_info: dict[str, Any] = Field(default_factory=dict[str, Any])
    """What else the scorer returned."""
    tool_rewards: dict[str, float] = Field(default_factory=dict[str, float])
    """`calc_reward` of each tool, asked once at the end."""
    metrics: dict[str, float] = Field(default_factory=dict[str, float])
    release_failures: list[str] = Field(default_factory=list[str])
    """What went wrong when tools were released and the interaction was finalized."""
    num_cut_prompt_tokens: int = 0
    """Tokens that the prompt lost to its budget, those of the tools' opening messages included."""
    dropped: str | None = None
    """Why it was left out of baseline and loss though it may have ended well; None: it was not."""
    is_checked: bool = False
    """Whether the tokenization check held its ledger against its conversation."""
    differences: list[TokenDifference] = Field(default_factory=list[TokenDifference])
    """What the tokenization check found."""
