"""The plug-ins of a run: its tools, its interactions, its scorer. Nothing here imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    turns = config.rollout.multi_turn
    tools = load_all_tools(turns.tool_config_path, turns.function_tool_path)
    if turns.tool_schema_style != "full":
        for tool in tools:
            tool.tool_schema = as_verl_shows(tool.tool_schema, turns.tool_schema_style)
    interactions: dict[str, BaseInteraction] = {}
    if turns.interaction_config_path is not None:
        interactions = initialize_interactions_from_config(turns.interaction_config_path)
    return Plugins(tools, interactions, make_reward_manager(config.reward))


def find_classes_of_verl(config: RunConfig) -> list[str]:
    """Name the classes of verl's among a run's plug-ins, each with ours that stands for it."""
    turns = config.rollout.multi_turn
    tools, users = turns.tool_config_path, turns.interaction_config_path
    return [
        *(tool_registry.classes_of_verl(tools) if tools is not None else []),
        *(interaction_registry.classes_of_verl(users) if users is not None else []),
    ]
