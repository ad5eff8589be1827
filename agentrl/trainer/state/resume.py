"""Which checkpoint a run goes on from."""

import hashlib
from datetime import datetime
from pathlib import Path
from typing import Any

from agentrl.atomic_io import written_whole
from agentrl.config.schema.run import RunConfig
from agentrl.errors import CheckpointError
from agentrl.workers.checkpoint import find_latest
from agentrl.workers.distributed import World
from agentrl.workers.snapshot import on_main

CHECKPOINTS = "checkpoints"
_HASHED_ELSEWHERE: Any = {
    "trainer": True,
    "prepare": True,
    "model": {"path"},
    "data": {"train_files", "val_files"},
}


def checkpoint_folder(config: RunConfig) -> Path:
    """Where the checkpoints of a run lie."""
    return config.trainer.default_local_dir / CHECKPOINTS


def has_checkpoints(config: RunConfig) -> bool:
    """Whether a run has written any; none is read."""
    return any(checkpoint_folder(config).glob("global_step_*"))


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
                told = "is not set" if path is None else f"no folder {path}"
                raise CheckpointError(
                    f"trainer.resume_from_path: {told}",
                    key="trainer.resume_from_path",
                    expected="a checkpoint's folder, such as "
                    f"{checkpoint_folder(config) / 'global_step_10'}",
                )
            return path


def policy_origin(config: RunConfig) -> str:
    """Say which policy a run begins from: what made it, or the sizes of its weights.

    A hub's name stands for itself. Weights themselves are not read: they may be hundreds of GiB.
    """
    folder = Path(config.model.path)
    manifest = folder / "manifest.json"
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    weights = [(p.name, p.stat().st_size) for p in sorted(folder.glob("*.safetensors"))]
    return hashlib.sha256(repr(weights or config.model.path).encode()).hexdigest()


def check_origin(origin: str, config: RunConfig, path: Path) -> None:
    """Refuse a checkpoint of a run that began from another policy.

    Raises:
        CheckpointError: naming the checkpoint.
    """
    if origin and origin != policy_origin(config):
        raise CheckpointError(
            f"{path.name} is of a run that began from another policy than {config.model.path}",
            path=path,
            expected="trainer.resume_mode=disable to begin anew, another "
            "trainer.default_local_dir, or the policy that the run began from",
        )


def config_digest(config: RunConfig, *, total_steps: int, device: str) -> str:
    """Hash what of a configuration decides what is sampled and trained, step by step.

    That is every section but `prepare` and the paths of policy and data, whose files are hashed
    elsewhere, and `trainer`, of which the seed counts: what a run writes and where changes no step,
    and how long it goes on none either, unless the learning rate falls towards the last one.

    Args:
        config: Of the run.
        total_steps: Training steps of the whole run.
        device: The kind that it runs on, `cpu` or `cuda`.
    """
    kept = config.model_dump(mode="json", exclude=_HASHED_ELSEWHERE)
    falls = config.actor.optim.lr_scheduler != "constant"
    kept["trainer"] = {
        "seed": config.trainer.seed,
        "device": device,
        "falls_over": total_steps if falls else None,
    }
    return hashlib.sha256(repr(kept).encode()).hexdigest()


START_FILE = "started"


def start_date(config: RunConfig, world: World) -> datetime:
    """Give the date of a run: today, or that on which the run that is resumed began.

    The main rank decides for all.
    """
    return on_main(world, lambda: _start_date(config))


def _start_date(config: RunConfig) -> datetime:
    path = config.trainer.default_local_dir / START_FILE
    goes_on = config.trainer.resume_mode != "disable" and has_checkpoints(config)
    if goes_on and path.is_file():
        return _read(path)
    now = datetime.now()
    with written_whole(path) as draft:
        draft.write_text(now.isoformat() + "\n", encoding="utf-8")
    return now


def _read(path: Path) -> datetime:
    try:
        return datetime.fromisoformat(path.read_text(encoding="utf-8").strip())
    except ValueError:
        return datetime.now()
