"""Find the checkpoint that a run resumes from, and archive outputs of an earlier run."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from agentrl.atomic_io import move_into
from agentrl.config.schema.run import RunConfig
from agentrl.errors import CheckpointError
from agentrl.remote_io import Location, locate, write_whole
from agentrl.trainer.metrics.sinks import METRICS_FILE, move_metrics_aside
from agentrl.trainer.rollouts.digests import drop_digests
from agentrl.trainer.rollouts.files import SKIPPED
from agentrl.trainer.rollouts.line_files import find_later_files
from agentrl.trainer.state.run_folder import START_FILE
from agentrl.workers.checkpoint import SUPERSEDED, Checkpoint, newest_first, set_aside_later
from agentrl.workers.distributed import World
from agentrl.workers.snapshot import find_latest, on_main, verify_together

_HASHED_ELSEWHERE: Any = {
    "trainer": True,
    "prepare": True,
    "model": {"path"},
    "data": {"train_files", "val_files"},
}
_NO_STEP = -1
"""Before step 0; the validation of step 0 has a rollout file."""


def saved_folder(config: RunConfig) -> Location:
    """Return the folder of what a run needs to resume: its own, or that in a store."""
    trainer = config.trainer
    return locate(trainer.default_remote_dir or trainer.default_local_dir)


def checkpoint_folder(config: RunConfig) -> Location:
    """Return the folder of a run's checkpoints."""
    return saved_folder(config) / "checkpoints"


def find_checkpoint(config: RunConfig, world: World) -> Checkpoint | None:
    """Find the checkpoint that `trainer.resume_mode` asks for; None to start from the beginning.

    A collective: the ranks verify it together.

    Raises:
        CheckpointError: if `resume_path` names none, or it is damaged.
        StoreError: if its store cannot be read.
    """
    trainer = config.trainer
    match trainer.resume_mode:
        case "disable":
            return None
        case "auto":
            return find_latest(checkpoint_folder(config), world)
        case "resume_path":
            path = None if trainer.resume_from_path is None else locate(trainer.resume_from_path)
            if path is None or not on_main(world, path.is_dir):
                reason = "is not set" if path is None else f"no folder {path}"
                example = checkpoint_folder(config) / "global_step_10"
                raise CheckpointError(
                    f"trainer.resume_from_path: {reason}",
                    key="trainer.resume_from_path",
                    expected=f"a checkpoint's folder, such as {example}",
                )
            return verify_together(path, world)


def policy_origin(config: RunConfig) -> str:
    """Identify the policy that a run begins from, by its manifest or the sizes of its weights.

    A hub name is used as it is. Weights are not read, because they may be hundreds of GiB, except
    those of an adapter.
    """
    folder = Path(config.model.path)
    manifest = folder / "manifest.json"
    if manifest.is_file():
        origin = hashlib.sha256(manifest.read_bytes())
    else:
        weights = [(p.name, p.stat().st_size) for p in sorted(folder.glob("*.safetensors"))]
        origin = hashlib.sha256(repr(weights or config.model.path).encode())
    if (adapter := config.model.lora_adapter_path) is not None:
        files = sorted(Path(adapter).glob("*.safetensors"))
        origin.update(b"".join(p.read_bytes() for p in files) or adapter.encode())
    return origin.hexdigest()


def check_origin(origin: str, config: RunConfig, path: Location) -> None:
    """Refuse a checkpoint of a run that began from another policy.

    Raises:
        CheckpointError: naming the checkpoint.
    """
    if origin and origin != policy_origin(config):
        raise CheckpointError(
            f"{path.name} is of a run that began from another policy than {config.model.path}",
            path=path,
            expected="trainer.resume_mode=disable to start again, another "
            "trainer.default_local_dir, or the policy that the run began from",
        )


def config_digest(config: RunConfig, *, total_steps: int, device: str) -> str:
    """Hash the part of a configuration that decides what is sampled and trained.

    This is every section except `prepare`, the paths of policy and data (their content is hashed
    elsewhere) and `trainer`, of which only the seed counts: outputs change no step, and neither
    does the number of steps, unless the learning rate decreases towards the last one.

    Args:
        config: The run's configuration.
        total_steps: Training steps of the whole run.
        device: The type of the run's device, `cpu` or `cuda`.
    """
    kept = config.model_dump(mode="json", exclude=_HASHED_ELSEWHERE)
    schedules = config.actor.optim.lr_scheduler, config.critic.optim.lr_scheduler
    decreases = any(schedule != "constant" for schedule in schedules)
    kept["trainer"] = {
        "seed": config.trainer.seed,
        "device": device,
        "falls_over": total_steps if decreases else None,
    }
    return hashlib.sha256(repr(kept).encode()).hexdigest()


