"""A trainer whose process ends in the middle of a step, and nobody hears of it."""

from typing import Any

from agentrl import Trainer


class Killed(BaseException):
    """The process ends here."""


class Mortal(Trainer):
    """Ends before or behind the update of a step."""

    ends_at: tuple[str, int] | None = None

    def update_actor(self, batch: Any) -> Any:
        if self.ends_at == ("before", self.step):
            raise Killed
        result = super().update_actor(batch)
        if self.ends_at == ("behind", self.step):
            raise Killed
        return result
