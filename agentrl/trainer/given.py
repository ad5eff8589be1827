"""Python objects in the place of what a run file names by path: `Trainer(config, tools=[...])`.

The configuration then holds the mark `GIVEN` in the place of the path, so that the checks of the
configuration, and its copy in the run's folder, say what the run has.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from agentrl.config.schema import CustomRewardConfig, RunConfig
from agentrl.data.prompt import Prompt
from agentrl.engines.protocol import Engine
from agentrl.errors import ConfigError
from agentrl.interactions import BaseInteraction
from agentrl.interactions.registry import default_name
from agentrl.rewards import make_reward_manager
from agentrl.rewards.arguments import check_arguments
from agentrl.rewards.scoring import ScoreFn
from agentrl.tools import BaseTool
from agentrl.tools.function_tool import FunctionTool
from agentrl.tools.registry import refuse_duplicates, refuse_undeclared
from agentrl.trainer.plugin_set import GIVEN, Plugins, load_interactions, load_tools

Row = Mapping[str, Any] | Prompt
Tool = BaseTool | Callable[..., Any]
"""A tool, or a function that `@function_tool` marks."""
EngineFactory = Callable[[Any, Any], Engine]
"""(model, tokenizer) -> engine, for engines that share the policy's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What was passed to a `Trainer` as Python objects; None: what the configuration names."""

    tools: Sequence[Tool] | None = None
    interactions: Sequence[BaseInteraction] | None = None
    reward: ScoreFn | None = None
    rows: Sequence[Row] | None = None
    val_rows: Mapping[str, Sequence[Row]] = field(default_factory=dict[str, Sequence[Row]])
    engine: Engine | EngineFactory | None = None

    def mark(self, config: RunConfig) -> RunConfig:
        """Note in a configuration what is given instead of being named.

        Raises:
            ConfigError: for a scorer or rows that the configuration names as well.
        """
        data, reward, turns = config.data, config.reward, config.rollout.multi_turn
        if self.rows is not None:
            _refuse_both("rows", "data.train_files", data.train_files)
            data = data.model_copy(update={"train_files": [Path(GIVEN)]})
        if self.val_rows:
            _refuse_both("val_rows", "data.val_files", data.val_files)
            data = data.model_copy(update={"val_files": dict.fromkeys(self.val_rows, Path(GIVEN))})
        if self.reward is not None:
            named = reward.custom_reward_function or reward.functions
            _refuse_both("reward", "reward.custom_reward_function", named)
            scorer = CustomRewardConfig(path=GIVEN, name=_name(self.reward))
            reward = reward.model_copy(update={"custom_reward_function": scorer})
        if self.tools is not None and turns.function_tool_path is None:
            turns = turns.model_copy(update={"function_tool_path": GIVEN})
        if self.interactions is not None and turns.interaction_config_path is None:
            turns = turns.model_copy(update={"interaction_config_path": Path(GIVEN)})
        rollout = config.rollout.model_copy(update={"multi_turn": turns})
        return config.model_copy(update={"data": data, "reward": reward, "rollout": rollout})

    def build_plugins(self, config: RunConfig) -> Plugins:
        """Build what a marked configuration names, and add what is given.

        Raises:
            ConfigError: see `load_plugins`; for two tools or interactions of one name, too.
            PluginError: see `load_plugins`.
        """
        given = [_as_tool(tool) for tool in self.tools or ()]
        refuse_undeclared(given)
        tools = [*load_tools(config), *given]
        refuse_duplicates(tools)
        interactions = load_interactions(config)
        for interaction in self.interactions or ():
            name = interaction.config.get("name") or default_name(type(interaction))
            if name in interactions:
                raise ConfigError(
                    f"two interactions have the name {name!r}",
                    expected="a name for each: config={'name': ...}",
                )
            interaction.name = name
            interactions[name] = interaction
        if self.reward is not None:
            check_arguments(self.reward, {})
        rewards = make_reward_manager(config.reward, self.reward)
        return Plugins(tools, interactions, rewards)

    def rows_of(self, name: str) -> Sequence[Row] | None:
        """Return the rows that are given for a set, `train` or a validation set; None: none are."""
        return self.rows if name == "train" else self.val_rows.get(name)


NOTHING = Given()


def given_rows(rows: Sequence[Row] | Mapping[str, Sequence[Row]] | None) -> Mapping[str, Any]:
    """Name validation rows that come as a plain list: the set `val`."""
    if rows is None or isinstance(rows, Mapping):
        return cast("Mapping[str, Any]", rows or {})
    return {"val": rows}


def _as_tool(tool: Tool) -> BaseTool:
    if isinstance(tool, BaseTool):
        return tool
    try:
        return FunctionTool(tool)
    except (KeyError, TypeError):
        raise ConfigError(
            f"{tool!r} is no tool",
            expected="an object of a BaseTool subclass, or a function with @function_tool",
        ) from None


def _name(scorer: Any) -> str:
    return str(getattr(scorer, "__qualname__", type(scorer).__qualname__))


def _refuse_both(argument: str, key: str, named: object) -> None:
    if named:
        raise ConfigError(
            f"{argument} is given, and the configuration names {key}",
            key=key,
            expected="one of both",
        )
