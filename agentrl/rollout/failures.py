"""Failures of a rollout: their records, their counts over a batch, and when a run must end.

A call fails if it crashes, times out or finds the tool unavailable. A `ToolError` is not a failure.
A call that crashes on arguments that do not match the tool's schema is a mistake of the policy and
is not counted; it reaches the tool only if `check_tool_arguments` is off (verl run files). Releases
are counted like calls, one per request, and so are the ends of interactions.
"""

import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from agentrl.errors import (
    AgentError,
    EngineError,
    Fault,
    InteractionError,
    RolloutError,
    TemplateError,
    ToolCallError,
    ToolLifeError,
    text_of,
)
from agentrl.messages import CallOutcome
from agentrl.plugins.call import at_source_line
from agentrl.rollout.argument_schemas import find_argument_error
from agentrl.rollout.records import Failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState

NEVER_RAN = frozenset({CallOutcome.MALFORMED, CallOutcome.SKIPPED})
"""Outcomes of calls that did not reach a tool."""
FAILED = frozenset({CallOutcome.TIMEOUT, CallOutcome.CRASHED, CallOutcome.UNAVAILABLE})
"""Outcomes of calls in which the tool failed."""
MIN_CALLS = 16
"""Calls of one tool before its share of failures is judged."""
_MAX_REASONS = 3
_MAX_LINE_CHARS = 300
_MAX_MESSAGE_CHARS = 2000
_MAX_TRACEBACK_CHARS = 4000

_FAULT_OF_TYPE = {
    AgentError: Fault.AGENT,
    EngineError: Fault.ENGINE,
    InteractionError: Fault.INTERACTION,
    ToolLifeError: Fault.TOOL,
    ToolCallError: Fault.TOOL,
    TemplateError: Fault.LIMIT,
}
_FAULT_IN_STATE = {
    RequestState.PENDING: Fault.LIMIT,
    RequestState.RUNNING: Fault.ENGINE,
    RequestState.TOOL_CALLING: Fault.TOOL,
    RequestState.INTERACTING: Fault.INTERACTION,
    RequestState.COMPLETED: Fault.TOOL,
}


def find_fault(error: BaseException, state: RequestState) -> Fault:
    """Return whose fault an exception is: by its type, else by the state in which it was raised.

    An error before the first turn that no plug-in caused means that the run cannot use the row.
    """
    by_type = (fault for kind, fault in _FAULT_OF_TYPE.items() if isinstance(error, kind))
    return next(by_type, _FAULT_IN_STATE[state])


def describe_failure(error: BaseException, fault: Fault, *, turn: int) -> Failure:
    """Make the record of an exception. Never raises, even if the exception cannot be printed.

    Args:
        error: The exception.
        fault: Whose fault it is.
        turn: Number of turns that the request had.
    """
    message, source_line = text_of(error), at_source_line(error)
    if source_line not in message:
        message += source_line
    try:
        trace = "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001 - formatting calls the code of users' exceptions
        trace = "".join(traceback.format_tb(error.__traceback__))
    return Failure(
        fault=fault,
        kind=type(error).__name__,
        message=message[:_MAX_MESSAGE_CHARS],
        turn=turn,
        traceback=trace[-_MAX_TRACEBACK_CHARS:],
    )


@dataclass(frozen=True, slots=True)
class CallCount:
    """Calls of one tool, or releases of it. Counts of several ranks or batches can be added."""

    num_calls: int = 0
    failures: Counter[str] = field(default_factory=Counter[str])
    """Number of failed calls for each message."""

    @property
    def num_failed(self) -> int:
        """Number of failed calls."""
        return self.failures.total()

    def __add__(self, other: Self) -> "CallCount":
        return CallCount(self.num_calls + other.num_calls, self.failures + other.failures)

    def describe(self, what: str) -> str:
        """Describe how many calls failed, and the most frequent message."""
        [(message, count)] = self.failures.most_common(1)
        often = "" if count == self.num_failed else "most often "
        return f"{what} failed in {self.num_failed} of {self.num_calls} calls: {often}{message}"


CallCounts = dict[str, CallCount]
"""Counts by tool (`tool 'sql'`), or by what was released (`tool 'sql', release`)."""


