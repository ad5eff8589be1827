"""Check what a run on Ray asks for against its cluster, pool by pool."""

from collections.abc import Sequence

from agentrl.cluster.pools import (
    NodeResources,
    Pool,
    describe_nodes,
    device_kind,
    find_shortfall,
    make_pools,
    num_local_cpus,
)
from agentrl.config.schema.run import RunConfig
from agentrl.doctor.report import Checked
from agentrl.plugins.environment import require_package


def check_cluster(config: RunConfig) -> Checked[None]:
    """Connect to the cluster, or start the one that the run would start, and check each pool.

    Raises:
        MissingExtraError: if ray is not installed.
        ClusterError: if there is no cluster at the address.
        ConfigError: for a wrong key of `cluster.runtime_env`.
    """
    if not config.asks_for_cluster:
        return Checked(None, "one process, without Ray")
    require_package("ray", extra="cluster", what="a run on several devices")
    from agentrl.cluster.connection import connected, forwarded_variables, list_nodes

    forwarded_variables(config.cluster.runtime_env.env_vars)
    with connected(config.cluster, min_cpus=num_local_cpus(config)) as cluster:
        nodes = list_nodes()
        return compare(make_pools(config, device_kind(config, nodes)), nodes, cluster)


def compare(pools: Sequence[Pool], nodes: Sequence[NodeResources], cluster: str) -> Checked[None]:
    """Compare what the pools ask for with what the nodes have.

    Args:
        pools: The pools of the run.
        nodes: The living nodes of the cluster.
        cluster: A sentence that names the cluster.
    """
    lines = [cluster, *(f"pool {pool}" for pool in pools), f"nodes: {describe_nodes(nodes)}"]
    missing = find_shortfall(pools, [(node, dict(node.total)) for node in nodes])
    busy = find_shortfall(pools, [(node, dict(node.available)) for node in nodes])
    doubts = () if missing else (f"in use by other work now: {one}" for one in busy)
    return Checked(None, "\n".join(lines), tuple(doubts), tuple(missing))
