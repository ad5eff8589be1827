"""Worker groups of Ray actors: placement, calls with time limits, and errors that name the rank.

A failed call raises `ClusterError` as soon as one rank fails: the others may wait for it in a
collective. The error has the rank, its node, and the last lines of its log. A call that takes
longer than its limit names the ranks that did not answer. Actors end with the process that made the
group, or with `shutdown`.
"""

import copyreg
import importlib
import inspect
import os
import random
import re
import string
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import ray
import torch
from ray.actor import ActorClass
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from torch.utils._config_module import ConfigModule

from agentrl.cluster.connection import list_nodes
from agentrl.cluster.groups import (
    CALL_TIMEOUT_S,
    ClassWithInitArgs,
    ResourcePool,
    WorkerGroup,
    check_environment,
    free_address,
)
from agentrl.cluster.pools import Pool, describe_nodes, find_shortfall
from agentrl.errors import ClusterError, ConfigError

PLACEMENT_TIMEOUT_S = 120.0
"""Default limit of the wait for the resources of a pool, in seconds."""
START_TIMEOUT_S = 300.0
"""Default limit of the start of a group, in seconds: processes, imports and constructors."""
_LOG_LINES = 20
_LOG_BYTES = 65_536
_LOG_TIMEOUT_S = 10.0
_TRANSFER_S = 60.0
"""Least limit of the transfer of results that are ready, in seconds."""
_SMALL_BYTES = 65_536
"""Arguments up to this size are sent with each call; larger ones are stored once."""
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_DEVICES = {"cuda": "GPU", "npu": "NPU"}
"""Ray's names of devices."""


@dataclass(frozen=True)
class Place:
    """The process of a rank."""

    node_id: str
    address: str
    process: int
    logs: tuple[str, ...]
    """Files with its output, on its node."""

    @classmethod
    def here(cls, _: object = None) -> "Place":
        """Describe this process."""
        context = ray.get_runtime_context()
        streams = {os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)}
        return cls(
            node_id=context.get_node_id(),
            address=ray.util.get_node_ip_address(),
            process=os.getpid(),
            logs=tuple(sorted(path for path in streams if Path(path).is_file())),
        )


