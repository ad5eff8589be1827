"""What came of a run, in one small file."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from agentrl.atomic_io import written_whole
from agentrl.errors import TrainingError
from agentrl.trainer.metrics.sinks import has_no_signal
from agentrl.workers.actor import UpdateResult


@dataclass(slots=True)
class Summary:
    """The figures by which a run is judged. `None`: not measured."""

    seed: int
    steps: int = 0
    """Training steps done."""
    steps_without_signal: int = 0
    """Those of them in which no group had a learning signal: every advantage was 0."""
    num_val: int = 0
    """Problems of the first validation set."""
    val_success_before: float | None = None
    """Share of them solved before the first step."""
    val_success_after: float | None = None
    """The same after the last."""
    others_before: dict[str, float] = field(default_factory=dict[str, float])
    """The further validation sets by name, before."""
    others_after: dict[str, float] = field(default_factory=dict[str, float])
    """The same, after."""
    best_val_success: float | None = None
    best_step: int | None = None
    val_step: int | None = None
    """The step that was validated last."""
    best_saved_step: int | None = None
    """Of the validated steps that have a checkpoint, the best; its checkpoint is kept."""
    best_saved_success: float | None = None
    seconds_prepare: float = 0.0
    """Data, policy and warm-up, where they were missing."""
    seconds_total: float = 0.0
    """Preparation, training, validation and saving; over all attempts of a resumed run."""
    skipped_updates: int = 0
    """The last updates in a row of which every optimizer step was skipped: not finite."""
    checkpoint: str | None = None
    """The last one."""
    exported: str | None = None
    """The trained policy as a Hugging Face folder."""

    def count_preparation(self, seconds: float) -> None:
        """Count what was spent before the loop."""
        self.seconds_prepare += seconds
        self.seconds_total += seconds

    def note_validation(self, step: int, success: dict[str, float], num_val: int) -> None:
        """Enter the success rates of one validation."""
        if not success:
            return
        first, *others = success
        rest = {name: success[name] for name in others}
        self.num_val = num_val
        if step == 0:
            self.val_success_before, self.others_before = success[first], rest
        self.val_success_after, self.others_after = success[first], rest
        self.val_step = step
        if self.best_val_success is None or success[first] > self.best_val_success:
            self.best_val_success, self.best_step = success[first], step

    def note_checkpoint(self, step: int) -> None:
        """Enter that a step is saved, for the best of the saved ones."""
        success = self.val_success_after
        if success is None or self.val_step != step:
            return
        if self.best_saved_success is None or success > self.best_saved_success:
            self.best_saved_step, self.best_saved_success = step, success

    def note_update(self, result: UpdateResult) -> None:
        """Count on while updates take no step, and from 0 behind one that did."""
        if result.metrics["actor/optimizer_steps"]:
            self.skipped_updates = 0
        elif result.skipped:
            self.skipped_updates += 1

    def note_signal(self, metrics: Mapping[str, float]) -> None:
        """Count a step in which there was nothing to learn."""
        self.steps_without_signal += has_no_signal(metrics)

    def refuse_to_idle(self, most: int | None) -> None:
        """End a run that trains no more.

        Args:
            most: `actor.max_skipped_updates`.

        Raises:
            TrainingError: where more than that were skipped in a row.
        """
        if most is not None and self.skipped_updates >= most:
            raise TrainingError(
                f"the last {most} updates took no step: none had a finite loss and gradient",
                key="actor.max_skipped_updates",
                expected="finite numbers: skipped/ in the run's folder has the rows; a lower "
                "actor.optim.lr or actor.grad_clip, or model.dtype=float32, may help",
            )

    def back_at(self, finished: Self) -> Self:
        """Go back to what a finished step left; time goes on, and what was saved stays."""
        return replace(finished, seconds_total=self.seconds_total, checkpoint=self.checkpoint)

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all."""
        with written_whole(path) as draft:
            draft.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    def in_words(self, folder: Path) -> str:
        """Say what came of the run, for its last lines."""
        lines = [f"{self.steps} steps in {self._times_in_words()}; all of it in {folder}"]
        if self.steps_without_signal:
            lines.append(
                f"{self.steps_without_signal} of {self.steps} steps had no learning signal: "
                "every advantage was 0"
            )
        if self.val_success_after is not None:
            told = _change(self.val_success_before, self.val_success_after)
            lines.append(f"success on {self.num_val} held-out problems: {told}")
        for name, after in self.others_after.items():
            lines.append(f"success on {name}: {_change(self.others_before.get(name), after)}")
        if self.exported is not None and self.best_step not in (None, self.steps):
            lines.append(self._best_in_words())
        return "\n".join(lines)

    def _best_in_words(self) -> str:
        best = f"the best validation was {self.best_val_success:.3f} at step {self.best_step}"
        saved = self.best_saved_step
        kept = f"; best saved step: global_step_{saved}" if saved is not None else ""
        return f"{best}{kept}; trained/ is the last step, {self.steps}"

    def at_stop(self, step: int) -> str:
        """Say where a run stands that was stopped.

        Args:
            step: The one that was finished last; 0: none.
        """
        if step == 0:
            return "no step was finished"
        goes_on = f"the run goes on from {self.checkpoint}" if self.checkpoint else "no checkpoint"
        return f"step {step} was finished last; {goes_on}"

    def _times_in_words(self) -> str:
        steps = f"{self.seconds_total - self.seconds_prepare:.0f} s"
        before = f"{self.seconds_prepare:.0f} s"
        return steps if before == "0 s" else f"{steps}, after {before} of preparation"


def _change(before: float | None, after: float) -> str:
    return f"{after:.3f}" if before is None else f"{before:.3f} -> {after:.3f}"
