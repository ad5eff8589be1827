"""Each pool of a run on Ray reports the share of a step that it worked, by phase."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import parse_config
from agentrl.trainer.metrics.aggregators import compute_values, merge_metrics
from agentrl.trainer.metrics.pools import Traffic, pool_metrics, traffic_metrics

SECONDS = {
    "timing_s/step": 10.0, "timing_s/gen": 5.0, "timing_s/reward": 1.0,
    "timing_s/old_log_prob": 1.0, "timing_s/update_actor": 2.0, "timing_s/sync_weights": 0.5,
}  # fmt: skip


def config_of(roles: dict[str, list[str]], **sections: Any):
    pools = [{"name": name, "roles": given} for name, given in roles.items()]
    return parse_config(
        {"data": {}, "model": {"path": "m"}, "cluster": {"pools": pools}} | sections
    )


def values_of(config: Any, seconds: dict[str, float] = SECONDS) -> dict[str, float]:
    return compute_values(merge_metrics([pool_metrics(config, seconds)]))


def test_one_pool_with_all_roles_works_in_every_phase():
    metrics = values_of(config_of({"all": ["train", "engine", "rollout"]}))
    assert metrics == pytest.approx(
        {
            "perf/pool/all/gen_frac": 0.5,
            "perf/pool/all/reward_frac": 0.1,
            "perf/pool/all/old_log_prob_frac": 0.1,
            "perf/pool/all/update_actor_frac": 0.2,
            "perf/pool/all/sync_weights_frac": 0.05,
            "perf/pool/all/busy_frac": 0.95,
        }
    )


def test_servers_and_workers_of_their_own_leave_the_ranks_idle_while_they_generate():
    config = config_of(
        {"ranks": ["train"], "servers": ["engine"], "workers": ["rollout"]},
        rollout={"num_workers": 4, "engine": {"name": "sglang_server"}},
    )
    metrics = values_of(config)
    busy = {
        name: metrics[f"perf/pool/{name}/busy_frac"] for name in ("ranks", "servers", "workers")
    }
    assert busy == pytest.approx({"ranks": 0.35, "servers": 0.55, "workers": 0.6})
    assert "perf/pool/ranks/gen_frac" not in metrics
    assert "perf/pool/workers/update_actor_frac" not in metrics


def test_embedded_engine_and_requests_without_workers_are_work_of_the_ranks():
    metrics = values_of(config_of({"ranks": ["train"], "spare": ["rollout"]}))
    assert metrics["perf/pool/ranks/busy_frac"] == pytest.approx(0.95)
    assert metrics["perf/pool/spare/busy_frac"] == 0


def test_servers_at_typed_addresses_are_in_no_pool():
    engine = {"name": "sglang_server", "sglang_server": {"addresses": ["http://a:1"]}}
    config = config_of(
        {"ranks": ["train"], "workers": ["rollout"]}, rollout={"num_workers": 2, "engine": engine}
    )
    metrics = values_of(config)
    assert "perf/pool/ranks/gen_frac" not in metrics
    assert metrics["perf/pool/workers/gen_frac"] == 0.5


@given(
    seconds=st.lists(st.floats(0.001, 100), min_size=3, max_size=3),
    slower=st.floats(1.0, 3.0),
)
def test_shares_are_means_over_ranks_and_never_more_than_the_step(
    seconds: list[float], slower: float
):
    config = config_of({"all": ["train", "engine", "rollout"]})
    names = ("gen", "update_actor", "sync_weights")
    ranks = [
        {"timing_s/step": sum(seconds) * factor}
        | {f"timing_s/{name}": value for name, value in zip(names, seconds, strict=True)}
        for factor in (1.0, slower)
    ]
    metrics = compute_values(merge_metrics([pool_metrics(config, rank) for rank in ranks]))
    busy = metrics["perf/pool/all/busy_frac"]
    assert busy == pytest.approx((1 + 1 / slower) / 2)
    parts = [metrics[f"perf/pool/all/{name}_frac"] for name in names]
    assert sum(parts) == pytest.approx(busy)


def test_bytes_of_all_ranks_add_up():
    ranks = [traffic_metrics(Traffic(10, 7) - Traffic(4, 2)), traffic_metrics(Traffic(1, 1))]
    assert compute_values(merge_metrics(ranks)) == {
        "perf/rollout_workers/sent_bytes": 7.0,
        "perf/rollout_workers/received_bytes": 6.0,
    }
