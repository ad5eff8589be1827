"""What the run stands on: versions and what they pin, devices, the disk."""

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

from agentrl.config.schema.run import RunConfig
from agentrl.doctor.report import Checked
from agentrl.engines.sglang.arguments import TESTED_VERSION
from agentrl.errors import ConfigError
from agentrl.plugins.environment import DISTRIBUTION, num_cores
from agentrl.workers.distributed import World, start_world

_SHOWN = (DISTRIBUTION, "torch", "transformers", "sglang")
_PINNING = (DISTRIBUTION, "sglang")
BUSY_FRAC = 0.5
"""Share of an accelerator's memory that others may hold before it is told."""


def check_versions() -> Checked[None]:
    """Hold what is installed against what agentrl and SGLang ask for."""
    found = {name: _installed(name) for name in _SHOWN}
    told = [f"{name} {number or 'not installed'}" for name, number in found.items()]
    broken = [line for name in _PINNING if found[name] for line in find_broken_pins(name)]
    if found["sglang"] not in (None, TESTED_VERSION):
        broken.append(f"agentrl is tested with sglang {TESTED_VERSION}")
    return Checked(None, ", ".join([f"python {platform.python_version()}", *told]), tuple(broken))


def find_broken_pins(distribution: str) -> Iterator[str]:
    """Say which requirements of an installed distribution are not met."""
    for line in requires(distribution) or ():
        wanted = Requirement(line)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        there = _installed(wanted.name)
        if there is None or not wanted.specifier.contains(there, prereleases=True):
            asked = f"{wanted.name}{wanted.specifier}"
            yield f"{distribution} asks for {asked}; installed: {there or 'none'}"


def check_machine() -> Checked[None]:
    """Count cores, memory and accelerators."""
    memory = psutil.virtual_memory()
    devices = list(_accelerators())
    told = [
        f"{num_cores()} CPU cores",
        f"{memory.available / 1e9:.0f} of {memory.total / 1e9:.0f} GB of memory free",
        *(line for line, _ in devices),
    ]
    busy = tuple(
        f"others hold {1 - free:.0%} of the memory of device {place}"
        for place, (_, free) in enumerate(devices)
        if free < BUSY_FRAC
    )
    return Checked(None, ", ".join(told if devices else [*told, "no accelerator"]), busy)


def check_disk(config: RunConfig, stack: ExitStack) -> Checked[RunConfig]:
    """See that the run's folder can be written; gives the run with nothing that it leaves there.

    What it would keep goes to a folder that lies where the run will write, so that servers which
    are to read new weights there can.

    Args:
        config: Of the run.
        stack: Removes that folder when it unwinds.

    Raises:
        ConfigError: where nothing can be written.
    """
    key = "weight_sync.folder" if config.weight_sync.folder else "trainer.default_local_dir"
    place = nearest_folder(config.weight_sync.folder or config.trainer.default_local_dir)
    try:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix=".doctor-", dir=place))
    except OSError as error:
        expected = "a folder that can be written"
        raise ConfigError(
            f"cannot write to {place}: {error.strerror}", key=key, expected=expected
        ) from error
    folder = config.trainer.default_local_dir
    free = shutil.disk_usage(nearest_folder(folder)).free
    return Checked(_in_folder(config, Path(made)), f"{free / 1e9:.1f} GB free for {folder}")


def _in_folder(config: RunConfig, folder: Path) -> RunConfig:
    data = config.data.model_copy(update={"cache_dir": folder / "cache"})
    sync = config.weight_sync.model_copy(update={"folder": folder / "weights"})
    return config.model_copy(update={"data": data, "weight_sync": sync})


def check_device(config: RunConfig) -> Checked[World]:
    """Take the device that the run asks for.

    Raises:
        ConfigError: where it is not there, or other ranks were started beside this one.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            "the doctor looks at one process", expected="agentrl doctor FILE, without torchrun"
        )
    trainer = config.trainer
    world = start_world(trainer.device, timeout_s=trainer.collective_timeout_s)
    return Checked(world, f"trains on {world.device}")


def _accelerators() -> Iterator[tuple[str, float]]:
    """Describe each device, with the share of its memory that is free."""
    if not torch.accelerator.is_available():
        return
    kind = torch.get_device_module()
    for place in range(torch.accelerator.device_count()):
        free, total = kind.mem_get_info(place)
        name = kind.get_device_name(place)
        yield f"{name} ({free / 1e9:.0f} of {total / 1e9:.0f} GB free)", free / total


def nearest_folder(folder: Path) -> Path:
    """Find the folder, or the innermost one above it that is there."""
    whole = folder.absolute()
    return next(path for path in (whole, *whole.parents) if path.is_dir())


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
