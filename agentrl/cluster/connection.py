"""Connect to a Ray cluster, or start one on this machine, for the time of a run."""

import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray._private import services

from agentrl.cluster.monitor import NAMESPACE
from agentrl.cluster.pools import NodeResources
from agentrl.config.schema.cluster import ClusterConfig
from agentrl.errors import ClusterError, ConfigError
from agentrl.plugins.environment import num_cores

LOCAL = "local"
CONNECT_TIMEOUT_S = 10.0


@contextmanager
def connected(config: ClusterConfig, *, min_cpus: float = 0) -> Iterator[str]:
    """Connect this process to the cluster for the `with` block.

    Args:
        config: The address, and what the nodes get from this machine.
        min_cpus: CPUs that a new local cluster has at least: a device of a run on CPUs is one of
            them, also if the machine has fewer cores.

    Yields:
        A sentence that names the cluster.

    Raises:
        ConfigError: if a name or folder of `runtime_env` does not exist.
        ClusterError: if there is no cluster at the address.
    """
    address = config.address or os.environ.get("RAY_ADDRESS") or LOCAL
    given: dict[str, Any] = {"runtime_env": make_runtime_env(config)}
    if address == LOCAL:
        given |= {
            "num_cpus": max(num_cores(), int(min_cpus)),
            "include_dashboard": False,
            "object_store_memory": config.object_store_bytes,
        }
    already = ray.is_initialized()
    try:
        if not already:
            _check_listens(address)
            with _own_session():
                ray.init(
                    address=address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    **given,
                )
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise ClusterError(
            f"cannot connect to the Ray cluster at {address}: {error}",
            key="cluster.address",
            expected="the address of a running cluster (`ray start --head` prints it), or local",
        ) from error
    try:
        where = "started on this machine" if address == LOCAL else f"at {address}"
        nodes = list_nodes()
        yield f"Ray {ray.__version__} {where}: {len(nodes)} node{'s' * (len(nodes) != 1)}"
    finally:
        if not already:
            ray.shutdown()


def _check_listens(address: str) -> None:
    """Raise if nothing listens at the address of a cluster, `host:port`. Ray tries it for long."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ConnectionError(error.strerror or f"{error}") from error


@contextmanager
def _own_session() -> Iterator[None]:
    """Start the processes of a local cluster in sessions of their own while the block runs.

    A signal to the process group of the driver, such as that of `timeout`, would otherwise end Ray
    before the ranks have saved. Ray does this itself on Windows, and has no option for it.
    """
    started = services.ConsolePopen
    services.ConsolePopen = partial(started, start_new_session=True)  # type: ignore[misc]
    try:
        yield
    finally:
        services.ConsolePopen = started


def make_runtime_env(config: ClusterConfig) -> dict[str, Any]:
    """Make Ray's runtime environment. It has no values of environment variables: Ray logs them.

    Raises:
        ConfigError: if a folder does not exist.
    """
    given = config.runtime_env
    folders = {"cluster.runtime_env.working_dir": given.working_dir} | {
        f"cluster.runtime_env.py_modules[{index}]": path
        for index, path in enumerate(given.py_modules)
    }
    for key, folder in folders.items():
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"no folder {folder}", key=key, expected="a folder", cwd=Path.cwd())
    environment: dict[str, Any] = {}
    if given.working_dir is not None:
        environment["working_dir"] = str(given.working_dir.absolute())
    if given.excludes:
        environment["excludes"] = given.excludes
    if given.py_modules:
        environment["py_modules"] = [str(path.absolute()) for path in given.py_modules]
    return environment


def forwarded_variables(names: Sequence[str]) -> dict[str, str]:
    """Read the environment variables that every process gets.

    Args:
        names: `cluster.runtime_env.env_vars`.

    Raises:
        ConfigError: naming a variable that is not set.
    """
    for index, name in enumerate(names):
        if name not in os.environ:
            raise ConfigError(
                f"the environment variable {name} is not set here",
                key=f"cluster.runtime_env.env_vars[{index}]",
                expected="the name of a variable that is set where `agentrl train` runs",
            )
    return {name: os.environ[name] for name in names}


def list_nodes() -> list[NodeResources]:
    """List the living nodes of the cluster, with what they have and what is free."""
    free = ray._private.state.available_resources_per_node()  # pyright: ignore
    return [
        NodeResources(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            total=node["Resources"],
            available=free.get(node["NodeID"], {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
