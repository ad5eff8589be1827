"""Whole runs with dynamic sampling, greedy baselines, overlong answers and token baselines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl import Trainer
from agentrl.config import parse_config
from agentrl.trainer.rollouts.files import read_trajectories
from agentrl.workers.checkpoint import open_checkpoint
from tests.fakes.killed_trainer import Killed, KilledTrainer
from tests.fakes.run_differences import differences
from tests.fakes.runs import read_lines, tiny_run

SCORER = """
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(sum(map(ord, solution_str)) % {kinds})
"""
"""With two kinds of rewards a group of two is alike every other time; with one, always."""
FILTER = {"algorithm__filter_groups__enable": True}
Train = Callable[..., Trainer]


@pytest.fixture
def train(tiny_home: Path, tmp_path: Path, alone: None) -> Train:
    """Run a small deterministic configuration, to its end or to where its process ends."""

    def run(
        folder: Path, ends_at: tuple[str, int] | None = None, *, kinds: int = 2, **changes: Any
    ) -> Trainer:
        scorer = tmp_path / f"score_{kinds}.py"
        scorer.write_text(SCORER.format(kinds=kinds))
        common = {
            "rollout__deterministic": True,
            "reward__custom_reward_function": {"path": str(scorer)},
            "trainer__val_before_train": False,
            "data__val_files": None,
            "trainer__save_freq": 1,
            "trainer__rollout_data_dir": f"{folder}/rollouts",
        }
        trainer = KilledTrainer(parse_config(tiny_run(tiny_home, folder, **(common | changes))))
        trainer.ends_at = ends_at
        trainer.fit()
        return trainer

    return run


def metrics(folder: Path) -> list[dict[str, float]]:
    return read_lines(folder / "metrics.jsonl")


def weights_moved(trainer: Trainer) -> bool:
    before = load_file(Path(trainer.config.model.path) / "model.safetensors")
    after = load_file(trainer.folder / "trained/model.safetensors")
    return any(not torch.equal(after[name].float(), before[name].float()) for name in after)


SAMPLER = """
class Easiest:
    def __init__(self, data_source, data_config):
        self.scores = [0.0] * len(data_source)

    def __iter__(self):
        return iter(sorted(range(len(self.scores)), key=lambda row: self.scores[row]))

    def update(self, batch):
        for row, score in enumerate(batch.batch["token_level_scores"].sum(-1).tolist()):
            self.scores[row % len(self.scores)] += score + 0.01 * row
