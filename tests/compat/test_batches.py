"""Batches and the rollout's correction, under verl's names and arguments."""

import io

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from agentrl.compat.algorithms import (
    compute_offpolicy_metrics,
    compute_rollout_correction_and_rejection_mask,
)
from agentrl.compat.data import (
    DataProto,
    collate_items,
    fold_batch_dim,
    process_image,
    process_video,
    unfold_batch_dim,
    union_numpy_dict,
    union_tensor_dict,
)
from agentrl.errors import DataError
from tests.fakes.vision_models import random_picture


def batch(*xs: int, **facts: object) -> DataProto:
    return DataProto.from_dict(
        {"x": torch.tensor(xs)}, {"uid": [f"u{x}" for x in xs]}, meta_info=facts
    )


def test_concat_collects_the_metrics_of_the_workers():
    parts = [
        batch(1, step=3, metrics={"loss": 0.5}),
        batch(2, step=3),
        batch(3, metrics=[{"loss": 0.7}, {"loss": 0.9}]),
    ]
    whole = DataProto.concat(parts)
    assert whole.meta_info == {"step": 3, "metrics": {"loss": [0.5, 0.7, 0.9]}}
    with pytest.raises(DataError, match="meta_info 'step' is 3 and 4"):
        DataProto.concat([batch(1, step=3), batch(2, step=4)])
    with pytest.raises(DataError, match="only some workers have the metric 'kl'"):
        DataProto.concat([batch(1, metrics={"loss": 1}), batch(2, metrics={"kl": 1})])


@pytest.mark.parametrize("times", [[2, 0, 1], (2, 0, 1), torch.tensor([2, 0, 1])])
def test_rows_are_repeated_as_often_as_each_says(times: object):
    repeated = batch(1, 2, 3).sample_level_repeat(times)
    assert repeated.batch["x"].tolist() == [1, 1, 3]
    assert repeated.non_tensor_batch["uid"].tolist() == ["u1", "u1", "u3"]
    with pytest.raises(DataError, match="repeat_times"):
        batch(1, 2).sample_level_repeat([1])


def test_columns_are_cut_into_rows():
    data = DataProto.from_dict(
        {"a": torch.arange(8).reshape(2, 4), "b": torch.tensor([5, 6])},
        {"parts": [["p", "q"], ["r", "s"]], "uid": ["u", "v"]},
    )
    cut = data.unfold_column_chunks(2, split_keys=["a", "parts"])
    assert cut.batch["a"].tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert cut.batch["b"].tolist() == [5, 5, 6, 6]
    assert cut.non_tensor_batch["parts"].tolist() == [["p"], ["q"], ["r"], ["s"]]
    assert cut.non_tensor_batch["uid"].tolist() == ["u", "u", "v", "v"]
    with pytest.raises(DataError, match="'a' is 4 wide"):
        data.unfold_column_chunks(3, split_keys=["a"])


def test_a_batch_goes_through_a_tensordict_and_back():
    data = batch(1, 2, step=3)
    whole = data.to_tensordict()
    assert whole["x"].tolist() == [1, 2]
    assert whole["uid"] == ["u1", "u2"]
    assert whole["step"] == 3
    back = DataProto.from_tensordict(whole)
    assert back.batch["x"].tolist() == [1, 2]
    assert back.non_tensor_batch["uid"].tolist() == ["u1", "u2"]
    assert back.meta_info == {"step": 3}


def test_padding_appends_a_row_in_place():
    data = batch(1, 2)
    data.padding(2)
    data.padding(1, "first")
    assert data.batch["x"].tolist() == [1, 2, 2, 2, 1]


def test_size_and_contents_are_described(capsys: pytest.CaptureFixture[str]):
    batch(1, 2, step=3).print_size("here")
    assert capsys.readouterr().out.startswith("here, size of tensors: ")
    assert "x: (2,) (torch.int64) cpu" in batch(1, 2).get_data_info()


def test_rows_become_a_batch():
    data = batch(1, 2)
    again = collate_items([data[0], data[1]])
    assert again.batch["x"].tolist() == [1, 2]
    assert again.non_tensor_batch["uid"].tolist() == ["u1", "u2"]


def test_folding_is_undone_by_unfolding():
    folded = fold_batch_dim(batch(1, 2, 3, 4), 2)
    assert folded.batch["x"].tolist() == [[1, 2], [3, 4]]
    assert unfold_batch_dim(folded).batch["x"].tolist() == [1, 2, 3, 4]


def test_unions_compare_by_value_and_change_the_first():
    mine = TensorDict({"x": torch.tensor([1])}, batch_size=[1])
    union_tensor_dict(mine, TensorDict({"y": torch.tensor([2])}, batch_size=[1]))
    assert sorted(mine.keys()) == ["x", "y"]
    nested = np.array([np.array([1.0, np.nan]), "text"], dtype=object)
    arrays = {"a": nested}
    union_numpy_dict(arrays, {"a": nested.copy(), "b": np.array([1, 2])})
    assert sorted(arrays) == ["a", "b"]
    other = np.array([np.array([1.0, 2.0]), "text"], dtype=object)
    with pytest.raises(DataError, match="'a' differs"):
        union_numpy_dict(arrays, {"a": other})


def test_the_rollouts_correction_takes_the_arguments_of_0_6_1():
    old = torch.tensor([[-1.0, -1.0], [-1.0, -9.0]])
    rollout = torch.tensor([[-1.0, -2.0], [-1.0, -1.0]])
    weights, mask, metrics = compute_rollout_correction_and_rejection_mask(
        old_log_prob=old,
        rollout_log_prob=rollout,
        response_mask=torch.ones(2, 2),
        rollout_is="token",
        rollout_is_threshold=2.0,
        rollout_rs="token",
        rollout_rs_threshold=2.0,
        rollout_token_veto_threshold=1e-2,
    )
    assert weights is not None
    assert weights.batch["rollout_is_weights"][0].tolist() == [1.0, 2.0]
    # The token with ratio e is above 2; the second sequence has a token with ratio e^-8.
    assert mask.tolist() == [[1.0, 0.0], [0.0, 0.0]]
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == 0.5
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.5
    assert "rollout_corr/rollout_rs_mean" in metrics
    alone = compute_offpolicy_metrics(old_log_prob=old, rollout_log_prob=None, response_mask=mask)
    assert alone["training_log_ppl"] == pytest.approx(1.0)
    with pytest.raises(ValueError, match="keeps no token"):
        compute_offpolicy_metrics(old, rollout, torch.zeros(2, 2))


def test_images_and_videos_are_decoded():
    picture = random_picture(1, (6, 4))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    assert process_image({"bytes": buffer.getvalue()}).tobytes() == picture.tobytes()
    assert process_image(picture, image_patch_size=14).size == (6, 4)
    video = process_video({"video": [picture, picture]}, fps=2.0)
    assert (video.shape, video.dtype) == ((2, 3, 4, 6), torch.float32)
