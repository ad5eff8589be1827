"""Whole runs with a reward model: its score changes the reward as declared."""

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import Trainer, load_config
from agentrl.errors import ConfigError, TemplateError
from agentrl.workers.distributed import stop_world
from tests.fakes.reward_models import (
    WITHOUT_TOOL_ROLE,
    make_reward_model,
)
from tests.fakes.runs import put, read_lines, run_agentrl, tiny_run, write_yaml
from tests.fakes.torchrun import ranks_of

NO_SCORER = {"reward__weights": {"trajectory": 0.0}}


def run_file(home: Path, folder: Path, **changes: Any) -> Path:
    """A run with a reward model of weight 0.5."""
    model = make_reward_model(folder / "reward_model")
    run = tiny_run(home, folder / "run", trainer__rollout_data_dir=str(folder / "rollouts"))
    put(run, "reward.model", {"path": str(model), "weight": 0.5})
    for path, value in changes.items():
        put(run, path.replace("__", "."), value)
    return write_yaml(folder / "run.yaml", run)


@pytest.fixture
def close_world():
    yield
    stop_world()


def fit(file: Path) -> list[dict[str, Any]]:
    """Run it, and return the metrics of its steps, validation before the first one included."""
    config = load_config(file)
    with Trainer(config) as trainer:
        trainer.fit()
    return read_lines(config.trainer.default_local_dir / "metrics.jsonl")


def saved(folder: Path, step: int = 1) -> list[dict[str, Any]]:
    """Return the requests that a step saved."""
    lines = read_lines(folder / f"rollouts/step_{step:06d}.jsonl.zst")
    return [line["request"] for line in lines]


pytestmark = pytest.mark.usefixtures("close_world")


def test_the_score_is_one_more_part_of_the_reward(tiny_home: Path, tmp_path: Path):
    metrics = fit(run_file(tiny_home, tmp_path))
    step = metrics[1]
    requests = saved(tmp_path)
    scores = [one["rm_score"] for one in requests]
    assert len(set(scores)) > 1
    combined = [one["reward"] + 0.5 * one["rm_score"] for one in requests]
    assert step["critic/score/mean"] == pytest.approx(sum(combined) / len(combined), rel=1e-5)
    assert step["critic/score/max"] == pytest.approx(max(combined), rel=1e-5)
    assert step["reward/model/mean"] == pytest.approx(sum(scores) / len(scores), rel=1e-5)
    assert step["reward/model/max"] == pytest.approx(max(scores))
    assert step["reward/model/min"] == pytest.approx(min(scores))
    assert step["reward/model/truncated_frac"] == 0
    assert [one["reward_extra_info"]["reward_model"] for one in requests] == scores
    # The reward of the scorer, and success, stay the scorer's.
    assert step["rollout/reward/mean"] == sum(one["reward"] for one in requests) / len(requests)
    before = metrics[0]
    assert before["val/arithmetic/success"] == 0
    assert before["val/arithmetic/reward_model/mean"] < -0.1


def test_rows_keep_the_weighted_score_on_their_last_trained_token(tiny_home: Path, tmp_path: Path):
    with Trainer(load_config(run_file(tiny_home, tmp_path))) as trainer:
        trainer.begin()
        requests = trainer.sample(trainer.load_prompts())
        batch = trainer.collate(requests).batch
    assert batch is not None
    assert batch["rm_scores"].dtype == torch.float32
    for row, request in enumerate(requests):
        expected = torch.zeros(batch["responses"].shape[1])
        last = max(i for i, trained in enumerate(request.loss_mask) if trained)
        assert request.rm_score is not None
        expected[last] = 0.5 * request.rm_score
        assert torch.equal(batch["rm_scores"][row], expected)
        difference = batch["token_level_scores"][row].sum() - expected.sum()
        assert float(difference) == pytest.approx(request.reward, abs=1e-6)


def test_a_reward_model_alone_trains_groups_without_a_scorer(tiny_home: Path, tmp_path: Path):
    [_, step, *_] = fit(run_file(tiny_home, tmp_path, **NO_SCORER))
    assert step["rollout/combined_reward/mean"] == pytest.approx(0.5 * step["reward/model/mean"])
    assert step["critic/advantages/max"] > 0.1
    assert step["actor/grad_norm"] > 0


def test_groups_are_filtered_by_the_combined_reward(tiny_home: Path, tmp_path: Path):
    """Every answer of the untrained policy scores 0: only the reward model tells groups apart."""
    filtered = {"algorithm__filter_groups": {"enable": True, "metric": "score"}}
    [_, step, *_] = fit(run_file(tiny_home, tmp_path, **filtered))
    assert step["rollout/reward/max"] == 0
    assert step["filter_groups/num_gen_batches"] == 1
    assert step["filter_groups/num_missing"] == 0


