"""What of a batch failed, counted so that the parts of several ranks add up to the whole."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from agentrl.errors import Fault
from agentrl.rollout.call_counts import CallCounts, add_counts, count_calls
from agentrl.rollout.records import Failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState

MAX_TOLD = 3
"""Kinds of failures that are told of a batch."""
_LONGEST_MESSAGE = 300


class Reason(NamedTuple):
    """What failures that are counted together share: their messages may name ids and times."""

    fault: Fault
    kind: str
    """The exception's type."""


@dataclass(frozen=True, slots=True)
class Census:
    """The failures of a batch, or of one rank's part of it."""

    num_requests: int
    reasons: Counter[Reason]
    """How many requests failed for it."""
    examples: dict[Reason, str]
    """What the first of them says."""
    groups: frozenset[str]
    """Groups in which one failed."""
    calls: CallCounts
    """Calls of each tool, and how many of them failed."""

    @classmethod
    def of(cls, finished: Sequence[AsyncRolloutRequest]) -> Self:
        """Count the failures of finished requests."""
        failed = [request for request in finished if request.state is RequestState.FAILED]
        errors = [request.error for request in failed if request.error is not None]
        return cls(
            num_requests=len(finished),
            reasons=Counter(map(_reason, errors)),
            examples={_reason(error): _example(error) for error in reversed(errors)},
            groups=frozenset(request.uid for request in failed),
            calls=count_calls(finished),
        )

    @classmethod
    def together(cls, parts: Iterable[Self]) -> Self:
        """Add the parts of all ranks."""
        whole = list(parts)
        told = [item for part in reversed(whole) for item in part.examples.items()]
        return cls(
            num_requests=sum(part.num_requests for part in whole),
            reasons=sum((part.reasons for part in whole), Counter[Reason]()),
            examples=dict(told),
            groups=frozenset[str]().union(*(part.groups for part in whole)),
            calls=add_counts(part.calls for part in whole),
        )

    @property
    def num_failed(self) -> int:
        """Requests that failed."""
        return self.reasons.total()

    def troubles(self) -> str:
        """Say in one line which tools and requests failed; empty if none did."""
        troubles = [count.in_words(what) for what, count in self.calls.items() if count.num_failed]
        if self.num_failed:
            requests = f"{self.num_failed} of {self.num_requests} requests failed"
            troubles.append(f"{requests}: {self.in_words()}")
        return "; ".join(troubles)

    def in_words(self) -> str:
        """The commonest failures in one line, with what one of each says."""
        return "; ".join(
            f"{count} x {reason.fault}: {reason.kind}: {self.examples[reason]}"
            for reason, count in self.reasons.most_common(MAX_TOLD)
        )


def _reason(error: Failure) -> Reason:
    return Reason(error.fault, error.kind)


def _example(error: Failure) -> str:
    return " ".join(error.message.split())[:_LONGEST_MESSAGE]
