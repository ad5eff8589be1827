"""What the pools of a run ask for, and which cluster has it."""

from typing import Any

import pytest

from agentrl.cluster.pools import NodeResources, check_pools, device_kind, make_pools
from agentrl.config import parse_config
from agentrl.errors import ClusterError, ConfigError


def run_of(**changes: Any):
    return parse_config({"data": {}, "model": {"path": "m"}} | changes)


def node(address: str, *, free: dict[str, float] | None = None, **total: float) -> NodeResources:
    return NodeResources(address, address, total, total if free is None else free)


def test_one_device_needs_no_cluster():
    assert not run_of().asks_for_cluster
    assert run_of().num_ranks == 1
    assert not run_of(rollout={"num_workers": 1}).asks_for_cluster


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"n_gpus_per_node": 2}},
        {"trainer": {"nnodes": 2}},
        {"rollout": {"num_workers": 2}},
        {"cluster": {"address": "auto"}},
        {"cluster": {"pools": [{"name": "a", "roles": ["train"]}]}},
    ],
)
def test_several_devices_workers_pools_or_an_address_need_a_cluster(changes: dict[str, Any]):
    assert run_of(**changes).asks_for_cluster


def test_the_default_pool_has_every_role_and_the_workers():
    config = run_of(
        trainer={"nnodes": 2, "n_gpus_per_node": 4, "device": "cuda"}, rollout={"num_workers": 3}
    )
    (pool,) = make_pools(config, "GPU")
    assert (pool.nodes, pool.num_devices, pool.workers) == (2, 8, (2, 1))
    assert pool.bundle == {"CPU": 6.0, "GPU": 4.0}
    assert config.num_ranks == 8


def test_ranks_are_counted_in_the_pools_that_train():
    pools = [
        {"name": "learners", "nodes": 2, "devices_per_node": 3, "roles": ["train"]},
        {"name": "servers", "devices_per_node": 8, "roles": ["engine"]},
    ]
    config = run_of(cluster={"pools": pools})
    assert config.num_ranks == 6
    assert [pool.name for pool in make_pools(config, "GPU")] == ["learners", "servers"]


def test_on_cpus_a_device_is_a_cpu():
    config = run_of(trainer={"n_gpus_per_node": 3, "device": "cpu"})
    assert device_kind(config, [node("a", GPU=8)]) == "CPU"
    assert make_pools(config, "CPU")[0].bundle == {"CPU": 3.0}
    assert device_kind(run_of(), [node("a", GPU=8)]) == "GPU"
    assert device_kind(run_of(), [node("a", CPU=8)]) == "CPU"


def test_the_shortfall_is_named_for_each_pool():
    pools = make_pools(
        run_of(
            cluster={
                "pools": [
                    {"name": "learners", "nodes": 2, "devices_per_node": 8, "roles": ["train"]},
                    {"name": "servers", "devices_per_node": 4, "roles": ["engine"]},
                    {"name": "workers", "devices_per_node": 0, "roles": ["rollout"]},
                ]
            },
            rollout={"num_workers": 2},
        ),
        "GPU",
    )
    nodes = [node("one", CPU=32, GPU=8), node("two", CPU=32, GPU=4)]
    with pytest.raises(ClusterError) as caught:
        check_pools(pools, nodes)
    text = str(caught.value)
    assert "pool learners asks for 2 x (8 CPU, 8 GPU), and 1 of 2 nodes has it" in text
    assert "pool workers" not in text
    assert "pool servers" not in text, "it fits on the second node"
    assert "one: 32 CPU, 8 GPU (free: 32 CPU, 8 GPU)" in text
    assert check_pools(pools, [*nodes, node("three", CPU=8, GPU=8)])


def test_resources_in_use_are_not_a_shortfall():
    pools = make_pools(run_of(trainer={"n_gpus_per_node": 2, "device": "cpu"}), "CPU")
    assert not check_pools(pools, [node("one", free={"CPU": 1}, CPU=2)])
    assert check_pools(pools, [node("one", CPU=2)])


def test_pools_share_a_node_that_has_enough_for_both():
    pools = make_pools(
        run_of(
            cluster={
                "pools": [
                    {"name": "a", "devices_per_node": 2, "roles": ["train"]},
                    {"name": "b", "devices_per_node": 2, "roles": ["engine"]},
                ]
            }
        ),
        "CPU",
    )
    assert check_pools(pools, [node("one", CPU=4)])
    with pytest.raises(ClusterError):
        check_pools(pools, [node("one", CPU=3)])


@pytest.mark.parametrize("reverse", [False, True])
def test_a_pool_leaves_a_node_to_the_pool_that_has_no_other(reverse: bool):
    pools = [
        {"name": "a", "devices_per_node": 1, "roles": ["train"], "resources": {"disk": 1}},
        {"name": "b", "devices_per_node": 1, "roles": ["engine"], "resources": {"net": 1}},
    ]
    made = make_pools(run_of(cluster={"pools": pools[::-1] if reverse else pools}), "CPU")
    nodes = [node("one", CPU=1, disk=1, net=1), node("two", CPU=2, disk=1)]
    assert check_pools(made, nodes)
    with pytest.raises(ClusterError, match=r"pool [ab] asks for"):
        check_pools(made, nodes[:1])


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ([{"name": "a", "roles": ["train"]}, {"name": "a", "roles": ["engine"]}], "one name"),
        ([{"name": "a", "roles": ["train", "train"]}], "a role twice"),
        ([{"name": "a", "roles": ["trian"]}], "cluster.pools[0].roles[0]"),
        ([{"name": "a", "roles": []}], "cluster.pools[0].roles"),
    ],
)
def test_wrong_pools_are_refused(pools: list[dict[str, Any]], said: str):
    with pytest.raises(ConfigError, match=said.replace("[", r"\[")):
        run_of(cluster={"pools": pools})
