from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.schema.prepare import SftConfig
from agentrl.config.schema.run import DataConfig, ModelConfig, RunConfig
from agentrl.errors import CheckpointError
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.setup import prepare as preparation
from agentrl.trainer.state.resume import (
    config_digest,
    find_checkpoint,
    policy_origin,
)
from agentrl.workers.checkpoint import ModelIdentity, RunState
from agentrl.workers.distributed import start_world, stop_world
from tests.fakes.checkpoints import write_checkpoint


def make_config(folder: Path, **changes: Any) -> RunConfig:
    sections: dict[str, Any] = {
        "data": DataConfig(train_files=[Path("train.parquet")]),
        "model": ModelConfig(path="policy"),
        "trainer": {"default_local_dir": folder},
    }
    return RunConfig(**(sections | changes))


def make_trainer(folder: Path, **settings: Any) -> RunConfig:
    return make_config(folder, trainer={"default_local_dir": folder, **settings})


def digest(config: RunConfig, *, total_steps: int = 4, device: str = "cpu") -> str:
    return config_digest(config, total_steps=total_steps, device=device)


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer": {"seed": 1}},
        {"rollout": {"temperature": 0.5}},
        {"model": ModelConfig(path="policy", tokenizer_path="other")},
    ],
)
def test_digest_changes_with_what_decides_a_step(tmp_path: Path, changes: dict[str, Any]):
    assert digest(make_config(tmp_path, **changes)) != digest(make_config(tmp_path))


def test_digest_changes_with_the_device(tmp_path: Path):
    config = make_config(tmp_path)
    assert digest(config, device="cuda") != digest(config)


def test_digest_is_blind_to_length_and_place(tmp_path: Path):
    other = make_trainer(tmp_path / "moved", total_training_steps=9, save_freq=3)
    assert digest(other, total_steps=9) == digest(make_config(tmp_path))


@pytest.mark.parametrize("scheduler", ["cosine", "linear"])
def test_digest_changes_with_the_length_over_which_the_learning_rate_falls(
    tmp_path: Path, scheduler: str
):
    for role in ("actor", "critic"):
        config = make_config(tmp_path, **{role: {"optim": {"lr_scheduler": scheduler}}})
        assert digest(config, total_steps=9) != digest(config)


def test_origin_changes_with_the_adapter_that_is_continued(tmp_path: Path):
    (tmp_path / "adapter").mkdir()
    weights = tmp_path / "adapter/adapter_model.safetensors"
    config = make_config(
        tmp_path, model=ModelConfig(path="policy", lora_adapter_path=str(weights.parent))
    )
    origins = set[str]()
    for content in (b"first", b"other"):
        weights.write_bytes(content)
        origins.add(policy_origin(config))
    assert len(origins | {policy_origin(make_config(tmp_path))}) == 3


def test_resume_from_a_path_has_a_short_name(tmp_path: Path):
    path = write_checkpoint(tmp_path, RunState(3, ModelIdentity("Toy", {})), {})
    config = make_trainer(tmp_path, resume_mode="path", resume_from_path=path)
    assert config.trainer.resume_mode == "resume_path"
    found = find_checkpoint(config, start_world("cpu", timeout_s=60))
    stop_world()
    assert found is not None
    assert (found.path, found.state.step) == (path, 3)


def test_resume_from_a_missing_path_is_reported(tmp_path: Path):
    config = make_trainer(tmp_path, resume_mode="path", resume_from_path=tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"resume_from_path: no folder .*none"):
        find_checkpoint(config, start_world("cpu", timeout_s=60))
    stop_world()


def test_warm_up_finds_the_folder_that_a_killed_run_had_moved_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    moved = tmp_path / ".replaced-warm"
    moved.mkdir()
    (moved / "notes.txt").write_text("a user's")
    calls: list[str] = []
    monkeypatch.setattr(preparation, "_train", lambda *_, **__: calls.append("trained"))
    sft = SftConfig(
        model_path="policy", train_file=tmp_path / "demos.jsonl", out_dir=tmp_path / "warm"
    )
    config = make_config(tmp_path, prepare={"sft": sft})
    run_logger = RunLogger(config.trainer, is_main=False)
    world = start_world("cpu", timeout_s=60)
    preparation.warm_up(config, sft, world, run_logger, [], now=datetime.now())
    stop_world()
    assert calls == ["trained"]
    assert (tmp_path / "warm/notes.txt").read_text() == "a user's"
