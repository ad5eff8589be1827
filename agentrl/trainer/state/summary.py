"""The result of a run, in one small file."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Self

from agentrl.atomic_io import atomic_file
from agentrl.errors import TrainingError
from agentrl.messages import dump_json
from agentrl.trainer.metrics.sinks import has_no_signal
from agentrl.workers.update import UpdateResult

SKIPPED_UPDATES = {"actor": "skipped_updates", "critic": "skipped_critic_updates"}
"""The field that counts the skipped updates of a trained model."""

_CLEAR_FALL, _CLEAR_FALL_FRAC = 0.05, 0.2
"""The last success is clearly worse than the best one if it is lower by more than either."""


@dataclass(slots=True)
class Summary:
    """The numbers by which a run is judged. `None`: not measured."""

    seed: int
    steps: int = 0
    """Completed training steps."""
    steps_without_signal: int = 0
    """Steps in which no group had a learning signal: every advantage was 0."""
    num_val: int = 0
    """Problems of the first validation set."""
    val_success_before: float | None = None
    """Success on the first validation set before the first step."""
    val_success_after: float | None = None
    """Success after the last step."""
    others_before: dict[str, float] = field(default_factory=dict[str, float])
    """Success on the other validation sets by name, before the first step."""
    others_after: dict[str, float] = field(default_factory=dict[str, float])
    """Success on the other validation sets by name, after the last step."""
    best_val_success: float | None = None
    best_step: int | None = None
    val_step: int | None = None
    """The step that was validated last."""
    best_saved_step: int | None = None
    """The best of the validated steps that have a checkpoint; its checkpoint is kept."""
    best_saved_success: float | None = None
    seconds_prepare: float = 0.0
    """Seconds that preparing data, policy and warm-up took."""
    seconds_total: float = 0.0
    """Seconds of preparation, training, validation and saving, over all attempts of a run."""
    skipped_updates: int = 0
    """Consecutive last updates of the policy of which every optimizer step was skipped (not
    finite)."""
    skipped_critic_updates: int = 0
    """The same of the critic."""
    checkpoint: str | None = None
    """The last checkpoint."""
    exported: str | None = None
    """The trained policy as a Hugging Face folder."""

    def count_preparation(self, seconds: float) -> None:
        """Add the seconds that preparation took."""
        self.seconds_prepare += seconds
        self.seconds_total += seconds

    def note_validation(self, step: int, success: dict[str, float], num_val: int) -> None:
        """Record the success rates of one validation, by set."""
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
        """Record that a step is saved; if it is also validated, it may be the best saved step."""
        success = self.val_success_after
        if success is None or self.val_step != step:
            return
        if self.best_saved_success is None or success > self.best_saved_success:
            self.best_saved_step, self.best_saved_success = step, success

    def note_update(self, role: str, result: UpdateResult) -> None:
        """Count consecutive skipped updates of the policy (`actor`) or the `critic`."""
        name = SKIPPED_UPDATES[role]
        if result.metrics[f"{role}/optimizer_steps"]:
            setattr(self, name, 0)
        elif result.skipped:
            setattr(self, name, getattr(self, name) + 1)

    def note_signal(self, metrics: Mapping[str, float]) -> None:
        """Count a step without a learning signal."""
        self.steps_without_signal += has_no_signal(metrics)

    def check_skipped_updates(self, role: str, limit: int | None) -> None:
        """End a run in which the policy or the critic no longer trains.

        Args:
            role: `actor` or `critic`.
            limit: Its `max_skipped_updates`.

        Raises:
            TrainingError: if at least so many consecutive updates were skipped.
        """
        if limit is not None and getattr(self, SKIPPED_UPDATES[role]) >= limit:
            raise TrainingError(
                f"the last {limit} updates of the {role} took no step: none had a finite loss and "
                "gradient",
                key=f"{role}.max_skipped_updates",
                expected="finite numbers: skipped/ in the run's folder has the rows; a lower "
                f"{role}.optim.lr or {role}.grad_clip, or model.dtype=float32, may help",
            )

    def restored(self, snapshot: Self) -> Self:
        """Return the snapshot of a completed step, with the time and the checkpoint of now."""
        return replace(snapshot, seconds_total=self.seconds_total, checkpoint=self.checkpoint)

    def save(self, path: Path) -> None:
        """Write the summary as JSON, whole or not at all."""
        with atomic_file(path) as draft:
            draft.write_text(dump_json(asdict(self), indent=2) + "\n", encoding="utf-8")

    def describe(self, folder: Path | str) -> str:
        """Return the last lines that a run prints."""
        seconds = f"{self.seconds_total - self.seconds_prepare:.0f} s"
        if (preparation := f"{self.seconds_prepare:.0f} s") != "0 s":
            seconds += f", after {preparation} of preparation"
        steps = f"{self.steps} step{'' if self.steps == 1 else 's'}"
        lines = [f"{steps} in {seconds}; all of it in {folder}"]
        if self.steps_without_signal:
            lines.append(
                f"{self.steps_without_signal} of {steps} had no learning signal: "
                "every advantage was 0"
            )
        if self.val_success_after is not None:
            change = _describe_change(self.val_success_before, self.val_success_after)
            lines.append(f"success on {self.num_val} held-out problems: {change}")
        for name, after in self.others_after.items():
            change = _describe_change(self.others_before.get(name), after)
            lines.append(f"success on {name}: {change}")
        if self.exported is not None and self.best_step not in (None, self.steps):
            lines.append(f"{self._describe_best()}; trained/ is the last step, {self.steps}")
        return "\n".join(lines)

    def _describe_best(self) -> str:
        """Describe the best validation, and name its checkpoint if it is better than the start."""
        best, after = self.best_val_success or 0.0, self.val_success_after or 0.0
        described = f"the best validation was {best:.3f} at step {self.best_step}"
        if best - after > min(_CLEAR_FALL, _CLEAR_FALL_FRAC * abs(best)):
            described = f"validation fell from {best:.3f} (step {self.best_step}) to {after:.3f}"
        saved, before = self.best_saved_success, self.val_success_before
        if saved is not None and (before is None or saved > before):
            described += f"; best saved step: global_step_{self.best_saved_step}"
        return described

    def at_stop(self, step: int) -> str:
        """Describe the state of a run that was stopped.

        Args:
            step: The last completed step; 0 if there is none.
        """
        if step == 0:
            return "no step was completed"
        resumes = f"the run resumes from {self.checkpoint}" if self.checkpoint else "no checkpoint"
        return f"step {step} was completed last; {resumes}"


def _describe_change(before: float | None, after: float) -> str:
    return f"{after:.3f}" if before is None else f"{before:.3f} -> {after:.3f}"
