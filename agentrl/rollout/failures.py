"""Whose fault a failure is, and how it is written down."""

import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from agentrl.errors import (
    EngineError,
    Fault,
    InteractionError,
    RolloutError,
    ToolCallError,
    ToolLifeError,
    text_of,
)
from agentrl.messages import CallOutcome
from agentrl.plugins.call import at_place_of
from agentrl.rollout.argument_schemas import objection_to
from agentrl.rollout.records import CallRecord, Failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState

_MAX_MESSAGE_CHARS = 2000
_LONGEST_TRACEBACK = 4000

_FAULT_OF_TYPE = {
    EngineError: Fault.ENGINE,
    InteractionError: Fault.INTERACTION,
    ToolLifeError: Fault.TOOL,
    ToolCallError: Fault.TOOL,
}
_FAULT_IN_STATE = {
    RequestState.PENDING: Fault.LIMIT,
    RequestState.RUNNING: Fault.ENGINE,
    RequestState.TOOL_CALLING: Fault.TOOL,
    RequestState.INTERACTING: Fault.INTERACTION,
    RequestState.COMPLETED: Fault.TOOL,
}


def find_fault(error: BaseException, state: RequestState) -> Fault:
    """Say whose fault an exception is: by its type, else by the state in which it came.

    What breaks before the first turn, and is no plug-in's, is a row that this run cannot roll out.
    """
    by_type = (fault for kind, fault in _FAULT_OF_TYPE.items() if isinstance(error, kind))
    return next(by_type, _FAULT_IN_STATE[state])


def describe_failure(error: BaseException, fault: Fault, *, turn: int) -> Failure:
    """Write an exception down; raises nothing, even where the exception cannot be printed.

    Args:
        error: What was raised.
        fault: Whose doing it is.
        turn: Turns that the request had.
    """
    return Failure(
        fault=fault,
        kind=type(error).__name__,
        message=_with_place(text_of(error), error)[:_MAX_MESSAGE_CHARS],
        turn=turn,
        traceback=_traceback_of(error)[-_LONGEST_TRACEBACK:],
    )


def _with_place(message: str, error: BaseException) -> str:
    """Add the line of users' code that raised, unless the message names it already."""
    place = at_place_of(error)
    return message if place in message else f"{message}{place}"


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - users' errors may break when their notes are asked for
        return "".join(traceback.format_tb(error.__traceback__))


NEVER_RAN = frozenset({CallOutcome.MALFORMED, CallOutcome.SKIPPED})
"""Outcomes of calls that did not reach a tool."""
FAILED = frozenset({CallOutcome.TIMEOUT, CallOutcome.CRASHED, CallOutcome.UNAVAILABLE})
"""Outcomes of calls in which the tool failed."""
MIN_CALLS = 16
"""Calls of one tool before its share of failures is judged."""
_LONGEST_MESSAGE = 300


@dataclass(frozen=True, slots=True)
class CallCount:
    """Calls of one tool, or releases of it; parts of several ranks or batches add up."""

    num_calls: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])
    """Failed calls by message."""

    @property
    def num_failed(self) -> int:
        """Calls that failed."""
        return self.failures.total()

    def __add__(self, other: Self) -> "CallCount":
        return CallCount(self.num_calls + other.num_calls, self.failures + other.failures)

    def describe(self, what: str) -> str:
        """Say how many failed, and the most frequent message."""
        [(message, count)] = self.failures.most_common(1)
        often = "" if count == self.num_failed else "most often "
        return f"{what} failed in {self.num_failed} of {self.num_calls} calls: {often}{message}"


CallCounts = dict[str, CallCount]
"""By tool (`tool 'sql'`), or by what was released (`tool 'sql', release`)."""


def count_calls(finished: Sequence[AsyncRolloutRequest]) -> CallCounts:
    """Count the calls and the failed releases of finished requests."""
    num_calls: Counter[str] = Counter()
    failures: dict[str, Counter[str]] = defaultdict(Counter)
    for request in finished:
        calls = (call for turn in request.turns for call in turn.calls)
        for call in (call for call in calls if _is_judged(call, request)):
            tool = f"tool {call.name!r}"
            num_calls[tool] += 1
            if call.outcome in FAILED:
                failures[tool][_short(call.message or call.outcome)] += 1
        for failure in request.release_failures:
            what, _, message = failure.partition(": ")
            num_calls[what] = len(finished)
            failures[what][_short(message)] += 1
    return {what: CallCount(number, failures[what]) for what, number in num_calls.items()}


def add_counts(parts: Iterable[Mapping[str, CallCount]]) -> CallCounts:
    """Add counts, name by name."""
    whole: CallCounts = {}
    for part in parts:
        for what, count in part.items():
            whole[what] = whole.get(what, CallCount()) + count
    return whole


class CallJudge:
    """Ends a run in which too many calls of a tool fail.

    Calls are added up until there are `MIN_CALLS` of a tool, so that small batches are judged too.

    Args:
        max_failed_frac: `rollout.failure.max_failed_calls_frac`.
    """

    def __init__(self, max_failed_frac: float) -> None:
        self._max_failed_frac = max_failed_frac
        self._pending: CallCounts = {}

    def judge(self, counts: Mapping[str, CallCount]) -> None:
        """Add the calls of a batch, and judge every tool that was called often enough.

        Raises:
            RolloutError: naming the tools, with their most frequent messages.
        """
        self._pending = add_counts([self._pending, counts])
        ready = {what: c for what, c in self._pending.items() if c.num_calls >= MIN_CALLS}
        for what in ready:
            del self._pending[what]
        allowed = self._max_failed_frac
        failed = [c.describe(w) for w, c in ready.items() if c.num_failed > allowed * c.num_calls]
        if failed:
            raise RolloutError(
                "; ".join(failed),
                key="rollout.failure.max_failed_calls_frac",
                expected=f"at most {allowed:.0%} of its calls",
            )


def _is_judged(call: CallRecord, request: AsyncRolloutRequest) -> bool:
    """Whether a call reached a tool, and does not owe its crash to the policy's arguments."""
    if call.outcome != CallOutcome.CRASHED:
        return call.outcome not in NEVER_RAN
    schemas = (tool.function.parameters for tool in request.tool_schemas if tool.name == call.name)
    return not any(objection_to(call.arguments, schema) for schema in schemas)


def _short(message: str) -> str:
    return " ".join(message.split())[:_LONGEST_MESSAGE]


MAX_TOLD = 3
"""Kinds of failures that are told of a batch."""


class Reason(NamedTuple):
    """What failures that are counted together share: their messages may name ids and times."""

    fault: Fault
    kind: str
    """The exception's type."""


@dataclass(frozen=True, slots=True)
class FailureSummary:
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
    def merge(cls, parts: Iterable[Self]) -> Self:
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

    def describe(self) -> str:
        """Say in one line which tools and requests failed; empty if none did."""
        troubles = [count.describe(what) for what, count in self.calls.items() if count.num_failed]
        if self.num_failed:
            requests = f"{self.num_failed} of {self.num_requests} requests failed"
            troubles.append(f"{requests}: {self.describe_reasons()}")
        return "; ".join(troubles)

    def describe_reasons(self) -> str:
        """The commonest failures in one line, with what one of each says."""
        return "; ".join(
            f"{count} x {reason.fault}: {reason.kind}: {self.examples[reason]}"
            for reason, count in self.reasons.most_common(MAX_TOLD)
        )


def _reason(error: Failure) -> Reason:
    return Reason(error.fault, error.kind)


def _example(error: Failure) -> str:
    return " ".join(error.message.split())[:_LONGEST_MESSAGE]
