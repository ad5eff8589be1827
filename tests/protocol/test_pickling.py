"""A batch in another process: equal, writable, and no larger than its rows."""

import pickle

import numpy as np
import pytest
import torch

from agentrl.protocol import DataProto

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
)  # fmt: skip


def send(data: DataProto) -> tuple[DataProto, int]:
    """Send through shared memory, which is read-only there; also return the bytes."""
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    shared = [bytes(buffer.raw()) for buffer in buffers]
    return pickle.loads(text, buffers=shared), len(text) + sum(map(len, shared))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_shapes_and_dtypes_arrive(dtype: torch.dtype):
    tensor = torch.tensor([[0.0, 1, 2], [3, 0, 1]]).to(dtype)
    received, _ = send(DataProto.from_dict({"x": tensor, "turned": tensor.T.contiguous().T}))
    assert received.batch is not None
    for name in ("x", "turned"):
        assert received.batch[name].dtype == dtype
        assert torch.equal(received.batch[name].view(torch.uint8), tensor.view(torch.uint8))


def test_objects_facts_and_empty_batches_arrive():
    sent = DataProto.from_dict(None, {"uid": ["a", None, {"b": [1]}]}, {"step": 3})
    received, _ = send(sent)
    assert received.non_tensor_batch["uid"].tolist() == ["a", None, {"b": [1]}]
    assert received.meta_info == {"step": 3}
    assert received.batch is None
    nothing, _ = send(DataProto.from_dict({"x": torch.zeros(0, 5)}))
    assert nothing.batch is not None
    assert nothing.batch["x"].shape == (0, 5)


def test_a_chunk_carries_its_own_rows_only():
    whole = DataProto.from_dict({"x": torch.arange(80_000).view(8, -1)})
    received, num_bytes = send(whole.chunk(8)[3])
    assert received.batch is not None
    assert torch.equal(received.batch["x"], torch.arange(30_000, 40_000)[None])
    assert num_bytes < 85_000


def test_what_arrives_can_be_changed_without_effect_on_others():
    sent = DataProto.from_dict({"x": torch.zeros(2, 2), "y": torch.zeros(2, dtype=torch.bfloat16)})
    received, _ = send(sent)
    assert received.batch is not None
    assert sent.batch is not None
    received.batch["x"] += 1
    received.batch["y"] += 1
    assert not sent.batch["x"].any()
    assert not sent.batch["y"].any()
    assert received.batch["y"].tolist() == [1, 1]


def test_rows_selected_in_another_order_arrive():
    rows = DataProto.from_dict({"x": torch.arange(6)})[np.array([4, 1])]
    received, _ = send(rows)
    assert received.batch is not None
    assert received.batch["x"].tolist() == [4, 1]


def test_a_tensor_that_numpy_cannot_hold_arrives():
    sparse = torch.eye(3).to_sparse()
    received, _ = send(DataProto.from_dict({"x": sparse}))
    assert received.batch is not None
    assert torch.equal(received.batch["x"].to_dense(), torch.eye(3))
