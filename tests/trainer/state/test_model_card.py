"""The model card of an exported policy."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from agentrl.config import parse_config
from agentrl.errors import DataError
from agentrl.trainer.state.model_card import Training, write_card
from agentrl.trainer.state.run_folder import write_start

RUN: dict[str, Any] = {
    "data": {"train_files": ["secret-folder/train.parquet"], "val_files": {"math": "val.parquet"}},
    "model": {"path": "Qwen/Qwen2.5-1.5B-Instruct"},
    "trainer": {"experiment_name": "a run"},
}
LINES = [
    {"step": 0, "val/math/success": 0.25},
    {"step": 1, "rollout/reward/mean": 0.1},
    {"step": 2, "rollout/reward/mean": 0.5, "val/math/success": 0.75},
    {"step": 3, "rollout/reward/mean": 0.4, "val/math/success": 0.5, "val/math/num": 256.0},
]


def make_run(
    folder: Path, *, about: dict[str, Any] | None = None, num_ranks: int = 2, **sections: Any
) -> Path:
    """Make the folder of a run that has ended; return that of its model."""
    write_start(folder, parse_config(RUN | sections), num_ranks=num_ranks)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    model = folder / "trained"
    model.mkdir()
    (model / "config.json").write_text("{}")
    given = {"step": 3, "tools": ["calculator"], "data_sources": ["openai/gsm8k"]} | (about or {})
    (model / "agentrl.json").write_text(json.dumps(given))
    return model


def card_of(folder: Path, **sections: Any) -> ModelCard:
    model = make_run(folder, **sections)
    write_card(folder, model)
    return ModelCard.load(model / "README.md")


def test_a_card_has_base_method_data_tools_rewards_results_and_revision(tmp_path: Path):
    card = card_of(tmp_path, prepare={"gsm8k": {"out_dir": "data"}})
    assert card.data.to_dict() == {
        "base_model": "Qwen/Qwen2.5-1.5B-Instruct",
        "datasets": ["openai/gsm8k"],
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["agentrl", "reinforcement-learning", "grpo"],
    }
    for text in (
        "# a run", "`Qwen/Qwen2.5-1.5B-Instruct`, trained by reinforcement learning with `grpo` "
        "for 3 steps", 'AutoModelForCausalLM.from_pretrained(path, dtype="auto")',
        "| actor.optim | `adamw, lr 1e-06` |", "data files: `train.parquet`; validation: `math`",
        "tools: `calculator`", "data sources: `openai/gsm8k`",
        "rewards: `the bundled scorer of each data source`",
        "| mean training reward, step 1 | `0.100` |", "| mean training reward, step 3 | `0.400` |",
        "| success on math (256 requests), step 0 | `0.250` |",
        "| success on math (256 requests), step 2 | `0.750` |",
        "| success on math (256 requests), step 3 | `0.500` |",
        "reward.weights: `trajectory: 1.0`", "git revision `", "2 ranks",
    ):  # fmt: skip
        assert text in card.content


def test_a_card_has_no_secret_no_folder_and_no_host(tmp_path: Path, monkeypatch: Any):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-of-the-environment")
    monkeypatch.setattr("socket.gethostname", lambda: "host-of-the-run")
    scorer = {
        "path": str(tmp_path / "score.py"),
        "reward_kwargs": {
            "api_key": "sk-of-the-file",
            "judge": "sk-of-the-environment",
            "strict": True,
            "nested": {"file": str(tmp_path), "base_url": "http://host-of-the-run:30000/v1"},
        },
    }
    card = card_of(
        tmp_path,
        reward={"custom_reward_function": scorer},
        trainer={"experiment_name": "sk-of-the-environment", "default_local_dir": str(tmp_path)}
        | {"alerts": {"webhook_url": "https://hooks.example/secret"}},
        rollout={"engine": {"sglang_server": {"api_key": "sk-of-a-server"}}},
    )
    assert "rewards: `score.py:compute_score with " in card.content
    assert "strict: true" in card.content
    for hidden in ("sk-of", "hooks.example", "secret-folder", str(tmp_path), "host-of-the-run"):
        assert hidden not in card.content


def test_a_base_that_is_a_folder_is_named_without_its_path(tmp_path: Path):
    base = tmp_path / "models/small"
    base.mkdir(parents=True)
    card = card_of(tmp_path / "run", model={"path": str(base)})
    assert "base_model" not in card.data.to_dict()
    assert "| base model | `small` |" in card.content
    assert str(tmp_path) not in card.content


def test_a_card_has_the_arguments_and_weights_of_rewards(tmp_path: Path):
    scorer = {"path": "agentrl.rewards.gsm8k", "reward_kwargs": {"require_tool": True}}
    reward = {
        "custom_reward_function": scorer, "weights": {"trajectory": 0.5, "tool": 0.25},
        "length_penalty": 0.1,
    }  # fmt: skip
    card = card_of(tmp_path, reward=reward)
    for text in (
        "rewards: `agentrl.rewards.gsm8k:compute_score with require_tool: true`",
        "reward.weights: `trajectory: 0.5, tool: 0.25`",
        "bonuses and penalties: `length_penalty: 0.1`",
    ):
        assert text in card.content


@pytest.mark.parametrize("warm_up", [False, True])
def test_a_made_policy_is_said_to_have_random_weights(tmp_path: Path, warm_up: bool):
    made = {"out_dir": str(tmp_path / "policy"), "corpus": "demos.jsonl"}
    prepare: dict[str, Any] = {"tiny_policy": made}
    if warm_up:
        sft = {"model_path": made["out_dir"], "train_file": "demos.jsonl", "out_dir": "warm"}
        prepare |= {"sft": sft}
    base = "warm" if warm_up else made["out_dir"]
    card = card_of(tmp_path, prepare=prepare, model={"path": base}, num_ranks=1)
    assert "`random weights, made by prepare.tiny_policy`, trained" in card.content
    assert "- 1 rank; " in card.content


@pytest.mark.parametrize(
    ("text", "license"),
    [
        ("---\nlicense: apache-2.0\n---\n# base\n", "apache-2.0"),
        ("# no metadata\n", None),
        ("---\nlicense: [a, b]\n---\n", None),
        ("---\n{broken\n---\n", None),
    ],
)
def test_a_card_has_the_license_of_its_base(tmp_path: Path, text: str, license: str | None):
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(text)
    card = card_of(tmp_path / "run", model={"path": str(base)})
    assert card.data.to_dict().get("license") == license


def test_an_adapter_is_loaded_with_peft(tmp_path: Path):
    model = make_run(tmp_path, model=RUN["model"] | {"lora_rank": 8})
    (model / "adapter_config.json").write_text("{}")
    write_card(tmp_path, model)
    card = ModelCard.load(model / "README.md")
    assert card.data.library_name == "peft"
    assert "AutoPeftModelForCausalLM" in card.content
    assert "| model.lora\\_rank | `8 (alpha 16)` |" in card.content


def test_names_cannot_break_the_card(tmp_path: Path):
    name = "x\n---\n<script>alert(1)</script> | `code`"
    sections = {"trainer": {"experiment_name": name}, "about": {"tools": [name] * 30}}
    card = card_of(tmp_path, **sections)
    assert card.data.library_name == "transformers"
    assert "\n# x --- \\<script\\>alert(1)\\</script\\> \\| \\`code\\`\n" in card.content
    assert "and 10 more" in card.content


def test_an_earlier_card_is_replaced_and_not_changed(tmp_path: Path):
    model = make_run(tmp_path)
    (tmp_path / "other").write_text("a card of before")
    (model / "README.md").hardlink_to(tmp_path / "other")
    write_card(tmp_path, model)
    assert "# a run" in (model / "README.md").read_text()
    assert (tmp_path / "other").read_text() == "a card of before"


def test_a_folder_without_a_start_is_no_run(tmp_path: Path):
    with pytest.raises(DataError, match="no record of a start"):
        Training.read(tmp_path, tmp_path)


def test_the_metadata_is_what_yaml_reads(tmp_path: Path):
    model = make_run(tmp_path)
    write_card(tmp_path, model)
    _, metadata, _ = (model / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(metadata)["tags"][0] == "agentrl"
