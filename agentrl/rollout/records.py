"""Records of a rollout: budgets, tool calls, turns, failures, and the fields of a request."""

import time
import uuid
from base64 import b64encode
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.engines.protocol import FinishReason, SamplingParams, VersionSpan
from agentrl.errors import Fault
from agentrl.messages import CallOutcome, Message, OpenAIFunctionToolSchema

BranchCause = Literal["compaction", "delegate", "branch", "rewrite", "side_call"]
"""Why a trajectory has one more sequence.

`compaction`: the policy replaced its history by a summary. `delegate`: a sub-agent worked for a
call of the `delegate` tool. `branch`: the agent continued an earlier history a second time.
`rewrite`: the agent changed what its history says. `side_call`: the agent named a model of
`untrained_models`, for a title or a summary.
"""


_UNIX_TIME_OF_CLOCK = time.time() - time.monotonic()


def unix_time(clock: float) -> float:
    """Convert a time of this process's monotonic clock to Unix time, in whole microseconds."""
    return round(_UNIX_TIME_OF_CLOCK + clock, 6)


def to_plain(value: Any) -> Any:
    """Convert a value that JSON cannot hold.

    Arrays become lists, PIL images become data URLs (`data:image/png;base64,...`), other values
    become strings.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "_repr_png_"):
        return f"data:image/png;base64,{b64encode(value._repr_png_()).decode()}"
    return str(value)


class Record(BaseModel):
    """A validated record without unknown fields."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_bytes="base64",
        # As Python's `json` writes them. `null` would be loaded as another value, or not at all.
        ser_json_inf_nan="constants",
    )


class Budgets(Record):
    """What one request may use (budgets are separate). Each cut by a budget is recorded.

    Budgets of tokens apply to one sequence. Turns, calls and wall clock are counted over all
    sequences of the trajectory; a delegate has budgets of its own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_response_tokens: int = 4096
    """Response tokens of one sequence, sampled and observed, over all turns."""
    max_model_len: int = 32768
    """Prompt and response of one sequence together."""
    max_turn_tokens: int | None = None
    """Sampled tokens of one turn."""
    max_observation_tokens: int = 1024
    """Tokens of one tool result or user reply."""
    max_assistant_turns: int | None = None
    """Completions of the policy."""
    max_user_turns: int | None = None
    """Replies of the interaction."""
    max_tool_calls: int | None = None
    """Calls of all tools together."""
    timeout_s: float | None = None
    """Wall clock of the request."""


class CallRecord(Record):
    """One tool call: its arguments, its outcome, its times."""

    call_id: str = ""
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict[str, Any])
    outcome: CallOutcome = CallOutcome.OK
    message: str = ""
    """What went wrong; empty if nothing did."""
    traceback: str = ""
    """The end of the traceback of a call that crashed."""
    seconds: float = 0.0
    """Duration of all executions together."""
    queue_seconds: float = 0.0
    """Time of waiting: for a free slot (parallel calls, concurrency, rate limit), for an identical
    call, between attempts, and for the event loop before the work starts and after it ends."""
    seconds_started: float | None = None
    """Unix time at which the call began, with its time of waiting. None: not executed."""
    num_attempts: int = 1
    """Executions, retries included; 0 if a cache answered or the tool was not called."""
    is_cached: bool = False
    """Whether the result came from a cache, or from an identical call in progress."""
    span: tuple[int, int] | None = None
    """Tokens of the call in the response, as `[start, end)`; None if they were not located."""
    reward: float | None = None
    num_tokens: int = 0
    """Tokens of the observation as appended."""
    num_cut_tokens: int = 0
    """Tokens that the observation lost to its budget."""
    metrics: dict[str, Any] = Field(default_factory=dict[str, Any])
    """What the tool itself reported."""


MALFORMED_CALL = "malformed tool call"
"""Reason for which a turn is excluded under `on_malformed_call: mask`."""


class Turn(Record):
    """A part of the response: a completion, tool results, or a reply of the user."""

    index: int
    role: Literal["assistant", "tool", "user"]
    start: int
    """First token, as an index into the response."""
    end: int
    """Index after the last token."""
    reward: float | None = None
    """Reward of this turn. The score of an interaction is on the completion that it judges."""
    seconds: float = 0.0
    seconds_started: float | None = None
    """Unix time at which `seconds` began; None: unknown."""
    finish_reason: FinishReason | None = None
    """Why the engine stopped; for completions only."""
    weight_versions: tuple[VersionSpan, ...] = ()
    """The weights that sampled the tokens of a completion. Spans count from `start`."""
    cached_tokens: int = 0
    """Input tokens of a completion that a prefix cache served."""
    calls: list[CallRecord] = Field(default_factory=list[CallRecord])
    """Tool calls of a completion, in order, with their outcomes."""
    excluded: str | None = None
    """Why a sampled turn was excluded from the loss; None if it was not."""
    cut: Literal["turn", "response", "model", "observation", "summary"] | None = None
    """The budget that cut this turn; None if none did. After `response` and `model` no token is
    left; `turn` ended a completion early, `summary` the summary of a compaction; `observation`
    shortened a reply of the interaction. (For the result of a tool, see its `CallRecord`.)"""
    is_compaction: bool = False
    """Whether the turn asks for the summary of a compaction, or is that summary. No budget of turns
    counts it."""
    num_cut_tokens: int = 0
    """Tokens that a reply of the interaction lost to its budget."""
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    """What the interaction that judged a completion reported besides the score."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the turn."""
        return self.end - self.start


