"""Names of verl that are functions of agentrl's own under another signature."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from agentrl.compat.verl.trainer.main_ppo import create_rl_dataset
from agentrl.compat.verl.trainer.ppo.core_algos import compute_policy_loss
from agentrl.compat.verl.utils.dataset import RLHFDataset
from omegaconf import OmegaConf

LARGER = """
from agentrl.compat.verl.utils.dataset import RLHFDataset

class Larger(RLHFDataset):
    pass
"""


@pytest.mark.parametrize(
    ("ratio", "advantage", "clips", "loss", "clipped", "lower"),
    [
        (1.5, 1.0, {"cliprange": 0.2}, -1.2, 1.0, 0.0),
        (1.5, 1.0, {"cliprange": 0.2, "cliprange_high": 0.4}, -1.4, 1.0, 0.0),
        (0.5, -1.0, {"cliprange": 0.2}, 0.8, 1.0, 0.0),
        (0.5, -1.0, {"cliprange": 0.2, "cliprange_low": 0.4}, 0.6, 1.0, 0.0),
        (5.0, -1.0, {"cliprange": 0.2}, 3.0, 0.0, 1.0),
        (5.0, -1.0, {"cliprange": 0.2, "clip_ratio_c": 4.0}, 4.0, 0.0, 1.0),
        (1.1, 1.0, {"cliprange": 0.2}, -1.1, 0.0, 0.0),
    ],
)
def test_the_policy_loss_has_verls_arguments_and_results(
    ratio: float, advantage: float, clips: Any, loss: float, clipped: float, lower: float
):
    old, new = torch.zeros(1, 2), torch.tensor([[ratio, 9.0]]).log()
    mask = torch.tensor([[1.0, 0.0]])
    found = compute_policy_loss(old, new, torch.full((1, 2), advantage), mask, **clips)
    expected = (loss, clipped, -torch.tensor(ratio).log().item(), lower)
    assert [float(one) for one in found] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("is_own", [False, True])
def test_a_dataset_is_built_from_the_section_data(tmp_path: Path, is_own: bool):
    rows, module = tmp_path / "rows.jsonl", tmp_path / "larger.py"
    rows.write_text("".join(json.dumps({"prompt": str(i)}) + "\n" for i in range(4)))
    module.write_text(LARGER)
    chosen = {"path": str(module) if is_own else None, "name": "Larger"}
    config = OmegaConf.create({"custom_cls": chosen, "max_prompt_length": 7})
    found = create_rl_dataset(str(rows), config, None, None, max_samples=3)
    assert type(found).__name__ == ("Larger" if is_own else "RLHFDataset")
    assert isinstance(found, RLHFDataset)
    assert ([row["prompt"] for row in found], found.max_prompt_length) == (["0", "1", "2"], 7)
