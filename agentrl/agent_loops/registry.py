"""Agent loops by name: registered by decorator, or listed in a YAML file.

A file is a list, as in verl:

    - name: search_agent
      _target_: my_package.loops.SearchLoop
      max_queries: 3
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from agentrl.agent_loops.base import AgentLoopBase
from agentrl.config.schema.agent import TOOL_AGENT
from agentrl.errors import ConfigError, did_you_mean
from agentrl.plugins import load_class, load_object
from agentrl.plugins.from_verl import translate
from agentrl.plugins.registry import note_replaced

TARGET = "_target_"
SINGLE_TURN = "single_turn_agent"
"""Name of the bundled loop with one completion."""
BUNDLED = (TOOL_AGENT, SINGLE_TURN)
"""Names of the bundled agents."""
VERL_LOOPS = (
    "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop",
    "verl.experimental.agent_loop.SingleTurnAgentLoop",
    "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop",
    "verl.experimental.agent_loop.ToolAgentLoop",
)
"""Class paths of verl's loops that `agentrl.compat` has too."""
_OFFERED = frozenset({
    *("self", "trainer_config", "server_manager", "tokenizer", "processor", "dataset_cls"),
    *("data_config", "dataset_config", "hf_model_type", "tools", "interactions"),
})  # fmt: skip
"""Arguments that agentrl passes to constructors."""
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
L = TypeVar("L", bound=type[AgentLoopBase])


@dataclass(frozen=True, slots=True)
class LoopEntry:
    """A class of agent loops, and arguments of its constructor."""

    name: str
    loop: type[AgentLoopBase]
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def check(self, *, file: Path | None = None) -> None:
        """Check that the constructor takes the entry's arguments and needs no others.

        Raises:
            ConfigError: With the argument that is unknown or missing.
        """
        parameters = inspect.signature(self.loop.__init__).parameters.values()
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters)
        if self.loop.__init__ is AgentLoopBase.__init__:  # passes the rest to `init_class`
            takes_all = _implementation(self.loop) is not _implementation(AgentLoopBase)
        named = {one.name: one for one in parameters if one.kind in _NAMED}
        own = [name for name in named if name not in _OFFERED]
        for name in self.arguments:
            if name not in named and not takes_all:
                self._refuse(f"has no argument {name!r}" + did_you_mean(name, own), own, file)
        for name in own:
            if named[name].default is inspect.Parameter.empty and name not in self.arguments:
                self._refuse(f"needs the argument {name!r}, which its entry lacks", own, file)

    def _refuse(self, what: str, own: list[str], file: Path | None) -> None:
        raise ConfigError(
            f"the agent loop {self.name!r}: {self.loop.__name__} {what}",
            file=file,
            key=None if file else "rollout.agent.default_agent_loop",
            expected=f"arguments of its constructor: {', '.join(own) or 'it has none of its own'}",
        )

    def build(self, offered: Mapping[str, Any]) -> AgentLoopBase:
        """Build the loop of one request.

        Args:
            offered: Arguments that agentrl passes. A constructor that names its parameters gets
                those that it names; one with `**kwargs` gets all, except `dataset_config`, the name
                of `data_config` in verl 0.7.
        """
        parameters = inspect.signature(self.loop.__init__).parameters.values()
        named = {parameter.name for parameter in parameters}
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        wanted = offered.keys() - {"dataset_config"} if takes_all else named
        arguments = {k: v for k, v in offered.items() if k in wanted or k in named}
        return self.loop(**{**arguments, **_instantiate_all(self.arguments)})


def _implementation(loop: type[AgentLoopBase]) -> object:
    """Return the function of `init_class`, which gets the arguments too."""
    return getattr(loop.init_class, "__func__", loop.init_class)


_REGISTERED: dict[str, LoopEntry] = {}


def register(agent_name: str) -> Callable[[L], L]:
    """Register a class of agent loops under a name, for `agent_name` and `default_agent_loop`.

    The module must be imported: name it in the key `plugins`, or in `agent_loop_config_path`. The
    last registration of a name counts, also if the name is that of a bundled agent.
    """

    def decorate(loop: L) -> L:
        if not (isinstance(loop, type) and issubclass(loop, AgentLoopBase)):
            raise ConfigError(
                f"{loop!r} is registered as the agent {agent_name!r}",
                expected="a subclass of agentrl.agent_loops.AgentLoopBase",
            )
        if agent_name in BUNDLED and agent_name not in _REGISTERED:
            note_replaced("agent", agent_name, loop)
        _REGISTERED[agent_name] = LoopEntry(agent_name, loop)
        return loop

    return decorate


def registered_loops() -> dict[str, LoopEntry]:
    """Return the loops that were registered by the decorator, by name."""
    return dict(_REGISTERED)


def load_agent_loops(path: Path) -> dict[str, LoopEntry]:
    """Load the loops of a YAML file. Their classes are imported and checked, and not built.

    Raises:
        ConfigError: If the file is no list of entries with `name` and `_target_`, or a constructor
            does not take the arguments of its entry.
        PluginError: If a class cannot be imported, or is no agent loop.
    """
    key = "rollout.agent.agent_loop_config_path"
    expected = "a list of entries with `name`, `_target_` and arguments of the class"
    try:
        entries = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: {error}", key=key, expected=expected) from error
    found: dict[str, LoopEntry] = {}
    for index, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        if not isinstance(entry, dict) or not all(
            isinstance(entry.get(name), str) for name in ("name", TARGET)
        ):
            raise ConfigError(f"entry {index} is {entry!r}", file=path, expected=expected)
        arguments = {str(name): value for name, value in entry.items()}
        name, target = arguments.pop("name"), arguments.pop(TARGET)
        if name in found:
            raise ConfigError(f"two agent loops are named {name!r}", file=path)
        target = translate(target, VERL_LOOPS, base="agentrl.agent_loops.AgentLoopBase")
        found[name] = LoopEntry(name, load_class(target, AgentLoopBase, file=path), arguments)
        found[name].check(file=path)
    return found


def _instantiate_all(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _instantiate(value) for name, value in arguments.items()}


def _instantiate(value: Any) -> Any:
    """Build nested entries with `_target_`, as Hydra does; other containers become configs."""
    if isinstance(value, dict) and TARGET in value:
        arguments = cast("dict[str, Any]", value)
        rest = {name: one for name, one in arguments.items() if name != TARGET}
        return load_object(str(arguments[TARGET]))(**_instantiate_all(rest))
    return OmegaConf.create(value) if isinstance(value, dict | list) else value