def test_greedy_baselines_contain_the_score(tiny_home: Path, tmp_path: Path):
    [_, step, *_] = fit(run_file(tiny_home, tmp_path, algorithm__adv_estimator="remax"))
    assert step["rollout/greedy_reward/mean"] < -0.1


def test_a_score_that_is_no_number_fails_its_request(
    tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from agentrl.workers.reward_model import LocalClassifier

    score = LocalClassifier.score

    def broken(self: LocalClassifier, rows: Any, run: Any) -> list[Any]:
        return [*score(self, rows, run)[:-1], float("nan")] if len(rows) > 1 else [0.0]

    monkeypatch.setattr(LocalClassifier, "score", broken)
    [step, *_] = fit(run_file(tiny_home, tmp_path, trainer__val_before_train=False))
    requests = saved(tmp_path)
    assert sum(one["state"] == "failed" for one in requests) == 1
    [failed] = [one for one in requests if one["state"] == "failed"]
    assert failed["error"]["fault"] == "reward"
    assert failed["rm_score"] is None
    assert step["rollout/failures/reward"] == pytest.approx(1 / len(requests))


def test_a_template_without_tools_ends_the_run_before_the_policy_is_loaded(
    tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = run_file(tiny_home, tmp_path)
    make_reward_model(tmp_path / "reward_model", template=WITHOUT_TOOL_ROLE)
    monkeypatch.setattr("agentrl.trainer.components.load_policy", lambda *_: pytest.fail("loaded"))
    with pytest.raises(TemplateError, match=r"reward\.model\.custom_chat_template"):
        Trainer(load_config(file))


def test_a_template_of_ones_own_is_the_remedy(tiny_home: Path, tmp_path: Path):
    from tests.fakes.reward_models import TEMPLATE

    file = run_file(tiny_home, tmp_path, reward__model__custom_chat_template=TEMPLATE)
    make_reward_model(tmp_path / "reward_model", template=WITHOUT_TOOL_ROLE)
    [_, step, *_] = fit(file)
    assert step["reward/model/mean"] < -0.1


def test_a_folder_that_is_missing_is_named(
    tiny_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = run_file(tiny_home, tmp_path)
    output = run_agentrl(capsys, "train", file, "reward.model.path=/no/such/folder")
    assert output.code != 0
    assert "reward.model.path" in output.err


def test_a_server_that_does_not_answer_is_found_at_start(tiny_home: Path, tmp_path: Path):
    changes = {
        "reward__model__engine": "sglang",
        "reward__model__addresses": ["http://127.0.0.1:9"],
    }
    with pytest.raises(ConfigError, match=r"gives no score.*127\.0\.0\.1:9"):
        Trainer(load_config(run_file(tiny_home, tmp_path, **changes)))


@pytest.mark.slow
@pytest.mark.parametrize("fsdp_size", [-1, 1], ids=["sharded", "a copy on each rank"])
def test_two_ranks_give_the_same_scores_as_one(tiny_home: Path, tmp_path: Path, fsdp_size: int):
    """Groups of three on two ranks: no rank has whole groups, and the rows are unequal."""
    runs: dict[int, list[dict[str, Any]]] = {}
    for size in (1, 2):
        folder = tmp_path / str(size)
        file = run_file(
            tiny_home, folder, rollout__n=3, data__train_batch_size=5,
            actor__ppo_mini_batch_size=None, rollout__deterministic=True,
            trainer__total_training_steps=1, trainer__val_before_train=False,
            reward__model__fsdp_config={"fsdp_size": fsdp_size},
            reward__model__max_token_len_per_gpu=1200,
        )  # fmt: skip
        with ranks_of("agentrl", "train", str(file), size=size) as ranks:
            outputs = [rank.wait() for rank in ranks]
        assert all(output.code == 0 for output in outputs), outputs
        runs[size] = saved(folder)
        [step, *_] = read_lines(folder / "run/metrics.jsonl")
        runs[size].sort(key=lambda one: (one["batch_data_id"], one["rollout_offset"]))
        runs[size].append(step)
    alone, together = runs[1], runs[2]
    assert len(alone) == 16
    for one, other in zip(alone[:-1], together[:-1], strict=True):
        assert one["messages"] == other["messages"]
        assert one["rm_score"] == pytest.approx(other["rm_score"], rel=1e-5)
    for key in ("critic/score/mean", "critic/score/max", "reward/model/mean", "actor/grad_norm"):
        assert alone[-1][key] == pytest.approx(together[-1][key], rel=1e-4)
