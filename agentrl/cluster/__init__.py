"""Ray: place a run's processes on the nodes of a cluster, supervise them, and report on them.

Only this package imports ray (extra `cluster`). What runs in its processes is plain Python. The
public names are worker groups with declared dispatch, for roles of users (docs/cluster.md);
importing the package does not import ray, and the first use of a name that needs it does.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from agentrl.errors import MissingExtraError

if TYPE_CHECKING:
    from agentrl.cluster.dispatch import (
        DataProtoConfig,
        DataProtoFuture,
        Dispatch,
        Execute,
        get_predefined_dispatch_fn,
        make_nd_compute_dataproto_dispatch_fn,
        register,
        register_dispatch_mode,
        update_dispatch_mode,
    )
    from agentrl.cluster.groups import ClassWithInitArgs, ResourcePool, Worker, WorkerGroup
    from agentrl.cluster.ray_groups import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        create_colocated_worker_cls,
        create_colocated_worker_cls_fused,
        merge_resource_pool,
    )

_NAMES = {
    "dispatch": (
        "DataProtoConfig", "DataProtoFuture", "Dispatch", "Execute", "get_predefined_dispatch_fn",
        "make_nd_compute_dataproto_dispatch_fn", "register", "register_dispatch_mode",
        "update_dispatch_mode",
    ),
    "groups": ("ClassWithInitArgs", "ResourcePool", "Worker", "WorkerGroup"),
    "ray_groups": (
        "RayClassWithInitArgs", "RayResourcePool", "RayWorkerGroup", "create_colocated_worker_cls",
        "create_colocated_worker_cls_fused", "merge_resource_pool",
    ),
}  # fmt: skip
_MODULES = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "ClassWithInitArgs",
    "DataProtoConfig",
    "DataProtoFuture",
    "Dispatch",
    "Execute",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "Worker",
    "WorkerGroup",
    "create_colocated_worker_cls",
    "create_colocated_worker_cls_fused",
    "get_predefined_dispatch_fn",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "register",
    "register_dispatch_mode",
    "update_dispatch_mode",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _MODULES[name] == "ray_groups" and find_spec("ray") is None:
        raise MissingExtraError(
            f"agentrl.cluster.{name} needs ray", install="pip install 'agentrl-multiturn[cluster]'"
        )
    return vars(import_module(f"{__name__}.{_MODULES[name]}"))[name]
