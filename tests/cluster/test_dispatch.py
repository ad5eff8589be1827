"""How arguments are split over ranks, and results collected: in this process, without Ray."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.cluster import (
    DataProtoConfig,
    DataProtoFuture,
    Dispatch,
    Execute,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from agentrl.errors import ConfigError, DataError
from agentrl.protocol import DataProto
from tests.fakes.worker_groups import LocalGroup


class Role(Worker):
    """A role with a method for each mode."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._world_size, self._meshes = rank, size, {}
        self.seen: list[Any] = []

    def plain(self, x: int) -> int:
        return x + self.rank

    @register(Dispatch.ONE_TO_ALL)
    def one_to_all(self, x: Any, y: Any = 0) -> Any:
        return self.rank, x, y

    @register()
    def all_to_all(self, x: int) -> int:
        return x * 10

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)
    def on_rank_zero(self, x: int) -> Any:
        return self.rank, x

    @register(Dispatch.RANK_ZERO)
    def rank_zero(self, x: int) -> Any:
        return self.rank, x

    @register(Dispatch.DP_COMPUTE)
    def compute(self, x: Any) -> Any:
        return self.rank, x

    @register(Dispatch.DP_COMPUTE_PROTO)
    def proto(self, data: DataProto, other: DataProto | None = None) -> DataProto:
        self.seen = tensor(data, "x").tolist()
        added = 0 if other is None else tensor(other, "x")
        return DataProto.from_dict({"y": tensor(data, "x") * 2 + added})

    @register(Dispatch.DP_COMPUTE_PROTO_BALANCED)
    def balanced(self, data: DataProto) -> DataProto:
        self.seen = tensor(data, "attention_mask").sum(-1).tolist()
        return data.select(["x"])

    @register(Dispatch.DP_COMPUTE_METRIC)
    def metric(self, data: DataProto) -> int:
        return int(tensor(data, "x").sum())

    @register(Dispatch.DP_COMPUTE_PROTO)
    def update(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"loss": float(len(data))}})

    @register(Dispatch.DP_COMPUTE_PROTO)
    def bad_result(self, data: DataProto) -> int:
        return 1

    @register(Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def later(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": tensor(data, "x") + 100})

    @register(make_nd_compute_dataproto_dispatch_fn("actor"))
    def on_mesh(self, data: DataProto) -> DataProto:
        self.seen = tensor(data, "x").tolist()
        return data

    @register(Dispatch.DIRECT_ROLLOUT_METHOD)
    def direct(self) -> None: ...


def group_of(size: int) -> LocalGroup:
    return LocalGroup([Role(rank, size) for rank in range(size)])


def tensor(data: DataProto, name: str) -> torch.Tensor:
    assert data.batch is not None
    return data.batch[name]


def rows(count: int, **facts: Any) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(count)}, meta_info=facts)


def test_one_to_all_gives_every_rank_the_same_and_stores_it_once():
    group, large = group_of(3), torch.zeros(5)
    assert group.one_to_all(large, y=2) == [(rank, large, 2) for rank in range(3)]
    assert sum(value is large for value in group.shared) == 1


def test_all_to_all_gives_items_of_lists_and_other_arguments_to_all():
    group = group_of(3)
    assert group.all_to_all([1, 2, 3]) == [10, 20, 30]
    assert group.all_to_all(4) == [40, 40, 40]


@pytest.mark.parametrize("method", ["on_rank_zero", "rank_zero"])
def test_only_rank_zero_runs(method: str):
    assert getattr(group_of(2), method)(7) == (0, 7)


def test_dp_compute_gives_an_item_to_each_rank_and_names_a_wrong_count():
    group = group_of(2)
    assert group.compute(["a", "b"]) == [(0, "a"), (1, "b")]
    with pytest.raises(DataError, match=r"argument 0 is a list of 3\n.*2 items"):
        group.compute([1, 2, 3])
    with pytest.raises(DataError, match="x is a int"):
        group.compute(x=1)


def test_batches_are_split_and_the_results_concatenated():
    group = group_of(2)
    result = group.proto(rows(4), other=rows(4))
    assert [worker.seen for worker in group.workers] == [[0, 1], [2, 3]]
    assert tensor(result, "y").tolist() == [0, 3, 6, 9]
    assert group.metric(rows(4)) == [1, 5]
    assert group.update(rows(4)).meta_info["metrics"] == {"loss": [2.0, 2.0]}


def test_rows_that_do_not_divide_are_refused_unless_padding_is_allowed(
    monkeypatch: pytest.MonkeyPatch,
):
    group = group_of(4)
    with pytest.raises(DataError, match="5 rows cannot be split into 4"):
        group.proto(rows(5))
    allowed = rows(5, **{DataProtoConfig.auto_padding_key: True})
    assert tensor(group.proto(allowed), "y").tolist() == [0, 2, 4, 6, 8]
    assert [len(worker.seen) for worker in group.workers] == [2, 2, 2, 2]
    assert len(allowed) == 5, "the caller's batch is not changed"
    monkeypatch.setattr(DataProtoConfig, "auto_padding", True)
    assert tensor(group.proto(rows(1)), "y").tolist() == [0]
    assert group.update(rows(5)).meta_info["metrics"]["loss"] == [2.0] * 4


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=3, max_size=24),
    st.integers(1, 3),
)
def test_balanced_rows_return_in_order_and_no_rank_has_much_more(lengths: list[int], size: int):
    group = group_of(size)
    mask = (torch.arange(30)[None] < torch.tensor(lengths)[:, None]).long()
    data = DataProto.from_dict({"x": torch.arange(len(lengths)), "attention_mask": mask})
    result = group.balanced(data)
    assert tensor(result, "x").tolist() == list(range(len(lengths)))
    assert all(worker.seen for worker in group.workers)
    loads = [sum(max(1, length) for length in worker.seen) for worker in group.workers]
    assert max(loads) - min(loads) <= max(1, *lengths)


