"""Keys of the scoring: who scores, how rewards become one, and where they land."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.config.schema.section import ModulePath, Section

Placement = Literal[
    "last_token", "turn_last_token", "uniform", "exponential_decay", "tool_call_tokens"
]
_RENAMED = {"last": "last_token", "spread": "uniform"}
BUNDLED_SCORERS = (
    "gsm8k",
    "math",
    "math_dapo",
    "multiple_choice",
    "qa",
    "code",
    "judge",
    "data_source",
)
"""What a reward function without a path may be called; `data_source` is that of each row's own."""
TAKEN_NAMES = (
    "score", "trajectory_reward", "interaction_reward", "tool_call_reward", "tool_reward",
    "overlong_reward", "tool_call_bonus", "interaction_bonus", "length_penalty",
)  # fmt: skip
"""What no reward function may be called: under these names a reward's other parts are recorded."""


class CustomRewardConfig(Section):
    """A scorer of the user's own."""

    path: ModulePath
    """`package.module` or `path/to/file.py`."""
    name: str = "compute_score"
    """The function in it; or a class, built once with `reward_kwargs`, whose objects are called."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed to every call."""


class RewardFunctionConfig(Section):
    """One of several scorers, whose numbers are weighted and summed."""

    name: str = Field(min_length=1)
    """Under which its number is logged and stands in `reward_extra_info`; without `path`, also
    which bundled scorer it is: gsm8k, math, multiple_choice, qa, code, judge, or data_source, which
    is that of each row's `data_source`."""
    path: str | None = None
    """A module or file of the user's own, as in `custom_reward_function`; null: a bundled one."""
    function: str = "compute_score"
    """The function (or class) in `path`."""
    weight: float = 1.0
    """Times which its number enters the reward; 0: it is logged alone."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Passed to every call."""


def _names(section: object, key: str) -> bool:
    return isinstance(section, Mapping) and key in section


class RewardWeightsConfig(Section):
    """How rewards of four sources become one: each number times its weight, summed."""

    trajectory: float = 1.0
    """Weight of the scorer's number for the finished request."""
    interaction: float = 0.0
    """Weight of the scores that the interaction gave to turns, on those turns."""
    tool_call: float = 0.0
    """Weight of what `execute` returned for single calls, on the turns that made them."""
    tool: float = 0.0
    """Weight of `calc_reward` of the tools, for the trajectory."""

    @model_validator(mode="before")
    @classmethod
    def _name_what_turn_was(cls, given: object) -> object:
        if _names(given, "turn"):
            raise ValueError("`turn` was two things: now `interaction` and `tool_call`")
        return given


class OverlongBufferConfig(Section):
    """Soft punishment of training samples that come near `data.max_response_length`."""

    enable: bool = False
    """Take a penalty off the reward of responses that come close to the response budget."""
    len: int = Field(default=0, ge=0)
    """Sampled tokens before the limit over which the punishment grows from 0 on."""
    penalty_factor: float = Field(default=1.0, ge=0)
    """What is taken off the reward at the limit."""


class RewardConfig(Section):
    """Scoring."""

    manager: str = "naive"
    """Name of a registered reward manager."""
    custom_reward_function: CustomRewardConfig | None = None
    """null: the bundled scorer of the row's `data_source`."""
    functions: list[RewardFunctionConfig] = Field(default_factory=list[RewardFunctionConfig])
    """Several scorers, in place of the one; a row's reward is their weighted sum."""
    launch_reward_fn_async: bool = True
    """Score a request as soon as it has ended, while others still roll out. The manager `batch`
    then gets a group when the last of its samples has ended; false: all at once."""
    num_workers: int | None = Field(default=None, ge=1)
    """Processes of scorers that compute: those of the manager `prime`, and the bundled `math`;
    null: one for each core."""
    max_concurrent_scores: int = Field(default=64, ge=1)
    """Requests that are scored at once; of the manager `batch`, groups."""
    rate_limit: float | None = Field(default=None, gt=0)
    """Calls of scorers begun in a second, evenly spaced; null: no limit."""
    sandbox: SandboxConfig = SandboxConfig()
    """Where scorers run code that a model wrote."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of one call of a scorer; what it waits for its place is not counted. A late one fails
    its request; of the manager `batch`, all requests of the call."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

    success_threshold: float | None = None
    """Validation counts a request as solved if its combined reward is at least this; null: the
    scorer's `success` or `acc` decides, and without them the combined reward itself is averaged."""

    # How rewards become one, and where they land.
    weights: RewardWeightsConfig = RewardWeightsConfig()
    tool_call_bonus: float = Field(default=0.0, ge=0)
    """Added for a call that its tool answered (outcome `ok`), on the turn that made it."""
    max_bonus_calls: int = Field(default=1, ge=1)
    """Calls of one trajectory that earn `tool_call_bonus`, the first ones."""
    interaction_bonus: float = Field(default=0.0, ge=0)
    """Added where the interaction itself ended the conversation (not an answer that it did not
    hear, nor a limit, nor a budget of its own that was spent), on the turn that it heard last."""
    length_penalty: float = Field(default=0.0, ge=0)
    """Taken off for a response of `data.max_response_length` sampled tokens; of fewer, their share
    of it."""
    placement: Placement = "last_token"
    """On which trained tokens a reward lands: see `agentrl.rewards.placement`."""
    placement_decay: float = Field(default=0.99, ge=0, le=1)
    """Under `exponential_decay`: a token's share of the share of the next trained one."""

    @field_validator("placement", mode="before")
    @classmethod
    def _name_what_placements_were(cls, given: object) -> object:
        if isinstance(given, str) and given in _RENAMED:
            raise ValueError(f"{given!r} is called {_RENAMED[given]!r}")
        return given
