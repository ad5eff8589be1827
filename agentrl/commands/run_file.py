"""Read a run file and do all checks that need no torch, so that mistakes are reported at once."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import Purpose, RunConfig, naming_origin, read_config
from agentrl.config.verl import VerlReport
from agentrl.trainer.setup.plugins import Plugins


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


def num_ranks() -> int:
    """Return the number of ranks that torchrun started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def read_run_file(
    path: Path, overrides: Sequence[str], purpose: Purpose, *, world_size: int | None
) -> RunFile:
    """Read a run file, and refuse a run that cannot succeed.

    Args:
        path: The file.
        overrides: `key=value` each.
        purpose: The purpose of the run.
        world_size: Ranks of the run; None: unknown.

    Raises:
        AgentRLError: if the file or a plug-in cannot be used; see `check_run`.
    """
    config, report = read_config(path, overrides)
    # Imported late, so that a wrong key is reported before the plug-ins' packages are imported.
    from agentrl.trainer.setup.preflight import check_run

    with naming_origin(overrides, report):
        checked = check_run(config, world_size=world_size, file=path, purpose=purpose)
    return RunFile(
        path=path,
        overrides=tuple(overrides),
        purpose=purpose,
        config=config,
        report=report,
        plugins=checked.plugins,
        notes=checked.notes,
    )
