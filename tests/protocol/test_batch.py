import copy
import json
import math
import pickle
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DataError
from agentrl.messages import Message
from agentrl.protocol import DataProto, object_array, pad_dataproto_to_divisor, unpad_dataproto

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def batches(draw, min_rows=0, max_rows=7):
    rows = draw(st.integers(min_rows, max_rows))
    width = draw(st.integers(0, 3))
    dtypes = st.sampled_from([torch.int64, torch.float32, torch.bool, torch.bfloat16, torch.uint8])
    tensors = {
        f"t{i}": torch.arange(rows * width).reshape(rows, width).to(dtype)
        for i, dtype in enumerate(draw(st.lists(dtypes, min_size=1, max_size=3)))
    }
    column = st.lists(json_values, min_size=rows, max_size=rows)
    columns = draw(st.dictionaries(st.sampled_from(["uid", "messages"]), column))
    return DataProto.from_dict(tensors, columns, draw(st.dictionaries(st.text(), json_values)))


def small() -> DataProto:
    tensors = {"x": torch.arange(4), "y": torch.arange(8.0).reshape(4, 2)}
    return DataProto.from_dict(tensors, {"uid": ["a", "a", "b", "b"]}, {"step": 3})


def assert_same(left: DataProto, right: DataProto) -> None:
    assert len(left) == len(right)
    mine, theirs = dict(left.batch.items()), dict(right.batch.items())
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert mine[key].dtype == theirs[key].dtype
        assert torch.equal(mine[key], theirs[key])
    assert left.non_tensor_batch.keys() == right.non_tensor_batch.keys()
    for key in left.non_tensor_batch:  # repr: NaN is not equal to itself
        assert repr(left.non_tensor_batch[key].tolist()) == repr(
            right.non_tensor_batch[key].tolist()
        )
    assert repr(left.meta_info) == repr(right.meta_info)


# Round trips.