def start_date(config: RunConfig, world: World) -> datetime:
    """Return today, or the start date of the run that is resumed; the main rank decides."""

    def find_or_write() -> datetime:
        path, now = saved_folder(config) / START_FILE, datetime.now()
        if has_steps_to_resume(config) and path.is_file():
            return read_start_date(config) or now
        write_whole(path, f"{now.isoformat()}\n".encode())
        return now

    return on_main(world, find_or_write)


def has_steps_to_resume(config: RunConfig) -> bool:
    """Whether the run has a checkpoint and may resume; it is not verified here."""
    is_asked = config.trainer.resume_mode != "disable"
    return is_asked and bool(newest_first(checkpoint_folder(config)))


def read_start_date(config: RunConfig) -> datetime | None:
    """Return the start date that a run saved, which its templates write; None if it has none."""
    path = saved_folder(config) / START_FILE
    try:
        return datetime.fromisoformat(path.read_bytes().decode().strip())
    except (FileNotFoundError, ValueError):
        return None


# Outputs of an earlier run.


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchivedOutputs:
    """New paths of the files that were moved."""

    damaged: Sequence[Location] = ()
    """Damaged checkpoints that were skipped; the run repeats their steps."""
    checkpoints: Sequence[Location] = ()
    """Checkpoints of the earlier run."""
    rollouts: Sequence[Path] = ()
    metrics: Path | None = None

    def describe(self) -> Iterator[str]:
        """Yield a line for each damaged checkpoint, and one for all other files."""
        for path in self.damaged:
            yield f"skipped a damaged checkpoint, which is now {path}"
        moves = [
            f"{num} {noun}{'s' if num > 1 else ''} -> {folder}"
            for noun, paths in (("checkpoint", self.checkpoints), ("rollout file", self.rollouts))
            for folder, num in Counter(path.parent for path in paths).items()
        ]
        if self.metrics is not None:
            moves.append(f"{METRICS_FILE} -> {self.metrics}")
        if moves:
            yield f"moved files of an earlier run: {', '.join(moves)}"


def archive_earlier_outputs(config: RunConfig, path: Location | None, step: int) -> ArchivedOutputs:
    """Move away files of an earlier run that would be mistaken for files of this run.

    These are checkpoints that a later `auto` would resume from, and rollouts between the new ones.
    A run that resumes with `auto` continues the earlier run: it moves only damaged checkpoints, and
    overwrites the rollouts of a killed attempt. A run that only validates writes no checkpoints and
    moves none. Only the main rank calls this, after the run has read its checkpoint.

    Args:
        config: The run's configuration.
        path: The checkpoint that the run resumes from; None if it starts from the beginning.
        step: The step that it resumes from.

    Raises:
        CheckpointError: if checkpoints cannot be moved.
        OSError: if another file cannot be moved.
    """
    trainer = config.trainer
    metrics = None
    if path is None:
        metrics = move_metrics_aside(trainer.default_local_dir / METRICS_FILE)
    if trainer.val_only:
        return ArchivedOutputs(metrics=metrics)
    root = checkpoint_folder(config)
    is_own = path is not None and _resolve(path).parent == _resolve(root)
    last_kept = step if is_own else _NO_STEP
    later = set_aside_later(root, last_kept)
    if trainer.resume_mode == "auto":
        return ArchivedOutputs(damaged=later, metrics=metrics)
    skipped = trainer.default_local_dir / SKIPPED
    given = (trainer.rollout_data_dir, trainer.validation_data_dir, skipped)
    folders = [folder for folder in given if folder is not None]
    for folder in folders:
        drop_digests(folder, after=last_kept)
    rollouts = [
        moved
        for folder in folders
        for moved in move_into(find_later_files(folder, last_kept), folder / SUPERSEDED)
    ]
    return ArchivedOutputs(checkpoints=later, rollouts=rollouts, metrics=metrics)


def _resolve(path: Location) -> Location:
    return path.resolve() if isinstance(path, Path) else path