def count_calls(finished: Sequence[AsyncRolloutRequest]) -> CallCounts:
    """Count the calls and the failed releases of finished requests."""
    num_calls: Counter[str] = Counter()
    failures: dict[str, Counter[str]] = defaultdict(Counter)
    for request in finished:
        for call in (call for turn in request.turns for call in turn.calls):
            if call.outcome in NEVER_RAN:
                continue
            if call.outcome == CallOutcome.CRASHED:
                # Invalid arguments are a mistake of the policy, not of the tool.
                named = (tool for tool in request.tool_schemas if tool.name == call.name)
                if any(find_argument_error(call.arguments, t.function.parameters) for t in named):
                    continue
            tool = f"tool {call.name!r}"
            num_calls[tool] += 1
            if call.outcome in FAILED:
                failures[tool][_to_line(call.message or call.outcome)] += 1
        for failure in request.release_failures:
            what, _, message = failure.partition(": ")
            num_calls[what] = len(finished)
            failures[what][_to_line(message)] += 1
    return {what: CallCount(number, failures[what]) for what, number in num_calls.items()}


def _to_line(message: str) -> str:
    lines = (" ".join(line.split()) for line in message.splitlines())
    return "; ".join(line for line in lines if line)[:_MAX_LINE_CHARS]


def _add_counts(parts: Iterable[Mapping[str, CallCount]]) -> CallCounts:
    whole: CallCounts = {}
    for part in parts:
        for what, count in part.items():
            whole[what] = whole.get(what, CallCount()) + count
    return whole


class CallJudge:
    """End a run in which too many calls of a tool fail.

    Calls are added up until a tool has `MIN_CALLS` of them, so that small batches count too.

    Args:
        max_failed_frac: `rollout.failure.max_failed_calls_frac`.
    """

    def __init__(self, max_failed_frac: float) -> None:
        self._max_failed_frac = max_failed_frac
        self._pending: CallCounts = {}

    def judge(self, counts: Mapping[str, CallCount]) -> None:
        """Add the calls of a batch, and judge every tool that has enough calls.

        Raises:
            RolloutError: If too many calls of a tool failed. It names the tools and the messages.
        """
        self._pending = _add_counts([self._pending, counts])
        ready = {what: c for what, c in self._pending.items() if c.num_calls >= MIN_CALLS}
        for what in ready:
            del self._pending[what]
        allowed = self._max_failed_frac
        failed = [c.describe(w) for w, c in ready.items() if c.num_failed > allowed * c.num_calls]
        if failed:
            raise RolloutError(
                "; ".join(failed),
                key="rollout.failure.max_failed_calls_frac",
                expected=f"a tool that works, or a limit above {allowed:.0%} of its calls",
            )


class Reason(NamedTuple):
    """What failures have in common that are counted as one kind. Their messages may differ."""

    fault: Fault
    kind: str
    """Type name of the exception."""


@dataclass(frozen=True, slots=True)
class FailureSummary:
    """The failures of a batch, or of one rank's part of it."""

    num_requests: int
    reasons: Counter[Reason]
    """Number of failed requests by reason."""
    examples: dict[Reason, str]
    """The first message for each reason."""
    groups: frozenset[str]
    """Ids of the groups with a failed request."""
    calls: CallCounts
    """Calls and failed calls of each tool."""

    @classmethod
    def of(cls, finished: Sequence[AsyncRolloutRequest]) -> Self:
        """Count the failures of finished requests."""
        failed = [request for request in finished if request.state is RequestState.FAILED]
        errors = [request.error for request in failed if request.error is not None]
        reasons = [Reason(error.fault, error.kind) for error in errors]
        examples = [(why, _to_line(e.message)) for why, e in zip(reasons, errors, strict=True)]
        return cls(
            num_requests=len(finished),
            reasons=Counter(reasons),
            examples=dict(reversed(examples)),  # the first of each reason remains
            groups=frozenset(request.uid for request in failed),
            calls=count_calls(finished),
        )

    @classmethod
    def merge(cls, parts: Iterable[Self]) -> Self:
        """Merge the summaries of all ranks."""
        parts = list(parts)
        return cls(
            num_requests=sum(part.num_requests for part in parts),
            reasons=sum((part.reasons for part in parts), Counter[Reason]()),
            examples={k: v for part in reversed(parts) for k, v in part.examples.items()},
            groups=frozenset[str]().union(*(part.groups for part in parts)),
            calls=_add_counts(part.calls for part in parts),
        )

    @property
    def num_failed(self) -> int:
        """Number of failed requests."""
        return self.reasons.total()

    def describe(self) -> str:
        """Describe in one line which tools and requests failed; empty if none did."""
        failed = [count.describe(what) for what, count in self.calls.items() if count.num_failed]
        if self.num_failed:
            requests = f"{self.num_failed} of {self.num_requests} requests failed"
            failed.append(f"{requests}: {self.describe_reasons()}")
        return "; ".join(failed)

    def describe_reasons(self) -> str:
        """Describe in one line the most frequent reasons, with an example of each."""
        return "; ".join(
            f"{count} x {reason.fault}: {reason.kind}: {self.examples[reason]}"
            for reason, count in self.reasons.most_common(_MAX_REASONS)
        )
