"""A snapshot of the last completed step, for a run that ends in the middle of the next one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.data.order import DataOrder
from agentrl.trainer.state.summary import Summary
from agentrl.workers.rng import RandomState, capture_random_state, restore_random_state
from agentrl.workers.update import UpdateCounters, Updater


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSnapshot:
    """What a checkpoint of a completed step holds besides tensors."""

    step: int
    summary: Summary
    """A copy."""
    unlogged: dict[str, float] | None
    """Metrics of the step if they are not logged yet, because its validation comes first."""
    data: dict[str, Any]
    """State of the data's order."""
    random: RandomState
    """Random state of this rank."""
    counters: list[UpdateCounters]
    """Of each trained model."""


class LastCompletedStep:
    """Keeps the snapshot of the last completed step, and restores it.

    A started step consumes prompts and random numbers, but changes weights only at its end. Until
    then, the data position and the random state can be restored and the previous step saved.

    Args:
        order: The data's order.
        updaters: The trained models of this rank.
    """

    def __init__(self, order: DataOrder, updaters: Sequence[Updater]) -> None:
        self._order = order
        self._updaters = updaters
        self._snapshot: StepSnapshot | None = None

    @property
    def step(self) -> int:
        """The number of the last completed step; 0 if there is none."""
        return 0 if self._snapshot is None else self._snapshot.step

    @property
    def unlogged(self) -> dict[str, float] | None:
        """Metrics that are not logged yet."""
        return None if self._snapshot is None else self._snapshot.unlogged

    def record(self, step: int, summary: Summary, unlogged: dict[str, float] | None = None) -> None:
        """Take the snapshot of a step that is completed, before the next one starts."""
        self._snapshot = StepSnapshot(
            step=step,
            summary=replace(summary),
            unlogged=unlogged,
            data=self._order.state_dict(),
            random=capture_random_state(),
            counters=self._count(),
        )

    def is_overwritten(self) -> bool:
        """Return whether the weights have changed since the snapshot."""
        return self._snapshot is not None and self._snapshot.counters != self._count()

    def _count(self) -> list[UpdateCounters]:
        return [updater.counters() for updater in self._updaters]

    def restore(self) -> StepSnapshot | None:
        """Restore the data's order and the random state; the weights must not have changed.

        Returns:
            None if no step is completed.
        """
        if self._snapshot is None or self._snapshot.step == 0:
            return None
        self._order.load_state_dict(self._snapshot.data)
        restore_random_state(self._snapshot.random)
        return self._snapshot
