"""Offer inputs of a run, which are only on the driver's machine, to the nodes that run it.

The driver asks each node which inputs it has, with the same files. If a node lacks one, every node
gets the path of a copy in the configuration, and `agentrl.cluster.inputs` makes the copy there.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import ray
import yaml
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from agentrl.cluster.inputs import InputServer, Shipment, describe_input, file_names
from agentrl.cluster.placement import PlacedPool
from agentrl.config.inputs import input_paths, with_inputs
from agentrl.config.schema.prepare import PrepareConfig
from agentrl.config.schema.run import RunConfig
from agentrl.data.prepare.manifest import is_made
from agentrl.errors import ClusterError, ConfigError

_DEFAULT_CACHE = "~/.cache/agentrl/inputs"
Listing = dict[str, tuple[int, int]]
"""Size, and time of the last change in seconds, of each file below an input, by its path in it."""


def ship_inputs(
    config: RunConfig, pools: Iterable[PlacedPool], say: Callable[[str], None]
) -> tuple[RunConfig, Shipment]:
    """Find the inputs that a node lacks, and offer them to all nodes.

    Args:
        config: The run's configuration.
        pools: The pools, after their nodes are reserved.
        say: Prints a line for the user.

    Returns:
        The configuration with the paths that inputs have on the nodes, and what they copy.

    Raises:
        ConfigError: for an input that cannot be copied.
        ClusterError: if a node does not answer.
    """
    paths = input_paths(config)
    missing = find_missing(config, paths, pools)
    if not missing:
        return config, Shipment()
    config = _without_finished_preparation(config)
    for key, path in missing.items():
        _refuse_references(key, path)
    cache = (config.cluster.cache_dir or Path(_DEFAULT_CACHE)).expanduser().absolute()
    started = time.monotonic()
    inputs = {key: describe_input(path, cache) for key, path in missing.items()}
    num_bytes = sum(size for one in {i.digest: i for i in inputs.values()}.values()
                    for _, size, _ in one.files)  # fmt: skip
    say(
        f"nodes lack {', '.join(inputs)}: {num_bytes / 1e6:.1f} MB are copied to {cache} of each "
        f"node that has no copy yet (hashed in {time.monotonic() - started:.1f} s)"
    )
    remote: Any = ray.remote(InputServer)
    here = ray.get_runtime_context().get_node_id()
    server = remote.options(
        num_cpus=0,
        max_concurrency=8,
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
    ).remote({one.digest: str(missing[key].absolute()) for key, one in inputs.items()})
    targets = {key: Path(one.target) for key, one in inputs.items()}
    return with_inputs(config, targets), Shipment(tuple(inputs.values()), server)


def find_missing(
    config: RunConfig, paths: Mapping[str, Path], pools: Iterable[PlacedPool]
) -> dict[str, Path]:
    """Return the inputs that at least one node lacks, or has with other files."""
    here = ray.get_runtime_context().get_node_id()
    tables: Any = [ray.util.placement_group_table(one.group) for one in pools]
    nodes = {node for table in tables for node in table["bundles_to_node_id"].values()}
    if nodes <= {here}:
        return {}
    # A copy of the working directory has files of the same sizes, and other times.
    is_copied = config.cluster.runtime_env.working_dir is not None
    wanted: dict[str, tuple[str, Listing, bool]] = {}
    for key, path in paths.items():
        is_relative = is_copied and not path.is_absolute()
        place = str(path) if is_relative else str(path.absolute())
        wanted[key] = (place, list_input(path), not is_relative)
    probe: Any = ray.remote(find_absent)
    asked = [
        probe.options(
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                pool.group, placement_group_bundle_index=node
            ),
        ).remote(wanted)
        for pool in pools
        for node in range(pool.pool.nodes)
    ]
    limit = config.cluster.start_timeout_s
    try:
        absent = {key for keys in ray.get(asked, timeout=limit) for key in keys}
    except GetTimeoutError as error:
        raise ClusterError(
            f"a node did not say within {limit:g} s which files it has",
            key="cluster.start_timeout_s",
        ) from error
    return {key: path for key, path in paths.items() if key in absent}


def find_absent(wanted: Mapping[str, tuple[str, Listing, bool]]) -> list[str]:
    """Return the inputs that this node lacks, or has with other files. Runs on each node."""
    absent: list[str] = []
    for key, (path, listing, has_times) in wanted.items():
        found = list_input(Path(path))
        if not has_times:
            found = {name: (size, 0) for name, (size, _) in found.items()}
            listing = {name: (size, 0) for name, (size, _) in listing.items()}
        if found != listing:
            absent.append(key)
    return absent


def list_input(path: Path) -> Listing:
    """List the files of an input; none if it does not exist or cannot be read."""
    try:
        stats = {name: (path / name).stat() for name in file_names(path)}
    except OSError:
        return {}
    return {name: (one.st_size, int(one.st_mtime)) for name, one in stats.items()}


def _without_finished_preparation(config: RunConfig) -> RunConfig:
    """Leave out what `prepare` has made here: its files are inputs that are copied."""
    for name, maker in config.prepare:
        if maker is not None and not is_made(maker.out_dir):
            raise ConfigError(
                f"prepare.{name} would be made on one node, and the nodes do not see its folder",
                key=f"prepare.{name}.out_dir",
                expected="a folder that all nodes see; or prepare on this machine first, by a "
                "start of the run file without Ray (trainer.nnodes=1 trainer.n_gpus_per_node=1 "
                "trainer.total_training_steps=0)",
            )
    return config.model_copy(update={"prepare": PrepareConfig()})


def _refuse_references(key: str, path: Path) -> None:
    """Refuse a YAML file that names other files: they are not found next to its copy."""
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return
    for text in _texts(yaml.safe_load(path.read_text(encoding="utf-8"))):
        named = text.partition(":")[0]
        if ("/" in named or named.endswith(".py")) and Path(named).exists():
            raise ConfigError(
                f"{path} names {named}, and a copy of it on another node does not find that",
                key=key,
                expected="both files in cluster.runtime_env.working_dir, with paths relative to "
                "it; or a folder that all nodes see",
            )


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for one in cast("dict[Any, Any]", value).values():
            yield from _texts(one)
    elif isinstance(value, list):
        for one in cast("list[Any]", value):
            yield from _texts(one)
