"""How a method of a worker group spreads its arguments over the ranks, and gathers the results.

`register` marks a method of a worker's class with one of these modes. R is the number of ranks:

| mode | arguments on a rank | result of the call |
| --- | --- | --- |
| `ONE_TO_ALL` | the same on all; a large one is stored once | list of R results |
| `ALL_TO_ALL` (the default) | a list of R items: one to each; others: to all | list of R results |
| `RANK_ZERO` | passed on to rank 0 only | the result of rank 0 |
| `DP_COMPUTE` | item r of a list of R | list of R results |
| `DP_COMPUTE_PROTO` | part r of R equal parts of a `DataProto` | the results, concatenated |
| `DP_COMPUTE_PROTO_BALANCED` | about 1/R of the tokens | concatenated, in the order of the rows |
| `DP_COMPUTE_PROTO_WITH_FUNC` | a function for all, then parts of a `DataProto` | concatenated |
| `DP_COMPUTE_METRIC` | part r of R equal parts of a `DataProto` | list of R results |

Names and meaning are those of verl 0.6.1, except `DP_COMPUTE_PROTO_BALANCED`, which is new, and
`RANK_ZERO`, which verl declares and does not implement. Nothing here needs Ray.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np

from agentrl.errors import ConfigError, DataError
from agentrl.protocol import DataProto
from agentrl.protocol.batch import AUTO_PADDING
from agentrl.protocol.columns import tensor_columns
from agentrl.workers.packing import partition_balanced

if TYPE_CHECKING:
    from agentrl.cluster.groups import WorkerGroup

F = TypeVar("F", bound=Callable[..., Any])

MAGIC_ATTR = "attrs_3141562937"
"""Attribute of a registered method; the name is verl's, because its users' code reads it."""


class DataProtoConfig:
    """Whether batches are padded to a multiple of the ranks; the names are verl's."""

    auto_padding_key = AUTO_PADDING
    """Key of `meta_info`: pad this batch."""
    auto_padding = False
    """Pad every batch."""


class Execute(Enum):
    """The ranks that execute a method."""

    ALL = "execute_all"
    RANK_ZERO = "execute_rank_zero"


@dataclass(frozen=True)
class Rows:
    """The rows of a batch on the ranks, to undo the split in the result."""

    order: tuple[int, ...]
    """Numbers of the rows, in the order of the ranks; a padded row repeats a number."""
    num_rows: int

    def restore(self, result: DataProto) -> DataProto:
        """Remove padded rows, and restore the order. A result without rows is returned as it is.

        Raises:
            DataError: If the ranks returned another number of rows than they received.
        """
        if not len(result):
            return result
        if len(result) != len(self.order):
            raise DataError(
                f"the ranks returned {len(result)} rows for {len(self.order)}",
                expected="a result for each row, or no rows, from a method whose rows were padded "
                "or balanced",
            )
        index = np.full(self.num_rows, -1)
        index[list(reversed(self.order))] = np.arange(len(self.order))[::-1]
        return result.select_idxs(index)


Split = tuple[Any, ...]
"""Positional arguments and keyword arguments, each a list of one item per rank; then `Rows`, if the
result must be restored."""


@dataclass(frozen=True)
class Dispatch:
    """A mode of dispatch: the split of the arguments, and the collection of the results."""

    name: str
    dispatch_fn: Callable[..., Split]
    """Called with the group and the arguments."""
    collect_fn: Callable[..., Any]
    """Called with the group and the list of results."""

    if TYPE_CHECKING:
        RANK_ZERO: ClassVar["Dispatch"]
        ONE_TO_ALL: ClassVar["Dispatch"]
        ALL_TO_ALL: ClassVar["Dispatch"]
        DP_COMPUTE: ClassVar["Dispatch"]
        DP_COMPUTE_PROTO: ClassVar["Dispatch"]
        DP_COMPUTE_PROTO_BALANCED: ClassVar["Dispatch"]
        DP_COMPUTE_PROTO_WITH_FUNC: ClassVar["Dispatch"]
        DP_COMPUTE_METRIC: ClassVar["Dispatch"]
        DIRECT_ROLLOUT_METHOD: ClassVar["Dispatch"]