def read_last_lines(paths: Sequence[str]) -> str:
    """Return the last lines of log files of this node."""
    lines: list[str] = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                file.seek(max(0, os.path.getsize(path) - _LOG_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            continue
        # Ray's own lines begin with `:`: `:job_id:01000000`.
        lines += [line for line in text.splitlines() if line and not line.startswith(":")]
    return "\n".join(lines[-_LOG_LINES:])


def fetch(
    futures: Sequence[Any], *, call: str, timeout_s: float, places: Sequence[Place]
) -> list[Any]:
    """Wait for the results of ranks; raise at the first failure.

    Args:
        futures: References to the results, from rank 0 on.
        call: The name of the method.
        timeout_s: Limit in seconds.
        places: The processes of the ranks.

    Raises:
        ClusterError: If a rank raises, dies, or does not answer within the limit.
    """
    results: dict[Any, Any] = {}
    waiting, end = list(futures), time.monotonic() + timeout_s
    while waiting:
        left = max(0.0, end - time.monotonic())
        done, waiting = ray.wait(waiting, timeout=left, fetch_local=False)
        if not done:
            raise _time_error(futures, waiting, call, timeout_s, places)
        try:
            results[done[0]] = ray.get(done[0], timeout=0.0)
        except GetTimeoutError:
            continue  # it is on another node: fetched below, with the others
        except Exception as error:  # any error of a user's method
            raise _failure(error, futures.index(done[0]), call, places) from error
    remote = [future for future in futures if future not in results]
    try:
        left = max(_TRANSFER_S, end - time.monotonic())
        results |= zip(remote, ray.get(remote, timeout=left), strict=True)
    except RayError as error:
        raise ClusterError(
            f"a result of {call} did not arrive: {_first_line(error)}",
            expected="living nodes, and a timeout_s that includes the transfer of the results",
        ) from error
    return [results[future] for future in futures]


def _failure(error: Exception, rank: int, call: str, places: Sequence[Place]) -> ClusterError:
    """Describe the error of a rank, with the last lines of its log."""
    what, reason = "failed", _first_line(error)
    if isinstance(error, RayTaskError):
        what, reason = "raised", f"{type(error.cause).__name__}: {error.cause}"
    elif isinstance(error, RayActorError):
        what = "died"
    details: dict[str, Any] = {"rank": rank}
    if rank < len(places):
        place = places[rank]
        details |= {"node": place.address, "process": place.process}
        details["last_lines"] = _last_lines(place)
    return ClusterError(f"rank {rank} {what} in {call}: {reason}", **details)


def _time_error(
    futures: Sequence[Any],
    waiting: Sequence[Any],
    call: str,
    timeout_s: float,
    places: Sequence[Place],
) -> ClusterError:
    ranks = [rank for rank, future in enumerate(futures) if future in waiting]
    late = [places[rank] for rank in ranks if rank < len(places)]
    named = ", ".join(map(str, ranks))
    return ClusterError(
        f"rank {named} did not answer {call} within {timeout_s:g} s",
        ranks=ranks,
        node=", ".join(sorted({place.address for place in late})) or None,
        last_lines=_last_lines(late[0]) if late else None,
        expected="a larger timeout_s of the group or of @register, if the call is that slow",
    )


def _last_lines(place: Place) -> str:
    """Read the end of a process's log on its node; say why, if that is not possible."""
    reader = ray.remote(num_cpus=0, max_retries=0)(read_last_lines).options(
        scheduling_strategy=NodeAffinitySchedulingStrategy(place.node_id, soft=False)
    )
    try:
        text = ray.get(reader.remote(place.logs), timeout=_LOG_TIMEOUT_S)
    except Exception as error:  # noqa: BLE001 - the log is an addition to another error
        return f"(not readable: {_first_line(error)})"
    return "\n".join(f"    {line}" for line in ["", *text.splitlines()]) if text else "(empty)"


def _first_line(error: BaseException) -> str:
    """Return the first line of an error of Ray, and the last one, which has the user's error."""
    text = _COLORS.sub("", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip(" ^~\n")]
    return " ... ".join(dict.fromkeys([lines[0], lines[-1]])) if lines else type(error).__name__


def parallel_put(data_list: Sequence[Any], max_workers: int | None = None) -> list[Any]:
    """Store objects in the object store; return references, in order."""
    return [ray.put(value) for value in data_list]


class RayResourcePool(ResourcePool):
    """Processes on nodes of a Ray cluster, each with a device or a CPU.

    Args:
        process_on_nodes: The number of processes of each node.
        use_gpu: Whether each process has a device.
        name_prefix: Beginning of the names of the placement groups; by default random.
        max_colocate_count: Groups that may share the processes' devices.
        detached: Must be False: what is placed ends with the driver.
        accelerator_type: Ray's name of the kind of device, if any will not do.
        placement_timeout_s: Limit of the wait for resources, in seconds.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
        *,
        placement_timeout_s: float = PLACEMENT_TIMEOUT_S,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        _refuse_detached(detached)
        self.use_gpu = use_gpu
        self.name_prefix = _random_name() if name_prefix is None else name_prefix
        self.accelerator_type = accelerator_type
        self.placement_timeout_s = placement_timeout_s
        self.pgs: list[PlacementGroup] | None = None

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda"
    ) -> list[PlacementGroup]:
        """Reserve the processes' resources, once: a placement group for each node.

        Raises:
            ClusterError: If the cluster does not have them, or not in time.
        """
        if self.pgs is not None:
            return self.pgs
        bundle: dict[str, float] = {"CPU": 1}
        if self.use_gpu:
            bundle[_DEVICES.get(device_name, device_name)] = 1
            if self.accelerator_type is not None:
                bundle[f"accelerator_type:{self.accelerator_type}"] = 1e-3
        _check_capacity(self.name_prefix, bundle, self._store)
        groups = [
            placement_group(
                [dict(bundle) for _ in range(count)],
                strategy=strategy,
                name=f"{name or self.name_prefix}{node}",
            )
            for node, count in enumerate(self._store)
        ]
        ready, late = ray.wait(
            [group.ready() for group in groups],
            num_returns=len(groups),
            timeout=self.placement_timeout_s,
        )
        if late:
            for group in groups:
                remove_placement_group(group)
            raise ClusterError(
                f"pool {self.name_prefix}: {len(late)} of {len(groups)} nodes were not free within "
                f"{self.placement_timeout_s:g} s",
                asked=_describe(bundle, self._store),
                free=_describe_resources(ray.available_resources()),
                expected="resources that no other group or job uses, or a smaller pool",
            )
        del ready
        self.pgs = groups
        return groups

    def release(self) -> None:
        """Give the resources back; what runs on them ends."""
        for group in self.pgs or ():
            remove_placement_group(group)
        self.pgs = None


def _check_capacity(name: str, bundle: Mapping[str, float], counts: Sequence[int]) -> None:
    """Compare a pool with the whole cluster, so that an impossible one fails at once."""
    nodes = list_nodes()
    pools = [
        Pool(
            name=f"{name}, node {number}",
            nodes=1,
            devices_per_node=count,
            roles=(),
            device_kind="GPU" if "GPU" in bundle else "CPU",
            workers=(0,),
            bundle={resource: amount * count for resource, amount in bundle.items()},
        )
        for number, count in enumerate(counts)
    ]
    if missing := find_shortfall(pools, [(node, dict(node.total)) for node in nodes]):
        raise ClusterError(
            "the cluster has fewer resources than the pool asks for",
            shortfall="; ".join(missing),
            cluster=describe_nodes(nodes),
            expected="more nodes, a smaller pool, or use_gpu=False for roles without a device",
        )


def _describe(bundle: Mapping[str, float], counts: Sequence[int]) -> str:
    return f"{list(counts)} processes per node, each with {_describe_resources(bundle)}"


def _describe_resources(resources: Mapping[str, float]) -> str:
    kinds = [name for name in sorted(resources) if ":" not in name and "memory" not in name]
    return ", ".join(f"{resources[name]:g} {name}" for name in kinds) or "nothing"


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> RayResourcePool:
    """Make one pool of the processes of two.

    Raises:
        ConfigError: If they are of different kinds.
    """
    for name in ("use_gpu", "max_colocate_count", "accelerator_type"):
        ours, theirs = vars(first)[name], vars(second)[name]
        if ours != theirs:
            raise ConfigError(f"pools with {name} {ours} and {theirs} cannot be merged")
    merged = RayResourcePool(
        [*first.store, *second.store],
        first.use_gpu,
        f"{first.name_prefix}_{second.name_prefix}",
        first.max_colocate_count,
        accelerator_type=first.accelerator_type,
        placement_timeout_s=first.placement_timeout_s,
    )
    merged.pgs = [*first.get_placement_groups(), *second.get_placement_groups()]
    return merged


class RayClassWithInitArgs(ClassWithInitArgs):
    """A class for actors, decorated with `ray.remote` or not, and its arguments."""

    def __init__(self, cls: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, Any] = {}
        self.roles: dict[str, type] = {}
        """Classes of the roles in each process, by name; see `create_colocated_worker_cls`."""

    def update_options(self, options: Mapping[str, Any]) -> None:
        """Set options of the actors, as `ray.remote` has them."""
        self.options.update(options)

    def set_additional_resource(self, additional_resource: Mapping[str, Any]) -> None:
        """Set further options of the actors."""
        self.options.update(additional_resource)

    def start(self, options: Mapping[str, Any], environment: Mapping[str, str]) -> Any:
        """Start an actor with further options and environment variables."""
        runtime_env = dict(self.options.get("runtime_env") or {})
        runtime_env["env_vars"] = {**runtime_env.get("env_vars", {}), **environment}
        remote = self.cls if _is_remote(self.cls) else ray.remote(self.cls)
        _make_config_modules_picklable()
        given = {**options, **self.options, "runtime_env": runtime_env}
        return remote.options(**given).remote(*self.args, **self.kwargs)


def _make_config_modules_picklable() -> None:
    """Let cloudpickle refer to torch's configuration modules by name.

    Ray pickles a decorated class with the submodules that its methods seem to use. A method with
    the names `torch`, `distributed` and `config` takes `torch.distributed.config` along, which
    cannot be pickled.
    """
    for module in list(sys.modules.values()):
        if isinstance(module, ConfigModule):
            copyreg.pickle(type(module), _refer_to_module)


def _refer_to_module(module: ModuleType) -> tuple[Any, ...]:
    return importlib.import_module, (module.__name__,)


def _is_remote(cls: Any) -> bool:
    return isinstance(cls, ActorClass)


def _unwrap(cls: Any) -> type:
    """Return the class that `ray.remote` decorated."""
    return cls.__ray_metadata__.modified_class if _is_remote(cls) else cls


class RayWorkerGroup(WorkerGroup):
    """A group of Ray actors of one class, one for each process of a pool.

    Args:
        resource_pool: The pool; None: `worker_names` or `worker_handles` exist.
        ray_cls_with_init: The class and its arguments.
        bin_pack: Whether the processes of a node of the pool must be on one node.
        name_prefix: Beginning of the actors' names.
        detached: Must be False.
        worker_names: Names of actors of another group.
        worker_handles: Handles of these actors.
        device_name: `cuda` or `npu`.
        worker_env: Environment variables of the actors.
        timeout_s: Limit of a call, in seconds.
        start_timeout_s: Limit of the start, in seconds.
        profile_steps: Must be None.
        worker_nsight_options: Must be None.

    Raises:
        ClusterError: If the resources do not exist, or a worker does not start.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_wait_register_center_timeout: float | None = None,
        *,
        device_name: str = "cuda",
        worker_env: Mapping[str, str] | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        start_timeout_s: float = START_TIMEOUT_S,
        profile_steps: object = None,
        worker_nsight_options: object = None,
    ) -> None:
        super().__init__(timeout_s=timeout_s)
        _refuse_detached(detached)
        if profile_steps is not None or worker_nsight_options is not None:
            raise ConfigError(
                "agentrl's worker groups start no profiler",
                expected='update_options({"runtime_env": {"nsight": {...}}}) of '
                "RayClassWithInitArgs, which is Ray's own way",
            )
        self.name_prefix = _random_name() if name_prefix is None else name_prefix
        self.start_timeout_s = ray_wait_register_center_timeout or start_timeout_s
        self.ray_cls_with_init = ray_cls_with_init
        self._role: str | None = None
        self._master: tuple[str | None, str | None] = (None, None)
        self._names = list(worker_names or ())
        self._workers = list(worker_handles or map(ray.get_actor, self._names))
        self._places: list[Place] = []
        if resource_pool is not None and ray_cls_with_init is not None:
            self._start(resource_pool, ray_cls_with_init, bin_pack, device_name, worker_env or {})
        elif not self._workers:
            raise ConfigError(
                "a worker group needs a pool and a class, or the workers of another group",
                expected="RayWorkerGroup(resource_pool, ray_cls_with_init), or "
                "from_detached(worker_names=...)",
            )
        self._places = self._locate()
        if ray_cls_with_init is not None and not ray_cls_with_init.roles:
            self.bind(_unwrap(ray_cls_with_init.cls))

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Any] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> "RayWorkerGroup":
        """Make a group of the workers of another one, also in another process of the job."""
        return cls(
            ray_cls_with_init=ray_cls_with_init,
            name_prefix=name_prefix,
            worker_names=worker_names,
            worker_handles=worker_handles,
            **kwargs,
        )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self._workers)

    @property
    def workers(self) -> list[Any]:
        """Ray's handles of the actors, by rank."""
        return self._workers

    @property
    def worker_names(self) -> list[str]:
        """The actors' names, by rank."""
        return self._names

    @property
    def places(self) -> list[Place]:
        """The processes of the ranks."""
        return self._places

    @property
    def master_address(self) -> str | None:
        """Address of the ranks' process group."""
        return self._master[0]

    @property
    def master_port(self) -> str | None:
        """Port of the ranks' process group."""
        return self._master[1]

    def spawn(self, prefix_set: Sequence[str]) -> "dict[str, RayWorkerGroup]":
        """Return a group for each role of `create_colocated_worker_cls`, on the same actors."""
        roles = self.ray_cls_with_init.roles if self.ray_cls_with_init is not None else {}
        if unknown := set(prefix_set) - roles.keys():
            raise ConfigError(
                f"no role {', '.join(sorted(unknown))} in this group",
                expected=f"roles of create_colocated_worker_cls: {', '.join(roles) or 'none'}",
            )
        return {role: self._spawn_role(role, roles[role]) for role in prefix_set}

    def _spawn_role(self, role: str, cls: type) -> "RayWorkerGroup":
        group = RayWorkerGroup.__new__(RayWorkerGroup)
        vars(group).update(vars(self), _role=role, _meshes={})
        group.bind(cls)
        return group

    def fuse(self, prefix_set: Sequence[str]) -> None:
        """Make the group of each role an attribute of this one."""
        for role, group in self.spawn(prefix_set).items():
            setattr(self, role, group)

    def shutdown(self) -> None:
        """End the actors; their placement groups stay with the pool."""
        for worker in self._workers:
            ray.kill(worker)

    def submit(self, rank: int, method_name: str, args: Sequence[Any], kwargs: Any) -> Any:
        """Start a call on one rank; return Ray's reference to its result."""
        worker = self._workers[rank]
        if self._role is not None:
            return worker.call_role.remote(self._role, method_name, *args, **kwargs)
        try:
            method = getattr(worker, method_name)
        except AttributeError:
            raise ConfigError(f"the workers have no method {method_name!r}") from None
        return method.remote(*args, **kwargs)

    def wait(self, futures: Sequence[Any], *, call: str, timeout_s: float) -> list[Any]:
        """Wait for results; see `fetch`."""
        return fetch(futures, call=call, timeout_s=timeout_s, places=self._places)

    def waiter(self, call: str, timeout_s: float) -> Callable[[Sequence[Any]], list[Any]]:
        """Return a function that waits for results, also in another process."""
        return partial(fetch, call=call, timeout_s=timeout_s, places=tuple(self._places))

    def share(self, value: Any) -> Any:
        """Store a large value in the object store, once for all ranks; give others as they are."""
        is_small = value is None or isinstance(value, bool | int | float | ray.ObjectRef)
        if isinstance(value, str | bytes):
            is_small = len(value) <= _SMALL_BYTES
        if isinstance(value, torch.Tensor | np.ndarray):
            is_small = value.nbytes <= _SMALL_BYTES
        return value if is_small or self.world_size == 1 else ray.put(value)

    def _start(
        self,
        pool: RayResourcePool,
        cls: RayClassWithInitArgs,
        bin_pack: bool,
        device_name: str,
        worker_env: Mapping[str, str],
    ) -> None:
        strategy = "STRICT_PACK" if bin_pack else "PACK"
        groups = pool.get_placement_groups(strategy=strategy, device_name=device_name)
        slots = [
            (group, index)
            for group, count in _by_node(groups, pool.store)
            for index in range(count)
        ]
        self._master = _find_master(slots[0][0], self.start_timeout_s)
        share = 1 / pool.max_colocate_count
        for rank, (group, index) in enumerate(slots):
            own = {
                "WORLD_SIZE": str(len(slots)),
                "RANK": str(rank),
                "WG_PREFIX": self.name_prefix,
                "WG_BACKEND": "ray",
                "RAY_LOCAL_WORLD_SIZE": str(group.bundle_count),
                "MASTER_ADDR": str(self._master[0]),
                "MASTER_PORT": str(self._master[1]),
            }
            check_environment(worker_env, own)
            options: dict[str, Any] = {
                "name": f"{self.name_prefix}{_unwrap(cls.cls).__name__}_{rank}",
                "num_cpus": share,
                "max_concurrency": 1000 if _has_coroutines(_unwrap(cls.cls)) else 1,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
            }
            if pool.use_gpu:
                kind = _DEVICES.get(device_name, device_name)
                on_gpu = {"num_gpus": share} if kind == "GPU" else {"resources": {kind: share}}
                options |= on_gpu
            self._names.append(options["name"])
            self._workers.append(cls.start(options, {**worker_env, **own}))

    def _locate(self) -> list[Place]:
        """Wait until the constructors are done; return where the ranks run."""
        calls = [worker.__ray_call__.remote(Place.here) for worker in self._workers]
        return fetch(calls, call="the constructor", timeout_s=self.start_timeout_s, places=[])


