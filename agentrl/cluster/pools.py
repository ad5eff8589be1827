"""The pools of a run: what they ask for, and whether the cluster has it. Nothing here needs Ray.

A pool reserves one bundle of resources on each of its nodes. The check assigns every bundle to a
node, as the placement will, and names what is missing for each pool before anything starts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentrl.config.schema.cluster import HostRole, PoolConfig
from agentrl.config.schema.resources import make_bundle
from agentrl.config.schema.run import RunConfig
from agentrl.errors import ClusterError
from agentrl.plugins.remote import PlacedPlugin

DeviceKind = Literal["GPU", "CPU"]
Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Pool:
    """One pool with everything that its nodes must have."""

    name: str
    nodes: int
    devices_per_node: int
    roles: tuple[HostRole, ...]
    device_kind: DeviceKind
    """Ray's name of the resource that is a device of this run."""
    workers: tuple[int, ...]
    """Rollout workers on each node of the pool."""
    bundle: Resources
    """What is reserved on each node."""

    @property
    def num_devices(self) -> int:
        """Devices on all nodes of the pool."""
        return self.nodes * self.devices_per_node

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes != 1)}"
        roles = ", ".join(self.roles)
        return f"{self.name}: {nodes} x {_shown(self.bundle)} for {roles}"


@dataclass(frozen=True, slots=True)
class NodeResources:
    """A living node of the cluster."""

    node_id: str
    address: str
    total: Resources
    available: Resources


def device_kind(config: RunConfig, nodes: Sequence[NodeResources]) -> DeviceKind:
    """Return what a device of the run is; `trainer.device: auto` is a GPU if the cluster has any.

    Args:
        config: The run's configuration.
        nodes: The nodes of the cluster.
    """
    if config.trainer.device == "auto":
        return "GPU" if any(node.total.get("GPU") for node in nodes) else "CPU"
    return "CPU" if config.trainer.device == "cpu" else "GPU"