def test_balancing_names_what_it_needs():
    group = group_of(2)
    with pytest.raises(DataError, match="1 rows for 2 ranks"):
        group.balanced(rows(1))
    with pytest.raises(DataError, match="attention_mask or response_mask"):
        group.balanced(rows(2))


def test_a_mode_that_splits_rows_takes_batches_and_returns_batches():
    group = group_of(2)
    with pytest.raises(DataError, match=r"data is a int\n.*DataProto"):
        group.proto(data=3)
    with pytest.raises(DataError, match="rank 0 returned a int"):
        group.bad_result(rows(2))


def test_a_call_that_does_not_block_gives_a_future_that_another_call_takes():
    group = group_of(2)
    future = group.later(rows(4))
    assert isinstance(future, DataProtoFuture)
    assert tensor(future.get(), "x").tolist() == [100, 101, 102, 103]
    assert tensor(group.proto(future), "y").tolist() == [200, 202, 204, 206]
    on_four = group_of(4)
    assert tensor(on_four.proto(future), "y").tolist() == [200, 202, 204, 206]
    assert [worker.seen for worker in on_four.workers] == [[100], [101], [102], [103]]


def test_padding_of_a_call_that_does_not_block_is_removed_when_it_is_fetched():
    future = group_of(2).later(rows(3, **{DataProtoConfig.auto_padding_key: True}))
    assert tensor(future.get(), "x").tolist() == [100, 101, 102]


def test_ranks_of_a_mesh_that_share_a_part_get_the_same_and_one_of_them_returns_it():
    group = group_of(4)
    for worker in group.workers:
        worker._register_dispatch_collect_info("actor", worker.rank // 2, worker.rank % 2 == 0)
    result = group.on_mesh(rows(4))
    assert [worker.seen for worker in group.workers] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert tensor(result, "x").tolist() == [0, 1, 2, 3]
    assert len(group.shared) == 3, "the name of the mesh, and each part, once"
    with pytest.raises(ConfigError, match="registered twice on rank 1"):
        group.workers[1]._register_dispatch_collect_info("actor", 0, True)


def test_a_mesh_that_is_not_declared_is_named():
    with pytest.raises(ConfigError, match="Role has no mesh 'actor'"):
        group_of(2).on_mesh(rows(2))


def test_users_have_modes_of_their_own(monkeypatch: pytest.MonkeyPatch):
    def twice(group: Any, x: int) -> Any:
        return ([x] * group.world_size,), {}

    mode = register_dispatch_mode("TWICE", twice, lambda group, output: sum(output))
    try:

        class Own(Role):
            @register(Dispatch.TWICE)  # pyright: ignore[reportAttributeAccessIssue]
            def named(self, x: int) -> int:
                return x

            @register({"dispatch_fn": twice, "collect_fn": lambda group, output: output[-1]})
            def given(self, x: int) -> int:
                return x + self.rank

        group = LocalGroup([Own(0, 2), Own(1, 2)])
        assert group.named(3) == 6
        assert group.given(3) == 4
        with pytest.raises(ConfigError, match="TWICE exists"):
            register_dispatch_mode("TWICE", twice, twice)
        assert update_dispatch_mode(mode, twice, max).collect_fn is max
    finally:
        del Dispatch.TWICE  # pyright: ignore[reportAttributeAccessIssue]


def test_mistakes_are_named_with_what_to_do_instead():
    group = group_of(2)
    with pytest.raises(ConfigError, match=r"DIRECT_ROLLOUT_METHOD .*\n.*group.workers"):
        group.direct()
    with pytest.raises(ConfigError, match=r"no start_worker_aliveness_check\n.*each call reports"):
        group.start_worker_aliveness_check()
    with pytest.raises(AttributeError, match="'broken'"):
        group.broken()
    with pytest.raises(ConfigError, match="dispatch_mode is 'ONE_TO_ALL'"):
        register("ONE_TO_ALL")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="execute_mode is 0"):
        register(Dispatch.ONE_TO_ALL, 0)  # pyright: ignore[reportArgumentType]

    class Clash(Role):
        @register()
        def call(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Clash.call cannot be registered"):
        LocalGroup([Clash(0, 1)])


def test_methods_that_are_not_registered_are_called_by_name():
    group = group_of(2)
    assert group.execute_all_sync("plain", 3) == [3, 4]
    assert group.execute_all_sync("plain", x=[1, 2]) == [1, 3]
    assert group.execute_rank_zero_sync("plain", 3) == 3


def test_functions_run_on_workers():
    group = group_of(2)

    def double(worker: Role, data: DataProto) -> DataProto:
        return DataProto.from_dict({"x": tensor(data, "x") * 2 + worker.rank})

    assert tensor(group.execute_with_func_generator(double, rows(4)), "x").tolist() == [0, 2, 5, 7]
    assert group.execute_func_rank_zero(max, 2, 5) == 5
