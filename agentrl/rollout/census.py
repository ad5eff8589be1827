"""What of a batch failed, counted so that the parts of several ranks add up to the whole."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState

MAX_TOLD = 3
"""Kinds of failures that are told of a batch."""


@dataclass(frozen=True, slots=True)
class Census:
    """The failures of a batch, or of one rank's part of it."""

    num_requests: int
    reasons: Counter[str]
    """How many requests failed, by what their error says."""
    groups: frozenset[str]
    """Groups in which one failed."""

    @classmethod
    def of(cls, finished: Sequence[AsyncRolloutRequest]) -> Self:
        """Count the failures of finished requests."""
        failed = [request for request in finished if request.state is RequestState.FAILED]
        return cls(
            num_requests=len(finished),
            reasons=Counter(map(_reason, failed)),
            groups=frozenset(request.uid for request in failed),
        )

    @classmethod
    def together(cls, parts: Iterable[Self]) -> Self:
        """Add the parts of all ranks."""
        whole = list(parts)
        return cls(
            num_requests=sum(part.num_requests for part in whole),
            reasons=sum((part.reasons for part in whole), Counter[str]()),
            groups=frozenset[str]().union(*(part.groups for part in whole)),
        )

    @property
    def num_failed(self) -> int:
        """Requests that failed."""
        return self.reasons.total()

    def in_words(self) -> str:
        """The commonest failures in one line."""
        kinds = self.reasons.most_common(MAX_TOLD)
        return "; ".join(f"{count} x {kind}" for kind, count in kinds)


def _reason(request: AsyncRolloutRequest) -> str:
    error = request.error
    if error is None:
        return str(request.stop_reason)
    return f"{error.fault}: {error.kind}: {' '.join(error.message.split())[:300]}"
