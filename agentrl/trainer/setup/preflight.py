"""Check a run before anything is made or loaded, torch included: mistakes are cheapest here."""

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import Purpose, RunConfig, check_config
from agentrl.config.tables import method_facts
from agentrl.data.prepare.manifest import is_made, is_unfinished
from agentrl.errors import AgentRLError, ConfigError, DataError
from agentrl.plugins.registry import unknown_name
from agentrl.rewards import get_reward_manager
from agentrl.rollout.tool_parsers import get_tool_parser
from agentrl.tools import BaseTool
from agentrl.tools.function_tool import FunctionTool
from agentrl.trainer.setup.plugins import (
    GIVEN,
    Plugins,
    find_classes_of_verl,
    import_plugins,
    load_plugins,
)

ESTIMATOR_KEY, LOSS_KEY = "algorithm.adv_estimator", "actor.policy_loss"


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run whose configuration can succeed, as far as that is known without torch."""

    plugins: Plugins
    notes: tuple[str, ...]
    """What its user should know."""


def check_run(
    config: RunConfig,
    *,
    world_size: int = 1,
    file: Path | None = None,
    purpose: Purpose = Purpose.TRAIN,
    build: Callable[[RunConfig], Plugins] = load_plugins,
) -> CheckedRun:
    """Refuse a run that cannot succeed. `late_checks` has the checks that need torch.

    Args:
        config: Of the run.
        world_size: Ranks that share each batch.
        file: The run file, for errors.
        purpose: What is to be done with the run.
        build: Builds the run's plug-ins.

    Raises:
        ConfigError: for settings that contradict each other, an unknown name, a model's folder
            that is not there.
        PluginError: for a module, class path or function path that leads nowhere.
        DataError: for a data file that is not there.
    """
    notes = check_config(config, world_size=world_size, file=file, purpose=purpose)
    try:
        import_plugins(config.plugins)
        check_known_names(config)
        check_inputs(config)
        plugins = build(config)
    except AgentRLError as error:
        # An error in a plug-in's own YAML names that file already.
        if file is not None:
            error.details.setdefault("file", file)
        raise
    found = [
        *map(str, notes),
        *find_classes_of_verl(config),
        *find_idle_weights(config, plugins),
        *find_undescribed(plugins),
        *find_trained_validation(config),
    ]
    return CheckedRun(plugins, tuple(found))


def check_known_names(config: RunConfig) -> None:
    """Look up what the run file chooses by name, as far as that is known without torch.

    Raises:
        ConfigError: with the nearest name that there is.
    """
    get_reward_manager(config.reward.manager)
    if config.rollout.multi_turn.format is not None:
        get_tool_parser(config.rollout.multi_turn.format)
    if config.plugins or "agentrl.algorithms" in sys.modules:
        return  # there may be others: `late_checks` asks the registries
    facts, estimator = method_facts(), config.algorithm.adv_estimator
    for kind, key, name, known in (
        ("advantage estimator", ESTIMATOR_KEY, estimator, facts.estimators),
        ("policy loss", LOSS_KEY, config.actor.policy_loss.loss_mode, facts.losses),
    ):
        if name not in known:
            raise unknown_name(kind, name, known, key=key)


def find_undescribed(plugins: Plugins) -> Iterator[str]:
    """Find function tools of which the model is told too little to call them."""
    for tool in plugins.tools:
        if isinstance(tool, FunctionTool):
            properties = tool.tool_schema.function.parameters.get("properties") or {}
            bare = [name for name, schema in properties.items() if not schema]
            if bare:
                yield f"the function tool {tool.name!r} has no annotation for {', '.join(bare)}"
            if not tool.tool_schema.function.description:
                yield f"the function tool {tool.name!r} has no docstring: the model sees no purpose"


def find_trained_validation(config: RunConfig) -> Iterator[str]:
    """Find validation files that are training files too."""
    for name, path in config.data.val_files.items():
        if path in config.data.train_files and path != Path(GIVEN):
            yield f"data.val_files.{name} is a training file too: {path}"


def find_idle_weights(config: RunConfig, plugins: Plugins) -> Iterator[str]:
    """Find a weight on rewards that none of the run's tools gives."""
    weight = config.reward.weights.tool
    if weight and not any(
        type(tool).calc_reward is not BaseTool.calc_reward for tool in plugins.tools
    ):
        yield (
            f"reward.weights.tool is {weight:g}, and no tool of the run has a calc_reward: "
            "this part of the reward is always 0"
        )


def check_inputs(config: RunConfig) -> None:
    """Look for the files that the run reads and does not make itself.

    Raises:
        DataError: naming a data file that is not there.
        ConfigError: naming a model's folder that is not there.
    """
    for key, path in _data_files(config):
        is_named = config.data.custom_cls is None and path != Path(GIVEN)
        if is_named and not path.exists() and not is_made_later(config, path):
            raise DataError(
                f"no file {path}", key=key, expected="an existing data file", **looked_in(path)
            )
    check_model_folders(config)


