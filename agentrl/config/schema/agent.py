"""Keys of the agent that drives a request: the state machine, an agent loop, or a program."""

from pydantic import Field, model_validator

from agentrl.config.schema.section import Section, UserPath

TOOL_AGENT = "tool_agent"
"""Name of the request state machine."""


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
    command: list[str] | None = None
    """Program and arguments of an agent that speaks to the gateway; one process per request."""
    python: str | None = None
    """`module:function` of an agent that speaks to the gateway."""

    @property
    def is_external(self) -> bool:
        """Whether the agent is a program or function that speaks to the gateway."""
        return self.command is not None or self.python is not None

    @model_validator(mode="after")
    def _choose_one_agent(self) -> "AgentConfig":
        if self.command is not None and self.python is not None:
            raise ValueError("`command` and `python` are both set; an agent is one of them")
        if self.is_external and self.default_agent_loop != TOOL_AGENT:
            raise ValueError(
                "`default_agent_loop` and an external agent (`command`, `python`) are both set; a "
                "row without agent_name has one agent"
            )
        return self
