"""A rank that checks its run folder: `python -m ... FOLDER`, with `{rank}` in its name."""

import os
import sys
from pathlib import Path

from agentrl.config import parse_config
from agentrl.errors import AgentRLError
from agentrl.trainer.setup import preflight
from agentrl.workers.distributed import start_world, stop_world


def run() -> None:
    preflight.APPEARS_S = 1.0
    folder = Path(sys.argv[1].format(rank=os.environ["RANK"]))
    folder.mkdir(exist_ok=True)
    config = parse_config(
        {"data": {}, "model": {"path": "none"}, "trainer": {"default_local_dir": str(folder)}}
    )
    world = start_world("cpu", timeout_s=60)
    try:
        preflight.check_folder_is_shared(config, world)
    except AgentRLError as error:
        print(f"{type(error).__name__}: {error}")
    finally:
        stop_world()


if __name__ == "__main__":
    run()