def _by_node(
    groups: Sequence[PlacementGroup], counts: Sequence[int]
) -> list[tuple[PlacementGroup, int]]:
    """Order placement groups by the address of their node, so that ranks keep theirs."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    table = ray.util.placement_group_table()

    def address(group: PlacementGroup) -> str:
        nodes = table.get(group.id.hex(), {}).get("bundles_to_node_id", {})
        return addresses.get(nodes.get(0, ""), "")

    return sorted(zip(groups, counts, strict=True), key=lambda pair: address(pair[0]))


def _find_master(group: PlacementGroup, timeout_s: float) -> tuple[str, str]:
    """Find address and port for the process group on the node of rank 0."""
    finder = ray.remote(num_cpus=0)(free_address).options(
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0)
    )
    return fetch([finder.remote()], call="free_address", timeout_s=timeout_s, places=[])[0]


def _has_coroutines(cls: type) -> bool:
    return any(inspect.iscoroutinefunction(getattr(cls, name, None)) for name in dir(cls))


def _refuse_detached(detached: bool) -> None:
    if detached:
        raise ConfigError(
            "detached=True: workers would keep their devices after the driver has ended",
            expected="detached=False, and from_detached(worker_names=...) while the driver runs",
        )


def _random_name() -> str:
    return "".join(random.choices(string.ascii_lowercase, k=6))


# Several roles in one process.


class RoleHost:
    """Several roles in one actor, which share its device."""

    def __init__(self, roles: Mapping[str, tuple[type, tuple[Any, ...], dict[str, Any]]]) -> None:
        self.roles = {name: cls(*args, **kwargs) for name, (cls, args, kwargs) in roles.items()}
        for role in self.roles.values():
            vars(role)["fused_worker_dict"] = self.roles

    def call_role(self, role: str, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a role."""
        return getattr(self.roles[role], method_name)(*args, **kwargs)


class AsyncRoleHost(RoleHost):
    """The same, if a role has coroutines."""

    async def call_role(self, role: str, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a role; await its result if it is a coroutine."""
        result = super().call_role(role, method_name, *args, **kwargs)
        return await result if hasattr(result, "__await__") else result


def create_colocated_worker_cls(
    class_dict: Mapping[str, RayClassWithInitArgs],
) -> RayClassWithInitArgs:
    """Put several roles into each process of a group.

    Example:
        >>> cls = create_colocated_worker_cls({"actor": actor_cls, "ref": ref_cls})
        >>> groups = RayWorkerGroup(pool, cls).spawn(["actor", "ref"])
        >>> groups["actor"].update(data)
    """
    classes = {name: _unwrap(one.cls) for name, one in class_dict.items()}
    host = AsyncRoleHost if any(map(_has_coroutines, classes.values())) else RoleHost
    given = {name: (classes[name], one.args, one.kwargs) for name, one in class_dict.items()}
    colocated = RayClassWithInitArgs(host, given)
    colocated.roles = classes
    return colocated


create_colocated_worker_cls_fused = create_colocated_worker_cls
"""verl's second variant; here both are one."""
