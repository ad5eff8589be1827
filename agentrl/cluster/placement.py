"""Reserve the pools of a run on the cluster, and start processes in them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.connection import list_nodes
from agentrl.cluster.handles import RemoteHost
from agentrl.cluster.host import MAX_CALLS, Host, HostSpec
from agentrl.cluster.pools import Pool, check_pools, describe_nodes, sort_for_placement
from agentrl.errors import ClusterError

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class PlacedPool:
    """A pool with its reservation."""

    pool: Pool
    group: PlacementGroup

    def start(
        self,
        spec: HostSpec,
        monitor: Any,
        *,
        node: int,
        num_devices: float = 0,
        num_cpus: float = 0,
        max_restarts: int = 0,
    ) -> RemoteHost:
        """Start a process in the pool. Returns at once; `RemoteHost.describe` waits for it.

        Args:
            spec: The description of the process.
            monitor: The actor that gets its heartbeats.
            node: Index of the node in the pool.
            num_devices: Devices of the process. On GPUs Ray sets CUDA_VISIBLE_DEVICES to them.
            num_cpus: CPUs in addition to the devices.
            max_restarts: How often Ray starts it again if it dies; -1: always. The object is then
                made again from the same arguments.
        """
        gpus = num_devices if self.pool.device_kind == "GPU" else 0
        cpus = num_cpus + (num_devices if self.pool.device_kind == "CPU" else 0)
        remote: Any = ray.remote
        actor = remote(concurrency_groups={"control": 100})(Host).options(
            num_cpus=cpus,
            num_gpus=gpus,
            max_restarts=max_restarts,
            max_task_retries=0,
            max_concurrency=MAX_CALLS,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=node
            ),
        )
        return RemoteHost(spec.name, spec.role, spec.pool, actor.remote(spec, monitor))

    def node_ids(self) -> set[str]:
        """Return the nodes on which Ray has the pool now; a dead one is among them until Ray
        notices.
        """
        table: Any = placement_group_table(self.group)
        return {node for node in table["bundles_to_node_id"].values() if node}

    def release(self) -> None:
        """Remove the reservation; Ray ends the processes in it."""
        remove_placement_group(self.group)


def place(pools: Sequence[Pool], *, timeout_s: float, say: Any) -> dict[str, PlacedPool]:
    """Reserve every pool, after the check that the cluster has what it asks for.

    Args:
        pools: The pools of the run.
        timeout_s: Seconds to wait for resources that other runs use.
        say: Prints a line for the user.

    Raises:
        ClusterError: naming the shortfall of each pool.
    """
    nodes = list_nodes()
    if not check_pools(pools, nodes):
        say(f"waiting up to {timeout_s:g} s: other work uses a part of the cluster's resources")
    end = time.monotonic() + timeout_s
    groups: dict[str, PlacedPool] = {}
    try:
        for pool in sort_for_placement(pools, [node.available for node in nodes]):
            strategy = "STRICT_SPREAD" if pool.nodes > 1 else "STRICT_PACK"
            bundles = [dict(pool.bundle)] * pool.nodes
            groups[pool.name] = PlacedPool(pool, placement_group(bundles, strategy=strategy))
        while waiting := [one.pool for one in groups.values() if not one.group.wait(_POLL_S)]:
            nodes = list_nodes()
            check_pools(pools, nodes)  # a node may have left the cluster
            if time.monotonic() > end:
                raise ClusterError(
                    f"the cluster has no free resources after {timeout_s:g} s",
                    waiting="; ".join(map(str, waiting)),
                    cluster=describe_nodes(nodes),
                    key="cluster.placement_timeout_s",
                    expected="less work of others on the cluster, or a longer time",
                )
    except BaseException:
        for one in groups.values():
            one.release()
        raise
    return groups
