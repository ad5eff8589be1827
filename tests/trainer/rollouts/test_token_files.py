"""What training computed for tokens, on disk."""

from pathlib import Path

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
import torch

from agentrl.collate import collate
from agentrl.errors import DataError
from agentrl.protocol import DataProto
from agentrl.trainer.credit import IS_COMPUTED, tensors_of
from agentrl.trainer.rollouts import token_files
from agentrl.trainer.rollouts.token_files import (
    read_tokens,
    save_tokens,
    tabulate_tokens,
    token_path,
)
from tests.fakes.requests import build_request, observed, said


def make_batch() -> DataProto:
    """Two sequences of different lengths; the update has skipped the second."""
    requests = [
        build_request(said(3), observed(2), said(1), num_prompt_tokens=4),
        build_request(said(2), num_prompt_tokens=6),
    ]
    batch = collate(requests, pad_token_id=0)
    shape = tensors_of(batch)["responses"].shape
    count = torch.arange(shape.numel(), dtype=torch.float32).view(shape)
    computed = {"advantages": count, "old_log_probs": -count}
    return batch.union(DataProto.from_dict({**computed, IS_COMPUTED: torch.tensor([True, False])}))


def test_values_are_those_of_the_tokens_without_padding(tmp_path: Path):
    batch, path = make_batch(), token_path(tmp_path / "step_000004.jsonl")
    save_tokens(path, [tabulate_tokens(batch, 4), tabulate_tokens(batch, 4)])
    table = pandas.read_parquet(path)
    assert len(table) == 4
    assert table.step.tolist() == [4] * 4
    assert table.request_id.tolist() == 2 * batch.non_tensor_batch["request_id"].tolist()
    assert table.num_prompt_tokens.tolist() == 2 * [4, 6]
    assert table.advantages[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert table.advantages[1].tolist() == [6, 7]
    assert table.old_log_probs[0].tolist() == [0, -1, -2, -3, -4, -5]
    assert table.old_log_probs[1] is None
    assert table.response_mask[0].tolist() == [1, 1, 1, 0, 0, 1]
    assert table.rollout_log_probs[0].dtype == np.float32
    assert "returns" not in table


def test_few_sequences_are_read_with_their_row_groups_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(token_files, "_GROUP_TOKENS", 64)
    tables = [tabulate_tokens(make_batch(), step) for step in range(20)]
    for number, table in enumerate(tables):
        names = [f"{number}-{row}" for row in range(2)]
        tables[number] = table.set_column(1, "request_id", [names])
    save_tokens(tmp_path / "a.parquet", tables)
    with pq.ParquetFile(tmp_path / "a.parquet") as file:
        assert file.num_row_groups == 3
    found = read_tokens(tmp_path / "a.parquet", columns=["step"], request_ids=["19-1", "2-0", "x"])
    assert found.to_pydict() == {"step": [2, 19]}


def test_a_rank_without_rows_adds_none(tmp_path: Path):
    batch = make_batch()
    save_tokens(tmp_path / "a.parquet", [tabulate_tokens(part, 1) for part in (batch[:0], batch)])
    assert len(read_tokens(tmp_path / "a.parquet")) == 2


def test_missing_damaged_and_newer_files_are_errors(tmp_path: Path):
    path = tmp_path / "step_000001.tokens.parquet"
    with pytest.raises(DataError, match="no such file"):
        read_tokens(path)
    path.write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="cannot be read"):
        read_tokens(path)
    table = tabulate_tokens(make_batch(), 1).replace_schema_metadata({"agentrl_version": "2"})
    pq.write_table(table, path)
    with pytest.raises(DataError, match="of version 2"):
        read_tokens(path)
