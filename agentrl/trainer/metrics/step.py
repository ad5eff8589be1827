"""Figures of a step under flat names, where there is one the name that verl gave it.

`rollout_figures` sees finished requests, `batch_figures` the tensors made from them, `Timer` the
clock. A figure over nothing is left out, so that no NaN is made here; a name from a closed set
(stop reasons, outcomes, faults) is always there, so that the columns of a run stay the same.
Each sees one rank; `agentrl.trainer.metrics.aggregators` puts the ranks' figures together.
"""

import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch

from agentrl.errors import Fault
from agentrl.protocol import DataProto
from agentrl.rollout.records import Turn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import ENDS, RequestState, StopReason
from agentrl.trainer.metrics.aggregators import (
    Deviation,
    Figures,
    Largest,
    Mean,
    Metrics,
    Rate,
    Share,
    Smallest,
    Total,
    spread,
    tail,
    tensor_spread,
)
from agentrl.trainer.metrics.plugins import call_figures, calls_of
from agentrl.trainer.metrics.sinks import NO_SIGNAL

_GIB = 1024**3
_CUT_BY_LENGTH = frozenset({StopReason.RESPONSE_BUDGET, StopReason.MODEL_LENGTH})


def step_figures(
    requests: Sequence[AsyncRolloutRequest], batch: DataProto, seconds: Mapping[str, float]
) -> Figures:
    """Describe one rank's part of a training step.

    Args:
        requests: What was rolled out.
        batch: The rows that became of it.
        seconds: Of the stations (`Timer.pop_metrics`), `timing_s/step` among them.
    """
    num_tokens = sum(r.num_prompt_tokens + r.num_response_tokens for r in requests)
    return (
        rollout_figures(requests)
        | batch_figures(batch)
        | perf_figures(num_tokens, seconds["timing_s/step"])
        | time_figures(seconds)
    )


# Requests.


def rollout_figures(requests: Sequence[AsyncRolloutRequest]) -> Figures:
    """Describe what a rollout did: lengths, turns, tool calls, ends, failures.

    Every request counts, failed ones too: they cost their tokens. Only `rollout/reward` leaves out
    those that are not in their group's baseline.
    """
    if not requests:
        return {}
    scored = [r.reward for r in requests if r.in_baseline and r.reward is not None]
    return {
        "rollout/num_requests": Total(float(len(requests))),
        **spread("rollout/reward", scored),
        **_length_figures(requests),
        **_turn_figures(requests),
        **call_figures(requests),
        **_end_figures(requests),
        **_ledger_figures(requests),
    }


def _length_figures(requests: Sequence[AsyncRolloutRequest]) -> Figures:
    cut = [request.stop_reason in _CUT_BY_LENGTH for request in requests]
    return {
        **spread("prompt_length", [r.num_prompt_tokens for r in requests]),
        **spread("response_length", [r.num_response_tokens for r in requests]),
        "response_length/clip_ratio": Mean.of(cut),
    }


def _turn_figures(requests: Sequence[AsyncRolloutRequest]) -> Figures:
    sampled = [turn for request in requests for turn in request.turns if turn.role == "assistant"]
    tokens = [turn.num_tokens for turn in sampled]
    return {
        **spread("num_turns", [r.num_turns for r in requests]),
        **spread("rollout/assistant_turns", [r.num_assistant_turns for r in requests]),
        **spread("rollout/user_turns", [r.num_user_turns for r in requests]),
        **spread("rollout/tokens_per_turn", tokens),
        **tail("rollout/turn_seconds", [turn.seconds for turn in sampled]),
        "rollout/cut_turns/mean": _per_request(sum(t.cut is not None for t in sampled), requests),
        "rollout/excluded_turns/mean": _per_request(
            sum(t.excluded is not None for t in sampled), requests
        ),
        **_cut_observation_figures(requests),
    }


def _cut_observation_figures(requests: Sequence[AsyncRolloutRequest]) -> Figures:
    cut_calls = [call for call in calls_of(requests) if call.num_cut_tokens]
    cut_replies = sum(
        turn.role == "user" and turn.cut is not None for r in requests for turn in r.turns
    )
    lost = sum(call.num_cut_tokens for call in cut_calls)
    return {
        "rollout/cut_observations/mean": _per_request(len(cut_calls) + cut_replies, requests),
        "rollout/cut_observation_tokens/mean": _per_request(lost, requests),
    }


