"""Keys of the agent that drives a request: the state machine, an agent loop, or a program."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from agentrl.config.schema.sandbox import AgentSandboxConfig
from agentrl.config.schema.section import Section, UserPath

TOOL_AGENT = "tool_agent"
"""Name of the request state machine."""


class GatewayConfig(Section):
    """What the gateway trains and bounds. A call above a limit gets an error."""

    discarded: Literal["exclude", "train"] = "exclude"
    """Training of completions that the agent sampled again from the same history and did not use.
    exclude: they are not in the loss, because the reward is that of another completion; train: for
    agents that use all samples, such as a vote."""
    untrained_models: tuple[str, ...] = ()
    """Names of models, with `*` and `?`, that the agent calls for titles and summaries of its own.
    The policy answers such a call in a sequence of its own, which is kept and not trained."""
    model_name: str = Field(default="policy", min_length=1)
    """Name of the model in `GET /v1/models` and in the environment of agents. Calls may name any.
    """
    max_calls: int = Field(default=1024, ge=1)
    """Most calls of one request, those without a completion included."""
    max_concurrent_calls: int = Field(default=32, ge=1)
    """Most calls of one request at the same time."""
    max_body_bytes: int = Field(default=32 << 20, ge=1)
    """Most bytes of a call."""
    max_connections: int = Field(default=4096, ge=1)
    """Most connections of the gateway's process, and at most half of its open files; above it,
    those without a request are closed."""
    header_timeout_s: float = Field(default=20.0, gt=0)
    """Seconds until a new connection has sent the headers of its first call."""
    body_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds in which the body of a call must arrive, and in which the client must read the
    answer."""
    ping_interval_s: float = Field(default=10.0, gt=0)
    """Seconds between the comments that keep a waiting stream alive."""


class AgentConfig(Section):
    """The agent that drives the requests of a run."""

    default_agent_loop: str = TOOL_AGENT
    """Name of the agent of a row without the column `agent_name`. tool_agent: the request state
    machine (tools and interactions); single_turn_agent: one completion; any other name: a loop of
    the user, from `agent_loop_config_path` or with `@register`."""
    agent_loop_config_path: UserPath | None = None
    """YAML list of agent loops: `name`, `_target_` (the class), and further arguments of its
    constructor."""
    loop_timeout_s: float = Field(default=600.0, gt=0)
    """Most seconds for which an agent loop may neither return nor call the policy (its tools, its
    environment). The time of completions does not count."""
    max_loop_calls: int = Field(default=1024, ge=1)
    """Most calls of `generate` by the agent loop of one request. A loop that calls more often fails
    its request."""
    command: list[str] | None = Field(default=None, min_length=1)
    """Program and arguments of an agent that speaks to the gateway; one process for each request.
    `{base_url}`, `{anthropic_base_url}`, `{key}`, `{model}`, `{row}` (a file) and `{request_id}`
    are replaced in the arguments; environment variables say the same (docs/agents.md)."""
    python: str | None = None
    """`module:function` of an agent that speaks to the gateway. It is called with an `AgentRecord`
    for each request; a plain function runs on a thread."""
    isolation: Literal["thread", "process"] = "thread"
    """process: each call of `python` has a process of its own, which can be killed. A thread that
    hangs is abandoned."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Most seconds of one run of an external agent, its calls of the policy included.
    `rollout.request_timeout_s` bounds it too."""
    env: dict[str, str] = Field(default_factory=dict[str, str])
    """Further environment variables of the agent's process."""
    files: list[UserPath] = Field(default_factory=list[Path])
    """Text files that are copied into the working folder of the agent's process."""
    hidden_keys: tuple[str, ...] = ("ground_truth", "answer", "solution")
    """Keys of a row, at any depth of `extra_info` and its other columns, that an external agent
    does not see. It never sees the ground truth nor the arguments of tools and interactions."""
    on_failure: Literal["fail", "score"] = "fail"
    """How to treat a request of which the external agent crashed or was late. fail: the agent is at
    fault, not the policy; the request is not trained (see `rollout.failure`). score: what was
    sampled is scored and trained as if the agent had ended by itself, if it has called the policy.
    """
    sandbox: AgentSandboxConfig | None = None
    """Limits of the agent's process; null: of its output alone. The provider `bubblewrap` isolates
    a `command` and keeps every limit: it reads its own files, and reaches the gateway alone.
    `subprocess` with `trusted: true` sets limits and isolates nothing."""

    gateway: GatewayConfig = GatewayConfig()
    """The HTTP server by which external agents call the policy (docs/gateway.md)."""

    @property
    def is_external(self) -> bool:
        """Whether the agent is a program or function that speaks to the gateway."""
        return self.command is not None or self.python is not None

    @model_validator(mode="after")
    def _choose_one_agent(self) -> "AgentConfig":
        if self.command is not None and self.python is not None:
            raise ValueError("`command` and `python` are both set; an agent is one of them")
        provider = "subprocess" if self.sandbox is None else self.sandbox.provider
        if provider not in ("subprocess", "bubblewrap"):
            raise ValueError(
                f"`sandbox.provider` is {provider}; an agent must reach the gateway: write "
                "bubblewrap, which isolates, or subprocess with `trusted: true`, which sets limits"
            )
        if self.sandbox is not None and provider == "subprocess" and not self.sandbox.trusted:
            raise ValueError(
                "`sandbox.provider` is subprocess, which isolates nothing: add `trusted: true` if "
                "you trust the agent and what the policy lets it do, or write bubblewrap"
            )
        if self.sandbox is not None and self.sandbox.timeout_s != AgentSandboxConfig().timeout_s:
            raise ValueError(
                "`sandbox.timeout_s` is set, and an agent's time is `rollout.agent.timeout_s`"
            )
        if provider == "bubblewrap" and self.command is None:
            raise ValueError("`sandbox.provider` is bubblewrap, which isolates a `command` only")
        if self.is_external and self.default_agent_loop != TOOL_AGENT:
            raise ValueError(
                "`default_agent_loop` and an external agent (`command`, `python`) are both set; a "
                "row without agent_name has one agent"
            )
        return self
