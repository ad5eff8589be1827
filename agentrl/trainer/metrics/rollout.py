"""Metrics of finished requests: lengths, turns, tool calls, ends, failures, scores.

A metric of no values is left out, so that no NaN is logged. A metric with a name from a closed
set (stop reasons, outcomes, faults) is always logged, so that a run's columns stay the same.

rollout/tool_calls/...                 calls of a request: mean, max, min
rollout/tool_calls/<outcome>           mean by outcome; they sum to the mean
rollout/tool_calls/failed_frac         fraction of the executed calls, of all tools, that failed
rollout/tool/<name>/num_calls          calls that reached the tool, its cache or its breaker
rollout/tool/<name>/seconds/...        of executed calls: seconds of all attempts
rollout/tool/<name>/queue_seconds/...  seconds of waiting for capacity or between attempts
rollout/tool/<name>/retries            executions after the first one of a call, in all
rollout/tool/<name>/cache_hit_frac     fraction that a cache answered
rollout/tool/<name>/failed_frac        fraction that timed out, crashed, or found the tool down
rollout/tool/<name>/unavailable_frac   fraction that found the tool down
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, SupportsFloat

from agentrl.config.schema.reward import RewardConfig
from agentrl.errors import Fault
from agentrl.messages import CallOutcome
from agentrl.rewards import Source
from agentrl.rewards.rendering import NUM_CUT_TOKENS, NUM_TOKENS
from agentrl.rollout.compaction import NO_SPACE
from agentrl.rollout.failures import FAILED, NEVER_RAN
from agentrl.rollout.records import CallRecord, Turn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import ENDS, RequestState, StopReason
from agentrl.trainer.metrics.aggregators import (
    MaxMetric,
    MeanMetric,
    MetricDict,
    MinMetric,
    SumMetric,
    mean_max_min,
    mean_p95_max,
)

MAX_SCORER_KEYS = 50
"""Keys of a scorer's dict that become metrics, in alphabetical order. A scorer that makes up a key
for each problem must not fill the log with columns."""
_CUT_BY_LENGTH = frozenset({StopReason.RESPONSE_BUDGET, StopReason.MODEL_LENGTH})
_SOURCE_KEYS = frozenset(source.value for source in Source)

Requests = Sequence[AsyncRolloutRequest]


def rollout_metrics(requests: Requests) -> MetricDict:
    """Measure what a rollout did: lengths, turns, tool calls, ends, failures.

    Every request counts, failed ones too, because they cost their tokens. Only `rollout/reward`
    leaves out requests that are not in their group's baseline.
    """
    if not requests:
        return {}
    scored = [r.reward for r in requests if r.in_baseline and r.reward is not None]
    cut = [request.stop_reason in _CUT_BY_LENGTH for request in requests]
    sequences = [one for request in requests for one in request.sequences]
    return {
        "rollout/num_requests": SumMetric(float(len(requests))),
        **mean_max_min("rollout/reward", scored),
        **mean_max_min("prompt_length", [one.num_prompt_tokens for one in sequences]),
        **mean_max_min("response_length", [one.num_response_tokens for one in sequences]),
        "response_length/clip_ratio": MeanMetric.of(cut),
        **_turn_metrics(requests),
        **_branch_metrics(requests),
        **tool_metrics(requests),
        **_end_metrics(requests),
        **_token_metrics(requests),
        **_version_metrics(requests),
        **_check_metrics(requests),
        **_agent_loop_metrics(requests),
        **_gateway_metrics(requests),
    }


def _turn_metrics(requests: Requests) -> MetricDict:
    turns = [turn for request in requests for one in request.sequences for turn in one.turns]
    sampled = [turn for turn in turns if turn.role == "assistant"]
    cut_calls = [call for call in calls_of(requests) if call.num_cut_tokens]
    counts = {
        "cut_turns": sum(turn.cut is not None for turn in sampled),
        "excluded_turns": sum(turn.excluded is not None for turn in sampled),
        "cut_observations": len(cut_calls)
        + sum(turn.role == "user" and turn.cut is not None for turn in turns),
        "cut_observation_tokens": sum(call.num_cut_tokens for call in cut_calls),
    }
    return {
        **mean_max_min("num_turns", [r.num_turns for r in requests]),
        **mean_max_min("rollout/assistant_turns", [r.num_assistant_turns for r in requests]),
        **mean_max_min("rollout/user_turns", [r.num_user_turns for r in requests]),
        **mean_max_min("rollout/tokens_per_turn", [turn.num_tokens for turn in sampled]),
        **mean_p95_max("rollout/turn_seconds", [turn.seconds for turn in sampled]),
        **{f"rollout/{name}/mean": MeanMetric(n, len(requests)) for name, n in counts.items()},
    }


def _branch_metrics(requests: Requests) -> MetricDict:
    """Count the sequences of trajectories, branches by cause, and histories left as they were."""
    causes = Counter(one.branch_cause for request in requests for one in request.branches)
    missed = Counter[str]()
    for one in (one for request in requests for one in request.sequences):
        missed.update({n: int(v) for n, v in one.metrics.items() if n.startswith(NO_SPACE)})
    return {
        **mean_max_min("rollout/sequences", [len(request.sequences) for request in requests]),
        **{f"rollout/branches/{c}": SumMetric(float(causes[c])) for c in causes if c is not None},
        **{f"rollout/{name}": SumMetric(float(n)) for name, n in missed.items()},
    }


def _end_metrics(requests: Requests) -> MetricDict:
    """Fractions of the requests by stop reason and, of failed ones, by fault."""
    num = len(requests)
    reasons = Counter(request.stop_reason for request in requests)
    failed = [request for request in requests if request.state is RequestState.FAILED]
    faults = Counter(
        request.error.fault if request.error else ENDS[request.stop_reason].fault
        for request in failed
        if request.stop_reason is not None
    )
    return {
        **{f"rollout/stop_reason/{r}": MeanMetric(reasons[r], num) for r in StopReason},
        **{f"rollout/failures/{f}": MeanMetric(faults[f], num) for f in Fault},
        "rollout/failed_frac": MeanMetric(len(failed), num),
        "rollout/dropped_frac": MeanMetric.of([r.dropped is not None for r in requests]),
        "rollout/retried_frac": MeanMetric.of([r.attempt > 0 for r in requests]),
    }


def _token_metrics(requests: Requests) -> MetricDict:
    """Fraction of trained response tokens, and of input tokens served by a prefix cache."""
    rows = [(one, request) for request in requests for one in request.sequences]
    sampled = [(one, turn) for one, _ in rows for turn in one.turns if turn.role == "assistant"]
    counts = {
        "mask_ones_ratio": (
            sum(sum(one.loss_mask) for one, r in rows if r.is_trained and one.is_trained),
            sum(one.num_response_tokens for one, _ in rows),
        ),
        "cached_tokens_frac": (
            sum(turn.cached_tokens for _, turn in sampled),
            sum(one.num_prompt_tokens + turn.start for one, turn in sampled),
        ),
    }
    return {f"rollout/{name}": MeanMetric(n, of) for name, (n, of) in counts.items() if of}


def _version_metrics(requests: Requests) -> MetricDict:
    """Which weights sampled the batch, and how many versions one trajectory spans at most."""

    def versions(turns: Sequence[Turn]) -> set[int]:
        return {span.version for turn in turns for span in turn.weight_versions}

    turns = ([turn for one in request.sequences for turn in one.turns] for request in requests)
    found = [of_request for of_turns in turns if (of_request := versions(of_turns))]
    if not found:
        return {}
    widths = [max(of_request) - min(of_request) for of_request in found]
    return {
        "rollout/policy_version/min": MinMetric(float(min(map(min, found)))),
        "rollout/policy_version/max": MaxMetric(float(max(map(max, found)))),
        "rollout/policy_version/spread_max": MaxMetric(float(max(widths))),
        "rollout/policy_version/spread_mean": MeanMetric.of(widths),
    }


def _check_metrics(requests: Requests) -> MetricDict:
    """Findings of the tokenization check, over the sequences that were checked."""
    checked = [one for request in requests for one in request.sequences if one.is_checked]
    different = [len(one.differences) for one in checked]
    if not different:
        return {}
    return {
        "rollout/tokenization_differences/mean": MeanMetric.of(different),
        "rollout/tokenization_differences_frac": MeanMetric.of([n > 0 for n in different]),
    }


def _agent_loop_metrics(requests: Requests) -> MetricDict:
    """Calls of agent loops, and what they sampled and did not train; for each request."""
    driven = [r.metrics for r in requests if "agent_loop/calls" in r.metrics]
    names = ("calls", "unused_calls", "dropped_tokens", "masked_tokens")
    return {
        f"agent_loop/{name}/mean": MeanMetric.of([one[f"agent_loop/{name}"] for one in driven])
        for name in names
        if driven
    }


def _gateway_metrics(requests: Requests) -> MetricDict:
    """Sequences of each request that the gateway served, and its other counts (docs/gateway.md).

    A count that a rank does not have is 0 there, so these are sums. Names of clients' options are
    left out, so that clients cannot fill the log with columns.
    """
    served = [r.metrics for r in requests if "gateway/sequences" in r.metrics]
    if not served:
        return {}
    counts = Counter[str]()
    for one in served:
        counts.update({n: int(v) for n, v in one.items() if n.startswith("gateway/")})
    num_sequences = counts.pop("gateway/sequences")
    return {
        "gateway/sequences/mean": MeanMetric(num_sequences, len(served)),
        **{
            name: SumMetric(float(number))
            for name, number in sorted(counts.items())
            if name == "gateway/ignored_tools" or not name.startswith("gateway/ignored_")
        },
    }


# Tool calls.


def calls_of(requests: Requests) -> Iterator[CallRecord]:
    """Iterate over all calls, malformed and skipped ones too."""
    sequences = (one for request in requests for one in request.sequences)
    return (call for one in sequences for turn in one.turns for call in turn.calls)


def tool_metrics(requests: Requests) -> MetricDict:
    """Measure the calls of some requests, in all and by tool."""
    outcomes = Counter(call.outcome for call in calls_of(requests))
    metrics = mean_max_min("rollout/tool_calls", [request.num_tool_calls for request in requests])
    for outcome in CallOutcome:
        metrics[f"rollout/tool_calls/{outcome}"] = MeanMetric(outcomes[outcome], len(requests))
    if executed := sum(outcomes.values()) - sum(outcomes[name] for name in NEVER_RAN):
        failed = sum(outcomes[name] for name in FAILED)
        metrics["rollout/tool_calls/failed_frac"] = MeanMetric(failed, executed)
    # A policy can call any name. Names without a schema are counted together, so that names that a
    # model makes up cannot fill the log with columns.
    by_tool: dict[str, list[CallRecord]] = defaultdict(list)
    for request in requests:
        known = {schema.name for one in request.sequences for schema in one.tool_schemas}
        for call in calls_of([request]):
            if call.outcome not in NEVER_RAN:
                by_tool[call.name if call.name in known else "unknown"].append(call)
    for tool, calls in sorted(by_tool.items()):
        metrics |= _metrics_of_tool(f"rollout/tool/{tool}", calls)
    return metrics


def _metrics_of_tool(name: str, calls: Sequence[CallRecord]) -> MetricDict:
    return {
        f"{name}/num_calls": SumMetric(float(len(calls))),
        **mean_p95_max(f"{name}/seconds", [call.seconds for call in calls if call.num_attempts]),
        **mean_p95_max(f"{name}/queue_seconds", [call.queue_seconds for call in calls]),
        f"{name}/retries": SumMetric(float(sum(max(0, call.num_attempts - 1) for call in calls))),
        f"{name}/cache_hit_frac": MeanMetric.of([call.is_cached for call in calls]),
        f"{name}/failed_frac": MeanMetric.of([call.outcome in FAILED for call in calls]),
        f"{name}/unavailable_frac": MeanMetric.of(
            [c.outcome is CallOutcome.UNAVAILABLE for c in calls]
        ),
    }


# Scores.


def reward_metrics(requests: Requests, config: RewardConfig) -> MetricDict:
    """Measure one rank's scores.

    As in `rollout/reward`, requests that are not in their group's baseline are left out.
    `reward/seconds` is the duration of one score, also if other requests still roll out during it.
    `timing_s/reward` is the time that the loop waits for scores after the rollout.
    """
    scored = [r for r in requests if r.in_baseline and r.reward is not None]
    key = "seconds_reward"
    metrics = mean_p95_max("reward/seconds", [r.metrics[key] for r in requests if key in r.metrics])
    metrics |= mean_max_min("reward/model", [r.rm_score for r in scored if r.rm_score is not None])
    if read := [r.metrics for r in requests if NUM_TOKENS in r.metrics]:
        metrics |= mean_max_min("reward/model/num_tokens", [one[NUM_TOKENS] for one in read])
        cut = [one[NUM_CUT_TOKENS] > 0 for one in read]
        metrics["reward/model/truncated_frac"] = MeanMetric.of(cut)
    for function in config.functions:
        values = [float(request.reward_extra_info[function.name]) for request in scored]
        metrics |= mean_max_min(f"reward/{function.name}", values)
    by_key: dict[str, list[float]] = defaultdict(list)
    for request in scored:
        for key, number in scorer_numbers(request, config).items():
            by_key[key].append(number)
    for key in sorted(by_key)[:MAX_SCORER_KEYS]:
        metrics |= mean_max_min(f"scorer/{key}", by_key[key])
    return metrics


def scorer_numbers(request: AsyncRolloutRequest, config: RewardConfig) -> dict[str, float]:
    """Return the finite numbers that the scorer returned under its own keys.

    Numbers that other metrics already show are left out: those of `reward.functions`, bonuses and
    penalties.
    """
    functions = {function.name for function in config.functions}
    numbers = {
        str(key): read_number(value)
        for key, value in scorer_dict(request).items()
        if key not in functions
    }
    return {key: number for key, number in numbers.items() if number is not None}


def scorer_dict(request: AsyncRolloutRequest) -> dict[str, Any]:
    """Return what the scorer returned besides its number; empty if it returned a bare number.

    A bare number is recorded as `acc` too, which adds nothing to the reward.
    """
    found = {k: v for k, v in request.reward_extra_info.items() if k not in _SOURCE_KEYS}
    return {} if found == {"acc": request.reward} else found


def read_number(value: object) -> float | None:
    """Read a boolean or a finite number of any library; None for text or anything else."""
    if not isinstance(value, SupportsFloat):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if math.isfinite(number) else None
