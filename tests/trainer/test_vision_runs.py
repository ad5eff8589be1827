"""Whole runs of small vision-language models, with pictures in rows and in replies of the user."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor

from agentrl import Trainer
from agentrl.config import load_config
from agentrl.trainer.rollouts.files import read_trajectories
from agentrl.trainer.rollouts.transcript import plain_transcript, read_transcript
from agentrl.workers.distributed import stop_world
from tests.fakes.vision_models import PATCH, make_tokenizer
from tests.fakes.vision_runs import vision_run


def fit(folder: Path, **changes: Any) -> Path:
    """Train, and return the run's folder."""
    Trainer(load_config(vision_run(folder, **changes))).fit()
    stop_world()
    return folder / "run"


def read_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def changed_weights(run: Path) -> set[str]:
    """Names of the weights that differ between the start and the end of a run."""
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (run.parent / "policy", run / "trained")
    )
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = fit(tmp_path_factory.mktemp("vision"))
    torch.set_num_threads(threads)
    return folder


def test_pictures_of_the_user_are_turns_of_the_conversation(run: Path):
    assert [line["rollout/user_turns/mean"] > 1 for line in read_metrics(run)] == [True, True]
    for one in read_trajectories(run.parent / "rollouts/step_000002.jsonl.zst"):
        pictures = one.request.multi_modal_data["image"]
        own = len(pictures) - one.request.num_user_turns
        assert own in (1, 2)
        assert [picture.size for picture in pictures[own:]] == [(24, 24)] * len(pictures[own:])


def test_transcripts_of_saved_rollouts_show_pictures_with_their_files(run: Path):
    file = run.parent / "rollouts/step_000001.jsonl.zst"
    for one in read_trajectories(file):
        text = plain_transcript(read_transcript(one.request, make_tokenizer().decode))
        pictures = one.request.multi_modal_data["image"]
        assert text.count("[image: ") == len(pictures)
        files = re.findall(r"  image \d+ x \d+, (.*\.png)", text)
        assert [Path(name).parent for name in files] == [file.parent / "media"] * len(pictures)


def test_engine_and_trainer_agree_on_every_token(run: Path):
    for step in (1, 2):
        tokens = pandas.read_parquet(run.parent / f"rollouts/step_{step:06d}.tokens.parquet")
        mask, old, sampled = (
            np.concatenate(tokens[name].to_list())
            for name in ("response_mask", "old_log_probs", "rollout_log_probs")
        )
        assert mask.sum() > 100
        assert np.abs(old - sampled)[mask == 1].max() < 1e-5


def test_the_tower_stays_and_the_language_model_learns(run: Path):
    changed = changed_weights(run)
    assert changed
    assert not any("visual" in name for name in changed)
    assert AutoImageProcessor.from_pretrained(run / "trained").patch_size == PATCH


def test_tokens_of_images_count_in_the_length_of_a_prompt(
    alone: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    # Prompts with one picture have 139 tokens, those with two have 147.
    changes = {"data__max_prompt_length": 140, "trainer__total_training_steps": 0}
    fit(tmp_path, **changes)
    assert "train: 4 of 8 prompts were dropped: longer than 140 tokens" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_a_tower_that_is_not_frozen_learns(alone: None, tmp_path: Path, family: str):
    changed = changed_weights(fit(tmp_path, family=family, model__freeze_vision_tower=False))
    assert any("visual" in name for name in changed)


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_was_not_stopped(alone: None, tmp_path: Path):
    changes: dict[str, Any] = {"rollout__deterministic": True, "trainer__save_freq": 1}
    whole = fit(tmp_path / "whole", **changes)
    fit(tmp_path / "parts", trainer__total_training_steps=1, **changes)
    parts = fit(tmp_path / "parts", **changes)
    weights = [load_file(run / "trained/model.safetensors") for run in (whole, parts)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    clocks = ("timing_s/", "perf/", "rollout/turn_seconds", "reward/seconds", "weight_sync/seconds")
    ours, theirs = (
        {key: value for key, value in read_metrics(run)[-1].items() if not key.startswith(clocks)}
        for run in (whole, parts)
    )
    assert ours == theirs