def _end_figures(requests: Sequence[AsyncRolloutRequest]) -> Figures:
    """Shares of the requests by stop reason and, of failed ones, by fault."""
    reasons = Counter(request.stop_reason for request in requests)
    faults = Counter(_fault(request) for request in requests)
    failed = [request.state is RequestState.FAILED for request in requests]
    return {
        **{f"rollout/stop_reason/{r}": _per_request(reasons[r], requests) for r in StopReason},
        **{f"rollout/failures/{f}": _per_request(faults[f], requests) for f in Fault},
        "rollout/failed_frac": Mean.of(failed),
        "rollout/dropped_frac": Mean.of([request.dropped is not None for request in requests]),
        "rollout/retried_frac": Mean.of([request.attempt > 0 for request in requests]),
    }


def _fault(request: AsyncRolloutRequest) -> Fault | None:
    """Whose fault a failed request is; None for one that did not fail."""
    if request.state is not RequestState.FAILED or request.stop_reason is None:
        return None
    return request.error.fault if request.error else ENDS[request.stop_reason].fault


def _ledger_figures(requests: Sequence[AsyncRolloutRequest]) -> Figures:
    num_response = sum(request.num_response_tokens for request in requests)
    num_trained = sum(sum(request.loss_mask) for request in requests if request.is_trained)
    return {
        **_ratio("rollout/mask_ones_ratio", num_trained, num_response),
        **_cache_figures(requests),
        **_version_figures(requests),
        **_check_figures(requests),
    }


def _check_figures(requests: Sequence[AsyncRolloutRequest]) -> Figures:
    """What the tokenization check found, over the requests that it was drawn for."""
    different = [len(request.differences) for request in requests if request.is_checked]
    if not different:
        return {}
    return {
        "rollout/tokenization_differences/mean": Mean.of(different),
        "rollout/tokenization_differences_frac": Mean.of([n > 0 for n in different]),
    }


def _cache_figures(requests: Sequence[AsyncRolloutRequest]) -> Figures:
    """Share of the engine's input tokens, over all turns, that a prefix cache served."""
    sent = cached = 0
    for request in requests:
        for turn in (turn for turn in request.turns if turn.role == "assistant"):
            sent += request.num_prompt_tokens + turn.start
            cached += turn.cached_tokens
    return _ratio("rollout/cached_tokens_frac", cached, sent)


def _version_figures(requests: Sequence[AsyncRolloutRequest]) -> Figures:
    """Which weights sampled the batch, and how many versions one trajectory spans at most."""
    of_requests = [versions for r in requests if (versions := _versions(r.turns))]
    if not of_requests:
        return {}
    widths = [max(versions) - min(versions) for versions in of_requests]
    return {
        "rollout/policy_version/min": Smallest(float(min(map(min, of_requests)))),
        "rollout/policy_version/max": Largest(float(max(map(max, of_requests)))),
        "rollout/policy_version/spread_max": Largest(float(max(widths))),
        "rollout/policy_version/spread_mean": Mean.of(widths),
    }


def _versions(turns: Sequence[Turn]) -> set[int]:
    return {span.version for turn in turns for span in turn.weight_versions}


# Tensors.


def batch_figures(data: DataProto) -> Figures:
    """Describe a batch's rewards, credit, and how far trainer and engine disagree.

    Rows that are not in their group's baseline are out of scores and rewards. Of tokens only those
    with `response_mask` 1 count, and for the distance of trainer and engine those that it made
    the correction reject. Figures whose tensors are not there are left out.

    Args:
        data: `response_mask` and, where there are, `token_level_scores`, `token_level_rewards`,
            `advantages`, `returns`, `old_log_probs`, `rollout_log_probs`, all `[B, T]`;
            `rejected` `[B, T]`, tokens that the rollout's correction took out of the mask;
            `in_baseline` `[B]` (without it every row counts); `uid` for each row.
    """
    if data.batch is None or len(data) == 0:
        return {}
    tensors = cast("Mapping[str, torch.Tensor]", dict(data.batch.items()))
    trained = tensors["response_mask"].bool()
    scored = tensors.get("in_baseline", torch.ones(len(data))).bool()
    figures = _reward_figures(tensors, scored)
    for key in ("advantages", "returns", "values"):
        if key in tensors:
            figures |= tensor_spread(f"critic/{key}", tensors[key][trained])
    sampled = trained | tensors["rejected"] if "rejected" in tensors else trained
    figures |= _mismatch_figures(tensors, sampled)
    if "uid" in data.non_tensor_batch and "advantages" in tensors:
        has_signal = ((tensors["advantages"] != 0) & trained).any(dim=-1)
        figures |= _signal_figures(data.non_tensor_batch["uid"], has_signal.tolist())
    return figures