@dataclass(frozen=True)
class Registration:
    """What `register` says about a method."""

    dispatch: Dispatch
    execute: Execute
    blocking: bool
    timeout_s: float | None


def register(
    dispatch_mode: Dispatch | Mapping[str, Callable[..., Any]] | None = None,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
    materialize_futures: bool = True,
    *,
    timeout_s: float | None = None,
) -> Callable[[F], F]:
    """Declare how a worker group calls a method of its workers.

    Args:
        dispatch_mode: A member of `Dispatch`, by default `ALL_TO_ALL`; or a mapping with your own
            `dispatch_fn(group, *args, **kwargs)`, which returns `(args, kwargs)` of lists with one
            item per rank, and `collect_fn(group, results)`.
        execute_mode: The ranks.
        blocking: Whether the call waits for the results. If not, it returns references to them, or
            a `DataProtoFuture` if the results are concatenated.
        materialize_futures: Whether the rank waits for a `DataProtoFuture` before the method runs.
        timeout_s: Seconds until a call fails; None: the group's `timeout_s`.

    Raises:
        ConfigError: If a mode is not one of these.

    Example:
        >>> class Scorer(Worker):
        ...     @register(Dispatch.DP_COMPUTE_PROTO)
        ...     def score(self, data: DataProto) -> DataProto: ...
    """
    mode = _check_dispatch_mode(Dispatch.ALL_TO_ALL if dispatch_mode is None else dispatch_mode)
    if not isinstance(execute_mode, Execute):
        raise ConfigError(f"execute_mode is {execute_mode!r}", expected="a member of Execute")

    def decorator(method: F) -> F:
        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
            return _materialize(args, kwargs) if materialize_futures else (args, kwargs)

        @wraps(method)
        def inner(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = prepare(args, kwargs)
            return method(*args, **kwargs)

        @wraps(method)
        async def async_inner(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = prepare(args, kwargs)
            return await method(*args, **kwargs)

        wrapper: Any = async_inner if inspect.iscoroutinefunction(method) else inner
        setattr(wrapper, MAGIC_ATTR, Registration(mode, execute_mode, blocking, timeout_s))
        return wrapper

    return decorator


def register_dispatch_mode(
    dispatch_mode_name: str,
    dispatch_fn: Callable[..., Split],
    collect_fn: Callable[..., Any],
) -> Dispatch:
    """Add a mode as `Dispatch.<NAME>`.

    Raises:
        ConfigError: If the name exists.
    """
    if hasattr(Dispatch, dispatch_mode_name):
        raise ConfigError(
            f"Dispatch.{dispatch_mode_name} exists",
            expected="another name, or update_dispatch_mode to replace it",
        )
    mode = Dispatch(dispatch_mode_name, dispatch_fn, collect_fn)
    setattr(Dispatch, dispatch_mode_name, mode)
    return mode


def update_dispatch_mode(
    dispatch_mode: Dispatch, dispatch_fn: Callable[..., Split], collect_fn: Callable[..., Any]
) -> Dispatch:
    """Replace the functions of a mode, for methods that are registered later."""
    mode = Dispatch(dispatch_mode.name, dispatch_fn, collect_fn)
    setattr(Dispatch, mode.name, mode)
    return mode


def get_predefined_dispatch_fn(dispatch_mode: Dispatch) -> dict[str, Callable[..., Any]]:
    """Return the two functions of a mode, as verl does."""
    return {"dispatch_fn": dispatch_mode.dispatch_fn, "collect_fn": dispatch_mode.collect_fn}


def registered_methods(cls: type) -> dict[str, Registration]:
    """Return the registered methods of a class, by name."""
    found: dict[str, Registration] = {}
    for name in dir(cls):
        attribute = inspect.getattr_static(cls, name)
        if (registration := vars_of(attribute).get(MAGIC_ATTR)) is not None:
            found[name] = registration
    return found


def vars_of(attribute: object) -> Mapping[str, Any]:
    """Return the attributes of a function; none for other objects."""
    function = (
        attribute.__func__ if isinstance(attribute, staticmethod | classmethod) else attribute
    )
    return vars(function) if inspect.isfunction(function) else {}


def _check_dispatch_mode(mode: Dispatch | Mapping[str, Callable[..., Any]]) -> Dispatch:
    if isinstance(mode, Dispatch):
        return mode
    if not isinstance(mode, Mapping) or not {"dispatch_fn", "collect_fn"} <= mode.keys():
        raise ConfigError(
            f"dispatch_mode is {mode!r}",
            expected="a member of Dispatch, or a mapping with dispatch_fn and collect_fn",
        )
    return Dispatch("custom", mode["dispatch_fn"], mode["collect_fn"])


# Results that are not there yet.


@dataclass(frozen=True)
class DataProtoFuture:
    """A `DataProto` whose parts are still computed, or are in Ray's object store.

    Pass it to a method of another group: the parts travel from the ranks that made them to those
    that read them, and never through the driver.
    """

    futures: tuple[Any, ...]
    """Ray's references to the parts, in order."""
    fetch: Callable[[Sequence[Any]], Sequence[DataProto]]
    """Waits for the parts; can be pickled."""
    rows: Rows | None = None
    share: tuple[int, int] = (0, 1)
    """`(r, n)`: this is part r of n equal parts."""

    def get(self) -> DataProto:
        """Wait for the parts, and concatenate them.

        Raises:
            ClusterError: If a rank fails, dies, or does not answer in time.
        """
        data = DataProto.concat(list(self.fetch(self.futures)))
        data = data if self.rows is None else self.rows.restore(data)
        part, num_parts = self.share
        return data if num_parts == 1 else data.chunk(num_parts)[part]

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """Split into parts of equal length. None of them is fetched."""
        if self.rows is None and self.share == (0, 1) and len(self.futures) == chunks:
            return [DataProtoFuture((future,), self.fetch) for future in self.futures]
        if self.share != (0, 1):
            raise DataError("a part of a DataProtoFuture cannot be split", expected="call get()")
        return [
            DataProtoFuture(self.futures, self.fetch, self.rows, (part, chunks))
            for part in range(chunks)
        ]


@dataclass(frozen=True)
class PendingResults:
    """What `collect_fn` receives from a call that does not block: references, and how to wait."""

    futures: tuple[Any, ...]
    fetch: Callable[[Sequence[Any]], Sequence[Any]]


def _materialize(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    def wait(value: Any) -> Any:
        return value.get() if isinstance(value, DataProtoFuture) else value

    return tuple(map(wait, args)), {name: wait(value) for name, value in kwargs.items()}


# Dispatch and collection. `group` is the worker group.


def dispatch_one_to_all(group: "WorkerGroup", *args: Any, **kwargs: Any) -> Split:
    """Give every rank the same arguments. A large one is stored once."""
    shared = [group.share(arg) for arg in args]
    return (
        tuple([arg] * group.world_size for arg in shared),
        {name: [group.share(value)] * group.world_size for name, value in kwargs.items()},
    )


def dispatch_all_to_all(group: "WorkerGroup", *args: Any, **kwargs: Any) -> Split:
    """Pass the arguments on; see `WorkerGroup.execute_all`."""
    return args, kwargs


def collect_all_to_all(group: "WorkerGroup", output: Any) -> Any:
    """Return the results as they are."""
    return list(output.futures) if isinstance(output, PendingResults) else output


def dispatch_dp_compute(group: "WorkerGroup", *args: Any, **kwargs: Any) -> Split:
    """Give rank r item r of each argument.

    Raises:
        DataError: If an argument is not a list with one item per rank.
    """
    for name, value in _named(args, kwargs):
        if not isinstance(value, list | tuple) or len(value) != group.world_size:
            size = f" of {len(value)}" if isinstance(value, list | tuple) else ""
            raise DataError(
                f"{name} is a {type(value).__name__}{size}",
                expected=f"a list of {group.world_size} items, one for each rank",
            )
    return tuple(map(list, args)), {name: list(value) for name, value in kwargs.items()}


def dispatch_dp_compute_data_proto(group: "WorkerGroup", *args: Any, **kwargs: Any) -> Split:
    """Split batches into equal parts; padded if the batch or `DataProtoConfig` allows it.

    Raises:
        DataError: If rows cannot be split evenly.
    """
    padded, rows = _pad(group.world_size, args, kwargs)
    given = iter(padded)
    return (
        [next(given).chunk(group.world_size) for _ in args],
        {name: next(given).chunk(group.world_size) for name in kwargs},
        rows,
    )


def dispatch_dp_compute_data_proto_with_func(
    group: "WorkerGroup", func: Callable[..., Any], *args: Any, **kwargs: Any
) -> Split:
    """Give every rank a function, and split the batches."""
    if not callable(func):
        raise DataError(f"the first argument is {func!r}", expected="a function")
    parts, named, *rows = dispatch_dp_compute_data_proto(group, *args, **kwargs)
    return [[group.share(func)] * group.world_size, *parts], named, *rows


def dispatch_balanced(group: "WorkerGroup", *args: Any, **kwargs: Any) -> Split:
    """Give the ranks about equal numbers of tokens: rows by `attention_mask` of the first batch.

    The ranks may get different numbers of rows, each at least one. Without `attention_mask`,
    `response_mask` is counted.

    Raises:
        DataError: If there are fewer rows than ranks, or no mask.
    """
    batches = [_check_batch(name, value) for name, value in _named(args, kwargs)]
    num_rows = _common_length(batches)
    if num_rows < group.world_size:
        raise DataError(f"{num_rows} rows for {group.world_size} ranks", expected="a row for each")
    lengths = [max(1, length) for length in _count_tokens(batches[0])]
    parts = [sorted(part) for part in partition_balanced(lengths, group.world_size)]
    rows = Rows(tuple(row for part in parts for row in part), num_rows)

    def split(batch: DataProto) -> list[DataProto]:
        return [batch.select_idxs(part) for part in parts]

    return [split(arg) for arg in args], {k: split(value) for k, value in kwargs.items()}, rows


def collect_dp_compute_data_proto(group: "WorkerGroup", output: Any) -> Any:
    """Concatenate the results of the ranks."""
    if isinstance(output, PendingResults):
        return DataProtoFuture(output.futures, output.fetch)
    for rank, result in enumerate(output):
        if not isinstance(result, DataProto):
            raise DataError(
                f"rank {rank} returned a {type(result).__name__}",
                expected="a DataProto; use DP_COMPUTE_METRIC or ONE_TO_ALL for other results",
            )
    return DataProto.concat(output)


def collect_rank_zero(group: "WorkerGroup", output: Any) -> Any:
    """Return the result of rank 0."""
    return output


def refuse_direct_rollout(group: "WorkerGroup", *args: Any, **kwargs: Any) -> Any:
    """Refuse verl's mode for the executor of its vLLM server."""
    raise ConfigError(
        "Dispatch.DIRECT_ROLLOUT_METHOD does not exist in agentrl: it serves verl's vLLM executor",
        expected="call the worker's handle, group.workers[rank].method.remote(...), or the engines "
        "of rollout.engine",
    )


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> dict[str, Callable[..., Any]]:
    """Make a mode for ranks of which several compute the same rows (a device mesh).

    Each worker calls `self._register_dispatch_collect_info(mesh_name, dp_rank, is_collect)` first.
    Ranks with the same `dp_rank` get the same part, which is stored once. The results of the ranks
    with `is_collect` are concatenated.
    """
    return {
        "dispatch_fn": partial(_dispatch_mesh, mesh_name),
        "collect_fn": partial(_collect_mesh, mesh_name),
    }


def _dispatch_mesh(mesh_name: str, group: "WorkerGroup", *args: Any, **kwargs: Any) -> Split:
    dp_ranks = group.query_mesh(mesh_name).dp_ranks
    padded, rows = _pad(max(dp_ranks) + 1, args, kwargs)
    parts = [[group.share(part) for part in batch.chunk(max(dp_ranks) + 1)] for batch in padded]
    given = iter([[part[dp_rank] for dp_rank in dp_ranks] for part in parts])
    return [next(given) for _ in args], {name: next(given) for name in kwargs}, rows


def _collect_mesh(mesh_name: str, group: "WorkerGroup", output: Any) -> Any:
    chosen = [rank for rank, is_kept in enumerate(group.query_mesh(mesh_name).collects) if is_kept]
    if isinstance(output, PendingResults):
        futures = tuple(output.futures[rank] for rank in chosen)
        return collect_dp_compute_data_proto(group, PendingResults(futures, output.fetch))
    return collect_dp_compute_data_proto(group, [output[rank] for rank in chosen])


def _pad(
    num_parts: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], Rows | None]:
    """Pad the batches to a multiple, if they allow it."""
    batches = [_check_batch(name, value) for name, value in _named(args, kwargs)]
    lengths = {len(batch) for batch in batches if isinstance(batch, DataProto)}
    is_allowed = DataProtoConfig.auto_padding or any(
        batch.meta_info.get(DataProtoConfig.auto_padding_key)
        for batch in batches
        if isinstance(batch, DataProto)
    )
    if all(length % num_parts == 0 for length in lengths):
        return batches, None
    if not is_allowed or any(isinstance(batch, DataProtoFuture) for batch in batches):
        raise DataError(
            f"{max(lengths)} rows cannot be split into {num_parts} equal parts",
            expected="pad_dataproto_to_divisor first; "
            f"meta_info[{DataProtoConfig.auto_padding_key!r}] = True, if the method may compute "
            "rows twice (it trains nothing); or Dispatch.DP_COMPUTE_PROTO_BALANCED",
        )
    num_rows = _common_length(batches)
    if not num_rows:
        raise DataError("no row to pad with", expected="at least one row")
    last = num_rows - 1
    order = (*range(num_rows), *[last] * (-num_rows % num_parts))
    return [batch.select_idxs(order) for batch in batches], Rows(order, num_rows)


def _named(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    positional = [(f"argument {number}", arg) for number, arg in enumerate(args)]
    return [*positional, *kwargs.items()]


def _check_batch(name: str, value: Any) -> Any:
    if not isinstance(value, DataProto | DataProtoFuture):
        raise DataError(
            f"{name} is a {type(value).__name__}",
            expected="a DataProto: this mode splits rows. Put other values into meta_info",
        )
    return value


def _common_length(batches: Sequence[Any]) -> int:
    lengths: list[Hashable] = [
        len(batch) if isinstance(batch, DataProto) else "unknown" for batch in batches
    ]
    if len(set(lengths)) != 1 or not isinstance(lengths[0], int):
        shown = ", ".join(map(str, lengths)) or "none"
        raise DataError(f"batches of {shown} rows", expected="batches of one known length")
    return lengths[0]


def _count_tokens(batch: DataProto) -> list[int]:
    columns = tensor_columns(batch.batch)
    for name in ("attention_mask", "response_mask"):
        if name in columns:
            return columns[name].sum(-1).long().tolist()
    raise DataError(
        "the rows cannot be balanced by tokens",
        expected="a column attention_mask or response_mask in the first batch",
    )


for _name, _split, _collect in (
    ("RANK_ZERO", dispatch_all_to_all, collect_rank_zero),
    ("ONE_TO_ALL", dispatch_one_to_all, collect_all_to_all),
    ("ALL_TO_ALL", dispatch_all_to_all, collect_all_to_all),
    ("DP_COMPUTE", dispatch_dp_compute, collect_all_to_all),
    ("DP_COMPUTE_PROTO", dispatch_dp_compute_data_proto, collect_dp_compute_data_proto),
    ("DP_COMPUTE_PROTO_BALANCED", dispatch_balanced, collect_dp_compute_data_proto),
    (
        "DP_COMPUTE_PROTO_WITH_FUNC",
        dispatch_dp_compute_data_proto_with_func,
        collect_dp_compute_data_proto,
    ),
    ("DP_COMPUTE_METRIC", dispatch_dp_compute_data_proto, collect_all_to_all),
    ("DIRECT_ROLLOUT_METHOD", refuse_direct_rollout, refuse_direct_rollout),
):
    setattr(Dispatch, _name, Dispatch(_name, _split, _collect))
