"""What an agent loop returns, with verl's names."""

from typing import Any

from pydantic import BaseModel, Field


class AgentLoopMetrics(BaseModel):
    """Seconds that a loop measured. Further numbers are kept too."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1
    """-1: not known."""


class AgentLoopOutput(BaseModel):
    """One token sequence of a trajectory. A loop may return a list; the last one is the end."""

    prompt_ids: list[int]
    """Tokens before the response."""
    response_ids: list[int]
    """Sampled tokens, and tokens that the loop added between them."""
    response_mask: list[int]
    """1 for each token of `response_ids` that is trained; it must have been sampled."""
    response_logprobs: list[float] | None = None
    """Log-probability of each token of `response_ids`; None: those that were recorded."""
    routed_experts: Any = None
    """Not used."""
    multi_modal_data: dict[str, Any] | None = None
    """The images and videos that the sequence shows, in order, under `images` (or `image`) and
    `videos` (or `video`). None: those of the calls."""
    reward_score: float | None = None
    """Reward of the trajectory as the loop computed it; `reward.agent_reward` says how it
    counts."""
    num_turns: int = 0
    """Turns as the loop counts them; recorded only."""
    metrics: AgentLoopMetrics = Field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further values. They become columns of the batch and entries of the scorer's `extra_info`."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Not used."""
    mm_processor_output: list[dict[str, Any]] | None = None
    """Not used."""
