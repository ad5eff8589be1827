"""Whole runs with a KL in the reward and a rollout correction."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentrl import Trainer
from agentrl.algorithms import get_adv_estimator_fn, register_adv_est
from agentrl.config import parse_config
from agentrl.trainer.components import choose_actor_config
from agentrl.workers.checkpoint import open_checkpoint
from tests.fakes.killed_runs import SCORER
from tests.fakes.killed_trainer import Killed, KilledTrainer
from tests.fakes.run_differences import differences
from tests.fakes.runs import read_lines, tiny_run

ADAPTIVE = {
    "use_kl_in_reward": True,
    "kl_penalty": "k3",
    "kl_ctrl": {"type": "adaptive", "kl_coef": 0.2, "target_kl": 1e-4, "horizon": 40},
    "rollout_correction": {"preset": "decoupled_seq_is_rs", "rollout_is_threshold": "0.5_2.0"},
}
"""Everything at once; the target is so low that the weight rises with each step."""


Train = Callable[..., Trainer]


@pytest.fixture
def train(tiny_home: Path, tmp_path: Path, alone: None) -> Train:
    """Run a small deterministic configuration, to its end or to where its process ends."""
    scorer = tmp_path / "score.py"
    scorer.write_text(SCORER)

    def run(folder: Path, ends_at: tuple[str, int] | None = None, **changes: Any) -> Trainer:
        common = {
            "rollout__deterministic": True,
            "reward__custom_reward_function": {"path": str(scorer)},
            "actor__optim": {"lr": 1e-2},
            "trainer__val_before_train": False,
            "data__val_files": None,
            "trainer__save_freq": 1,
        }
        trainer = KilledTrainer(parse_config(tiny_run(tiny_home, folder, **(common | changes))))
        trainer.ends_at = ends_at
        trainer.fit()
        return trainer

    return run


@pytest.mark.slow
def test_resume_is_exact_an_adaptive_kl_and_a_correction_go_on_as_if_never_stopped(
    train: Train, tmp_path: Path
):
    changes = {"algorithm": ADAPTIVE, "trainer__total_training_steps": 4}
    train(tmp_path / "whole", **changes)
    for end in (("before", 2), ("after", 3)):
        with pytest.raises(Killed):
            train(tmp_path / "killed", end, **changes)
    train(tmp_path / "killed", **changes)
    assert differences(tmp_path / "whole", tmp_path / "killed") == []
    lines = read_lines(tmp_path / "killed/metrics.jsonl")
    weights = [line["actor/reward_kl_penalty_coeff"] for line in lines]
    assert weights[0] == 0.2
    assert len(set(weights)) == 4, "the weight moved with every step"
    assert all("timing_s/ref" in line for line in lines), "the reference is there for the reward"
    kept = open_checkpoint(tmp_path / "killed/checkpoints/global_step_4").state
    assert kept.trainer["credit"]["kl_coef"] != weights[-1], "the state is behind the last step's"


def test_a_run_is_corrected_and_says_by_how_much(train: Train, tmp_path: Path):
    algorithm = {"rollout_correction": {"rollout_is": "turn", "rollout_is_batch_normalize": True,
                                        "rollout_rs": "seq_mean_k3",
                                        "rollout_rs_threshold": 0.01}}  # fmt: skip
    train(tmp_path / "run", algorithm=algorithm, trainer__total_training_steps=1)
    [line] = read_lines(tmp_path / "run/metrics.jsonl")
    for name in ("kl", "chi2_token", "rollout_is_eff_sample_size", "rollout_rs_masked_fraction",
                 "rollout_is_max", "ratio_max"):  # fmt: skip
        assert f"rollout_corr/{name}" in line
    assert line["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1, abs=1e-4)
    assert line["rollout_corr/rollout_rs_masked_fraction"] == 0


def test_a_run_with_only_rejected_samples_leaves_the_weights_alone(train: Train, tmp_path: Path):
    none = {"rollout_rs": "token_k1", "rollout_rs_threshold": "100_101"}
    algorithm = ADAPTIVE | {"rollout_correction": none}
    trainer = train(tmp_path / "run", algorithm=algorithm, trainer__total_training_steps=1)
    [line] = read_lines(tmp_path / "run/metrics.jsonl")
    assert line["rollout_corr/rollout_rs_masked_fraction"] == 1
    assert line["actor/optimizer_steps"] == 0
    assert line["training/rollout_probs_diff_max"] > 0, "their distance is still measured"
    assert trainer.components.credit.state_dict() == {"kl_coef": 0.2}, (
        "nor does that of the KL move"
    )
    before = load_file(Path(trainer.config.model.path) / "model.safetensors")
    after = load_file(tmp_path / "run/trained/model.safetensors")
    assert all(torch.equal(after[name].float(), before[name].float()) for name in after)


@pytest.mark.parametrize("preset", ["bypass_ppo_clip", "bypass_pg_is"])
def test_bypass_takes_the_engine_s_log_probabilities(train: Train, tmp_path: Path, preset: str):
    algorithm = {"rollout_correction": {"preset": preset}}
    trainer = train(tmp_path / "run", algorithm=algorithm, trainer__total_training_steps=1)
    [line] = read_lines(tmp_path / "run/metrics.jsonl")
    assert "timing_s/old_log_prob" not in line, "nothing is recomputed"
    assert line["actor/grad_norm"] > 0
    policy_loss = choose_actor_config(trainer.config).policy_loss
    assert policy_loss.loss_mode == "bypass_mode"
    assert policy_loss.rollout_correction == trainer.components.credit.correction


@pytest.mark.parametrize("adv_estimator", ["grpo", "old_log_probs_are_read"])
def test_one_optimizer_step_takes_old_log_probs_from_its_own_pass(
    train: Train, tmp_path: Path, adv_estimator: str
):
    changes = {
        "actor__ppo_mini_batch_size": None,
        "algorithm": {"adv_estimator": adv_estimator},
        "trainer__total_training_steps": 2,
    }
    train(tmp_path / "run", **changes)
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    is_read = adv_estimator != "grpo"
    for line in lines:
        assert ("timing_s/old_log_prob" in line) == is_read
        assert line["training/rollout_probs_diff_max"] < 1e-4, "the engine has the same weights"
        assert line["rollout_corr/kl"] == pytest.approx(0, abs=1e-4)
    assert lines[0]["actor/grad_norm"] > 0


@register_adv_est("old_log_probs_are_read")
def compute_advantage_of_everything(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: Any,
    old_log_probs: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GRPO, which also names the log-probabilities before the update."""
    return get_adv_estimator_fn("grpo")(
        token_level_rewards=token_level_rewards, response_mask=response_mask, index=index
    )


def test_a_run_is_trained_alike_with_a_pass_before_its_only_step(train: Train, tmp_path: Path):
    changes = {"actor__ppo_mini_batch_size": None, "trainer__total_training_steps": 2}
    weights = []
    for name in ("grpo", "old_log_probs_are_read"):
        train(tmp_path / name, algorithm={"adv_estimator": name}, **changes)
        weights.append(load_file(tmp_path / name / "trained/model.safetensors"))
    one, other = weights
    assert all(torch.allclose(one[key], other[key], rtol=1e-4, atol=1e-5) for key in one)
