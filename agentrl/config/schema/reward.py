"""Keys of the scoring: scorers, reward model, combination of rewards, and their tokens."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from agentrl.config.schema.engine import Address
from agentrl.config.schema.resources import PluginResources
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.config.schema.section import FolderOrHubName, ModulePath, Penalty, Section
from agentrl.config.schema.training import FsdpConfig

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
"""Names for a reward function without a path; `data_source`: the scorer of the row's data
source."""
TAKEN_NAMES = (
    "score", "trajectory_reward", "interaction_reward", "tool_call_reward", "tool_reward",
    "overlong_reward", "tool_call_bonus", "interaction_bonus", "length_penalty", "reward_model",
    "model", "agent_reward",
)  # fmt: skip
"""Names that no reward function may have: other parts of the reward are recorded with them, and
`reward/model` are the metrics of the reward model."""


class CustomRewardConfig(Section):
    """A scorer of the user's own."""

    path: ModulePath
    """`package.module` or `path/to/file.py`."""
    name: str = "compute_score"
    """The function in it; or a class, which is built once with `reward_kwargs` and then called."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of every call."""
    resources: PluginResources = Field(default_factory=dict[str, float])
    """Where it runs on a Ray cluster: `num_cpus`, `num_gpus`, custom resources. It then has a
    process of its own with them. Empty, or without Ray: in the processes that roll out."""


class RewardFunctionConfig(Section):
    """One of several scorers; their numbers are weighted and summed."""

    name: str = Field(min_length=1)
    """The name of its number in logs and in `reward_extra_info`. Without `path` it is also the name
    of a bundled scorer: gsm8k, math, multiple_choice, qa, code, judge, or data_source (the scorer
    of each row's `data_source`)."""
    path: str | None = None
    """A module or file of the user, as in `custom_reward_function`; null: a bundled scorer."""
    function: str = "compute_score"
    """The function (or class) in `path`."""
    weight: float = 1.0
    """Factor of its number in the reward; 0: it is only logged."""
    reward_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Arguments of every call."""
    resources: PluginResources = Field(default_factory=dict[str, float])
    """Where it runs on a Ray cluster: `num_cpus`, `num_gpus`, custom resources. It then has a
    process of its own with them. Empty, or without Ray: in the processes that roll out."""

    @model_validator(mode="after")
    def _refuse_placed_lookup(self) -> "RewardFunctionConfig":
        if self.resources and self.path is None and self.name == "data_source":
            raise ValueError("resources need one scorer: a path, or a bundled name")
        return self


def _names(section: object, key: str) -> bool:
    return isinstance(section, Mapping) and key in section


class RewardWeightsConfig(Section):
    """Weights of the four sources of reward; the reward is the weighted sum."""

    trajectory: float = 1.0
    """Weight of the scorer's number for the finished request."""
    interaction: float = 0.0
    """Weight of the scores that the interaction gave to turns; they are on those turns."""
    tool_call: float = 0.0
    """Weight of the rewards that `execute` returned; they are on the turns that made the calls."""
    tool: float = 0.0
    """Weight of the tools' `calc_reward` for the trajectory."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_old_turn_key(cls, given: object) -> object:
        if _names(given, "turn"):
            raise ValueError("`turn` is now two keys: `interaction` and `tool_call`")
        return given


class OverlongBufferConfig(Section):
    """Soft penalty for training samples that come near `data.max_response_length`."""

    enable: bool = False
    """Subtract a penalty from the reward of responses that come near the response budget."""
    len: int = Field(default=0, ge=0)
    """Number of sampled tokens before the limit over which the penalty grows from 0."""
    penalty_factor: Penalty = 1.0
    """The penalty at the limit."""


class RewardModelConfig(Section):
    """A sequence-classification model with one label that scores whole conversations."""

    path: FolderOrHubName
    """A Hugging Face folder (or hub name) that `AutoModelForSequenceClassification` loads."""
    tokenizer_path: FolderOrHubName | None = None
    """The folder of its tokenizer; null: the model's."""
    custom_chat_template: str | None = None
    """A template's text, or a path to a `.jinja` file; replaces the one of its tokenizer. The
    conversation is rendered again with it."""
    weight: float = 1.0
    """Factor of its score in the combined reward; 0: the score is only logged."""
    max_length: int | None = Field(default=None, ge=1)
    """Most tokens of a conversation; null: what the model allows."""
    truncation: Literal["left", "right", "error"] = "left"
    """A longer conversation: the side that is cut, or an error that fails its request."""
    engine: Literal["local", "sglang"] = "local"
    """local: on the training devices, after the rollout; sglang: SGLang servers that were started
    with `--is-embedding`, at `addresses`."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of its weights and activations. auto: bfloat16 on an accelerator, float32 on a CPU."""
    max_token_len_per_gpu: int | None = Field(default=None, ge=1)
    """Tokens of one forward pass, padding included; a longer conversation is alone. null: by
    device."""
    fsdp_config: FsdpConfig = FsdpConfig()
    """How its weights are sharded. `fsdp_size: 1` keeps a whole copy on each rank, which is faster
    if the memory allows it; `param_offload` keeps them in host memory between uses."""
    addresses: list[Address] = Field(default_factory=list[str])
    """`sglang`: addresses of the servers, such as `http://127.0.0.1:30000`."""
    request_timeout_s: float = Field(default=60.0, gt=0)
    """`sglang`: seconds of one score; a late one is requested from another server."""
    max_concurrent_requests: int = Field(default=64, ge=1)
    """`sglang`: scores that one rank requests at the same time."""
    trust_remote_code: bool = False
    """Run code that is part of the model's folder."""


