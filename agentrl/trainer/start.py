"""When a run began: templates that write a date must write the same one until it ends."""

from datetime import datetime
from pathlib import Path

from agentrl.config.schema import RunConfig
from agentrl.files import written_whole
from agentrl.trainer.resume import has_checkpoints
from agentrl.workers.distributed import World
from agentrl.workers.snapshot import on_main

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
