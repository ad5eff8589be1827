"""Check a run before anything is prepared or loaded, and before torch is imported."""

import os
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.agent_loops.routing import check_agents
from agentrl.config import Purpose, RunConfig, check_config
from agentrl.config.schema.run import TrainerConfig
from agentrl.config.schema.training import OptimConfig
from agentrl.config.tables import method_facts
from agentrl.data.files import read_rows
from agentrl.data.prepare.manifest import is_made, is_unfinished
from agentrl.data.rows import RowReader
from agentrl.errors import AgentRLError, ConfigError, DataError, describe_missing
from agentrl.plugins.registry import unknown_name
from agentrl.remote_io import check_store
from agentrl.rewards import get_reward_manager
from agentrl.rollout.tool_parsers import get_tool_parser
from agentrl.tools import BaseTool
from agentrl.tools.function_tool import FunctionTool
from agentrl.trainer.metrics.trackers import check_trackers
from agentrl.trainer.setup.plugins import (
    GIVEN,
    Plugins,
    find_classes_of_verl,
    find_idle_resources,
    import_plugins,
    load_plugins,
)
from agentrl.trainer.state.run_folder import is_run
from agentrl.trainer.tracing.tracer import check_tracing

if TYPE_CHECKING:
    from agentrl.workers.distributed import World

