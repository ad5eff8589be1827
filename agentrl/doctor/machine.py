"""Check the machine: installed versions and what they require, devices, the disk."""

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

from agentrl.config.dead_keys import find_dead_keys_here
from agentrl.config.schema.run import RunConfig
from agentrl.doctor.report import Checked
from agentrl.engines.sglang.arguments import TESTED_VERSION
from agentrl.errors import ConfigError
from agentrl.plugins.environment import DISTRIBUTION, num_cores
from agentrl.trainer.setup.engine_factory import choose_engine
from agentrl.trainer.setup.preflight import claim_store
from agentrl.workers.distributed import World, start_world

_SHOWN = (DISTRIBUTION, "torch", "transformers", "sglang")
_PINNING = (DISTRIBUTION, "sglang")
BUSY_FRAC = 0.5
"""Free share of an accelerator's memory below which the row warns."""


def check_versions() -> Checked[None]:
    """Check the installed packages against the requirements of agentrl and SGLang."""
    found = {name: _installed(name) for name in _SHOWN}
    shown = [f"{name} {number or 'not installed'}" for name, number in found.items()]
    broken = [line for name in _PINNING if found[name] for line in find_broken_pins(name)]
    if found["sglang"] not in (None, TESTED_VERSION):
        broken.append(f"agentrl is tested with sglang {TESTED_VERSION}")
    return Checked(None, ", ".join([f"python {platform.python_version()}", *shown]), tuple(broken))


def find_broken_pins(distribution: str) -> Iterator[str]:
    """Report the requirements of an installed distribution that are not met."""
    # Not `pip check`: environments that uv makes have no pip.
    for line in requires(distribution) or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        installed = _installed(wanted.name)
        if installed is None or not wanted.specifier.contains(installed, prereleases=True):
            required = f"{wanted.name}{wanted.specifier}"
            yield f"{distribution} requires {required}; installed: {installed or 'none'}"


def check_machine() -> Checked[None]:
    """Count cores, memory and accelerators."""
    memory = psutil.virtual_memory()
    devices = list(_accelerators())
    found = [
        f"{num_cores()} CPU cores",
        f"{memory.available / 1e9:.0f} of {memory.total / 1e9:.0f} GB of memory free",
        *([line for line, _ in devices] or ["no accelerator"]),
    ]
    busy = tuple(
        f"other processes use {1 - free:.0%} of the memory of device {index}"
        for index, (_, free) in enumerate(devices)
        if free < BUSY_FRAC
    )
    return Checked(None, ", ".join(found), busy)


def check_disk(config: RunConfig, stack: ExitStack) -> Checked[RunConfig]:
    """Check that the run's folder and its store can be written; return it with a temporary folder.

    The temporary folder is where the run will write, so that servers can read new weights there.

    Args:
        config: The run.
        stack: Removes the temporary folder.

    Raises:
        ConfigError: if the folder cannot be written.
    """
    folder, sync = config.trainer.default_local_dir, config.weight_sync
    parent = nearest_folder(sync.folder or folder)
    try:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix=".doctor-", dir=parent))
    except OSError as error:
        raise ConfigError(
            f"cannot write to {parent}: {error.strerror}",
            key="weight_sync.folder" if sync.folder else "trainer.default_local_dir",
            expected="a folder that can be written",
        ) from error
    free = shutil.disk_usage(nearest_folder(folder)).free
    changes = {
        "data": config.data.model_copy(update={"cache_dir": Path(made) / "cache"}),
        "weight_sync": sync.model_copy(update={"folder": Path(made) / "weights"}),
    }
    local = config.model_copy(update=changes)
    claim_store(config)
    store = config.trainer.default_remote_dir
    written = f"; {store} was written to" if store else ""
    return Checked(local, f"{free / 1e9:.1f} GB free for {folder}{written}")


def check_device(config: RunConfig) -> Checked[World]:
    """Take the device that the run asks for.

    Raises:
        ConfigError: if it does not exist, or if torchrun started several ranks.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "the doctor checks one process", expected="agentrl doctor FILE, without torchrun"
        )
    trainer = config.trainer
    world = start_world(trainer.device, timeout_s=trainer.collective_timeout_s)
    dead = find_dead_keys_here(config, device=world.device.type, engine=choose_engine(config))
    return Checked(world, f"trains on {world.device}", tuple(map(str, dead)))


def _accelerators() -> Iterator[tuple[str, float]]:
    """Describe each device; yield the free share of its memory too."""
    if not torch.accelerator.is_available():
        return
    kind = torch.get_device_module()
    for index in range(torch.accelerator.device_count()):
        free, total = kind.mem_get_info(index)
        name = kind.get_device_name(index)
        yield f"{name} ({free / 1e9:.0f} of {total / 1e9:.0f} GB free)", free / total


def nearest_folder(folder: Path) -> Path:
    """Return the folder, or its nearest parent that exists."""
    whole = folder.absolute()
    return next(path for path in (whole, *whole.parents) if path.is_dir())


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