def check_model_folders(config: RunConfig) -> None:
    """Look for the folders of models and tokenizers, and for the hub where one is named.

    Raises:
        ConfigError: naming one that is not there.
    """
    for key, name in (
        ("model.path", config.model.path),
        ("model.tokenizer_path", config.model.tokenizer_path),
        ("ref.path", config.ref.path),
    ):
        if name is None or Path(name).exists() or is_made_later(config, Path(name)):
            continue
        # Only a name that is no folder here is worth the import of the hub's client.
        from agentrl.trainer.setup.huggingface import is_hub_name, is_within_reach

        told, expected = f"no folder {name}", "a Hugging Face folder, or a hub name"
        if not is_hub_name(name):
            raise ConfigError(told, key=key, expected=expected, **looked_in(name))
        if not is_within_reach(name):
            told += " here, and the hub cannot be reached"
            raise ConfigError(told, key=key, expected=expected, **looked_in(name))


def looked_in(path: Path | str) -> dict[str, str]:
    """Name the folder in which a relative path was looked for: the command's, not the file's."""
    return {} if Path(path).is_absolute() else {"looked_in": str(Path.cwd())}


def is_made_later(config: RunConfig, path: Path) -> bool:
    """Whether `prepare` will write what a path leads to: it is not there yet, or not whole."""
    prepare = config.prepare
    makers = (prepare.arithmetic, prepare.gsm8k, prepare.tiny_policy, prepare.sft)
    folders = [maker.out_dir for maker in makers if maker is not None]
    return any(
        path.absolute().is_relative_to(folder.absolute())
        and (_is_missing(path) or is_unfinished(folder))
        for folder in folders
    )


def claim_folders(config: RunConfig) -> None:
    """Make the folders that a run writes to, before it has anything to lose.

    Raises:
        ConfigError: naming the key of one that cannot be written.
    """
    trainer = config.trainer
    for key, folder in (
        ("trainer.default_local_dir", trainer.default_local_dir),
        ("trainer.rollout_data_dir", trainer.rollout_data_dir),
        ("trainer.validation_data_dir", trainer.validation_data_dir),
        ("data.cache_dir", config.data.cache_dir),
    ):
        if folder is not None:
            claim_folder(folder, key=key)
    claim_prepared(config)


def claim_prepared(config: RunConfig) -> None:
    """Make the folders that `prepare` will fill; what was made before is only to be read.

    Raises:
        ConfigError: naming the key of one that cannot be written.
    """
    prepare = config.prepare
    for name, maker in (
        ("arithmetic", prepare.arithmetic),
        ("gsm8k", prepare.gsm8k),
        ("tiny_policy", prepare.tiny_policy),
        ("sft", prepare.sft),
    ):
        if maker is not None and not is_made(maker.out_dir):
            claim_folder(maker.out_dir, key=f"prepare.{name}.out_dir")


def claim_file(file: Path, *, key: str) -> None:
    """See that a file can be written, before there is anything to write.

    Raises:
        ConfigError: where it is a folder, or its folder cannot be written.
    """
    if file.is_dir():
        raise ConfigError(f"{file} is a folder", key=key, expected="a file to write")
    claim_folder(file.parent, key=key)


def check_disk_space(folder: Path, num_weights: int, config: RunConfig) -> None:
    """Refuse a run whose checkpoint the disk has no room for: it may be written after days.

    Args:
        folder: Of the run.
        num_weights: Of the policy.
        config: Of the run.

    Raises:
        ConfigError: with what is needed and what is free.
    """
    # The weights and two moments each, in float32; Muon's matrices have one.
    copies = 2 if config.actor.optim.name == "muon" else 3
    needed, free = 4 * copies * num_weights, shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"a checkpoint takes {_size(needed)}, and {_size(free)} are free",
            key="trainer.default_local_dir",
            expected="a folder on a disk with room for a checkpoint",
        )


def _size(num_bytes: int) -> str:
    unit, factor = ("GB", 1e9) if num_bytes >= 1e8 else ("MB", 1e6)
    return f"{num_bytes / factor:.2f} {unit}"


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Make absolute what a run writes to, and reads again later: a tool may change the directory.

    A model's name stays as it is if there is no such folder: it is a name of the hub.
    """
    trainer = config.trainer
    paths = {n: v.absolute() for n in type(trainer).model_fields
             if isinstance(v := getattr(trainer, n), Path)}  # fmt: skip
    model = config.model
    if Path(model.path).is_dir() or is_made_later(config, Path(model.path)):
        model = model.model_copy(update={"path": str(Path(model.path).absolute())})
    return config.model_copy(update={"trainer": trainer.model_copy(update=paths), "model": model})


def claim_folder(folder: Path, *, key: str) -> None:
    """Make a folder and try to write in it.

    Raises:
        ConfigError: where that cannot be done.
    """
    probe = folder / ".agentrl-can-write"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink(missing_ok=True)
    except OSError as error:
        blocking = next((p for p in (folder, *folder.parents) if p.is_file()), None)
        reason = f"{blocking} is a file" if blocking else error.strerror
        raise ConfigError(
            f"cannot write to {folder}: {reason}",
            key=key,
            expected="a folder that can be written",
        ) from error


def _data_files(config: RunConfig) -> Iterator[tuple[str, Path]]:
    if not config.trainer.val_only:
        for place, path in enumerate(config.data.train_files):
            yield f"data.train_files[{place}]", path
    for name, path in config.data.val_files.items():
        yield f"data.val_files.{name}", path


def _is_missing(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))
