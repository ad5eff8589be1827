"""From what a run may go on, and with which date."""

import json
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.config import RunConfig, parse_config
from agentrl.errors import CheckpointError
from agentrl.trainer.resume import check_origin, policy_origin
from agentrl.trainer.start import START_FILE, start_date
from agentrl.training.checkpoint import ModelIdentity, RunState, Snapshot, save_checkpoint
from agentrl.training.distributed import World, start_world


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "policy").mkdir()
    return parse_config(
        {
            "data": {"train_files": ["rows.jsonl"]},
            "model": {"path": str(tmp_path / "policy")},
            "trainer": {"default_local_dir": str(tmp_path / "run")},
        }
    )


@pytest.fixture
def world() -> World:
    return start_world("cpu")


def write_checkpoint(config: RunConfig) -> Path:
    state = RunState(step=1, identity=ModelIdentity("Tiny", {}))
    tensors = {"weight": torch.zeros(2)}
    root = config.trainer.default_local_dir / "checkpoints"
    return save_checkpoint(root, Snapshot(state, tensors, tensors))


def test_policy_made_anew_is_another_origin(config: RunConfig) -> None:
    manifest = Path(config.model.path) / "manifest.json"
    manifest.write_text(json.dumps({"steps": 30}))
    first = policy_origin(config)
    assert policy_origin(config) == first
    manifest.write_text(json.dumps({"steps": 1000}))
    assert policy_origin(config) != first


def test_policy_without_a_manifest_is_known_by_its_weights(config: RunConfig) -> None:
    weights = Path(config.model.path) / "model.safetensors"
    save_file({"weight": torch.zeros(2)}, weights)
    first = policy_origin(config)
    save_file({"weight": torch.zeros(3)}, weights)
    assert policy_origin(config) != first


def test_checkpoint_of_a_run_from_another_policy_is_refused(config: RunConfig) -> None:
    path = Path("checkpoints/global_step_2")
    check_origin(policy_origin(config), config, path)
    check_origin("", config, path)  # written before origins were
    with pytest.raises(CheckpointError, match="global_step_2 is of a run that began from another"):
        check_origin("of another", config, path)


def test_resumed_run_keeps_the_date_on_which_it_began(config: RunConfig, world: World) -> None:
    began = datetime.now() - timedelta(days=3)
    path = config.trainer.default_local_dir / START_FILE
    path.parent.mkdir()
    path.write_text(began.isoformat())
    write_checkpoint(config)
    assert start_date(config, world) == began


def test_run_without_a_checkpoint_begins_today(config: RunConfig, world: World) -> None:
    path = config.trainer.default_local_dir / START_FILE
    path.parent.mkdir()
    path.write_text((datetime.now() - timedelta(days=3)).isoformat())
    now = start_date(config, world)
    assert datetime.now() - now < timedelta(minutes=1)
    assert datetime.fromisoformat(path.read_text().strip()) == now
