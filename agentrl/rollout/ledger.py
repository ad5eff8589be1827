"""The ledger of one request: its tokens, what is trained of them, and what sampled them.

Tokens enter by two doors and never leave. The checks stand at the doors and cost what the new
tokens cost, so that a long conversation is not validated again at every turn.
"""

import math
from collections.abc import Sequence

from agentrl.errors import LedgerError

_ROUNDING = 1e-4
"""How far above 0 the log-probability of a certain token may come out of an engine."""


class Ledger:
    """Four lists that agree at every moment (law 1).

    Attributes:
        prompt_ids: Tokens before the first sampled one, generation prompt included.
        response_ids: All tokens after the prompt, sampled and observed, in order.
        loss_mask: 1 for each response token that is trained, 0 for the others.
        rollout_log_probs: Log-probability at sampling; 0.0 for observed tokens.
    """

    __slots__ = ("loss_mask", "prompt_ids", "response_ids", "rollout_log_probs")

    def __init__(self, prompt_ids: Sequence[int] = ()) -> None:
        self.prompt_ids: list[int] = list(prompt_ids)
        self.response_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.rollout_log_probs: list[float] = []

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def append_sampled(self, ids: Sequence[int], log_probs: Sequence[float]) -> tuple[int, int]:
        """Append what the policy sampled, verbatim. Returns its span in the response.

        Raises:
            LedgerError: where lengths differ, or a log-probability is not a finite number <= 0.
        """
        if len(ids) != len(log_probs):
            raise LedgerError(f"{len(ids)} sampled tokens with {len(log_probs)} log-probabilities")
        if not all(map(math.isfinite, log_probs)) or max(log_probs, default=0.0) > _ROUNDING:
            bad = next(p for p in log_probs if not (math.isfinite(p) and p <= _ROUNDING))
            raise LedgerError(f"{bad} is no log-probability", expected="a finite number <= 0")
        return self._append(ids, 1, log_probs)

    def append_observed(self, ids: Sequence[int]) -> tuple[int, int]:
        """Append what the policy was shown. Returns its span in the response."""
        return self._append(ids, 0, [0.0] * len(ids))

    def exclude(self, start: int, end: int) -> None:
        """Leave the tokens `[start, end)` of the response out of the loss."""
        self.loss_mask[start:end] = [0] * (end - start)

    def _append(self, ids: Sequence[int], mask: int, log_probs: Sequence[float]) -> tuple[int, int]:
        new = list(map(int, ids))
        if new and min(new) < 0:
            raise LedgerError(f"{min(new)} is no token id", expected="an integer >= 0")
        start = len(self.response_ids)
        self.response_ids += new
        self.loss_mask += [mask] * len(new)
        self.rollout_log_probs += map(float, log_probs)
        return start, len(self.response_ids)
