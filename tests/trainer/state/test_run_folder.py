"""What a run's folder says of the run itself."""

import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl import Trainer, load_config
from agentrl.config import RunConfig, parse_config
from agentrl.trainer.state.run_folder import (
    changed_keys,
    move_paths,
    removing_failed_start,
    write_start,
)
from tests.fakes.runs import tiny_run


@pytest.fixture
def config(tiny_home: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    return lambda **changes: parse_config(tiny_run(tiny_home, tmp_path / "run", **changes))


def test_written_configuration_can_be_run_again(config: Any, tmp_path: Path):
    ours = config(actor__optim__lr=0.25)
    assert write_start(tmp_path, ours, num_ranks=1) == "starts/0001"
    for name in ("config.yaml", "resolved.yaml"):
        assert load_config(tmp_path / "starts/0001" / name) == ours
    given = yaml.safe_load((tmp_path / "starts/0001/config.yaml").read_text())
    assert "temperature" not in given["rollout"]
    assert write_start(tmp_path, ours, num_ranks=1) == "starts/0002"


def test_failed_start_removes_only_the_folders_that_it_made(config: Any, tmp_path: Path):
    folders = {
        f"trainer__{name}_data_dir": str(tmp_path / name) for name in ("rollout", "validation")
    }
    (tmp_path / "rollout").mkdir()
    new = [tmp_path / "run", tmp_path / "validation"]
    with suppress(OSError), removing_failed_start(config(**folders), is_main=True):
        for folder in new:
            folder.mkdir()
        raise OSError("a failed start")
    assert (tmp_path / "rollout").is_dir()
    assert not any(folder.exists() for folder in new)


def test_written_configuration_names_its_files_from_any_folder(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name in ("tools.yaml", "functions.py", "made/weights", "demos.jsonl", "package/a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("tools: []")
    turns = {"tool_config_path": "tools.yaml", "function_tool_path": "functions.py"}
    sft = {"model_path": "made", "train_file": "demos.jsonl", "out_dir": "made"}
    ours = config(
        rollout__multi_turn=turns, prepare={"sft": sft}, plugins=["package"],
        reward__custom_reward_function={"path": "agentrl.rewards.gsm8k"},
    )  # fmt: skip
    write_start(tmp_path, ours, num_ranks=1)
    for name in ("config.yaml", "resolved.yaml"):
        written = yaml.safe_load((tmp_path / "starts/0001" / name).read_text())
        files = [written["rollout"]["multi_turn"][key] for key in turns]
        files += [written["prepare"]["sft"][key] for key in sft]
        assert [Path(file).is_absolute() for file in files] == [True] * 5
        assert written["plugins"] == ["package"]
        assert written["reward"]["custom_reward_function"]["path"] == "agentrl.rewards.gsm8k"
    given = yaml.safe_load((tmp_path / "starts/0001/config.yaml").read_text())
    assert set(given["prepare"]["sft"]) == set(sft)
    assert changed_keys(tmp_path / "starts/0001", ours) == []


def test_record_names_command_versions_revision_and_hardware(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    secrets = ["judge.api_key=sk-12", "reward.reward_kwargs={api_key: sk-34, k: 1}"]
    monkeypatch.setattr(sys, "argv", ["agentrl", "train", "a.yaml", *secrets, "a=[b, c]"])
    (tmp_path / "starts/0-copy").mkdir(parents=True)
    write_start(tmp_path, config(), num_ranks=2)
    run = json.loads((tmp_path / "starts/0001/run.json").read_text())
    assert run["command"] == [
        "agentrl", "train", "a.yaml", "judge.api_key=[redacted]",
        'reward.reward_kwargs={"api_key": "[redacted]", "k": 1}', "a=[b, c]",
    ]  # fmt: skip
    assert run["packages"]["torch"]
    assert run["hardware"]["cores"] >= 1
    assert run["num_ranks"] == 2
    assert set(run["git"]) == {"directory", "agentrl"}


def test_no_secret_is_written(config: Any, tmp_path: Path):
    scorer = {"path": "score.py", "reward_kwargs": {"api_key": "sk-very-secret"}}
    write_start(tmp_path, config(reward__custom_reward_function=scorer), num_ranks=1)
    texts = [path.read_text() for path in (tmp_path / "starts/0001").iterdir()]
    assert not any("sk-very-secret" in text for text in texts)


def test_changed_keys_are_named_with_both_values(config: Any, tmp_path: Path):
    write_start(tmp_path, config(), num_ranks=1)
    start = tmp_path / "starts/0001"
    assert changed_keys(start, config()) == []
    changed = changed_keys(start, config(actor__optim__lr=0.5, data__val_files={"b": "b.jsonl"}))
    assert changed[0] == "actor.optim.lr: 0.001 -> 0.5"
    assert [line.split(":")[0] for line in changed[1:]] == [
        "data.val_files.arithmetic", "data.val_files.b",
    ]  # fmt: skip
    assert changed[2].endswith(': not set -> "b.jsonl"')
    assert changed_keys(tmp_path / "nowhere", config()) == []


@pytest.mark.usefixtures("alone")
def test_checkpoint_names_its_start_and_a_resumed_run_what_has_changed(
    config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    Trainer(config(trainer__total_training_steps=1)).fit()
    state = tmp_path / "run/checkpoints/global_step_1/state.json"
    assert json.loads(state.read_text())["trainer"]["started_as"] == "starts/0001"
    assert (tmp_path / "run/starts/0001/config.yaml").is_file()
    capsys.readouterr()
    Trainer(config(trainer__total_training_steps=1, actor__optim__lr=0.5)).fit()
    out = capsys.readouterr().out
    assert "the run's configuration differs from the checkpoint's" in out
    assert "  changed: actor.optim.lr: 0.001 -> 0.5\n" in out
    assert out.count("changed:") == 1


def test_paths_in_the_folder_of_a_run_that_was_moved_are_changed(tmp_path: Path):
    run = tmp_path / "copy"
    (run / "policy").mkdir(parents=True)
    config = {
        "trainer": {"default_local_dir": "/home/runs/a", "rollout_data_dir": "/home/runs/a/x"},
        "paths": ["runs/a/policy", "runs/a/missing", "/other/a/policy", "a", 5, None],
    }
    assert move_paths(config, run) == {
        "trainer": {"default_local_dir": str(run), "rollout_data_dir": f"{run}/x"},
        "paths": [f"{run}/policy", "runs/a/missing", "/other/a/policy", "a", 5, None],
    }
    assert move_paths(config, Path("/home/runs/a")) == config
    assert move_paths({"model": {}}, run) == {"model": {}}
