"""Workers, and groups of them whose methods are called on all ranks at once. No Ray in this module.

    class Scorer(Worker):                            group = RayWorkerGroup(
        @register(Dispatch.DP_COMPUTE_PROTO)             RayResourcePool([2], use_gpu=False),
        def score(self, data): ...                       RayClassWithInitArgs(Scorer))
                                                     scores = group.score(data)

`agentrl.cluster.ray_groups` has the groups of Ray actors. Names are those of verl 0.6.1.
"""

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from agentrl.cluster.dispatch import (
    DataProtoFuture,
    Dispatch,
    Execute,
    PendingResults,
    Registration,
    Rows,
    register,
    registered_methods,
)
from agentrl.errors import ConfigError
from agentrl.protocol import DataProto

CALL_TIMEOUT_S = 1800.0
"""Default limit of a call of a group, in seconds; `timeout_s` of the group or of the method."""

LEFT_OUT = {
    "start_worker_aliveness_check": "each call reports a rank that died; there is nothing to start",
    "create_transferqueue_client": "pass a DataProtoFuture: its parts travel between the ranks",
    "execute_func_rank_zero_async": "register the function's method with blocking=False",
}
"""Methods of verl's groups and workers that agentrl does not have, and the replacement."""


@dataclass(frozen=True)
class Mesh:
    """Which ranks compute the same rows, and which ones return the results."""

    dp_ranks: tuple[int, ...]
    collects: tuple[bool, ...]


class Worker:
    """A process of a worker group: the base class of users' roles.

    The group sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT before the constructor runs, so
    that `torch.distributed.init_process_group()` needs no arguments.
    """

    def __init__(self, cuda_visible_devices: str | None = None) -> None:
        if cuda_visible_devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = cuda_visible_devices
        # Ray shows each actor its own devices only, so that the local rank is always 0.
        os.environ.setdefault("LOCAL_RANK", "0")
        os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
        self._rank = int(os.environ["RANK"])
        self._world_size = int(os.environ["WORLD_SIZE"])
        self.fused_worker_dict: dict[str, Any] = {}
        self._meshes: dict[str, tuple[int, bool]] = {}

    @property
    def rank(self) -> int:
        """The rank of this worker in its group."""
        return self._rank

    @property
    def world_size(self) -> int:
        """The number of workers of the group."""
        return self._world_size

    def get_master_addr_port(self) -> tuple[str, str]:
        """Return address and port of the group's process group."""
        return os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]

    def get_available_master_addr_port(self) -> tuple[str, str]:
        """Return this node's address and a free port of it."""
        return free_address()

    def get_cuda_visible_devices(self) -> str:
        """Return the devices of this worker, or `not set`."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def get_fused_worker_by_name(self, worker_name: str) -> Any:
        """Return another role of this process (`create_colocated_worker_cls`), or None."""
        return self.fused_worker_dict.get(worker_name)

    def _register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool
    ) -> None:
        """Declare which part this rank computes, and whether it returns results.

        Raises:
            ConfigError: If the mesh is declared already.
        """
        if mesh_name in self._meshes:
            raise ConfigError(f"the mesh {mesh_name!r} is registered twice on rank {self.rank}")
        self._meshes[mesh_name] = (dp_rank, is_collect)

    @register(Dispatch.ONE_TO_ALL)
    def query_mesh_of_rank(self, mesh_name: str) -> tuple[int, bool]:
        """Return what `_register_dispatch_collect_info` declared.

        Raises:
            ConfigError: If the mesh is not declared.
        """
        if mesh_name not in self._meshes:
            raise ConfigError(
                f"{type(self).__name__} has no mesh {mesh_name!r}",
                expected=f"_register_dispatch_collect_info({mesh_name!r}, ...) on every rank, "
                "before the first call",
            )
        return self._meshes[mesh_name]

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function with this worker and its part of the batches."""
        return func(self, *args, **kwargs)

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function on rank 0."""
        return func(*args, **kwargs)


class ResourcePool:
    """Numbers of processes on nodes.

    Args:
        process_on_nodes: The number of processes of each node.
        max_colocate_count: Groups that may share a process's device.
        n_gpus_per_node: Kept for verl's signature; `process_on_nodes` counts.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        max_colocate_count: int = 10,
        n_gpus_per_node: int = 8,
    ) -> None:
        self._store = list(process_on_nodes or ())
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        """Add a node."""
        self._store.append(process_count)

    def __call__(self) -> list[int]:
        """Return `store`."""
        return self._store

    @property
    def store(self) -> list[int]:
        """The number of processes of each node."""
        return self._store

    @property
    def world_size(self) -> int:
        """The number of processes."""
        return sum(self._store)

    def local_world_size_list(self) -> list[int]:
        """Return, for each process, the number of processes of its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """Return, for each process, its number on its node."""
        return [rank for count in self._store for rank in range(count)]


class ClassWithInitArgs:
    """A class, and the arguments with which each rank constructs it."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        self.cls = cls
        self.args = args
        self.kwargs = kwargs

    def __call__(self) -> Any:
        """Make an object of the class."""
        return self.cls(*self.args, **self.kwargs)


