"""What a run was: its configuration, command, versions and machine, written at each start.

    starts/0001/config.yaml      the keys that were given, resolved; `agentrl train` takes this file
    starts/0001/resolved.yaml    every key, defaults included
    starts/0001/run.json         command line, directory, packages, git revisions, hardware

A resumed run writes the next number. Each checkpoint names the start that it belongs to. Secrets
are redacted by the names of their keys.
"""

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import yaml

import agentrl
from agentrl.config.schema import RunConfig
from agentrl.config.secrets import REDACTED, is_secret_name, without_secrets
from agentrl.files import written_whole
from agentrl.machine import num_cores

STARTED_AS = "started_as"
"""Under which name a checkpoint keeps the folder of its start."""
_STARTS = "starts"
_RESOLVED = "resolved.yaml"
_GIT_TIMEOUT_S = 5


def write_start(folder: Path, config: RunConfig, *, num_ranks: int) -> str:
    """Write what this start of a run is; the main rank alone calls it.

    Args:
        folder: Of the run.
        config: Of the run.
        num_ranks: Processes that train.

    Returns:
        The folder of the record, in the run's: `starts/0001`.

    Raises:
        OSError: if it cannot be written.
    """
    names = [path.name for path in (folder / _STARTS).glob("[0-9]*")]
    number = 1 + max((int(name) for name in names if name.isdecimal()), default=0)
    name = f"{_STARTS}/{number:04}"
    given = without_secrets(config.model_dump(mode="json", exclude_unset=True))
    files = {
        "config.yaml": yaml.safe_dump(given, sort_keys=False),
        _RESOLVED: yaml.safe_dump(_resolved(config), sort_keys=False),
        "run.json": json.dumps(_describe(num_ranks), indent=2) + "\n",
    }
    for file, text in files.items():
        with written_whole(folder / name / file) as draft:
            draft.write_text(text, encoding="utf-8")
    return name


def changed_keys(start: Path, config: RunConfig) -> list[str]:
    """Name the keys whose values differ from those of an earlier start, with both values.

    Args:
        start: The folder of the earlier start.
        config: Of this one.

    Returns:
        A line for each key; none if there is no record to compare with.
    """
    try:
        before = yaml.safe_load((start / _RESOLVED).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return []
    old, new = dict(_leaves(before)), dict(_leaves(_resolved(config)))
    return [
        f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
        for key in sorted(old.keys() | new.keys())
        if (key in old, old.get(key)) != (key in new, new.get(key))
    ]


def _resolved(config: RunConfig) -> dict[str, Any]:
    return without_secrets(config.model_dump(mode="json"))


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, Mapping) or not tree:
        yield key, tree
        return
    for name, value in cast("Mapping[str, Any]", tree).items():
        yield from _leaves(value, f"{key}.{name}" if key else str(name))


def _shown(leaves: Mapping[str, Any], key: str) -> str:
    return json.dumps(leaves[key]) if key in leaves else "not set"


def _describe(num_ranks: int) -> dict[str, Any]:
    return {
        "started": datetime.now().isoformat(timespec="seconds"),
        "command": without_secrets([_redacted(argument) for argument in sys.argv]),
        "directory": os.getcwd(),
        "num_ranks": num_ranks,
        "git": {
            "directory": _git_revision(Path.cwd()),
            "agentrl": _git_revision(Path(agentrl.__file__).parent),
        },
        "hardware": {
            "host": socket.gethostname(),
            "system": platform.platform(),
            "cores": num_cores(),
            "memory_bytes": psutil.virtual_memory().total,
            "accelerators": _accelerators(),
        },
        "python": platform.python_version(),
        "packages": dict(sorted({d.name: d.version for d in distributions()}.items())),
    }


def _redacted(argument: str) -> str:
    """Redact the secrets of an override, `section.api_key=value` or `section={api_key: value}`."""
    key, equals, value = argument.partition("=")
    if equals and is_secret_name(key.rpartition(".")[2].lstrip("-+")):
        return f"{key}={REDACTED}"
    if value[:1] not in ("{", "["):
        return argument
    try:
        given = yaml.safe_load(value)
        redacted = without_secrets(given)
    except (ValueError, TypeError, RecursionError, yaml.YAMLError):
        return f"{key}={REDACTED}"
    return argument if redacted == given else f"{key}={json.dumps(redacted, default=str)}"


def _accelerators() -> list[str]:
    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(place) for place in range(torch.cuda.device_count())]


def _git_revision(folder: Path) -> str | None:
    """Name the commit of a folder, with `+changes` if files differ; None outside of git."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return None
    return f"{commit}+changes" if _git(folder, "status", "--porcelain", "-uno") else commit


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
