"""The ledger of one request: its tokens, their mask and log-probabilities; and its saved form.

Tokens are appended by two methods and never removed. Appending checks only the new tokens, so its
cost does not grow with the conversation. A saved request is checked once, when it is loaded.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, ValidationError, model_validator

from agentrl.errors import LedgerError
from agentrl.rollout.records import Failure, MediaRun, Record, Turn, to_plain
from agentrl.rollout.states import ENDS, FINAL_STATES, RequestState, StopReason

_ROUNDING = 1e-4
"""How far above 0 an engine may report the log-probability of a certain token."""
_NUMBER = "a finite number <= 0"


class Ledger:
    """Four lists that always agree (ledger consistency).

    Attributes:
        prompt_ids: Tokens before the first sampled one, generation prompt included.
        response_ids: All tokens after the prompt, sampled and observed, in order.
        loss_mask: 1 for each response token that is trained, 0 for the others.
        rollout_log_probs: Log-probability at sampling; 0.0 for observed tokens.
    """

    __slots__ = ("loss_mask", "prompt_ids", "response_ids", "rollout_log_probs")

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self.prompt_ids: list[int] = _as_ids(prompt_ids)
        self.response_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.rollout_log_probs: list[float] = []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Ledger):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in Ledger.__slots__)

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def append_sampled(self, ids: Sequence[int], log_probs: Sequence[float]) -> None:
        """Append sampled tokens, verbatim, with mask 1.

        Raises:
            LedgerError: If the lengths differ, or a log-probability is not a finite number <= 0.
        """
        if len(ids) != len(log_probs):
            raise LedgerError(f"{len(ids)} sampled tokens with {len(log_probs)} log-probabilities")
        try:
            numbers = list(map(float, log_probs))
        except (TypeError, ValueError) as error:
            raise LedgerError(f"not a log-probability: {error}", expected=_NUMBER) from None
        # A sum is not finite if one of its numbers is not. If only the sum overflows, all is well.
        if not math.isfinite(sum(numbers)) or max(numbers, default=0.0) > _ROUNDING:
            for number in numbers:
                if not (math.isfinite(number) and number <= _ROUNDING):
                    raise LedgerError(f"{number} is not a log-probability", expected=_NUMBER)
        self._append(ids, 1, numbers)

    def append_observed(self, ids: Sequence[int]) -> None:
        """Append tokens that the policy was shown, with mask 0."""
        self._append(ids, 0, [0.0] * len(ids))

    def exclude(self, start: int, end: int) -> None:
        """Exclude the tokens `[start, end)` of the response from the loss."""
        self.loss_mask[start:end] = [0] * (end - start)

    def _append(self, ids: Sequence[int], mask: int, log_probs: list[float]) -> None:
        new = _as_ids(ids)
        self.response_ids += new
        self.loss_mask += [mask] * len(new)
        self.rollout_log_probs += log_probs


def _as_ids(ids: Sequence[int]) -> list[int]:
    try:
        checked = array("Q", ids)
    except (TypeError, OverflowError) as error:
        raise LedgerError(f"not a token id: {error}", expected="an integer >= 0") from None
    # The sum of plain integers is a plain integer; that of numpy's or torch's integers is not.
    return list(ids) if type(sum(ids)) is int else checked.tolist()


def make_turn(**fields: Any) -> Turn:
    """Make the record of a turn.

    Raises:
        LedgerError: For unknown fields, or weight versions that do not cover the turn's tokens.
    """
    try:
        turn = Turn(**fields)
    except ValidationError as error:
        raise LedgerError(f"not a record of a turn: {error}") from None
    spans = turn.weight_versions
    if spans and not _covers([(span.start, span.end) for span in spans], turn.num_tokens):
        raise LedgerError(f"the versions {spans} do not cover {turn.num_tokens} tokens")
    return turn


def _covers(spans: Sequence[tuple[int, int]], num_tokens: int) -> bool:
    """Whether the spans follow each other without a gap, from the first token to the last."""
    covered = 0
    for start, end in spans:
        if not covered == start <= end:
            return False
        covered = end
    return covered == num_tokens


def check_ledger(ledger: Ledger, turns: Sequence[Turn]) -> None:
    """Check a loaded ledger against its turns (ledger consistency).

    Raises:
        LedgerError: If the lists do not agree, or the turns do not account for each token.
    """
    num_tokens = len(ledger.response_ids)
    if {len(ledger.loss_mask), len(ledger.rollout_log_probs)} != {num_tokens}:
        raise LedgerError("tokens, mask and log-probabilities have different lengths")
    if not _covers([(turn.start, turn.end) for turn in turns], num_tokens):
        raise LedgerError("the turns do not cover the response")
    for turn in turns:
        own = slice(turn.start, turn.end)
        is_sampled = turn.role == "assistant"
        mask = [int(is_sampled and turn.excluded is None)] * turn.num_tokens
        has_log_probs = any(ledger.rollout_log_probs[own])
        if ledger.loss_mask[own] != mask or (has_log_probs and not is_sampled):
            raise LedgerError(f"turn {turn.index} of {turn.role} does not match its tokens")


RECORD_VERSION = 1
"""Version of the saved form of a request. It increases when the meaning changes."""


class SavedState(Record):
    """State, turns and ledger of a saved request."""

    version: int
    """`RECORD_VERSION` at saving."""
    state: RequestState
    stop_reason: StopReason | None
    error: Failure | None
    turns: list[Turn]
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    rollout_log_probs: list[float]
    media_runs: list[MediaRun] = Field(default_factory=list[MediaRun])

    @property
    def ledger(self) -> Ledger:
        """The ledger of the saved lists."""
        ledger = Ledger(self.prompt_ids)
        ledger.response_ids = self.response_ids
        ledger.loss_mask = self.loss_mask
        ledger.rollout_log_probs = self.rollout_log_probs
        return ledger

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_ledger(self.ledger, self.turns)
        num_tokens, end = len(self.prompt_ids) + len(self.response_ids), 0
        for run in self.media_runs:
            if not end <= run.start < run.end <= num_tokens:
                raise ValueError(f"a run of placeholder tokens from {run.start} to {run.end}")
            end = run.end
        end = None if self.stop_reason is None else ENDS[self.stop_reason].state
        has_error = (self.error is not None) is (self.state is RequestState.FAILED)
        if end is not (self.state if self.state in FINAL_STATES else None) or not has_error:
            raise ValueError(
                f"a request that is {self.state}, with the stop reason {self.stop_reason} and "
                f"{'an' if self.error else 'no'} error"
            )
        return self


def save_state(
    state: RequestState,
    stop_reason: StopReason | None,
    error: Failure | None,
    turns: Sequence[Turn],
    ledger: Ledger,
    media_runs: Sequence[MediaRun],
) -> dict[str, Any]:
    """Return the fields of `SavedState` as plain values."""
    media = [run.model_dump() for run in media_runs]
    return {
        "version": RECORD_VERSION,
        "state": str(state),
        "stop_reason": stop_reason and str(stop_reason),
        "error": error and error.model_dump(mode="json"),
        "turns": [turn.model_dump(mode="json", fallback=to_plain) for turn in turns],
        **{name: list(getattr(ledger, name)) for name in Ledger.__slots__},
        **({"media_runs": media} if media else {}),
    }


def split_saved(saved: dict[str, Any]) -> tuple[dict[str, Any], SavedState]:
    """Split a saved request into its fields and its checked state.

    Raises:
        ValueError: If it was saved in another version, or its parts do not agree.
    """
    if saved["version"] != RECORD_VERSION:
        raise ValueError(f"a request saved in version {saved['version']}, not {RECORD_VERSION}")
    names = SavedState.model_fields
    fields = {name: value for name, value in saved.items() if name not in names}
    state = {name: value for name, value in saved.items() if name in names}
    return fields, SavedState.model_validate(state)
