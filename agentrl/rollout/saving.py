"""The saved form of a request: what of it travels beside its public fields, checked on the way in.

The doors of a request keep its ledger and its state right while it lives. What comes back from a
file has passed no door, so it is held against the same invariants once, when it is read.
"""

from typing import Any, Self

from pydantic import model_validator

from agentrl.rollout.ledger import Ledger, check_ledger
from agentrl.rollout.records import Failure, Record, Turn, to_plain
from agentrl.rollout.states import ENDS, FINAL_STATES, RequestState, StopReason

RECORD_VERSION = 1
"""Version of the saved form of a request; raised when its meaning changes."""


class PrivateHalf(Record):
    """State, turns and ledger of a request."""

    version: int
    """`RECORD_VERSION` of whoever saved it."""
    state: RequestState
    stop_reason: StopReason | None
    error: Failure | None
    turns: list[Turn]
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    rollout_log_probs: list[float]

    @property
    def ledger(self) -> Ledger:
        """The ledger that the lists are."""
        ledger = Ledger(self.prompt_ids)
        ledger.response_ids = self.response_ids
        ledger.loss_mask = self.loss_mask
        ledger.rollout_log_probs = self.rollout_log_probs
        return ledger

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        check_ledger(self.ledger, self.turns)
        end = None if self.stop_reason is None else ENDS[self.stop_reason].state
        is_explained = (self.error is not None) is (self.state is RequestState.FAILED)
        if end is not (self.state if self.state in FINAL_STATES else None) or not is_explained:
            raise ValueError(
                f"a request that is {self.state}, with the stop reason {self.stop_reason} and "
                f"{'an' if self.error else 'no'} error"
            )
        return self


def save_private(
    state: RequestState,
    stop_reason: StopReason | None,
    error: Failure | None,
    turns: list[Turn],
    ledger: Ledger,
) -> dict[str, Any]:
    """Write the private half of a request as plain values."""
    return {
        "version": RECORD_VERSION,
        "state": str(state),
        "stop_reason": stop_reason and str(stop_reason),
        "error": error and error.model_dump(mode="json"),
        "turns": [turn.model_dump(mode="json", fallback=to_plain) for turn in turns],
        **{name: list(getattr(ledger, name)) for name in Ledger.__slots__},
    }


def split_saved(saved: dict[str, Any]) -> tuple[dict[str, Any], PrivateHalf]:
    """Split a saved request into its public fields and its checked private half.

    Raises:
        ValueError: where it was saved in another version, or its parts do not agree.
    """
    if saved["version"] != RECORD_VERSION:
        raise ValueError(f"a request saved in version {saved['version']}, not {RECORD_VERSION}")
    names = PrivateHalf.model_fields
    public = {name: value for name, value in saved.items() if name not in names}
    private = {name: value for name, value in saved.items() if name in names}
    return public, PrivateHalf.model_validate(private)