APPEARS_S = 30.0
"""Seconds in which a file of one node appears on the others: network file systems cache folders."""
ESTIMATOR_KEY, LOSS_KEY = "algorithm.adv_estimator", "actor.policy_loss"


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run that passed all checks that need no torch."""

    plugins: Plugins
    notes: tuple[str, ...]
    """Notes for the user."""


def check_run(
    config: RunConfig,
    *,
    world_size: int | None = 1,
    file: Path | None = None,
    purpose: Purpose = Purpose.TRAIN,
    build: Callable[[RunConfig], Plugins] = load_plugins,
) -> CheckedRun:
    """Refuse a run that cannot succeed; `check_names_and_engine` has the checks that need torch.

    Args:
        config: The run's configuration.
        world_size: Ranks that share each batch; None: unknown.
        file: The run file, for errors.
        purpose: The purpose of the run.
        build: Builds the run's plug-ins.

    Raises:
        ConfigError: for contradictory settings, an unknown name or a missing model folder.
        PluginError: for a module, class path or function path that cannot be imported.
        DataError: for a missing data file.
        MissingExtraError: for a tracker or an exporter of traces without its package.
    """
    notes = check_config(config, world_size=world_size, file=file, purpose=purpose)
    if purpose is Purpose.TRAIN:
        check_trackers(config.trainer)
        check_tracing(config.trainer)
    try:
        import_plugins(config.plugins)
        check_known_names(config)
        check_inputs(config)
        plugins = build(config)
        if purpose is not Purpose.SFT:
            check_agents(config)
    except AgentRLError as error:
        # An error in a plug-in's own YAML already names that file.
        if file is not None:
            error.details.setdefault("file", file)
        raise
    found = [
        *map(str, notes),
        *find_classes_of_verl(config),
        *find_idle_resources(plugins, config),
        *find_idle_weights(config, plugins),
        *find_undescribed(plugins),
        *find_trained_validation(config),
    ]
    return CheckedRun(plugins, tuple(found))


def check_known_names(config: RunConfig) -> None:
    """Look up names of the run file, as far as they are known without torch.

    Raises:
        ConfigError: with the nearest known name.
    """
    get_reward_manager(config.reward.manager)
    if config.rollout.multi_turn.format is not None:
        get_tool_parser(config.rollout.multi_turn.format)
    if config.plugins or "agentrl.algorithms" in sys.modules:
        return  # there may be registered names: `check_names_and_engine` looks them up
    facts, estimator = method_facts(), config.algorithm.adv_estimator
    for kind, key, name, known in (
        ("advantage estimator", ESTIMATOR_KEY, estimator, facts.estimators),
        ("policy loss", LOSS_KEY, config.actor.policy_loss.loss_mode, facts.losses),
    ):
        if name not in known:
            raise unknown_name(kind, name, known, key=key)


def find_undescribed(plugins: Plugins) -> Iterator[str]:
    """Find function tools with too little information for a model in their schemas."""
    for tool in plugins.tools:
        if isinstance(tool, FunctionTool):
            name, schema = f"the function tool {tool.name!r}", tool.tool_schema.function
            properties = schema.parameters.get("properties") or {}
            if bare := [key for key, value in properties.items() if not value]:
                yield f"{name} has no annotation for {', '.join(bare)}"
            if not schema.description:
                yield f"{name} has no docstring: the model does not see what it does"


def find_trained_validation(config: RunConfig) -> Iterator[str]:
    """Find validation files that are also training files."""
    for name, path in config.data.val_files.items():
        if path in config.data.train_files and path != Path(GIVEN):
            yield f"data.val_files.{name} is a training file too: {path}"


def find_idle_weights(config: RunConfig, plugins: Plugins) -> Iterator[str]:
    """Find a weight on tool rewards if no tool of the run gives any."""
    weight = config.reward.weights.tool
    if weight and not any(
        type(tool).calc_reward is not BaseTool.calc_reward for tool in plugins.tools
    ):
        yield (
            f"reward.weights.tool is {weight:g}, and no tool of the run has a calc_reward: "
            "this part of the reward is always 0"
        )


def check_inputs(config: RunConfig) -> None:
    """Check that the files exist that the run reads and does not prepare itself.

    Raises:
        DataError: naming a missing data file.
        ConfigError: naming a missing model folder.
    """
    train_files = () if config.trainer.val_only else config.data.train_files
    files = {f"data.train_files[{index}]": path for index, path in enumerate(train_files)}
    files |= {f"data.val_files.{name}": path for name, path in config.data.val_files.items()}
    prepares = any(maker is not None for _, maker in config.prepare)
    for key, path in files.items():
        is_named = config.data.custom_cls is None and path != Path(GIVEN)
        if is_named and not path.exists() and not is_made_later(config, path):
            raise DataError(
                describe_missing(path), key=key, expected="an existing data file", **looked_in(path)
            )
        if is_named and prepares and not is_made_later(config, path):
            check_first_row(config, path, key)
    check_plugin_files(config)
    check_model_folders(config)


def check_first_row(config: RunConfig, path: Path, key: str) -> None:
    """Read the first row of a data file, so that a wrong file is reported before the warm-up.

    Raises:
        DataError: if the file cannot be read, or the row cannot be used.
    """
    try:
        RowReader(path, config.data).read(read_rows(path, 1)[0], 0, 0)
    except DataError as error:
        details = {"key": key, **error.details, "file": None}
        raise DataError(f"{path}: {error.args[0]}", **details) from None


def check_plugin_files(config: RunConfig) -> None:
    """Check that the YAML files of tools and interactions exist.

    Raises:
        ConfigError: naming a missing one.
    """
    for name in ("tool_config_path", "interaction_config_path"):
        path = getattr(config.rollout.multi_turn, name)
        if path is not None and path != Path(GIVEN) and not path.exists():
            raise ConfigError(
                describe_missing(path),
                key=f"rollout.multi_turn.{name}",
                expected="an existing YAML file",
                **looked_in(path),
            )


def check_model_folders(config: RunConfig) -> None:
    """Check that folders of models and tokenizers exist, and that the hub answers if it is needed.

    Raises:
        ConfigError: naming a missing folder.
    """
    scorer = config.reward.model
    for key, name in (
        ("model.path", config.model.path),
        ("model.tokenizer_path", config.model.tokenizer_path),
        ("model.lora_adapter_path", config.model.lora_adapter_path),
        ("ref.path", config.ref.path),
        ("reward.model.path", scorer and scorer.path),
        ("reward.model.tokenizer_path", scorer and scorer.tokenizer_path),
    ):
        if name is None or Path(name).exists() or is_made_later(config, Path(name)):
            continue
        # Importing the hub's client takes long, so only for a name that is no folder here.
        from agentrl.trainer.setup.huggingface import is_hub_name, is_within_reach

        message = f"no folder {name}"
        if is_hub_name(name):
            if is_within_reach(name):
                continue
            message += " here, and the hub cannot be reached"
        expected = "a Hugging Face folder, or a hub name"
        raise ConfigError(message, key=key, expected=expected, **looked_in(name))


def looked_in(path: Path | str) -> dict[str, str]:
    """Return the folder that a relative path is relative to: the command's, not the run file's."""
    return {} if Path(path).is_absolute() else {"looked_in": str(Path.cwd())}


def is_made_later(config: RunConfig, path: Path) -> bool:
    """Return whether `prepare` will write this path, because it is missing or incomplete."""
    is_missing = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    return any(
        path.absolute().is_relative_to(maker.out_dir.absolute())
        and (is_missing or is_unfinished(maker.out_dir))
        for _, maker in config.prepare
        if maker is not None
    )


def claim_folders(config: RunConfig) -> None:
    """Create the folders that a run writes to, before it has results to lose.

    Raises:
        ConfigError: naming the key of one that cannot be written, or that is another run's.
    """
    trainer = config.trainer
    check_owner(trainer)
    for key, folder in (
        ("trainer.default_local_dir", trainer.default_local_dir),
        ("trainer.rollout_data_dir", trainer.rollout_data_dir),
        ("trainer.validation_data_dir", trainer.validation_data_dir),
        ("data.cache_dir", config.data.cache_dir),
    ):
        if folder is not None:
            claim_folder(folder, key=key)
    claim_store(config)
    claim_prepared(config)


def check_owner(trainer: TrainerConfig) -> None:
    """Check that rollouts are not written to the folder of another run, or to a folder in it.

    The recorded run file of a run names that run's folders.

    Raises:
        ConfigError: naming the key.
    """
    own = Path(os.path.abspath(trainer.default_local_dir))
    for key in ("rollout_data_dir", "validation_data_dir"):
        given: Path | None = getattr(trainer, key)
        if given is None:
            continue
        folder = Path(os.path.abspath(given))
        for parent in (folder, *folder.parents):
            if parent != own and parent not in own.parents and is_run(parent):
                raise ConfigError(
                    f"{given} {'is' if parent == folder else 'is in'} the folder of another run",
                    key=f"trainer.{key}",
                    expected=f"a folder of this run: {trainer.default_local_dir / folder.name}",
                )


def check_folder_is_shared(config: RunConfig, world: "World") -> None:
    """Check that all ranks have one run folder: each writes its part of a checkpoint there.

    A collective. It checks nothing if checkpoints go to a store, or if there are none.

    Raises:
        ConfigError: naming a node that has another folder.
        RankError: on the other ranks.
    """
    trainer = config.trainer
    if world.is_alone or trainer.default_remote_dir is not None or trainer.val_only:
        return
    name, node = world.broadcast((f".agentrl-{uuid.uuid4().hex}", socket.gethostname()))
    mark = trainer.default_local_dir / name
    try:
        with world.raise_on_all_ranks():
            if world.is_main:
                mark.touch()
        with world.raise_on_all_ranks():
            if not _appears(mark):
                raise ConfigError(
                    f"{mark.parent} of rank {world.rank} on node {socket.gethostname()} is not the "
                    f"folder of rank 0 on node {node}",
                    key="trainer.default_local_dir",
                    expected="a folder that all nodes with ranks see, or a store for checkpoints: "
                    "trainer.default_remote_dir=s3://...",
                )
    finally:
        if world.is_main:
            mark.unlink(missing_ok=True)


def _appears(path: Path) -> bool:
    end = time.monotonic() + APPEARS_S
    while not path.exists():
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True


def claim_store(config: RunConfig) -> None:
    """Try to write to the store of the checkpoints, if there is one.

    Raises:
        ConfigError: if that fails.
    """
    if (url := config.trainer.default_remote_dir) is not None:
        check_store(url, key="trainer.default_remote_dir")


def claim_prepared(config: RunConfig) -> None:
    """Create the folders that `prepare` will fill; finished folders are only read.

    Raises:
        ConfigError: naming the key of one that cannot be written.
    """
    for name, maker in config.prepare:
        if maker is not None and not is_made(maker.out_dir):
            claim_folder(maker.out_dir, key=f"prepare.{name}.out_dir")


def claim_file(file: Path, *, key: str) -> None:
    """Check that a file can be written, before there is anything to write.

    Raises:
        ConfigError: if it is a folder, or its folder cannot be written.
    """
    if file.is_dir():
        raise ConfigError(f"{file} is a folder", key=key, expected="a file to write")
    claim_folder(file.parent, key=key)


def checkpoint_bytes(num_weights: int, optim: OptimConfig) -> int:
    """Return the bytes of a model's part of a checkpoint.

    Args:
        num_weights: The number of its trained weights.
        optim: Its optimizer.
    """
    # The weights and two moments each, in float32; Muon's matrices have one.
    return 4 * (2 if optim.name == "muon" else 3) * num_weights


def check_disk_space(folder: Path, needed: int) -> None:
    """Refuse a run if its checkpoint does not fit on the disk; it may be written after days.

    Args:
        folder: The run's folder.
        needed: The bytes of a checkpoint.

    Raises:
        ConfigError: with the needed and the free space.
    """
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise ConfigError(
            f"a checkpoint takes {_size(needed)}, and {_size(free)} are free",
            key="trainer.default_local_dir",
            expected="a folder on a disk with enough space for a checkpoint",
        )


def _size(num_bytes: int) -> str:
    unit, factor = ("GB", 1e9) if num_bytes >= 1e8 else ("MB", 1e6)
    return f"{num_bytes / factor:.2f} {unit}"


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """Make output paths and the model's path absolute, because a tool may change the directory.

    A model's name is kept if there is no such folder: then it is a hub name.
    """
    trainer = config.trainer
    paths = {n: v.absolute() for n in type(trainer).model_fields
             if isinstance(v := getattr(trainer, n), Path)}  # fmt: skip
    model = config.model
    if Path(model.path).is_dir() or is_made_later(config, Path(model.path)):
        model = model.model_copy(update={"path": str(Path(model.path).absolute())})
    if (adapter := model.lora_adapter_path) is not None and Path(adapter).is_dir():
        model = model.model_copy(update={"lora_adapter_path": str(Path(adapter).absolute())})
    return config.model_copy(update={"trainer": trainer.model_copy(update=paths), "model": model})


def claim_folder(folder: Path, *, key: str) -> None:
    """Create a folder and try to write in it.

    Raises:
        ConfigError: if that fails.
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