class MediaRun(Record):
    """A run of placeholder tokens of an image or a video, as it is saved."""

    start: int
    """Index of the first token among `input_ids`."""
    end: int
    """Index after the last token."""
    kind: Literal["image", "video"]
    index: int | None
    """Index in `multi_modal_data[kind]`; None if it is not there."""
    offset: int = 0
    """Tokens of the same image or video in earlier runs."""
    source: str = ""
    """The file that it was read from; empty if it was given as bytes or as an object."""


class Failure(Record):
    """Why a request failed: whose fault, which exception, in which turn."""

    fault: Fault
    kind: str
    """Class name of the exception."""
    message: str
    turn: int
    """Number of turns that the request had when it failed."""
    traceback: str = ""


class AgentRun(Record):
    """How the program or function of an external agent ended, and what it printed."""

    end: str
    """`ok`, `error` (another exit code than 0, or an exception), `timeout`, `memory`, `cpu`,
    `killed`."""
    exit_code: int | None = None
    seconds: float = 0.0
    stdout: str = ""
    """The first and the last part of it."""
    stderr: str = ""
    """The first and the last part of it; for a function, the end of the traceback."""
    num_cut_bytes: int = 0
    """Bytes of output that were thrown away while the program ran."""


class TokenDifference(Record):
    """A difference between the ledger and the rendering of the whole conversation."""

    turn: int
    """Index of the turn; -1 for the prompt."""
    kind: str
    """`sampled_text`, `observed_tokens`, `whitespace` or `missing`; `rendering`: the output of the
    template depends on the texts; `other_tokens`: the same text, but not the tokens of the
    tokenizer."""
    expected: str
    """Excerpt of the rendering."""
    actual: str
    """Excerpt of the ledger."""


class RequestFields(Record):
    """The fields of an `AsyncRolloutRequest`."""

    # Identity.
    request_id: str = Field(default_factory=lambda: uuid.uuid4().hex)
    """Unique to this attempt: a retry has a new one."""
    batch_data_id: int = 0
    """Index of the prompt in the global batch."""
    rollout_offset: int = 0
    """Index of the sample in its group."""
    uid: str = Field(default_factory=lambda: uuid.uuid4().hex)
    """Id of the group. The samples of one prompt share it."""
    attempt: int = 0
    """Number of failed attempts before this one."""
    branch_cause: BranchCause | None = None
    """Why this sequence is a branch of a trajectory; None for the sequence in which the trajectory
    ended."""
    parent_id: str | None = None
    """`request_id` of the sequence from which this one came; None for the first one."""
    trace_id: str = ""
    """Id of the request's trace (`trainer.tracing`), 32 hexadecimal digits; empty without one."""

    # Inputs.
    messages: list[Message]
    """The conversation so far. Assistant messages are parsed from the sampled tokens."""
    multi_modal_data: dict[str, list[Any]] = Field(default_factory=dict[str, list[Any]])
    """Images and videos of the conversation, by kind (`image`, `video`), in the order of the parts
    of that type in `messages`."""
    tool_schemas: list[OpenAIFunctionToolSchema] = Field(
        default_factory=list[OpenAIFunctionToolSchema]
    )
    tools_kwargs: dict[str, dict[str, Any]] = Field(default_factory=dict[str, dict[str, Any]])
    """For each tool: `create_kwargs`, `execute_kwargs`, `calc_reward_kwargs`, `release_kwargs`."""
    interaction_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """`name` of the interaction, and the arguments of its methods."""
    tool_selection: list[str] | None = None
    """Names of the tools that this row may use; None: all."""
    data_source: str = "unknown"
    ground_truth: Any = None
    extra_info: dict[str, Any] = Field(default_factory=dict[str, Any])
    columns: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further columns of the row. They are carried through to the batch."""
    sampling: SamplingParams = SamplingParams(max_new_tokens=1 << 30)
    """Sampling parameters. The budgets determine the token limit of each turn."""
    budgets: Budgets = Budgets()
    seed: int = 0
    """Seed of all random draws of the request."""

    # Results.
    reward: float | None = None
    """Reward of the finished request; None if it was not scored."""
    agent_reward: float | None = None
    """Reward that the agent itself reported; None if it reported none. `reward.agent_reward` says
    how it counts."""
    rm_score: float | None = None
    """Score of the reward model, without its weight; None if there is none."""
    reward_extra_info: dict[str, Any] = Field(default_factory=dict[str, Any])
    """What the scorer returned besides the reward."""
    agent_run: AgentRun | None = None
    """For an external agent: how it ended, and what it printed."""
    tool_rewards: dict[str, float] = Field(default_factory=dict[str, float])
    """Result of `calc_reward` of each tool, called once at the end."""
    metrics: dict[str, float] = Field(default_factory=dict[str, float])
    release_failures: list[str] = Field(default_factory=list[str])
    """Errors of releasing the tools and finalizing the interaction."""
    num_cut_prompt_tokens: int = 0
    """Tokens that the prompt lost to its budget, including those of opening messages."""
    dropped: str | None = None
    """Why the request was excluded from baseline and loss; None if it was not."""
    is_checked: bool = False
    """Whether the token check compared the ledger with the conversation."""
    differences: list[TokenDifference] = Field(default_factory=list[TokenDifference])
    """What the token check found."""
