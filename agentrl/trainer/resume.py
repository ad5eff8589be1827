"""Which checkpoint a run goes on from."""

import hashlib
from pathlib import Path

from agentrl.config.schema import RunConfig
from agentrl.errors import CheckpointError
from agentrl.training.checkpoint import find_latest

CHECKPOINTS = "checkpoints"


def checkpoint_folder(config: RunConfig) -> Path:
    """Where the checkpoints of a run lie."""
    return config.trainer.default_local_dir / CHECKPOINTS


def find_checkpoint(config: RunConfig) -> Path | None:
    """Find the checkpoint that `trainer.resume_mode` asks for; None: begin anew.

    Raises:
        CheckpointError: where `resume_path` names none.
    """
    trainer = config.trainer
    match trainer.resume_mode:
        case "disable":
            return None
        case "auto":
            return find_latest(checkpoint_folder(config))
        case "resume_path":
            path = trainer.resume_from_path
            if path is None or not path.is_dir():
                raise CheckpointError(
                    f"trainer.resume_from_path is {path}", expected="a folder global_step_N"
                )
            return path


def config_digest(config: RunConfig) -> str:
    """Hash what of a configuration a run's results depend on: all but how long and where to."""
    content = config.model_dump(mode="json", exclude={"trainer", "prepare"})
    return hashlib.sha256(repr(content).encode()).hexdigest()