def make_pools(config: RunConfig, kind: DeviceKind) -> list[Pool]:
    """Make the table of pools of a run, with the resources of each node.

    Rollout workers are spread evenly over all nodes with the role.

    Args:
        config: The run's configuration.
        kind: What a device is.
    """
    declared = config.pools
    num_workers = config.rollout.num_workers or 0
    num_nodes = sum(pool.nodes for pool in declared if "rollout" in pool.roles)
    shares = [num_workers // num_nodes + (i < num_workers % num_nodes) for i in range(num_nodes)]
    pools: list[Pool] = []
    for pool in declared:
        on_nodes = [shares.pop(0) for _ in range(pool.nodes)] if "rollout" in pool.roles else []
        bundle = _bundle(pool, kind, most_workers=max(on_nodes, default=0))
        pools.append(
            Pool(
                name=pool.name,
                nodes=pool.nodes,
                devices_per_node=pool.devices_per_node,
                roles=tuple(pool.roles),
                device_kind=kind,
                workers=tuple(on_nodes) or (0,) * pool.nodes,
                bundle=bundle,
            )
        )
    return pools


def make_plugin_pools(plugins: Sequence[PlacedPlugin]) -> list[Pool]:
    """Make a pool of one process for each tool or scorer that asks for resources.

    Args:
        plugins: The plug-ins; their keys are the names of the pools.
    """
    return [
        Pool(
            name=plugin.key,
            nodes=1,
            devices_per_node=0,
            roles=("plugin",),
            device_kind="GPU",
            workers=(0,),
            bundle=make_bundle(plugin.resources),
        )
        for plugin in plugins
    ]


def num_local_cpus(config: RunConfig) -> float:
    """Count the CPUs that a new cluster on one machine needs if a device of the run is a CPU."""
    pools = make_pools(config, "CPU") if config.trainer.device != "cuda" else []
    return sum(pool.nodes * pool.bundle.get("CPU", 0.0) for pool in pools)


def _bundle(pool: PoolConfig, kind: DeviceKind, *, most_workers: int) -> dict[str, float]:
    """Return what is reserved on each node of a pool."""
    gpus = pool.devices_per_node if kind == "GPU" else 0
    cpus = pool.cpus_per_node if pool.cpus_per_node is not None else most_workers + gpus
    if kind == "CPU":
        cpus += pool.devices_per_node
    asked = {"CPU": float(cpus), "GPU": float(gpus), **pool.resources}
    return {name: amount for name, amount in asked.items() if amount}


def check_pools(pools: Sequence[Pool], nodes: Sequence[NodeResources]) -> bool:
    """Check what the pools ask for against the cluster.

    Args:
        pools: The pools of the run.
        nodes: The nodes of the cluster.

    Returns:
        Whether all of it is free now. If not, other runs use a part of it.

    Raises:
        ClusterError: with the shortfall of each pool, if the cluster does not have it.
    """
    missing = find_shortfall(pools, [(node, dict(node.total)) for node in nodes])
    if missing:
        raise ClusterError(
            "the cluster has fewer resources than the run asks for",
            shortfall="; ".join(missing),
            cluster=describe_nodes(nodes),
            key="cluster.pools" if len(pools) > 1 else "trainer.nnodes, trainer.n_gpus_per_node",
            expected="a larger cluster, or fewer nodes, devices, workers or `resources`",
        )
    return not find_shortfall(pools, [(node, dict(node.available)) for node in nodes])


def find_shortfall(
    pools: Sequence[Pool], nodes: Sequence[tuple[NodeResources, dict[str, float]]]
) -> list[str]:
    """Assign each bundle to a node, and describe the pools that do not fit.

    Pools share nodes if these have enough for all; the nodes of one pool differ. Pools are assigned
    in the order of `sort_for_placement`, each bundle to the node whose other resources are missed
    least.

    Args:
        pools: The pools of the run.
        nodes: The nodes, with what is free on each; assigned resources are subtracted.
    """
    missing: list[str] = []
    for pool in sort_for_placement(pools, [free for _, free in nodes]):
        fitting = [(node, free) for node, free in nodes if _fits(pool.bundle, free)]
        fitting.sort(key=lambda pair: _remainder(pair[1], pool.bundle))
        for _, free in fitting[: pool.nodes]:
            for name, amount in pool.bundle.items():
                free[name] -= amount
        if len(fitting) < pool.nodes:
            label = pool.name if pool.roles == ("plugin",) else f"pool {pool.name}"
            missing.append(
                f"{label} asks for {pool.nodes} x ({_shown(pool.bundle)}), and "
                f"{len(fitting)} of {len(nodes)} nodes {'has' if len(fitting) == 1 else 'have'} it"
            )
    return missing


def describe_nodes(nodes: Sequence[NodeResources]) -> str:
    """Describe the resources of each node for an error."""
    return "; ".join(
        f"{node.address}: {_shown(countable(node.total))} "
        f"(free: {_shown(countable(node.available))})"
        for node in nodes
    )


def countable(resources: Resources) -> dict[str, float]:
    """Leave out what Ray adds to the resources of a node: memory, addresses, reservations."""
    hidden = ("node:", "memory", "object_store_memory")
    return {
        name: amount
        for name, amount in resources.items()
        if not name.startswith(hidden) and "_group_" not in name
    }


def _fits(bundle: Resources, free: Resources) -> bool:
    return all(free.get(name, 0.0) >= amount - 1e-6 for name, amount in bundle.items())


def _size(resources: Resources) -> float:
    """Order resources: GPUs count most, because nodes without them cannot replace one."""
    return 1e6 * resources.get("GPU", 0.0) + resources.get("CPU", 0.0)


def _remainder(free: Resources, bundle: Resources) -> tuple[int, float]:
    """Order nodes for a bundle: first those without custom resources that it does not ask for, then
    the smallest.
    """
    custom = countable(free).keys() - bundle.keys() - {"CPU", "GPU"}
    return sum(free[name] > 0 for name in custom), _size(free)


def sort_for_placement(pools: Sequence[Pool], free: Sequence[Resources]) -> list[Pool]:
    """Sort pools in the order of their placement: those with the fewest nodes to spare first.

    Args:
        pools: The pools of the run.
        free: The resources of each node.
    """

    def spare_nodes(pool: Pool) -> int:
        return sum(_fits(pool.bundle, one) for one in free) - pool.nodes

    return sorted(pools, key=lambda pool: (spare_nodes(pool), -_size(pool.bundle)))


def _shown(resources: Resources) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