"""


@pytest.mark.slow
def test_resume_is_exact_with_a_sampler_that_learns_from_the_steps(train: Train, tmp_path: Path):
    file = tmp_path / "sampler.py"
    file.write_text(SAMPLER)
    changes = {
        "data__sampler": {"path": str(file), "name": "Easiest"},
        "trainer__total_training_steps": 4,
    }
    train(tmp_path / "whole", **changes)
    with pytest.raises(Killed):
        train(tmp_path / "killed", ("before", 3), **changes)
    train(tmp_path / "killed", **changes)
    assert differences(tmp_path / "whole", tmp_path / "killed") == []


@pytest.mark.slow
def test_resume_is_exact_a_step_of_several_batches_goes_on_as_if_never_stopped(
    train: Train, tmp_path: Path
):
    changes = FILTER | {"trainer__total_training_steps": 4, "trainer__max_ckpt_to_keep": 4}
    train(tmp_path / "whole", **changes)
    for end in (("before", 2), ("after", 3)):
        with pytest.raises(Killed):
            train(tmp_path / "killed", end, **changes)
    train(tmp_path / "killed", **changes)
    assert differences(tmp_path / "whole", tmp_path / "killed") == []
    lines = metrics(tmp_path / "killed")
    taken = [int(line["filter_groups/num_gen_batches"]) for line in lines]
    assert max(taken) > 1, "otherwise nothing was to be gone on with"
    for step, line in enumerate(lines, start=1):
        assert line["algorithm/zero_signal_groups_frac"] == 0
        assert line["rollout/num_requests"] == 8 * line["filter_groups/num_gen_batches"]
        kept = open_checkpoint(tmp_path / f"killed/checkpoints/global_step_{step}").state
        epoch, batch = divmod(sum(taken[:step]) - 1, kept.data["num_rows"] // 4)
        stands = kept.data["epoch"], kept.data["position"]
        assert stands == (epoch, 4 * (batch + 1)), "behind all that was taken"


def test_what_is_not_trained_is_saved_with_its_reason(train: Train, tmp_path: Path):
    train(tmp_path / "run", **FILTER)
    saved = list(read_trajectories(tmp_path / "run/rollouts/step_000001.jsonl.zst"))
    [line, *_] = metrics(tmp_path / "run")
    assert len(saved) == line["rollout/num_requests"]
    assert len({one.request.seed for one in saved}) == len(saved), "every sample draws its own"
    trained = [one.request.uid for one in saved if one.request.dropped is None]
    assert len(trained) == 8
    assert len(set(trained)) == 4


def test_a_step_without_any_signal_leaves_the_weights_alone_and_is_said(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    bounded = FILTER | {"algorithm__filter_groups__max_num_gen_batches": 2}
    trainer = train(tmp_path / "run", kinds=1, **bounded, trainer__total_training_steps=1)
    assert "0 of 4 groups have a signal, after 2 batches of prompts" in capsys.readouterr().out
    [line] = metrics(tmp_path / "run")
    assert line["filter_groups/num_without_signal"] == 8
    assert line["actor/optimizer_steps"] == 0
    assert trainer.summary.steps_without_signal == 1
    assert not weights_moved(trainer)


def test_remax_rolls_out_a_greedy_answer_for_each_prompt(train: Train, tmp_path: Path):
    trainer = train(
        tmp_path / "run", kinds=5, algorithm__adv_estimator="remax",
        trainer__total_training_steps=1,
    )  # fmt: skip
    saved = [
        one.request for one in read_trajectories(tmp_path / "run/rollouts/step_000001.jsonl.zst")
    ]
    greedy = {one.batch_data_id: one for one in saved if one.uid.startswith("greedy-")}
    samples = [one for one in saved if one.uid.startswith("train-")]
    assert sorted(greedy) == [0, 1, 2, 3]
    assert all(one.sampling.temperature == 0 and one.dropped for one in greedy.values())
    assert len(samples) == 8
    [line] = metrics(tmp_path / "run")
    assert line["rollout/num_requests"] == 8
    rewards = [one.reward or 0.0 for one in greedy.values()]
    assert line["rollout/greedy_reward/mean"] == pytest.approx(sum(rewards) / 4)
    above = [(one.reward or 0.0) - (greedy[one.batch_data_id].reward or 0.0) for one in samples]
    assert line["critic/advantages/max"] == pytest.approx(max(above))
    assert line["critic/advantages/min"] == pytest.approx(min(above))
    assert weights_moved(trainer)


def test_an_optimal_token_baseline_is_given_its_squares(train: Train, tmp_path: Path):
    trainer = train(
        tmp_path / "run", kinds=5, algorithm__adv_estimator="optimal_token_baseline",
        trainer__total_training_steps=1,
    )  # fmt: skip
    assert metrics(tmp_path / "run")[0]["actor/grad_norm"] > 0
    assert weights_moved(trainer)


def test_long_answers_are_punished_in_training_and_not_in_validation(
    train: Train, tmp_path: Path, tiny_home: Path
):
    buffer = {"enable": True, "len": 63, "penalty_factor": 50.0}
    train(
        tmp_path / "run", kinds=1, reward__overlong_buffer=buffer, trainer__total_training_steps=1,
        data__val_files={"arithmetic": str(tiny_home / "data/val.parquet")},
    )  # fmt: skip
    [line] = metrics(tmp_path / "run")
    assert line["rollout/overlong_frac"] > 0
    assert line["critic/score/mean"] == pytest.approx(line["rollout/overlong_reward/mean"])
    assert line["critic/score/mean"] < 0
    assert line["val/arithmetic/reward/mean"] == 0


def test_a_penalty_of_length_reaches_the_gradient_and_not_the_validation(
    train: Train, tmp_path: Path, tiny_home: Path
):
    trainer = train(
        tmp_path / "run", kinds=1, reward__length_penalty=0.5, reward__placement="uniform",
        algorithm__adv_estimator="reinforce_plus_plus", trainer__total_training_steps=1,
        data__val_files={"arithmetic": str(tiny_home / "data/val.parquet")},
    )  # fmt: skip
    [line] = metrics(tmp_path / "run")
    assert line["rollout/reward/mean"] == line["val/arithmetic/reward/mean"] == 0
    assert line["critic/score/mean"] == pytest.approx(line["rollout/length_penalty/mean"])
    assert -0.5 <= line["critic/score/mean"] < 0
    assert weights_moved(trainer)