@settings(deadline=None, max_examples=30)
@given(batches())
def test_saved_batch_is_read_back_the_same(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("saved") / "batch.safetensors"
    data.save_to_disk(path)
    assert_same(DataProto.load_from_disk(path), data)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@settings(deadline=None, max_examples=30)
@given(batches(min_rows=1), st.integers(1, 5))
def test_split_and_concat_undo_each_other(data, size):
    assert_same(DataProto.concat(data.split(size)), data)


@settings(deadline=None, max_examples=30)
@given(batches(min_rows=1), st.integers(1, 4))
def test_chunks_of_a_repeated_batch_are_the_batch(data, times):
    for part in data.repeat(times, interleave=False).chunk(times):
        assert_same(part, data)


@settings(deadline=None, max_examples=30)
@given(batches(min_rows=1), st.integers(1, 4))
def test_interleaved_repeat_keeps_copies_together(data, times):
    repeated = data.repeat(times)
    for offset in range(times):
        assert_same(repeated[offset::times], data)


@settings(deadline=None, max_examples=30)
@given(batches(min_rows=1), st.integers(1, 9))
def test_unpad_undoes_pad(data, divisor):
    padded, num_padded = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert num_padded < divisor
    assert_same(unpad_dataproto(padded, num_padded), data)


@settings(deadline=None, max_examples=30)
@given(batches(min_rows=1), st.randoms(use_true_random=False))
def test_reorder_by_inverse_restores(data, random):
    order = list(range(len(data)))
    random.shuffle(order)
    before = copy.deepcopy(data)
    data.reorder(torch.tensor(order))
    data.reorder(np.argsort(order))
    assert_same(data, before)


@settings(deadline=None, max_examples=30)
@given(batches())
def test_popped_columns_united_again_are_the_batch(data):
    before = copy.deepcopy(data)
    keys = sorted(data.batch.keys())
    popped = data.pop(keys[:1], list(data.non_tensor_batch))
    assert keys[0] not in data.batch
    assert not data.non_tensor_batch
    data.union(popped)
    assert set(data.batch.keys()) == set(before.batch.keys())
    for key, column in before.non_tensor_batch.items():
        assert repr(data.non_tensor_batch[key].tolist()) == repr(column.tolist())


@settings(deadline=None, max_examples=30)
@given(batches(min_rows=1), st.integers(1, 4), st.integers(0, 5))
def test_iterator_passes_over_every_row_once_an_epoch(data, size, seed):
    data.union(DataProto.from_dict({"number": torch.arange(len(data))}))
    parts = list(data.make_iterator(size, epochs=2, seed=seed))
    seen = torch.cat([part.batch["number"] for part in parts]).view(2, -1)
    assert seen.sort(dim=-1).values.tolist() == [list(range(len(data)))] * 2
    again = torch.cat([p.batch["number"] for p in data.make_iterator(size, epochs=2, seed=seed)])
    assert torch.equal(seen.view(-1), again)


def test_iterator_without_seed_keeps_the_order():
    parts = list(small().make_iterator(3))
    assert [part.batch["x"].tolist() for part in parts] == [[0, 1, 2], [3]]


# Choosing.


def test_one_row_has_no_batch_dimension():
    row = small()[-1]
    assert row.batch["y"].tolist() == [6.0, 7.0]
    assert row.non_tensor_batch == {"uid": "b"}


@pytest.mark.parametrize(
    "rows",
    [[2, 0], np.array([2, -4]), torch.tensor([2, 0])],
    ids=["list", "negative", "tensor"],
)
def test_rows_are_chosen_by_number(rows):
    assert small()[rows].batch["x"].tolist() == [2, 0]


def test_rows_are_chosen_by_truth_value():
    chosen = small()[torch.tensor([True, False, False, True])]
    assert chosen.batch["x"].tolist() == [0, 3]
    assert chosen.non_tensor_batch["uid"].tolist() == ["a", "b"]


def test_slices_may_step_backwards():
    assert small()[::-2].batch["x"].tolist() == [3, 1]


@pytest.mark.parametrize("rows", [4, -5, [0, 4]])
def test_row_outside_the_batch_is_refused(rows):
    with pytest.raises(IndexError):
        small()[rows]


def test_facts_of_a_part_are_its_own():
    data = small()
    data[:2].meta_info["step"] = 9
    assert data.meta_info == {"step": 3}


def test_select_keeps_named_columns_only():
    chosen = small().select(["x"], [], ["step"])
    assert list(chosen.batch.keys()) == ["x"]
    assert chosen.non_tensor_batch == {}
    assert chosen.meta_info == {"step": 3}


def test_missing_column_is_named_with_the_existing_ones():
    with pytest.raises(DataError, match=r"no 'z' in the batch\n.*one of x, y"):
        small().pop(["z"])


def test_rename_changes_names_only():
    data = small().rename("x", "z")
    assert sorted(data.batch.keys()) == ["y", "z"]
    with pytest.raises(DataError, match="two columns one"):
        data.rename("z", "y")


def test_a_list_of_lists_is_a_column_of_lists():
    assert object_array([[1, 2], [3, 4]]).shape == (2,)
    assert object_array(np.array([[1, 2], [3, 4]])).tolist() == [[1, 2], [3, 4]]


def test_tensors_and_objects_are_separated():
    data = DataProto.from_single_dict({"x": torch.zeros(2), "uid": ["a", "b"]})
    assert list(data.batch.keys()) == ["x"]
    assert data.non_tensor_batch["uid"].tolist() == ["a", "b"]


def test_batch_of_objects_alone_has_its_length():
    data = DataProto.from_dict(non_tensors={"uid": ["a", "b", "c"]})
    assert len(data) == 3
    assert len(data.repeat(2)) == 6
    assert len(DataProto()) == 0


def test_pickled_batch_is_the_same():
    assert_same(pickle.loads(pickle.dumps(small())), small())


# Refusals.


def test_union_names_key_and_row_of_a_conflict_and_changes_nothing():
    data, other = small(), small()
    other.batch["y"] = other.batch["y"].clone()
    other.batch["y"][2, 1] = -1
    other.batch["new"] = torch.zeros(4)
    with pytest.raises(DataError) as caught:
        data.union(other)
    assert caught.value.details == {"key": "y", "row": 2}
    assert_same(data, small())


def test_union_names_the_row_of_differing_objects():
    other = DataProto.from_dict(non_tensors={"uid": ["a", "a", "b", "c"]})
    with pytest.raises(DataError) as caught:
        small().union(other)
    assert caught.value.details == {"key": "uid", "row": 3}


def test_union_refuses_other_lengths_and_other_facts():
    with pytest.raises(DataError, match="2 rows to add to 4"):
        small().union(small()[:2])
    with pytest.raises(DataError, match="meta_info 'step'"):
        small().union(DataProto(meta_info={"step": 4}))


def test_union_takes_nan_as_equal_to_nan():
    data = DataProto.from_dict({"x": torch.tensor([torch.nan, 1.0])})
    assert len(data.union(copy.deepcopy(data))) == 2


def test_union_returns_the_batch_itself():
    data = small()
    assert data.union(DataProto.from_dict({"z": torch.zeros(4)})) is data
    assert "z" in data.batch


@pytest.mark.parametrize(
    "columns",
    [{"tensors": {"x": torch.zeros(2), "y": torch.zeros(3)}},
     {"tensors": {"x": torch.zeros(2)}, "non_tensors": {"y": [1, 2, 3]}},
     {"tensors": {"y": torch.tensor(1.0)}}],
)  # fmt: skip
def test_column_of_another_length_is_named(columns):
    with pytest.raises(DataError, match="'y' has shape"):
        DataProto.from_dict(**columns)


def test_rows_that_do_not_divide_are_refused():
    with pytest.raises(DataError, match="4 rows cannot be split into 3"):
        small().chunk(3)


def test_concat_names_what_differs():
    wide = small().union(DataProto.from_dict({"z": torch.zeros(4, 3)}))
    wider = small().union(DataProto.from_dict({"z": torch.zeros(4, 5)}))
    with pytest.raises(DataError, match="'z' is \\(4, 3\\) here and \\(4, 5\\) there"):
        DataProto.concat([wide, wider])
    with pytest.raises(DataError, match="only one of the batches has 'z'"):
        DataProto.concat([wide, small()])


def test_objects_that_json_cannot_hold_are_named_and_nothing_is_written(tmp_path):
    data = DataProto.from_dict(non_tensors={"tool": ["fine", [SimpleNamespace()]]})
    with pytest.raises(DataError, match="'tool' in row 1 holds a SimpleNamespace"):
        data.save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


def test_pydantic_models_are_saved_as_dicts(tmp_path):
    data = DataProto.from_dict(non_tensors={"m": [[Message(role="user", content="Hi")]]})
    data.save_to_disk(tmp_path / "batch")
    loaded = DataProto.load_from_disk(tmp_path / "batch").non_tensor_batch["m"][0][0]
    assert Message.model_validate(loaded) == Message(role="user", content="Hi")


NUMBERS = [math.nan, math.inf, -math.inf, 1.5, "NaN", '"\\u004eaN"', "Infinity \ud800"]


def test_numbers_that_are_not_finite_are_saved_as_json(tmp_path):
    from safetensors.torch import load_file

    scores = object_array([{"b": number, "a": [number]} for number in NUMBERS])
    facts = {"x": NUMBERS, "NaN": {"-Infinity": -math.inf}}
    batch = DataProto.from_dict(non_tensors={"scores": scores}, meta_info=facts)
    batch.save_to_disk(tmp_path / "batch")
    [written] = load_file(tmp_path / "batch").values()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    json.loads(written.numpy().tobytes(), parse_constant=refuse)
    read = DataProto.load_from_disk(tmp_path / "batch")
    assert repr(list(read.non_tensor_batch["scores"])) == repr(list(scores))
    assert repr(read.meta_info) == repr(facts)


def test_tensors_that_share_memory_are_saved(tmp_path):
    scores = torch.arange(6.0).view(2, 3)
    data = DataProto.from_dict({"a": scores, "b": scores, "c": scores[:, 1:]})
    data.save_to_disk(tmp_path / "batch")
    assert_same(DataProto.load_from_disk(tmp_path / "batch"), data)


def test_damaged_missing_and_foreign_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    small().save_to_disk(tmp_path / "whole")
    (tmp_path / "half").write_bytes((tmp_path / "whole").read_bytes()[:-9])
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    for name in ("half", "missing", "foreign"):
        with pytest.raises(DataError) as caught:
            DataProto.load_from_disk(tmp_path / name)
        assert caught.value.details["file"] == tmp_path / name


def test_a_saved_pickle_is_never_run(tmp_path):
    (tmp_path / "batch").write_bytes(pickle.dumps(small()))
    with pytest.raises(DataError):
        DataProto.load_from_disk(tmp_path / "batch")


# Constructors: what they take, and what they refuse.

ROWS = {
    "tensor": torch.arange(2),
    "matrix": torch.zeros(2, 3),
    "list": ["a", "b"],
    "tuple": (1, None),
    "lists": [[1], [2, 3]],
    "array": np.array([1.0, 2.0]),
    "texts": np.array(["a", "bc"]),
    "grid": np.zeros((2, 3)),
    "range": range(2),
    "deque": deque(["a", "b"]),
    "tensors": [torch.zeros(1), torch.zeros(2)],
}
NO_ROWS = {
    "number": 3,
    "float": math.nan,
    "none": None,
    "text": "ab",
    "bytes": b"ab",
    "mapping": {"a": 1, "b": 2},
    "set": {1, 2},
    "scalar": torch.tensor(1),
    "point": np.array(1),
    "object": object(),
    "type": list,
}
CONSTRUCTORS = {
    "single": lambda columns: DataProto.from_single_dict(columns),
    "objects": lambda columns: DataProto.from_dict(non_tensors=columns),
    "tensors": lambda columns: DataProto.from_dict(columns),
    "batch": lambda columns: DataProto(batch=columns),
    "non_tensor_batch": lambda columns: DataProto(non_tensor_batch=columns),
}


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("how", CONSTRUCTORS)
def test_constructors_take_columns_with_a_value_for_each_row(how: str, kind: str):
    column = ROWS[kind]
    if how in ("tensors", "batch") and not isinstance(column, torch.Tensor):
        with pytest.raises(DataError) as caught:
            CONSTRUCTORS[how]({"x": column})
        assert caught.value.details["key"] == "x"
        return
    data = CONSTRUCTORS[how]({"x": column})
    assert len(data) == 2
    held = data.batch["x"] if data.batch is not None else data.non_tensor_batch["x"]
    assert [str(np.asarray(v)) for v in held] == [str(np.asarray(v)) for v in column]


@pytest.mark.parametrize("kind", NO_ROWS)
@pytest.mark.parametrize("how", CONSTRUCTORS)
@pytest.mark.parametrize("others", [{}, {"fine": torch.zeros(2)}])
def test_constructors_name_the_column_that_is_none(how: str, kind: str, others: Any):
    if how in ("objects", "non_tensor_batch"):
        others = {key: value.tolist() for key, value in others.items()}
    with pytest.raises(DataError) as caught:
        CONSTRUCTORS[how]({**others, "bad": NO_ROWS[kind]})
    assert caught.value.details["key"] == "bad"
    assert "'bad'" in str(caught.value)
    assert caught.value.details["expected"]


@pytest.mark.parametrize("columns", [[1], "x", 3, torch.zeros(2), [("x", torch.zeros(2))]])
@pytest.mark.parametrize("how", CONSTRUCTORS)
def test_constructors_refuse_what_is_no_mapping(how: str, columns: Any):
    with pytest.raises(DataError, match="expected: columns by name"):
        CONSTRUCTORS[how](columns)


@pytest.mark.parametrize("how", CONSTRUCTORS)
def test_constructors_refuse_names_that_are_no_texts_and_other_lengths(how: str):
    with pytest.raises(DataError, match="the name of a column is 3"):
        CONSTRUCTORS[how]({3: torch.zeros(2)})
    with pytest.raises(DataError, match="'y' has shape"):
        CONSTRUCTORS[how]({"x": torch.zeros(2), "y": torch.zeros(3)})
    for first, then in ((0, 2), (2, 0)):
        with pytest.raises(DataError, match="'y' has shape"):
            CONSTRUCTORS[how]({"x": torch.zeros(first), "y": torch.zeros(then)})


def test_empty_parts_may_be_none():
    data = DataProto(batch={}, non_tensor_batch=None, meta_info=None)  # pyright: ignore
    assert (data.batch, data.non_tensor_batch, data.meta_info, len(data)) == (None, {}, {}, 0)
    facts: dict[str, Any] = {}
    assert DataProto(meta_info=facts).meta_info is facts
