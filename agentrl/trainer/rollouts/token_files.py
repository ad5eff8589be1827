"""What training computed for each token of a step's batch, as Parquet.

    rollouts/step_000010.tokens.parquet    next to rollouts/step_000010.jsonl.zst

A row is a sequence of the batch; `request_id` is that of the sequence in the JSON lines. Sequences
that are not in the batch (groups that were filtered) have no row. Columns of a sequence:

    step, request_id, uid, batch_data_id, trajectory_id, in_baseline, num_prompt_tokens

Columns with a list of one value for each response token, float32, if the run computes them:

    response_mask         1 on tokens that were trained, after rejection
    rollout_log_probs     at sampling
    old_log_probs         of the policy before the update; null if the update skipped the row
    entropies             of the policy before the update
    ref_log_prob          of the reference
    values                of the critic
    token_level_scores    rewards on their tokens
    token_level_rewards   the same with the KL penalty
    advantages, returns
    rollout_is_weights    of the correction of the rollout

The file's metadata has `agentrl_version`, the version of this format.

Example:
    >>> pandas.read_parquet("rollouts/step_000010.tokens.parquet").advantages  # doctest: +SKIP
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.atomic_io import atomic_file
from agentrl.errors import DataError

if TYPE_CHECKING:  # readers of files need no torch, whose import takes seconds
    from numpy.typing import NDArray

    from agentrl.protocol import DataProto

TOKENS_VERSION = 1
"""Version of the format."""
_VERSION_KEY = b"agentrl_version"
_GROUP_TOKENS = 1 << 14
"""Tokens of a row group: the values of one sequence are read with those of few others."""
TOKEN_COLUMNS = (
    "response_mask", "rollout_log_probs", "old_log_probs", "entropies", "ref_log_prob", "values",
    "token_level_scores", "token_level_rewards", "advantages", "returns", "rollout_is_weights",
)  # fmt: skip
"""Columns with a value for each response token."""
_OF_ROWS = ("attention_mask", "responses", "batch_data_id", "trajectory_ids", "in_baseline")


def token_path(rollout_file: Path) -> Path:
    """Name the file of the tokens of a rollout file.

    Example:
        >>> token_path(Path("rollouts/step_000010.jsonl")).name
        'step_000010.tokens.parquet'
    """
    return rollout_file.with_name(f"{rollout_file.name.split('.')[0]}.tokens.parquet")


def tabulate_tokens(batch: "DataProto", step: int) -> pa.Table:
    """Make the rows of a batch.

    Args:
        batch: This rank's rows after the update: `[B, T]` tensors and objects of `collate`.
        step: The run's step.
    """
    from agentrl.trainer.credit import IS_COMPUTED, tensors_of

    # torch sums booleans slowly on CPUs, so everything below is NumPy's.
    names = (*TOKEN_COLUMNS, *_OF_ROWS, IS_COMPUTED)
    tensors: dict[str, Any] = {
        name: (values.float() if values.is_floating_point() else values).detach().cpu().numpy()
        for name, values in tensors_of(batch).items()
        if name in names
    }
    objects = batch.non_tensor_batch
    is_token = tensors["attention_mask"][:, -tensors["responses"].shape[1] :].astype(bool)
    num_prompt = tensors["attention_mask"].sum(-1) - is_token.sum(-1)
    columns: dict[str, Any] = {
        "step": pa.array(np.full(len(batch), step, np.int32)),
        "request_id": pa.array(objects["request_id"].tolist(), pa.string()),
        "uid": pa.array(objects["uid"].tolist(), pa.string()),
        "batch_data_id": pa.array(tensors["batch_data_id"]),
        "trajectory_id": pa.array(tensors["trajectory_ids"]),
        "in_baseline": pa.array(tensors["in_baseline"].astype(bool)),
        "num_prompt_tokens": pa.array(num_prompt.astype(np.int32)),
    }
    for name in TOKEN_COLUMNS:
        if name in tensors:
            is_known = tensors.get(IS_COMPUTED) if name == "old_log_probs" else None
            columns[name] = _as_lists(tensors[name], is_token, is_known)
    return pa.table(columns).replace_schema_metadata({_VERSION_KEY: str(TOKENS_VERSION)})


def _as_lists(
    values: "NDArray[Any]", is_token: "NDArray[np.bool_]", is_known: "NDArray[Any] | None"
) -> pa.Array:
    """Return the values of each row's tokens as a list; null for rows without values.

    Args:
        values: `[B, T]`.
        is_token: `[B, T]`.
        is_known: `[B]`; None: all rows have values.
    """
    if is_known is not None:
        is_token = is_token & is_known.astype(bool)[:, None]
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(is_token.sum(-1), out=offsets[1:])
    flat = pa.array(values[is_token].astype(np.float32))
    is_null = None if is_known is None else pa.array(~is_known.astype(bool))
    return pa.ListArray.from_arrays(pa.array(offsets), flat, mask=is_null)


def save_tokens(path: Path, tables: Sequence[pa.Table]) -> None:
    """Write the rows of all ranks to a file that appears when it is complete.

    Raises:
        OSError: naming `path`, if it cannot be written.
    """
    with atomic_file(path) as draft:
        table = pa.concat_tables(tables)
        num_tokens = sum(len(chunk.flatten()) for chunk in table["response_mask"].chunks)
        # Of small row groups, dictionaries of distinct floats would make the file larger.
        pq.write_table(
            table, draft, compression="zstd", use_dictionary=False, write_statistics=False,
            row_group_size=max(1, _GROUP_TOKENS * len(table) // max(1, num_tokens)),
        )  # fmt: skip


def read_tokens(
    path: Path, *, columns: Sequence[str] | None = None, request_ids: Sequence[str] = ()
) -> pa.Table:
    """Read a file of tokens.

    Args:
        path: The file.
        columns: Columns to read, of those that it has; None: all.
        request_ids: Sequences to read; empty: all. Only row groups with these are read.

    Raises:
        DataError: If there is no such file, or it is damaged or of another version.
    """
    if not path.is_file():
        raise DataError("no such file of tokens", file=path)
    try:
        with pq.ParquetFile(path) as file:
            schema = file.schema_arrow
            if columns is not None:
                columns = [name for name in columns if name in schema.names]
            table = _read_rows(file, columns, request_ids) if request_ids else file.read(columns)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"a file of tokens that cannot be read: {error}", file=path) from error
    found = (schema.metadata or {}).get(_VERSION_KEY, b"none").decode()
    if found != str(TOKENS_VERSION):
        raise DataError(
            f"a file of tokens of version {found}",
            file=path,
            expected=f"version {TOKENS_VERSION}",
        )
    return table


def _read_rows(
    file: pq.ParquetFile, columns: Sequence[str] | None, request_ids: Sequence[str]
) -> pa.Table:
    """Read the row groups that have the sequences, and keep the sequences' rows."""
    groups, kept, start = list[int](), list[bool](), 0
    wanted, ids = set(request_ids), file.read(["request_id"])["request_id"].to_pylist()
    for group in range(file.num_row_groups):
        end = start + file.metadata.row_group(group).num_rows
        is_wanted = [name in wanted for name in ids[start:end]]
        if any(is_wanted):
            groups.append(group)
            kept += is_wanted
        start = end
    return file.read_row_groups(groups, columns).filter(pa.array(kept, pa.bool_()))
