"""The ledger of one request: its tokens, what is trained of them, and what sampled them.

Tokens enter by two doors and never leave. The checks stand at the doors and cost what the new
tokens cost, so that a long conversation is not validated again at every turn.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any, Self

from pydantic import ValidationError, model_validator

from agentrl.errors import LedgerError
from agentrl.rollout.records import Failure, Record, Turn, to_plain
from agentrl.rollout.states import ENDS, FINAL_STATES, RequestState, StopReason

_ROUNDING = 1e-4
"""How far above 0 the log-probability of a certain token may come out of an engine."""


class Ledger:
    """Four lists that agree at every moment (ledger consistency).

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

    def append_sampled(self, ids: Sequence[int], log_probs: Sequence[float]) -> tuple[int, int]:
        """Append what the policy sampled, verbatim. Returns its span in the response.

        Raises:
            LedgerError: where lengths differ, or a log-probability is not a finite number <= 0.
        """
        if len(ids) != len(log_probs):
            raise LedgerError(f"{len(ids)} sampled tokens with {len(log_probs)} log-probabilities")
        numbers = _as_numbers(log_probs)
        # One number that is not finite leaves a sum that is not.
        if not math.isfinite(sum(numbers)) or max(numbers, default=0.0) > _ROUNDING:
            _check_each(numbers)
        return self._append(ids, 1, numbers)

    def append_observed(self, ids: Sequence[int]) -> tuple[int, int]:
        """Append what the policy was shown. Returns its span in the response."""
        return self._append(ids, 0, [0.0] * len(ids))

    def exclude(self, start: int, end: int) -> None:
        """Leave the tokens `[start, end)` of the response out of the loss."""
        self.loss_mask[start:end] = [0] * (end - start)

    def _append(self, ids: Sequence[int], mask: int, log_probs: list[float]) -> tuple[int, int]:
        new = _as_ids(ids)
        start = len(self.response_ids)
        self.response_ids += new
        self.loss_mask += [mask] * len(new)
        self.rollout_log_probs += log_probs
        return start, len(self.response_ids)


def make_turn(**fields: Any) -> Turn:
    """Make the record of a turn.

    Raises:
        LedgerError: for fields that a turn does not have, or versions of other tokens than its own.
    """
    try:
        turn = Turn(**fields)
    except ValidationError as error:
        raise LedgerError(f"no record of a turn: {error}") from None
    spans = turn.weight_versions
    if spans and not _covers([(span.start, span.end) for span in spans], turn.num_tokens):
        raise LedgerError(f"the versions {spans} do not cover {turn.num_tokens} tokens")
    return turn


def check_ledger(ledger: Ledger, turns: Sequence[Turn]) -> None:
    """Hold a ledger that comes from outside, such as a saved one, against its turns (ledger
    consistency).

    Raises:
        LedgerError: where the lists do not agree, or the turns do not account for each token.
    """
    num_tokens = len(ledger.response_ids)
    if {len(ledger.loss_mask), len(ledger.rollout_log_probs)} != {num_tokens}:
        raise LedgerError("tokens, mask and log-probabilities of different lengths")
    if not _covers([(turn.start, turn.end) for turn in turns], num_tokens):
        raise LedgerError("turns that do not cover the response")
    for turn in turns:
        _check_turn(ledger, turn)


def _covers(spans: Sequence[tuple[int, int]], num_tokens: int) -> bool:
    """Whether spans follow each other without a gap, from the first token to the last."""
    behind = 0
    for start, end in spans:
        if not behind == start <= end:
            return False
        behind = end
    return behind == num_tokens


def _check_turn(ledger: Ledger, turn: Turn) -> None:
    own = slice(turn.start, turn.end)
    is_sampled = turn.role == "assistant"
    mask = [int(is_sampled and turn.excluded is None)] * turn.num_tokens
    if ledger.loss_mask[own] != mask or not (is_sampled or not any(ledger.rollout_log_probs[own])):
        raise LedgerError(f"turn {turn.index} is {turn.role}'s, and its tokens say otherwise")


def _check_each(log_probs: Sequence[float]) -> None:
    """Find the number that is no log-probability; there is none where only their sum overflows."""
    for number in log_probs:
        if not (math.isfinite(number) and number <= _ROUNDING):
            raise LedgerError(f"{number} is no log-probability", expected="a finite number <= 0")


def _as_ids(ids: Sequence[int]) -> list[int]:
    try:
        checked = array("Q", ids)
    except (TypeError, OverflowError) as error:
        raise LedgerError(f"not a token id: {error}", expected="an integer >= 0") from None
    # A sum of plain integers is plain; one of numpy's or torch's is theirs.
    return list(ids) if type(sum(ids)) is int else checked.tolist()


def _as_numbers(log_probs: Sequence[float]) -> list[float]:
    try:
        return list(map(float, log_probs))
    except (TypeError, ValueError) as error:
        expected = "a finite number <= 0"
        raise LedgerError(f"not a log-probability: {error}", expected=expected) from None


RECORD_VERSION = 1
"""Version of the saved form of a request; raised when its meaning changes."""


class SavedState(Record):
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


def split_saved(saved: dict[str, Any]) -> tuple[dict[str, Any], SavedState]:
    """Split a saved request into its public fields and its checked private half.

    Raises:
        ValueError: where it was saved in another version, or its parts do not agree.
    """
    if saved["version"] != RECORD_VERSION:
        raise ValueError(f"a request saved in version {saved['version']}, not {RECORD_VERSION}")
    names = SavedState.model_fields
    public = {name: value for name, value in saved.items() if name not in names}
    private = {name: value for name, value in saved.items() if name in names}
    return public, SavedState.model_validate(private)
