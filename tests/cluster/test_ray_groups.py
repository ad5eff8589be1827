"""Worker groups on a real Ray cluster of this machine."""

import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agentrl.cluster import (
    DataProtoFuture,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
    merge_resource_pool,
)
from agentrl.errors import ClusterError, ConfigError
from agentrl.protocol import DataProto
from tests.fakes.cluster_roles import Other, Role, batch

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start a cluster; return a folder from which its processes can import."""
    folder = tmp_path_factory.mktemp("modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.syspath_prepend(folder)
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=100_000_000,
            log_to_driver=False,
            _temp_dir=os.environ.get("RAY_TMPDIR"),
        )
        yield folder
        ray.shutdown()


@pytest.fixture(scope="module")
def pool(cluster: Path) -> RayResourcePool:
    return RayResourcePool([2], use_gpu=False)


@pytest.fixture(scope="module")
def group(pool: RayResourcePool) -> RayWorkerGroup:
    return RayWorkerGroup(pool, RayClassWithInitArgs(Role, scale=3), name_prefix="shared_")


def column(data: DataProto) -> list[int]:
    assert data.batch is not None
    return data.batch["x"].tolist()


def test_ranks_find_each_other_by_their_environment(group: RayWorkerGroup):
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
    address = [group.master_address, group.master_port]
    answers = group.environment(*names)
    assert answers == [["0", "2", *address], ["1", "2", *address]]
    assert group.worker_names == ["shared_Role_0", "shared_Role_1"]
    assert len({place.process for place in group.places}) == 2


def test_a_batch_is_split_and_a_rank_may_change_its_part(group: RayWorkerGroup):
    sent = batch(4)
    assert column(group.scaled(sent)) == [0, 3, 6, 9]
    assert column(sent) == [0, 1, 2, 3]


def test_results_travel_to_another_group_as_references(
    group: RayWorkerGroup, pool: RayResourcePool
):
    other = RayWorkerGroup(pool, RayClassWithInitArgs(Role, scale=2))
    future = group.scaled_later(batch(4))
    assert isinstance(future, DataProtoFuture)
    assert column(other.scaled(future)) == [0, 6, 12, 18]
    other.shutdown()


def test_a_large_argument_is_stored_once_for_all_ranks(
    group: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch
):
    stored: list[object] = []
    put = ray.put
    monkeypatch.setattr(ray, "put", lambda value: stored.append(value) or put(value))
    assert group.size(torch.zeros(30_000_000, dtype=torch.uint8)) == [30_000_000] * 2
    assert group.size(torch.zeros(10, dtype=torch.uint8)) == [10] * 2
    assert len(stored) == 1, "the small one is sent with the calls"


def test_other_processes_of_the_job_attach_by_name(group: RayWorkerGroup):
    @ray.remote(num_cpus=0)
    def attach(names: list[str]) -> list[int]:
        attached = RayWorkerGroup.from_detached(
            worker_names=names, ray_cls_with_init=RayClassWithInitArgs(Role)
        )
        return column(attached.scaled(batch(2)))

    assert ray.get(attach.remote(group.worker_names), timeout=60) == [0, 3]


@pytest.mark.parametrize(("how", "said"), [("raise", "ValueError: a mistake"), ("die", "died in")])
def test_a_failed_rank_ends_the_call_at_once(pool: RayResourcePool, how: str, said: str):
    failing = RayWorkerGroup(pool, RayClassWithInitArgs(Role))
    start = time.monotonic()
    with pytest.raises(ClusterError, match=said) as caught:
        failing.fail(1, how)
    assert time.monotonic() - start < 30, "rank 0 sleeps for 60 s"
    assert caught.value.rank == 1
    assert caught.value.process == failing.places[1].process
    assert f"rank 1 is asked to {how}" in str(caught.value)
    failing.shutdown()


def test_a_rank_that_hangs_is_named_when_the_time_is_over(pool: RayResourcePool):
    hanging = RayWorkerGroup(pool, RayClassWithInitArgs(Role))
    with pytest.raises(ClusterError, match="rank 1 did not answer hang within 1 s") as caught:
        hanging.hang(1)
    assert "going to sleep" in str(caught.value)
    hanging.shutdown()


def test_a_constructor_that_raises_is_an_error_of_its_rank(pool: RayResourcePool):
    with pytest.raises(ClusterError, match=r"rank . .*scale is negative"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Role, scale=-1))


def test_a_pool_that_the_cluster_cannot_hold_names_what_is_missing():
    with pytest.raises(ClusterError, match="40 CPU"):
        RayResourcePool([40], use_gpu=False).get_placement_groups()
    with pytest.raises(ClusterError, match="1 GPU"):
        RayResourcePool([1]).get_placement_groups()


def test_a_pool_that_is_not_free_in_time_is_an_error(pool: RayResourcePool):
    pool.get_placement_groups()
    with pytest.raises(ClusterError, match="not free within 1 s"):
        RayResourcePool([7], use_gpu=False, placement_timeout_s=1).get_placement_groups()


def test_roles_share_a_process(pool: RayResourcePool):
    cls = create_colocated_worker_cls(
        {"first": RayClassWithInitArgs(Role, scale=2), "second": RayClassWithInitArgs(Other)}
    )
    both = RayWorkerGroup(pool, cls)
    groups = both.spawn(["first", "second"])
    assert column(groups["second"].shifted(groups["first"].scaled(batch(4)))) == [20, 22, 24, 26]
    processes = [place.process for place in both.places]
    assert groups["second"].execute_all_sync("process") == processes
    with pytest.raises(ConfigError, match="no role third"):
        both.spawn(["third"])
    both.shutdown()


def test_pools_can_be_merged(pool: RayResourcePool):
    second = RayResourcePool([1], use_gpu=False)
    merged = RayWorkerGroup(merge_resource_pool(pool, second), RayClassWithInitArgs(Role, scale=5))
    assert merged.world_size == 3
    assert column(merged.scaled(batch(3))) == [0, 5, 10]
    merged.shutdown()
    second.release()


def test_what_would_outlive_the_driver_is_refused(pool: RayResourcePool):
    with pytest.raises(ConfigError, match="detached"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Role), detached=True)
    with pytest.raises(ConfigError, match="profiler"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Role), profile_steps=[1])
    with pytest.raises(ConfigError, match="worker_env sets RANK"):
        RayWorkerGroup(pool, RayClassWithInitArgs(Role), worker_env={"RANK": "7"})


VERL_ROLE = '''
import ray
import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh

from verl import DataProto
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup


@ray.remote
class RewardWorker(Worker):
    """A reward model that trains: sharded over the second dimension of a device mesh."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(backend="gloo")
        size = torch.distributed.get_world_size()
        self.mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=["dp", "sp"])
        self._register_dispatch_collect_info(
            "reward",
            dp_rank=self.mesh["dp"].get_local_rank(),
            is_collect=self.mesh["sp"].get_local_rank() == 0,
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        self.weight = torch.full((), float(self.config["weight"]))

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward"))
    def compute_rm_score(self, data: DataProto):
        data = data.to("cpu")
        scores = data.batch["responses"].float().sum(-1) * self.weight
        torch.distributed.all_reduce(scores, group=self.mesh["sp"].get_group())
        return DataProto.from_dict(tensors={"rm_scores": scores / 2})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update_rm(self, data: DataProto):
        gradient = data.batch["responses"].float().mean()
        torch.distributed.all_reduce(gradient)
        self.weight -= data.meta_info["lr"] * gradient / self.world_size
        return DataProto(meta_info={"metrics": {"weight": self.weight.item()}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path, global_step=0):
        if self.rank == 0:
            torch.save(self.weight, f"{local_path}/{global_step}.pt")
        torch.distributed.barrier()


def run(folder):
    role = RayClassWithInitArgs(RewardWorker, config={"weight": 2})
    pool = RayResourcePool(process_on_nodes=[4], use_gpu=False)
    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=role)
    group.init_model()
    data = DataProto.from_dict({"responses": torch.arange(16).view(8, 2)}, meta_info={"lr": 0.1})
    scores = group.compute_rm_score(data).batch["rm_scores"]
    metrics = group.update_rm(data).meta_info["metrics"]
    group.save_checkpoint(folder, global_step=7)
    group.shutdown()
    return scores, metrics
'''


def test_a_role_of_verl_runs_after_its_import_lines_are_changed(
    cluster: Path, tmp_path: Path, pool: RayResourcePool
):
    pool.release()
    lines = VERL_ROLE.splitlines()
    first, last = lines.index("from verl import DataProto"), lines.index("@ray.remote")
    ours = [
        "from agentrl import DataProto",
        "from agentrl.cluster import (",
        "    Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, Worker,",
        "    make_nd_compute_dataproto_dispatch_fn, register,",
        ")",
    ]
    text = "\n".join([*lines[:first], *ours, *lines[last:]])
    (cluster / "users_role.py").write_text(text, encoding="utf-8")
    scores, metrics = importlib.import_module("users_role").run(str(tmp_path))
    assert scores.tolist() == [2.0 * (4 * row + 1) for row in range(8)]
    assert metrics["weight"] == [pytest.approx(2 - 0.1 * 7.5)] * 4
    assert torch.load(tmp_path / "7.pt").item() == pytest.approx(1.25)
