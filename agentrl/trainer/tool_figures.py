"""Figures of the tool calls of a step: how they came out, how long they took, who waited for whom.

rollout/tool_calls/...                 calls of a request: mean, max, min
rollout/tool_calls/<outcome>           the same, by outcome: they sum to the mean
rollout/tool_calls/failed_frac         share of the executed calls, of all tools, that failed
rollout/tool/<name>/num_calls          that reached the tool, its cache or its breaker
rollout/tool/<name>/seconds/...        of those that were executed, all attempts together
rollout/tool/<name>/queue_seconds/...  of all of them: waiting for a place, or a pause
rollout/tool/<name>/retries            executions beyond the first of a call, in all
rollout/tool/<name>/cache_hit_frac     share that a cache answered
rollout/tool/<name>/failed_frac        share that timed out, crashed, or found the tool down
rollout/tool/<name>/unavailable_frac   share that found the tool down
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import get_args

from agentrl.rollout.call_counts import FAILED, NEVER_RAN
from agentrl.rollout.records import CallRecord
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.figures import Figures, Mean, Total, spread, tail

OUTCOMES: tuple[str, ...] = get_args(CallRecord.model_fields["outcome"].annotation)
"""Every way in which a tool call can come out."""


def call_figures(requests: Sequence[AsyncRolloutRequest]) -> Figures:
    """Describe the calls of some requests, in all and by tool."""
    outcomes = Counter(call.outcome for call in calls_of(requests))
    figures = spread("rollout/tool_calls", [request.num_tool_calls for request in requests])
    for outcome in OUTCOMES:
        figures[f"rollout/tool_calls/{outcome}"] = Mean(outcomes[outcome], len(requests))
    if executed := sum(outcomes.values()) - sum(outcomes[name] for name in NEVER_RAN):
        failed = sum(outcomes[name] for name in FAILED)
        figures["rollout/tool_calls/failed_frac"] = Mean(failed, executed)
    for tool, calls in sorted(_calls_by_tool(requests).items()):
        figures |= _figures_of_tool(f"rollout/tool/{tool}", calls)
    return figures


def calls_of(requests: Sequence[AsyncRolloutRequest]) -> Iterator[CallRecord]:
    """Give every call, malformed and skipped ones too."""
    return (call for request in requests for turn in request.turns for call in turn.calls)


def _calls_by_tool(requests: Sequence[AsyncRolloutRequest]) -> dict[str, list[CallRecord]]:
    # A policy can call by any name: names that no schema has are counted together, so that what a
    # model invents cannot fill the log with columns.
    found: dict[str, list[CallRecord]] = defaultdict(list)
    for request in requests:
        known = {schema.name for schema in request.tool_schemas}
        for call in calls_of([request]):
            if call.outcome not in NEVER_RAN:
                found[call.name if call.name in known else "unknown"].append(call)
    return found


def _figures_of_tool(name: str, calls: Sequence[CallRecord]) -> Figures:
    return {
        f"{name}/num_calls": Total(float(len(calls))),
        **tail(f"{name}/seconds", [call.seconds for call in calls if call.num_attempts]),
        **tail(f"{name}/queue_seconds", [call.queue_seconds for call in calls]),
        f"{name}/retries": Total(float(sum(max(0, call.num_attempts - 1) for call in calls))),
        f"{name}/cache_hit_frac": Mean.of([call.is_cached for call in calls]),
        f"{name}/failed_frac": Mean.of([call.outcome in FAILED for call in calls]),
        f"{name}/unavailable_frac": Mean.of([call.outcome == "unavailable" for call in calls]),
    }
