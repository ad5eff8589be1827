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
    "data.sampler.path",
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
    "rollout.multi_turn.function_tool_path",
    "rollout.multi_turn.interaction_config_path",
    "trainer.resume_from_path",
)
"""Every key whose value can be a file or folder that all processes of a run read. The value may
also be something else: a name on the hub, a module, a template's text."""
OTHER_KEYS = ("trainer", "data.cache_dir", "weight_sync.folder", "cluster", "prepare")
"""Keys (or sections) with folders that a run writes, and with what `prepare` and Ray read."""
_NAMES_OF_PREPARE = ("prepare.sft.model_path", "prepare.sft.function_tool_path")
"""Keys of `prepare` whose value can be a path or a name."""
_MODULE_KEYS = frozenset({
    "plugins", "data.custom_cls.path", "reward.custom_reward_function.path",
    "rollout.multi_turn.function_tool_path", "prepare.sft.function_tool_path",
})  # fmt: skip
"""Keys whose value is a module unless it ends with `.py`: a package has a folder of that name."""


def input_paths(config: RunConfig) -> dict[str, Path]:
    """Return the inputs of a run that are files or folders of this machine, by key.

    A key in a list or mapping is named `data.train_files[0]`, `data.val_files.gsm8k`.
    """
    found: dict[str, Path] = {}
    for key in INPUT_KEYS:
        for name, value in _values(config, key):
            if _is_input(key, value):
                found[name] = Path(str(value))
    return found


def with_inputs(
    config: RunConfig, paths: Mapping[str, Path], keys: Sequence[str] = INPUT_KEYS
) -> RunConfig:
    """Return the configuration with other paths of some inputs, named as by `input_paths`."""
    for key in keys:
        if any(name in paths for name, _ in _values(config, key)):
            config = _replaced(config, key.split("."), key, paths)
    return config


def with_absolute_inputs(config: RunConfig) -> RunConfig:
    """Return the configuration with absolute paths of all files and folders that exist.

    Files that `prepare` reads and writes are included. A relative name of a module is kept.
    """
    moved = _absolute(config)
    names = (*INPUT_KEYS, *_NAMES_OF_PREPARE)
    paths = {
        name: Path(value).absolute()
        for key in names
        for name, value in _values(moved, key)
        if _is_input(key, value)
    }
    return with_inputs(moved, paths, names)


def _absolute(value: Any) -> Any:
    """Make the paths in a section absolute; keys that are not set stay so."""
    if isinstance(value, Path):
        return value.absolute() if value.exists() else value
    if isinstance(value, BaseModel):
        fields = {name: _absolute(getattr(value, name)) for name in value.model_fields_set}
        return value.model_copy(update=fields)
    if isinstance(value, list):
        return [_absolute(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _absolute(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


def _is_input(key: str, value: object) -> bool:
    text = str(value)
    if key in _MODULE_KEYS and not text.endswith(".py"):
        return False
    return "\n" not in text and len(text) < 4096 and Path(text).exists()


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
