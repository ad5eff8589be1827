"""What is written down of a rollout: budgets, turns, tool calls, failures, differences."""

import uuid
from base64 import b64encode
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from agentrl.engines.protocol import FinishReason, SamplingParams, VersionSpan
from agentrl.errors import Fault
from agentrl.messages import CallOutcome, Message, OpenAIFunctionToolSchema


def to_plain(value: Any) -> Any:
    """Give a value that JSON cannot hold the nearest form that it can.

    Arrays are lists, images of PIL the address of their PNG (`data:image/png;base64,...`).
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    return _to_png(value) if hasattr(value, "_repr_png_") else str(value)


def _to_png(image: Any) -> str:
    return f"data:image/png;base64,{b64encode(image._repr_png_()).decode()}"


class Record(BaseModel):
    """A checked record that refuses unknown fields."""

    model_config = ConfigDict(
        extra="forbid",
        use_attribute_docstrings=True,
        ser_json_bytes="base64",
        # As Python's `json` writes them: `null` would read back as another value, or not at all.
        ser_json_inf_nan="constants",
    )


class Budgets(Record):
    """Budgets of one request. Each has its own key, and each cut is recorded."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    max_response_tokens: int = 4096
    """Response tokens, sampled and observed, over all turns."""
    max_model_len: int = 32768
    """Prompt and response together."""
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
    """One tool call: what was asked, what came of it, how long it took."""

    call_id: str = ""
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict[str, Any])
    outcome: CallOutcome = CallOutcome.OK
    message: str = ""
    """What went wrong, in words; empty where nothing did."""
    traceback: str = ""
    """The end of the traceback of a call that crashed."""
    seconds: float = 0.0
    """Of the execution, all its attempts together."""
    queue_seconds: float = 0.0
    """Waited: for a place (parallel calls, concurrency, rate), for an equal call, and between two
    attempts."""
    num_attempts: int = 1
    """Executions, repeated ones included; 0 where a cache answered or nothing was asked."""
    is_cached: bool = False
    """Whether a cache answered, or an equal call that was under way."""
    span: tuple[int, int] | None = None
    """The call's own tokens in the response: the first, and behind the last; None: not located."""
    reward: float | None = None
    num_tokens: int = 0
    """Tokens of the observation as appended."""
    num_cut_tokens: int = 0
    """Tokens that the observation lost to its budget."""
    metrics: dict[str, Any] = Field(default_factory=dict[str, Any])
    """What the tool itself reported."""


class Turn(Record):
    """What one party added to the response: a completion, tool results, or a user's reply."""

    index: int
    role: Literal["assistant", "tool", "user"]
    start: int
    """First token, as an index into the response."""
    end: int
    """Behind the last token."""
    reward: float | None = None
    """Reward of this turn; an interaction's score stands on the completion that it judges."""
    seconds: float = 0.0
    finish_reason: FinishReason | None = None
    """Of a completion: why the engine stopped."""
    weight_versions: tuple[VersionSpan, ...] = ()
    """Of a completion: which weights sampled its tokens (spans count from `start`)."""
    cached_tokens: int = 0
    """Of a completion: input tokens that a prefix cache served."""
    calls: list[CallRecord] = Field(default_factory=list[CallRecord])
    """Of a completion: its tool calls, in order, with their outcomes."""
    excluded: str | None = None
    """Why a sampled turn was left out of the loss; None where it was not."""
    cut: Literal["turn", "response", "model", "observation"] | None = None
    """Which budget cut this turn short: `response` and `model` left no token, `turn` ended a
    completion early, `observation` shortened a reply of the interaction (that of a tool is written
    down with its call); None where none did."""
    num_cut_tokens: int = 0
    """Of a reply of the interaction: tokens that it lost to its budget."""
    metadata: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Of a completion: what else the interaction that judged it reported."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the turn."""
        return self.end - self.start


class Failure(Record):
    """Why a request failed: whose fault, what was raised, in which turn."""

    fault: Fault
    kind: str
    """Class name of the exception."""
    message: str
    turn: int
    """Number of turns that the request had when it failed."""
    traceback: str = ""


class TokenDifference(Record):
    """One place where the ledger and the rendering of the whole conversation differ."""

    turn: int
    """Index of the turn; -1 for the prompt."""
    kind: str
    """`sampled_text`, `observed_tokens`, `whitespace` or `missing`; `rendering`: the template
    writes something else if it sees the texts; `other_tokens`: other tokens than the tokenizer's
    for the same text."""
    expected: str
    """Excerpt of the rendering."""
    actual: str
    """Excerpt of the ledger."""


def _new_id() -> str:
    return uuid.uuid4().hex


class RequestFields(Record):
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