class WorkerGroup(ABC):
    """Workers whose registered methods are called on all ranks at once.

    The methods that `register` marks are methods of the group. A subclass says how a call reaches
    a rank.

    Args:
        timeout_s: Limit of a call, in seconds, for methods that declare none.
    """

    def __init__(self, *, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._meshes: dict[str, Mesh] = {}

    @property
    @abstractmethod
    def world_size(self) -> int:
        """The number of ranks."""

    @abstractmethod
    def submit(self, rank: int, method_name: str, args: Sequence[Any], kwargs: Any) -> Any:
        """Start a call on one rank; return a reference to its result."""

    @abstractmethod
    def wait(self, futures: Sequence[Any], *, call: str, timeout_s: float) -> list[Any]:
        """Wait for results. The first failure of a rank ends the wait.

        Args:
            futures: References, one for each rank from rank 0 on.
            call: The name of the method, for the error.
            timeout_s: Limit in seconds.
        """

    @abstractmethod
    def share(self, value: Any) -> Any:
        """Store a large argument once; return what `submit` accepts in its place."""

    def __getattr__(self, name: str) -> Any:
        if name in LEFT_OUT:
            raise ConfigError(f"agentrl's worker groups have no {name}", expected=LEFT_OUT[name])
        raise AttributeError(
            f"{type(self).__name__} has no method {name!r}. Methods of the workers that "
            "@register marks are methods of the group; others: execute_all_sync(name, ...)"
        )

    def bind(self, cls: type) -> list[str]:
        """Make the registered methods of a class methods of this group; return their names.

        Raises:
            ConfigError: If a method has the name of one of the group's own.
        """
        methods = registered_methods(cls)
        for name, registration in methods.items():
            if hasattr(type(self), name):
                raise ConfigError(
                    f"{cls.__name__}.{name} cannot be registered: a worker group has a method of "
                    "this name",
                    expected="another name",
                )
            setattr(self, name, partial(self.call, name, registration))
        return list(methods)

    def call(
        self, method_name: str, registration: Registration, /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a registered method: split the arguments, run the ranks, collect the results."""
        mode = registration.dispatch
        args, kwargs, *rest = mode.dispatch_fn(self, *args, **kwargs)
        rows: Rows | None = rest[0] if rest else None
        limit = self.timeout_s if registration.timeout_s is None else registration.timeout_s
        is_single = registration.execute is Execute.RANK_ZERO or mode.name == "RANK_ZERO"
        if is_single:
            futures = [self.submit(0, method_name, args, kwargs)]
        else:
            futures = self.execute_all(method_name, *args, **kwargs)
        fetch = self.waiter(method_name, limit)
        if registration.blocking:
            results = fetch(futures)
            output = mode.collect_fn(self, results[0] if is_single else results)
        elif is_single:
            return futures[0]
        else:
            output = mode.collect_fn(self, PendingResults(tuple(futures), fetch))
        return output if rows is None else _restore(output, rows)

    def waiter(self, call: str, timeout_s: float) -> Callable[[Sequence[Any]], list[Any]]:
        """Return a function that waits for results; a subclass may need one that can be pickled."""
        return partial(self.wait, call=call, timeout_s=timeout_s)

    def execute_all(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every rank, registered or not; return references to the results.

        If every argument is a list with one item per rank, each rank gets its item. Otherwise all
        ranks get all arguments.
        """
        values = [*args, *kwargs.values()]
        size = self.world_size
        if values and all(isinstance(value, list) and len(value) == size for value in values):
            return [
                self.submit(
                    rank,
                    method_name,
                    [arg[rank] for arg in args],
                    {name: value[rank] for name, value in kwargs.items()},
                )
                for rank in range(size)
            ]
        shared = [self.share(arg) for arg in args]
        named = {name: self.share(value) for name, value in kwargs.items()}
        return [self.submit(rank, method_name, shared, named) for rank in range(size)]

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Do the same as `execute_all`."""
        return self.execute_all(method_name, *args, **kwargs)

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> list[Any]:
        """Call a method of every rank, and wait for the results."""
        futures = self.execute_all(method_name, *args, **kwargs)
        return self.wait(futures, call=method_name, timeout_s=self.timeout_s)

    def execute_rank_zero(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of rank 0; return a reference to the result."""
        return self.submit(0, method_name, args, kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Do the same as `execute_rank_zero`."""
        return self.execute_rank_zero(method_name, *args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of rank 0, and wait for the result."""
        future = self.execute_rank_zero(method_name, *args, **kwargs)
        return self.wait([future], call=method_name, timeout_s=self.timeout_s)[0]

    def query_mesh(self, mesh_name: str) -> Mesh:
        """Ask the ranks for a mesh, once."""
        if mesh_name not in self._meshes:
            answers = self.execute_all_sync("query_mesh_of_rank", mesh_name)
            self._meshes[mesh_name] = Mesh(*map(tuple, zip(*answers, strict=True)))
        return self._meshes[mesh_name]


def _restore(output: Any, rows: Rows) -> Any:
    """Undo padding and order in a result that is a batch; lists of results stay as they are."""
    if isinstance(output, DataProtoFuture):
        return DataProtoFuture(output.futures, output.fetch, rows)
    return rows.restore(output) if isinstance(output, DataProto) else output


def check_environment(given: Mapping[str, str], own: Mapping[str, str]) -> None:
    """Refuse variables of the user that the group sets itself.

    Raises:
        ConfigError: With their names.
    """
    if both := sorted(given.keys() & own.keys()):
        raise ConfigError(
            f"worker_env sets {', '.join(both)}", expected="no variable that the group sets itself"
        )


def free_address() -> tuple[str, str]:
    """Return this node's address in its network, and a free port of it."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    return node_address(), str(port)


def node_address() -> str:
    """Return this node's address in its network; the loopback address without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: it selects the interface
        except OSError:
            return "127.0.0.1"
        return probe.getsockname()[0]
