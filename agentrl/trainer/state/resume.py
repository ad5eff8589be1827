"""Which checkpoint a run goes on from."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from agentrl.atomic_io import set_aside, written_whole
from agentrl.config.schema.run import RunConfig, TrainerConfig
from agentrl.errors import CheckpointError
from agentrl.trainer.metrics.sinks import METRICS_FILE, move_metrics_aside
from agentrl.trainer.rollouts.files import SKIPPED, find_rollouts
from agentrl.workers.checkpoint import SUPERSEDED, find_latest, set_aside_later
from agentrl.workers.distributed import World
from agentrl.workers.snapshot import on_main

CHECKPOINTS = "checkpoints"
_HASHED_ELSEWHERE: Any = {
    "trainer": True,
    "prepare": True,
    "model": {"path"},
    "data": {"train_files", "val_files"},
}


def checkpoint_folder(config: RunConfig) -> Path:
    """Where the checkpoints of a run lie."""
    return config.trainer.default_local_dir / CHECKPOINTS


def has_checkpoints(config: RunConfig) -> bool:
    """Whether a run has written any; none is read."""
    return any(checkpoint_folder(config).glob("global_step_*"))


def find_checkpoint(config: RunConfig) -> Path | None:
    """Find the checkpoint that `trainer.resume_mode` asks for; None: begin anew.

    Raises:
        CheckpointError: where `resume_path` names none.
    """
    trainer = config.trainer
    match trainer.resume_mode:
        case "disable":
            return None
        case "auto":
            return find_latest(checkpoint_folder(config))
        case "resume_path":
            path = trainer.resume_from_path
            if path is None or not path.is_dir():
                told = "is not set" if path is None else f"no folder {path}"
                raise CheckpointError(
                    f"trainer.resume_from_path: {told}",
                    key="trainer.resume_from_path",
                    expected="a checkpoint's folder, such as "
                    f"{checkpoint_folder(config) / 'global_step_10'}",
                )
            return path


def policy_origin(config: RunConfig) -> str:
    """Say which policy a run begins from: what made it, or the sizes of its weights.

    A hub's name stands for itself. Weights themselves are not read: they may be hundreds of GiB.
    """
    folder = Path(config.model.path)
    manifest = folder / "manifest.json"
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    weights = [(p.name, p.stat().st_size) for p in sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256(repr(weights or config.model.path).encode()).hexdigest()


def check_origin(origin: str, config: RunConfig, path: Path) -> None:
    """Refuse a checkpoint of a run that began from another policy.

    Raises:
        CheckpointError: naming the checkpoint.
    """
    if origin and origin != policy_origin(config):
        raise CheckpointError(
            f"{path.name} is of a run that began from another policy than {config.model.path}",
            path=path,
            expected="trainer.resume_mode=disable to begin anew, another "
            "trainer.default_local_dir, or the policy that the run began from",
        )


def config_digest(config: RunConfig, *, total_steps: int, device: str) -> str:
    """Hash what of a configuration decides what is sampled and trained, step by step.

    That is every section but `prepare` and the paths of policy and data, whose files are hashed
    elsewhere, and `trainer`, of which the seed counts: what a run writes and where changes no step,
    and how long it goes on none either, unless the learning rate falls towards the last one.

    Args:
        config: Of the run.
        total_steps: Training steps of the whole run.
        device: The kind that it runs on, `cpu` or `cuda`.
    """
    kept = config.model_dump(mode="json", exclude=_HASHED_ELSEWHERE)
    falls = config.actor.optim.lr_scheduler != "constant"
    kept["trainer"] = {
        "seed": config.trainer.seed,
        "device": device,
        "falls_over": total_steps if falls else None,
    }
    return hashlib.sha256(repr(kept).encode()).hexdigest()


START_FILE = "started"


def start_date(config: RunConfig, world: World) -> datetime:
    """Give the date of a run: today, or that on which the run that is resumed began.

    The main rank decides for all.
    """
    return on_main(world, lambda: _start_date(config))


def _start_date(config: RunConfig) -> datetime:
    path = config.trainer.default_local_dir / START_FILE
    goes_on = config.trainer.resume_mode != "disable" and has_checkpoints(config)
    if goes_on and path.is_file():
        return _read(path)
    now = datetime.now()
    with written_whole(path) as draft:
        draft.write_text(now.isoformat() + "\n", encoding="utf-8")
    return now


def _read(path: Path) -> datetime:
    try:
        return datetime.fromisoformat(path.read_text(encoding="utf-8").strip())
    except ValueError:
        return datetime.now()


_NO_STEP = -1
"""Before step 0, whose validation has a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAside:
    """What was moved, by where it lies now."""

    damaged: list[Path] = field(default_factory=list[Path])
    """Checkpoints that were passed over; the run takes their steps again."""
    checkpoints: list[Path] = field(default_factory=list[Path])
    """Those of the other course."""
    rollouts: list[Path] = field(default_factory=list[Path])
    metrics: Path | None = None

    def in_words(self) -> Iterator[str]:
        """Tell of each damaged checkpoint in a line, and in one of all that was left behind."""
        for path in self.damaged:
            yield f"a damaged checkpoint was passed over, and is now {path}"
        moves = [*_moves("checkpoint", self.checkpoints), *_moves("rollout file", self.rollouts)]
        if self.metrics is not None:
            moves.append(f"{METRICS_FILE} -> {self.metrics}")
        if moves:
            yield f"set aside, of the run that was here before: {', '.join(moves)}"


def set_aside_superseded(config: RunConfig, path: Path | None, step: int) -> SetAside:
    """Move aside what would be taken for this run's own.

    Such are checkpoints that a later `auto` would go on from, and rollouts that lie among the new
    ones. `auto` itself stays on its course: it moves what is damaged, and writes its rollouts anew
    over those of a killed attempt. A run that only validates writes no checkpoint, and moves none.
    The main rank alone calls it, once the run has read the checkpoint that it goes on from.

    Args:
        config: Of the run.
        path: The checkpoint that it goes on from; None: it begins anew.
        step: The step that it goes on from.

    Raises:
        CheckpointError: where checkpoints cannot be moved.
        OSError: where another file cannot be.
    """
    trainer = config.trainer
    metrics = None
    if path is None:
        metrics = move_metrics_aside(trainer.default_local_dir / METRICS_FILE)
    if trainer.val_only:
        return SetAside(metrics=metrics)
    root = checkpoint_folder(config)
    is_own = path is not None and path.resolve().parent == root.resolve()
    kept = step if is_own else _NO_STEP
    later = set_aside_later(root, kept)
    if trainer.resume_mode == "auto":
        return SetAside(damaged=later, metrics=metrics)
    rollouts = _set_rollouts_aside(trainer, kept)
    return SetAside(checkpoints=later, rollouts=rollouts, metrics=metrics)


def _set_rollouts_aside(trainer: TrainerConfig, kept: int) -> list[Path]:
    skipped = trainer.default_local_dir / SKIPPED
    folders = (trainer.rollout_data_dir, trainer.validation_data_dir, skipped)
    return [
        moved
        for folder in folders
        if folder is not None
        for moved in set_aside(find_rollouts(folder, after=kept), folder / SUPERSEDED)
    ]


def _moves(what: str, paths: Sequence[Path]) -> Iterator[str]:
    for folder, num in Counter(path.parent for path in paths).items():
        yield f"{num} {what}{'s' if num > 1 else ''} -> {folder}"
