"""The plug-ins of a run: its tools, its interactions, its scorer. Nothing here imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config.schema import RunConfig
from agentrl.errors import PluginError
from agentrl.interactions import BaseInteraction, initialize_interactions_from_config
from agentrl.interactions import registry as interaction_registry
from agentrl.plugins import load_module
from agentrl.plugins.shutdown import shut_down
from agentrl.rewards import RewardManager, make_reward_manager
from agentrl.tools import BaseTool
from agentrl.tools import registry as tool_registry
from agentrl.tools.registry import load_all_tools
from agentrl.tools.verl_names import as_verl_shows

GIVEN = "(given in Python)"
"""The value of a path in a configuration, if the object itself was passed to the `Trainer`."""


@dataclass(frozen=True, slots=True)
class Plugins:
    """What a run file names by path, built once for a run."""

    tools: list[BaseTool]
    interactions: dict[str, BaseInteraction]
    rewards: RewardManager

    async def shutdown(self) -> None:
        """Let every plug-in give back what the whole run shares; none of them can prevent that."""
        await shut_down([*self.tools, *self.interactions.values()])
        await self.rewards.close()


def import_plugins(modules: Sequence[str]) -> None:
    """Import the modules that the key `plugins` names: what they register is known from then on.

    Raises:
        PluginError: for a module that cannot be imported.
    """
    for place, module in enumerate(modules):
        try:
            load_module(module)
        except PluginError as error:
            error.details.setdefault("key", f"plugins[{place}]")
            error.details.setdefault("expected", "package.module or path/to/file.py")
            raise


def load_plugins(config: RunConfig) -> Plugins:
    """Build tools, interactions and the scorer; no model is touched.

    Raises:
        ConfigError: with file, key and what was expected.
        PluginError: for a class path that leads nowhere.
    """
    tools, interactions = load_tools(config), load_interactions(config)
    return Plugins(tools, interactions, make_reward_manager(config.reward))


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
    """Name verl's classes among the plug-ins of a run, each with the class that replaces it."""
    turns = config.rollout.multi_turn
    tools, users = turns.tool_config_path, turns.interaction_config_path
    is_named = users is not None and users != Path(GIVEN)
    return [
        *(tool_registry.classes_of_verl(tools) if tools is not None else []),
        *(interaction_registry.classes_of_verl(users) if users and is_named else []),
    ]
