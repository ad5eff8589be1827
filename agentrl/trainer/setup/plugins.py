"""Build the plug-ins of a run: tools, interactions, scorer. This module does not import torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from agentrl.config.schema.reward import CustomRewardConfig
from agentrl.config.schema.run import RunConfig
from agentrl.data.rows import Prompt
from agentrl.engines.protocol import Engine
from agentrl.engines.sglang.servers.directory import ServerDirectory
from agentrl.errors import ConfigError, PluginError
from agentrl.interactions import BaseInteraction, initialize_interactions_from_config
from agentrl.interactions import registry as interaction_registry
from agentrl.interactions.registry import default_name
from agentrl.plugins import load_module
from agentrl.plugins.call import HasShutdown, shut_down
from agentrl.plugins.remote import PlacedPlugin, Remotes
from agentrl.rewards import RewardManager, make_reward_manager
from agentrl.rewards.loading import check_arguments, placed_scorers
from agentrl.rewards.scoring import ScoreFn
from agentrl.tools import BaseTool
from agentrl.tools import registry as tool_registry
from agentrl.tools.from_verl import as_verl_shows
from agentrl.tools.function_tool import FunctionTool
from agentrl.tools.registry import load_all_tools, refuse_duplicates, refuse_undeclared

GIVEN = "(given in Python)"
"""The value of a path in a configuration if the object was passed to the `Trainer`."""


@dataclass(frozen=True, slots=True)
class Plugins:
    """The plug-ins of a run, built once."""

    tools: list[BaseTool]
    interactions: dict[str, BaseInteraction]
    rewards: RewardManager
    started: list[HasShutdown] = field(default_factory=list[HasShutdown])
    """What the rollout starts besides: the gateway and the programs of agents."""

    async def shutdown(self) -> None:
        """Shut down every plug-in, even if another plug-in raises."""
        here = [tool for tool in self.tools if tool.remote_object is None]
        await shut_down([*self.started, *here, *self.interactions.values()])
        await self.rewards.close()


def import_plugins(modules: Sequence[str]) -> None:
    """Import the modules that the key `plugins` names, so that they register their names.

    Raises:
        PluginError: for a module that cannot be imported.
    """
    for index, module in enumerate(modules):
        try:
            load_module(module)
        except PluginError as error:
            error.details.setdefault("key", f"plugins[{index}]")
            error.details.setdefault("expected", "package.module or path/to/file.py")
            raise


NOT_PLACED: Remotes = MappingProxyType({})


def load_plugins(config: RunConfig, remotes: Remotes = NOT_PLACED) -> Plugins:
    """Build tools, interactions and the scorer, without loading a model.

    Args:
        config: The run's configuration.
        remotes: The tools and scorers that run in processes with their `resources`.

    Raises:
        ConfigError: with file, key and what was expected.
        PluginError: for a class path that cannot be imported.
    """
    tools, interactions = load_tools(config), load_interactions(config)
    for tool in tools:
        if (remote := remotes.get(_key(tool))) is not None:
            tool.remote_object = remote
    load = partial(_load_tokenizer, config)
    rewards = make_reward_manager(config.reward, remotes=remotes, load_tokenizer=load)
    return Plugins(tools, interactions, rewards)


def _load_tokenizer(config: RunConfig) -> Any:
    """Load the policy's tokenizer for a reward manager; this imports torch."""
    from agentrl.workers.tokenizer import load_tokenizer

    return load_tokenizer(config.model)


def find_placed(plugins: Plugins, config: RunConfig) -> list[PlacedPlugin]:
    """List the tools and scorers that ask for resources.

    Args:
        plugins: The plug-ins, built from the configuration.
        config: The run's configuration.
    """
    tools = [
        PlacedPlugin(
            key=_key(tool),
            resources=dict(tool.required_resources),
            factory="agentrl.tools.runtime.remote:host_tool",
            arguments=(str(config.rollout.multi_turn.tool_config_path), tool.name),
        )
        for tool in plugins.tools
        if tool.required_resources
    ]
    scorers = [
        PlacedPlugin(
            key=key,
            resources=resources,
            factory="agentrl.rewards.remote:HostedScorer",
            arguments=(config.reward, index),
        )
        for key, index, resources in placed_scorers(config.reward)
    ]
    return tools + scorers