class RewardConfig(Section):
    """Scoring."""

    manager: str = "naive"
    """Name of a registered reward manager."""
    manager_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Further arguments of a reward manager of the user; the bundled ones take none."""
    custom_reward_function: CustomRewardConfig | None = None
    """null: the bundled scorer of the row's `data_source`."""
    functions: list[RewardFunctionConfig] = Field(default_factory=list[RewardFunctionConfig])
    """Several scorers instead of one; a row's reward is their weighted sum."""
    launch_reward_fn_async: bool = True
    """Score a request as soon as it has ended, while others still roll out. The manager `batch`
    gets a group when its last sample has ended. false: score all at once."""
    num_workers: int | None = Field(default=None, ge=1)
    """Processes for scorers that compute: those of the manager `prime`, and the bundled `math`;
    null: one for each core."""
    max_concurrent_scores: int = Field(default=64, ge=1)
    """Requests that are scored at the same time; for the manager `batch`, groups."""
    rate_limit: float | None = Field(default=None, gt=0)
    """Most calls of scorers that start in one second, evenly spaced; null: no limit."""
    model: RewardModelConfig | None = None
    """A reward model, in addition to the scorers; null: none."""
    sandbox: SandboxConfig = SandboxConfig()
    """The sandbox in which scorers run code that a model wrote."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Seconds of one call of a scorer, without the time in the queue. A late call fails its
    request; for the manager `batch`, all requests of the call."""
    overlong_buffer: OverlongBufferConfig = OverlongBufferConfig()

    success_threshold: float | None = None
    """Validation counts a request as solved if its combined reward is at least this; null: the
    scorer's `success` or `acc` decides, and without them the combined reward itself is averaged."""

    agent_reward: Literal["replace", "add", "ignore"] = "replace"
    """The reward that the agent itself reports (an agent loop's `reward_score`, an external agent's
    report). replace: the scorer is not called for that request; add: it is added to the scorer's
    number; ignore: it is only recorded. A request without one is scored by the scorer."""

    # How rewards are combined and placed.
    weights: RewardWeightsConfig = RewardWeightsConfig()
    tool_call_bonus: float = Field(default=0.0, ge=0)
    """Added for a call that its tool answered (outcome `ok`), on the turn of the call."""
    max_bonus_calls: int = Field(default=1, ge=1)
    """How many calls of one trajectory, the first ones, earn `tool_call_bonus`."""
    interaction_bonus: float = Field(default=0.0, ge=0)
    """Added if the interaction itself ended the conversation (not a limit, not a budget of the
    interaction, not an answer that it did not get), on the last turn that it got."""
    length_penalty: Penalty = 0.0
    """Subtracted for a response of `data.max_response_length` sampled tokens; for a shorter one, in
    proportion."""
    placement: Placement = "last_token"
    """The trained tokens that get a reward: see `agentrl.rewards.placement`."""
    placement_decay: float = Field(default=0.99, ge=0, le=1)
    """Under `exponential_decay`: a token's share, relative to the next trained token's."""

    @field_validator("placement", mode="before")
    @classmethod
    def _refuse_old_placement_names(cls, given: object) -> object:
        if isinstance(given, str) and given in _RENAMED:
            raise ValueError(f"{given!r} is now named {_RENAMED[given]!r}")
        return given
