"""Ranks for `tests/workers/test_rank_status.py`: exchanges that succeed or fail."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.snapshot import on_main

LIMIT_S = 2.0


def agrees(world: World) -> Any:
    rows = torch.full((3 * world.rank, 2), float(world.rank))
    return {
        "rows": world.gather_rows(rows).tolist(),
        "bits": world.gather_rows(torch.ones(1, 2, dtype=torch.bool)).tolist(),
        "on_main": world.gather_on_main([world.rank]),
        "flat": world.gather_flat(["a"] * world.rank),
        "sum": world.sum([1.0, world.rank]),
    }


def one_raises(world: World) -> None:
    world.status.enter("gen of step 1")
    with world.raise_on_all_ranks():
        if world.rank == 1:
            raise ValueError("no such tool")


def main_raises(world: World) -> None:
    def write() -> None:
        raise OSError("disk full")

    on_main(world, write)


def one_is_late(world: World) -> None:
    world.status.enter("gen of step 2")
    with world.raise_on_all_ranks():
        time.sleep(2 * LIMIT_S * world.rank)


def one_fails_elsewhere(world: World) -> None:
    world.status.enter("update_actor of step 3")
    if world.rank == 1:
        raise OSError("disk full")
    world.gather(None)


def one_is_killed(world: World) -> None:
    world.status.enter("gen of step 4" if world.rank == 1 else "update_actor of step 4")
    world.gather(None)
    if world.rank == 1:
        os._exit(9)
    world.gather(None)


SCENARIOS: tuple[Callable[[World], Any], ...] = (
    agrees, one_raises, main_raises, one_is_late, one_fails_elsewhere, one_is_killed,
)  # fmt: skip


def run_scenario(scenario: Callable[[World], Any], limit_s: float) -> dict[str, Any]:
    world = start_world("cpu", timeout_s=limit_s)
    began = time.monotonic()
    try:
        with world.status.explain_errors():
            return {"result": scenario(world)}
    except Exception as error:  # noqa: BLE001 - what is written down for the test to read
        outcome = {"error": type(error).__name__, "words": str(error)}
        is_shared = error is world.status.shared_error
        return outcome | {"is_shared": is_shared, "seconds": time.monotonic() - began}
    finally:
        stop_world()


def main(folder: Path, ports: list[str]) -> None:
    outcomes: dict[str, Any] = {}
    for scenario, port in zip(SCENARIOS, ports, strict=True):
        os.environ["MASTER_PORT"] = port
        outcomes[scenario.__name__] = run_scenario(
            scenario, LIMIT_S if scenario is one_is_late else 60.0
        )
        (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(outcomes))
    os._exit(0)  # see `agentrl.cli.leave_rank`


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