def find_idle_resources(plugins: Plugins, config: RunConfig) -> list[str]:
    """Report `resources` that have no effect, because the run does not use Ray."""
    if config.asks_for_cluster:
        return []
    return [
        f"{one.key}: `resources` have no effect without Ray (cluster.address, several devices or "
        "rollout.num_workers)"
        for one in find_placed(plugins, config)
    ]


def _key(tool: BaseTool) -> str:
    return f"tool {tool.name}"


def load_tools(config: RunConfig) -> list[BaseTool]:
    """Build the tools that a configuration names.

    Raises:
        ConfigError: see `load_plugins`.
        PluginError: see `load_plugins`.
    """
    turns = config.rollout.multi_turn
    functions = None if turns.function_tool_path == GIVEN else turns.function_tool_path
    tools = load_all_tools(turns.tool_config_path, functions)
    if turns.tool_schema_style != "full":
        for tool in tools:
            tool.tool_schema = as_verl_shows(tool.tool_schema, turns.tool_schema_style)
    return tools


def load_interactions(config: RunConfig) -> dict[str, BaseInteraction]:
    """Build the interactions that a configuration names.

    Raises:
        ConfigError: see `load_plugins`.
        PluginError: see `load_plugins`.
    """
    path = config.rollout.multi_turn.interaction_config_path
    if path is None or path == Path(GIVEN):
        return {}
    return initialize_interactions_from_config(path)


def find_classes_of_verl(config: RunConfig) -> list[str]:
    """Report verl's classes among the plug-ins of a run, each with the class that replaces it."""
    turns = config.rollout.multi_turn
    tools, users = turns.tool_config_path, turns.interaction_config_path
    is_named = users is not None and users != Path(GIVEN)
    return [
        *(tool_registry.classes_of_verl(tools) if tools is not None else []),
        *(interaction_registry.classes_of_verl(users) if users and is_named else []),
    ]


Row = Mapping[str, Any] | Prompt
Tool = BaseTool | Callable[..., Any]
"""A tool, or a function with `@function_tool`."""
EngineFactory = Callable[[Any, Any], Engine]
"""(model, tokenizer) -> engine, for an engine that shares the policy's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The Python objects passed to a `Trainer`; None for objects that the configuration names."""

    tools: Sequence[Tool] | None = None
    interactions: Sequence[BaseInteraction] | None = None
    reward: ScoreFn | None = None
    rows: Sequence[Row] | None = None
    val_rows: Mapping[str, Sequence[Row]] = field(default_factory=dict[str, Sequence[Row]])
    engine: Engine | EngineFactory | None = None
    servers: ServerDirectory | None = None
    """The SGLang servers of the run's cluster."""

    def mark(self, config: RunConfig) -> RunConfig:
        """Mark the objects that are given in the configuration.

        Raises:
            ConfigError: for a scorer or rows that the configuration also names.
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
        """Build the plug-ins of a marked configuration, and add the given ones.

        Raises:
            ConfigError: see `load_plugins`; also for two tools or interactions of one name.
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
                    expected="a different name for each: config={'name': ...}",
                )
            interaction.name = name
            interactions[name] = interaction
        if self.reward is not None:
            check_arguments(self.reward, {})
        load = partial(_load_tokenizer, config)
        rewards = make_reward_manager(config.reward, self.reward, load_tokenizer=load)
        return Plugins(tools, interactions, rewards)

    def rows_of(self, name: str) -> Sequence[Row] | None:
        """Return the given rows of a set, `train` or a validation set; None if none are given."""
        return self.rows if name == "train" else self.val_rows.get(name)


NOTHING = Given()


def given_rows(rows: Sequence[Row] | Mapping[str, Sequence[Row]] | None) -> Mapping[str, Any]:
    """Return validation rows by set; a plain list becomes the set `val`."""
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
            f"{tool!r} is not a tool",
            expected="an object of a BaseTool subclass, or a function with @function_tool",
        ) from None


def _name(scorer: Any) -> str:
    return str(getattr(scorer, "__qualname__", type(scorer).__qualname__))


def _refuse_both(argument: str, key: str, named: object) -> None:
    if named:
        raise ConfigError(
            f"{argument} is given, and the configuration names {key}",
            key=key,
            expected="one of the two",
        )
