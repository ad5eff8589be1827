"""What another course of a run left in its folder, moved out of the way of this one."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.atomic_io import set_aside
from agentrl.config.schema.run import RunConfig, TrainerConfig
from agentrl.trainer.metrics.sinks import METRICS_FILE, move_metrics_aside
from agentrl.trainer.rollouts.files import SKIPPED, find_rollouts
from agentrl.trainer.state.resume import checkpoint_folder
from agentrl.workers.checkpoint import SUPERSEDED, set_aside_later

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
