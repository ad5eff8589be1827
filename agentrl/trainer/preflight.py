"""What can be told of a run before anything is made or loaded: every mistake is cheapest here."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from agentrl.algorithms import get_adv_estimator_fn, get_policy_loss_fn
from agentrl.config import Purpose, RunConfig, check_config
from agentrl.data.prepare.manifest import is_made, is_unfinished
from agentrl.errors import AgentRLError, ConfigError, DataError, MissingExtraError
from agentrl.rewards import get_reward_manager
from agentrl.rollout.tool_parsers import get_tool_parser
from agentrl.trainer.engine_choice import check_engine
from agentrl.trainer.hub import is_hub_name, is_within_reach
from agentrl.trainer.journal import Journal
from agentrl.trainer.rollout_setup import Plugins, find_classes_of_verl, load_plugins


def check_run(
    config: RunConfig,
    journal: Journal,
    *,
    world_size: int = 1,
    file: Path | None = None,
    purpose: Purpose = Purpose.TRAIN,
    starts_here: bool = True,
) -> Plugins:
    """Refuse a run that cannot succeed, and say what its user should know.

    A run file that is only looked at may be meant for another machine: with `starts_here` false
    what is not installed on this one is a note.

    Returns:
        The run's plug-ins: building them is part of the check.

    Raises:
        ConfigError: for settings that contradict each other, an unknown name, a model's folder
            that is not there, an argument that the engine does not know.
        MissingExtraError: for an engine that is not installed.
        PluginError: for a class path or function path that leads nowhere.
        DataError: for a data file that is not there.
    """
    for note in check_config(config, world_size=world_size, file=file, purpose=purpose):
        journal.say(f"note: {note}")
    try:
        check_names(config)
        check_inputs(config)
        if purpose is not Purpose.SFT:
            _check_engine_here(config, journal, starts_here=starts_here)
        plugins = load_plugins(config)
    except AgentRLError as error:
        # What a plug-in's own YAML is to blame for names that file already.
        if file is not None:
            error.details.setdefault("file", file)
        raise
    journal.say(*(f"note: {classes}" for classes in find_classes_of_verl(config)))
    return plugins


def _check_engine_here(config: RunConfig, journal: Journal, *, starts_here: bool) -> None:
    try:
        check_engine(config)
    except MissingExtraError as missing:
        if starts_here:
            raise
        journal.say(f"note: on this machine, {missing}")


def check_names(config: RunConfig) -> None:
    """Look up what the run file chooses by name, so that a slip is not found at the first step.

    Raises:
        ConfigError: with the nearest name that there is.
    """
    get_adv_estimator_fn(config.algorithm.adv_estimator)
    get_policy_loss_fn(config.actor.policy_loss.loss_mode)
    get_reward_manager(config.reward.manager)
    if config.rollout.multi_turn.format is not None:
        get_tool_parser(config.rollout.multi_turn.format)


def check_inputs(config: RunConfig) -> None:
    """Look for the files that the run reads and does not make itself.

    Raises:
        DataError: naming a data file that is not there.
        ConfigError: naming a model's folder that is not there.
    """
    for key, path in _data_files(config):
        if config.data.custom_cls is None and not path.exists() and not is_made_later(config, path):
            raise DataError(f"no file {path}", key=key, expected="an existing data file")
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
        told, expected = f"no folder {name}", "a Hugging Face folder, or a hub name"
        if not is_hub_name(name):
            raise ConfigError(told, key=key, expected=expected)
        if not is_within_reach(name):
            told += " here, and the hub cannot be reached"
            raise ConfigError(told, key=key, expected=expected)


def is_made_later(config: RunConfig, path: Path) -> bool:
    """Whether `prepare` will write what a path leads to: it is not there yet, or not whole."""
    prepare = config.prepare
    makers = (prepare.arithmetic, prepare.gsm8k, prepare.tiny_policy, prepare.sft)
    folders = [maker.out_dir for maker in makers if maker is not None]
    return any(
        path.is_relative_to(folder) and (_is_missing(path) or is_unfinished(folder))
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


def check_room(folder: Path, num_weights: int, config: RunConfig) -> None:
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
            f"a checkpoint takes {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free",
            key="trainer.default_local_dir",
            expected="a folder on a disk with room for a checkpoint",
        )


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
