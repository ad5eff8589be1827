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

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, SupportsFloat

from agentrl.config.schema.run import RewardConfig
from agentrl.messages import CallOutcome
from agentrl.rewards import Source
from agentrl.rollout.failures import FAILED, NEVER_RAN
from agentrl.rollout.records import CallRecord
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.metrics.aggregators import Figures, Mean, Total, spread, tail


def call_figures(requests: Sequence[AsyncRolloutRequest]) -> Figures:
    """Describe the calls of some requests, in all and by tool."""
    outcomes = Counter(call.outcome for call in calls_of(requests))
    figures = spread("rollout/tool_calls", [request.num_tool_calls for request in requests])
    for outcome in CallOutcome:
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
        f"{name}/unavailable_frac": Mean.of(
            [call.outcome == CallOutcome.UNAVAILABLE for call in calls]
        ),
    }


MAX_SCORER_KEYS = 50
"""Keys of a scorer's dict that become metrics, in the order of the alphabet: a scorer that makes up
a key for each problem must not fill the log with columns."""
_OURS = frozenset(source.value for source in Source)


def reward_figures(requests: Sequence[AsyncRolloutRequest], config: RewardConfig) -> Figures:
    """Describe one rank's scores.

    As with `rollout/reward`, requests that are not in their group's baseline are left out.
    `reward/seconds` is of one score, from its call to its answer, be it while others still rolled
    out; `timing_s/reward` is what was waited for after the rollout.
    """
    scored = [r for r in requests if r.in_baseline and r.reward is not None]
    seconds = [
        request.metrics["seconds_reward"]
        for request in requests
        if "seconds_reward" in request.metrics
    ]
    figures = tail("reward/seconds", seconds)
    for function in config.functions:
        given = [float(request.reward_extra_info[function.name]) for request in scored]
        figures |= spread(f"reward/{function.name}", given)
    by_key: dict[str, list[float]] = defaultdict(list)
    for request in scored:
        for key, number in scorer_numbers(request, config).items():
            by_key[key].append(number)
    for key in sorted(by_key)[:MAX_SCORER_KEYS]:
        figures |= spread(f"scorer/{key}", by_key[key])
    return figures


def scorer_numbers(request: AsyncRolloutRequest, config: RewardConfig) -> dict[str, float]:
    """Read the finite numbers that the scorer returned under keys of its own.

    Left out are numbers with a name already: those of `reward.functions`, bonuses and penalties.
    """
    named = {function.name for function in config.functions}
    said = scorer_dict(request)
    read = {str(key): read_number(value) for key, value in said.items() if key not in named}
    return {key: number for key, number in read.items() if number is not None}


def scorer_dict(request: AsyncRolloutRequest) -> dict[str, Any]:
    """Read what the scorer returned besides its number; empty if it returned a bare number.

    A bare number is recorded as `acc` too, which says nothing that the reward does not say.
    """
    said = {k: v for k, v in request.reward_extra_info.items() if k not in _OURS}
    return {} if said == {"acc": request.reward} else said


def read_number(value: object) -> float | None:
    """Read a boolean or a finite number of any library; None for a text or anything else."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if math.isfinite(number) else None