def _reward_figures(tensors: Mapping[str, torch.Tensor], scored: torch.Tensor) -> Figures:
    """Rewards of whole trajectories: as scored, and as trained on (a KL penalty included)."""
    figures: Figures = {}
    for name, key in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        if key in tensors:
            figures |= tensor_spread(f"critic/{name}", tensors[key].sum(dim=-1)[scored])
    return figures


def _mismatch_figures(tensors: Mapping[str, torch.Tensor], sampled: torch.Tensor) -> Figures:
    """Distance of the engine's probabilities from the trainer's, over the tokens of `sampled`.

    Source: verl's `training/rollout_probs_diff_*` (differences of probabilities, not of logs).
    """
    if not {"old_log_probs", "rollout_log_probs"} <= tensors.keys() or not sampled.any():
        return {}
    old = tensors["old_log_probs"][sampled].double()
    rollout = tensors["rollout_log_probs"][sampled].double()
    of_probs = (old.exp() - rollout.exp()).abs()
    of_logs = (old - rollout).abs()
    return {
        "training/rollout_probs_diff_max": Largest(of_probs.max().item()),
        "training/rollout_probs_diff_mean": Mean(of_probs.sum().item(), of_probs.numel()),
        "training/rollout_probs_diff_std": Deviation.of(of_probs),
        "training/rollout_log_probs_diff_max": Largest(of_logs.max().item()),
        "training/rollout_log_probs_diff_mean": Mean(of_logs.sum().item(), of_logs.numel()),
    }


def _signal_figures(groups: Iterable[str], has_signal: Iterable[bool]) -> Figures:
    """Share of the groups that train on nothing: no trained token has an advantage but zero."""
    signal_of: dict[str, bool] = {}
    for group, signal in zip(groups, has_signal, strict=True):
        signal_of[group] = signal_of.get(group, False) or signal
    return {NO_SIGNAL: Share(signal_of)}


# The clock.


class Timer:
    """Seconds of each station of one step, as `timing_s/<station>`.

    Stations may nest and repeat (their seconds add up); a station that raises is still recorded.

    Args:
        clock: Seconds, from anywhere.
        on_enter: Told the name of each station as it begins.

    Example:
        >>> timer = Timer(clock=iter([0.0, 1.5]).__next__)
        >>> with timer("gen"):
        ...     pass
        >>> timer.pop_metrics()
        {'timing_s/gen': 1.5}
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_enter: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._on_enter = on_enter
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, station: str) -> Iterator[None]:
        """Add the seconds of the `with` block to `station`."""
        self._on_enter(station)
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[station] = self.seconds(station) + self._clock() - start

    def seconds(self, station: str) -> float:
        """Seconds of `station` so far; 0 where it was not entered."""
        return self._seconds.get(station, 0.0)

    def pop_metrics(self) -> Metrics:
        """All stations under `timing_s/`; the timer starts afresh for the next step."""
        metrics = {f"timing_s/{station}": seconds for station, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics


def time_figures(seconds: Mapping[str, float]) -> Figures:
    """Take the seconds of the slowest rank for those of the run."""
    return {name: Largest(value) for name, value in seconds.items()}


def perf_figures(num_tokens: int, seconds: float) -> Figures:
    """Describe one rank's speed and memory in a step.

    Args:
        num_tokens: Prompt and response tokens of the rank's batch.
        seconds: Wall clock of the step.

    Returns:
        `perf/throughput` in tokens per second and rank; peaks of memory in GiB, of the rank that
        needs most.
    """
    figures: Figures = {
        "perf/total_num_tokens": Total(float(num_tokens)),
        "perf/time_per_step": Largest(seconds),
        "perf/max_cpu_memory_gb": Largest(_peak_host_bytes() / _GIB),
    }
    if seconds > 0:
        figures["perf/throughput"] = Rate(num_tokens, seconds)
    if torch.cuda.is_available():
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        figures["perf/max_memory_allocated_gb"] = Largest(peaks[0] / _GIB)
        figures["perf/max_memory_reserved_gb"] = Largest(peaks[1] / _GIB)
    return figures


def _peak_host_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


# Numbers.


def _per_request(count: int, requests: Sequence[AsyncRolloutRequest]) -> Mean:
    return Mean(count, len(requests))


def _ratio(name: str, part: float, whole: float) -> Figures:
    return {name: Mean(part, whole)} if whole else {}
