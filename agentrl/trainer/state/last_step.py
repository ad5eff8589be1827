"""Where a run stood when its last step was finished, for a run that ends in the middle of one."""

from dataclasses import dataclass, replace
from typing import Any

from agentrl.data.order import DataOrder
from agentrl.trainer.state.summary import Summary
from agentrl.workers.actor import Actor, ActorCounters
from agentrl.workers.rng import RandomState, capture_random_state, restore_random_state


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a checkpoint of a finished step holds beside tensors."""

    step: int
    summary: Summary
    """A copy."""
    unlogged: dict[str, float] | None
    """Figures of the step whose validation is still to come; None: its line is written."""
    data: dict[str, Any]
    """Of the data's order."""
    random: RandomState
    """This rank's."""
    counters: ActorCounters


class LastStep:
    """Keeps the mark of the last finished step, and goes back to it.

    A step that was begun has taken prompts and drawn numbers, and moves the weights late: until
    then the run can be given back what it took, and saved as it stood.

    Args:
        order: Of the data.
        actor: Of this rank.
    """

    def __init__(self, order: DataOrder, actor: Actor) -> None:
        self._order = order
        self._actor = actor
        self.mark: Mark | None = None

    @property
    def step(self) -> int:
        """The step that was finished last; 0: none."""
        return 0 if self.mark is None else self.mark.step

    @property
    def unlogged(self) -> dict[str, float] | None:
        """Figures that are still to be logged."""
        return None if self.mark is None else self.mark.unlogged

    def note(self, step: int, summary: Summary, unlogged: dict[str, float] | None = None) -> None:
        """Note where the run stands: a step is finished, and the next not begun."""
        self.mark = Mark(
            step=step,
            summary=replace(summary),
            unlogged=unlogged,
            data=self._order.state_dict(),
            random=capture_random_state(),
            counters=self._actor.counters(),
        )

    def is_lost(self) -> bool:
        """Whether the weights have moved since."""
        return self.mark is not None and self.mark.counters != self._actor.counters()

    def go_back(self) -> Mark | None:
        """Put the data's order and the random streams back; None: there is no step to go back to.

        The weights must not have moved.
        """
        if self.mark is None or self.mark.step == 0:
            return None
        self._order.load_state_dict(self.mark.data)
        restore_random_state(self.mark.random)
        return self.mark
