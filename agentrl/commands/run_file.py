"""Read a run file and do all checks that need no torch, so that mistakes are reported at once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from agentrl.config import Purpose, RunConfig, naming_origin, read_config
from agentrl.config.dead_keys import DeadKey, find_placement_keys
from agentrl.config.verl import VerlReport
from agentrl.trainer.setup.plugins import Plugins

NUMBER_OF_RANKS = ("trainer.nnodes", "trainer.n_gpus_per_node")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFile:
    """A run file, read and checked, with its plug-ins built."""

    path: Path
    overrides: tuple[str, ...]
    purpose: Purpose
    config: RunConfig
    report: VerlReport | None
    """The result for each key, if the file is in verl's key tree."""
    plugins: Plugins
    notes: tuple[str, ...]
    """Notes for the user."""

    def without_plugins(self) -> "RunFile":
        """Return a copy for another process, which builds the plug-ins again before it uses it."""
        return replace(self, plugins=cast("Plugins", None))


def num_ranks(config: RunConfig, purpose: Purpose) -> int:
    """Return the number of ranks: those that torchrun started, or that training starts on Ray."""
    if (launched := os.environ.get("WORLD_SIZE")) is not None:
        return int(launched)
    return config.num_ranks if purpose is Purpose.TRAIN else 1


def uses_cluster(config: RunConfig) -> bool:
    """Return whether this process is the driver of a run on Ray; under torchrun it is a rank."""
    return config.asks_for_cluster and "WORLD_SIZE" not in os.environ


def find_ignored_by_torchrun(config: RunConfig) -> list[DeadKey]:
    """Find keys of a run on Ray under torchrun, unless they ask for as many ranks as it started."""
    launched = os.environ.get("WORLD_SIZE")
    if launched is None:
        return []
    found = find_placement_keys(config, f"torchrun has started the {launched} ranks of this run")
    if config.num_ranks == int(launched):
        found = [dead for dead in found if dead.key not in NUMBER_OF_RANKS]
    return found


def read_run_file(
    path: Path, overrides: Sequence[str], purpose: Purpose, *, starts_now: bool = True
) -> RunFile:
    """Read a run file, and refuse a run that cannot succeed.

    Args:
        path: The file.
        overrides: `key=value` each.
        purpose: The purpose of the run.
        starts_now: Whether the run starts now. If not, the number of its ranks is unknown, unless
            it is a run on Ray.

    Raises:
        AgentRLError: if the file or a plug-in cannot be used; see `check_run`.
    """
    config, report = read_config(path, overrides)
    # Imported late, so that a wrong key is reported before the plug-ins' packages are imported.
    from agentrl.trainer.setup.preflight import check_run

    is_known = starts_now or uses_cluster(config)
    world_size = num_ranks(config, purpose) if is_known else None
    with naming_origin(overrides, report):
        checked = check_run(config, world_size=world_size, file=path, purpose=purpose)
    return RunFile(
        path=path,
        overrides=tuple(overrides),
        purpose=purpose,
        config=config,
        report=report,
        plugins=checked.plugins,
        notes=(*checked.notes, *map(str, find_ignored_by_torchrun(config))),
    )
