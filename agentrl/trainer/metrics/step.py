"""Metrics of a training step on one rank: requests, tensors, time and memory.

Names are those of verl if verl has the metric. `agentrl.trainer.metrics.aggregators` merges the
ranks' metrics.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import cast

import torch

from agentrl.protocol import DataProto
from agentrl.rollout.records import unix_time
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.metrics.aggregators import (
    MaxMetric,
    MeanMetric,
    MetricDict,
    Metrics,
    StdMetric,
    SumMetric,
    ZeroSignalMetric,
    tensor_mean_max_min,
)
from agentrl.trainer.metrics.rollout import rollout_metrics
from agentrl.trainer.metrics.sinks import ZERO_SIGNAL
from agentrl.trainer.tracing.spans import Interval

_GIB = 1024**3


def step_metrics(
    requests: Sequence[AsyncRolloutRequest], batch: DataProto, seconds: Mapping[str, float]
) -> MetricDict:
    """Measure one rank's part of a training step.

    Args:
        requests: Everything that was rolled out.
        batch: The rows made from the requests.
        seconds: Seconds of the stages (`Timer.pop_metrics`), `timing_s/step` among them.
    """
    num_tokens = sum(r.num_prompt_tokens + r.num_response_tokens for r in requests)
    return {
        **rollout_metrics(requests),
        **batch_metrics(batch),
        **perf_metrics(num_tokens, seconds["timing_s/step"]),
        **time_metrics(seconds),
    }


def batch_metrics(data: DataProto) -> MetricDict:
    """Measure a batch's rewards, credit, and the mismatch between trainer and engine.

    Rows that are not in their group's baseline are left out of scores and rewards. Only tokens
    with `response_mask` 1 count; for the mismatch, tokens that the correction rejected count too.
    Metrics of missing tensors are left out.

    Args:
        data: `response_mask` and, if present, `token_level_scores`, `token_level_rewards`,
            `advantages`, `returns`, `old_log_probs`, `rollout_log_probs`, all `[B, T]`;
            `rejected` `[B, T]`, tokens that the rollout correction removed from the mask;
            `in_baseline` `[B]` (without it every row counts); `is_computed` `[B]`, the rows that
            have `old_log_probs` (without it all have); `uid` for each row.
    """
    if data.batch is None or len(data) == 0:
        return {}
    tensors = cast("Mapping[str, torch.Tensor]", dict(data.batch.items()))
    trained = tensors["response_mask"].bool()
    scored = tensors.get("in_baseline", torch.ones(len(data))).bool()
    metrics: MetricDict = {}
    for name, key in (("score", "token_level_scores"), ("rewards", "token_level_rewards")):
        if key in tensors:
            metrics |= tensor_mean_max_min(f"critic/{name}", tensors[key].sum(dim=-1)[scored])
    for key in ("advantages", "returns", "values"):
        if key in tensors:
            metrics |= tensor_mean_max_min(f"critic/{key}", tensors[key][trained])
    sampled = trained | tensors["rejected"] if "rejected" in tensors else trained
    if "is_computed" in tensors:
        sampled = sampled & tensors["is_computed"][:, None]
    metrics |= _mismatch_metrics(tensors, sampled)
    if "uid" in data.non_tensor_batch and "advantages" in tensors:
        has_signal: dict[str, bool] = {}
        rows = ((tensors["advantages"] != 0) & trained).any(dim=-1).tolist()
        for group, row in zip(data.non_tensor_batch["uid"], rows, strict=True):
            has_signal[group] = has_signal.get(group, False) or row
        metrics[ZERO_SIGNAL] = ZeroSignalMetric(has_signal)
    return metrics


def _mismatch_metrics(tensors: Mapping[str, torch.Tensor], sampled: torch.Tensor) -> MetricDict:
    """Compare the engine's probabilities with the trainer's, over the tokens of `sampled`.

    Source: verl's `training/rollout_probs_diff_*` (differences of probabilities, not of logs).
    """
    if not {"old_log_probs", "rollout_log_probs"} <= tensors.keys() or not sampled.any():
        return {}
    old = tensors["old_log_probs"][sampled].double()
    rollout = tensors["rollout_log_probs"][sampled].double()
    probs = (old.exp() - rollout.exp()).abs()
    logs = (old - rollout).abs()
    return {
        "training/rollout_probs_diff_max": MaxMetric(probs.max().item()),
        "training/rollout_probs_diff_mean": MeanMetric(probs.sum().item(), probs.numel()),
        "training/rollout_probs_diff_std": StdMetric.of(probs),
        "training/rollout_log_probs_diff_max": MaxMetric(logs.max().item()),
        "training/rollout_log_probs_diff_mean": MeanMetric(logs.sum().item(), logs.numel()),
    }


class Timer:
    """Seconds of each stage of one step, as `timing_s/<stage>`. A profile shows the stages too.

    Stages may nest and repeat (their seconds add up). A stage that raises is still recorded.

    Args:
        clock: The monotonic clock.
        on_enter: Called with the name of each stage when it begins.

    Example:
        >>> timer = Timer(clock=iter([0.0, 1.5]).__next__)
        >>> with timer("gen"):
        ...     pass
        >>> timer.pop_metrics()
        {'timing_s/gen': 1.5}
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        on_enter: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._on_enter = on_enter
        self._seconds: dict[str, float] = {}
        self._intervals: list[Interval] = []

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the seconds of the `with` block to `stage`."""
        self._on_enter(stage)
        start = self._clock()
        try:
            with torch.profiler.record_function(stage):
                yield
        finally:
            end = self._clock()
            self._seconds[stage] = self.seconds(stage) + end - start
            self._intervals.append(Interval(stage, unix_time(start), unix_time(end)))

    def seconds(self, stage: str) -> float:
        """Return the seconds of `stage` so far; 0 if it was not entered."""
        return self._seconds.get(stage, 0.0)

    def pop_metrics(self) -> Metrics:
        """Return the seconds of all stages under `timing_s/`, and reset the timer."""
        metrics = {f"timing_s/{stage}": seconds for stage, seconds in self._seconds.items()}
        self._seconds.clear()
        return metrics

    def pop_intervals(self) -> list[Interval]:
        """Return when the stages began and ended since the last call, in Unix time."""
        intervals, self._intervals = self._intervals, []
        return intervals


def time_metrics(seconds: Mapping[str, float]) -> MetricDict:
    """Use the slowest rank's seconds as those of the run."""
    return {name: MaxMetric(value) for name, value in seconds.items()}


def perf_metrics(num_tokens: int, seconds: float) -> MetricDict:
    """Measure one rank's tokens, time and peak memory in a step.

    Args:
        num_tokens: Prompt and response tokens of the rank's batch.
        seconds: Wall clock of the step.

    Returns:
        Metrics; memory is in GiB, of the rank that needs most.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
    metrics: MetricDict = {
        "perf/total_num_tokens": SumMetric(float(num_tokens)),
        "perf/time_per_step": MaxMetric(seconds),
        "perf/max_cpu_memory_gb": MaxMetric(peak_bytes / _GIB),
    }
    if torch.cuda.is_available():
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        metrics["perf/max_memory_allocated_gb"] = MaxMetric(peaks[0] / _GIB)
        metrics["perf/max_memory_reserved_gb"] = MaxMetric(peaks[1] / _GIB)
    return metrics


def compute_throughput(metrics: Metrics, num_ranks: int) -> Metrics:
    """Compute the tokens per second and rank from the merged metrics of `perf_metrics`."""
    if not metrics["perf/time_per_step"]:
        return {}
    per_second = metrics["perf/total_num_tokens"] / metrics["perf/time_per_step"]
    return {"perf/throughput": per_second / num_ranks}
