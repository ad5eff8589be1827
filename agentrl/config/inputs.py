"""The keys of a run file whose values are files or folders that a run reads, or writes.

A run on a Ray cluster copies the inputs that are only on the driver's machine to the other nodes.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from agentrl.config.schema.run import RunConfig

S = TypeVar("S", bound=BaseModel)

INPUT_KEYS = (
    "plugins",
    "data.train_files",
    "data.val_files",
    "data.custom_cls.path",
    "model.path",
    "model.tokenizer_path",
    "model.lora_adapter_path",
    "model.custom_chat_template",
    "critic.model.path",
    "ref.path",
    "reward.model.path",
    "reward.model.tokenizer_path",
    "reward.model.custom_chat_template",
    "reward.custom_reward_function.path",
    "rollout.agent.agent_loop_config_path",
    "rollout.agent.files",
    "rollout.multi_turn.tool_config_path",
    "rollout.multi_turn.interaction_config_path",
    "trainer.resume_from_path",
)
"""Every key whose value can be a file or folder that all processes of a run read. The value may
also be something else: a name on the hub, a module, a template's text."""
OTHER_KEYS = ("trainer", "data.cache_dir", "weight_sync.folder", "cluster", "prepare")
"""Keys (or sections) with folders that a run writes, and with what `prepare` and Ray read."""


def input_paths(config: RunConfig) -> dict[str, Path]:
    """Return the inputs of a run that are files or folders of this machine, by key.

    A key in a list or mapping is named `data.train_files[0]`, `data.val_files.gsm8k`.
    """
    found: dict[str, Path] = {}
    for key in INPUT_KEYS:
        for name, value in _values(config, key):
            text = str(value)
            if "\n" not in text and len(text) < 4096 and Path(text).exists():
                found[name] = Path(text)
    return found


def with_inputs(config: RunConfig, paths: Mapping[str, Path]) -> RunConfig:
    """Return the configuration with other paths of some inputs, named as by `input_paths`."""
    for key in INPUT_KEYS:
        if any(name in paths for name, _ in _values(config, key)):
            config = _replaced(config, key.split("."), key, paths)
    return config


def _values(config: RunConfig, key: str) -> Iterator[tuple[str, Any]]:
    value: Any = config
    for part in key.split("."):
        value = None if value is None else getattr(value, part)
    if isinstance(value, list):
        yield from ((f"{key}[{index}]", one) for index, one in enumerate(cast("list[Any]", value)))
    elif isinstance(value, dict):
        yield from ((f"{key}.{name}", one) for name, one in cast("dict[str, Any]", value).items())
    elif value is not None:
        yield key, value


def _replaced(section: S, parts: Sequence[str], key: str, paths: Mapping[str, Path]) -> S:
    name, *rest = parts
    value: Any = getattr(section, name)

    def moved(item: str, old: Any) -> Any:
        new = paths.get(item)
        return old if new is None else type(old)(new) if isinstance(old, str) else new

    if rest:
        value = _replaced(value, rest, key, paths)
    elif isinstance(value, list):
        value = [
            moved(f"{key}[{index}]", one) for index, one in enumerate(cast("list[Any]", value))
        ]
    elif isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        value = {item: moved(f"{key}.{item}", one) for item, one in items}
    else:
        value = moved(key, value)
    return section.model_copy(update={name: value})
