"""Metrics of a run on Ray: how each pool spends a step, and bytes between processes."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

from agentrl.config.schema.cluster import PoolConfig
from agentrl.config.schema.run import RunConfig
from agentrl.trainer.metrics.aggregators import MeanMetric, MetricDict, SumMetric

_TRAINING = (
    "reward_model", "old_log_prob", "ref", "values", "update_critic", "update_actor",
    "sync_weights",
)  # fmt: skip
"""Phases in which training ranks compute."""
_REQUESTS = ("gen", "reward")
"""Phases in which requests run: their tools, templates and scorers."""
_ENGINE = ("gen", "sync_weights")
"""Phases in which an engine computes or takes weights."""


class Traffic(NamedTuple):
    """Bytes between a training rank and the rollout workers since the start of the run."""

    sent: int = 0
    """From the rank: requests, and completions of its own engine."""
    received: int = 0
    """By the rank: finished requests, and calls of its own engine."""

    def __sub__(self, before: Self) -> "Traffic":
        return Traffic(self.sent - before.sent, self.received - before.received)


def phases_of(pool: PoolConfig, config: RunConfig) -> Sequence[str]:
    """List the phases of a step in which a pool works.

    Args:
        pool: A pool of the run.
        config: The run.
    """
    trains = "train" in pool.roles
    has_workers = config.rollout.num_workers is not None
    runs_requests = "rollout" in pool.roles if has_workers else trains
    # An embedded engine is in the ranks. Servers at typed addresses are in no pool.
    is_embedded = config.rollout.engine.name != "sglang_server"
    has_engine = trains if is_embedded else config.has_own_servers and "engine" in pool.roles
    found: dict[str, None] = {}
    for is_here, phases in (
        (runs_requests, _REQUESTS),
        (has_engine, _ENGINE),
        (trains, _TRAINING),
    ):
        found |= dict.fromkeys(phases if is_here else ())
    return list(found)


def pool_metrics(config: RunConfig, seconds: Mapping[str, float]) -> MetricDict:
    """Measure the share of a step that each pool worked, by phase, on this rank.

    Args:
        config: The run.
        seconds: Seconds of the stages (`Timer.pop_metrics`), `timing_s/step` among them.

    Returns:
        `perf/pool/<name>/<phase>_frac`, and their sum as `busy_frac`. The rest of the step the pool
        waited for others.
    """
    step_s = seconds["timing_s/step"]
    if not step_s:
        return {}
    metrics: MetricDict = {}
    for pool in config.pools:
        shares = {
            phase: seconds[f"timing_s/{phase}"] / step_s
            for phase in phases_of(pool, config)
            if f"timing_s/{phase}" in seconds
        }
        shares["busy"] = sum(shares.values())
        for name, share in shares.items():
            metrics[f"perf/pool/{pool.name}/{name}_frac"] = MeanMetric(share, 1)
    return metrics


def traffic_metrics(traffic: Traffic) -> MetricDict:
    """Measure what this rank exchanged with rollout workers in a step."""
    return {
        "perf/rollout_workers/sent_bytes": SumMetric(float(traffic.sent)),
        "perf/rollout_workers/received_bytes": SumMetric(float(traffic.received)),
    }
