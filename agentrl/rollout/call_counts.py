"""How many calls of each tool failed, and whether that is too many.

A call failed if it crashed, timed out or found the tool down. What a tool says by `ToolError` is no
failure. A call that crashed on arguments that the tool's schema refuses is the policy's mistake and
is not counted: such calls reach a tool if `check_tool_arguments` is off, as in run files of verl's.
Releases are counted like calls, one for each request, and so are the ends of interactions.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from agentrl.errors import RolloutError
from agentrl.messages import CallOutcome
from agentrl.rollout.argument_schemas import objection_to
from agentrl.rollout.records import CallRecord
from agentrl.rollout.request import AsyncRolloutRequest

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

    def in_words(self, what: str) -> str:
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
        failed = [c.in_words(w) for w, c in ready.items() if c.num_failed > allowed * c.num_calls]
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
