"""A trainer that is killed in the middle of a step."""

from typing import Any

from agentrl import Trainer


class Killed(BaseException):
    """Stands in for the kill of the process."""


class KilledTrainer(Trainer):
    """Raises `Killed` before or after the update of a step."""

    ends_at: tuple[str, int] | None = None

    def update_actor(self, batch: Any) -> Any:
        if self.ends_at == ("before", self.step):
            raise Killed
        result = super().update_actor(batch)
        if self.ends_at == ("after", self.step):
            raise Killed
        return result
