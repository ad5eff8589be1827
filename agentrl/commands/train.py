"""`agentrl train` and `agentrl sft`: from a checked run file to a trained policy."""

import gc
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.cluster.ranks import RankEnd, RankPlace
from agentrl.commands.run_file import RunFile
from agentrl.config import RunConfig, naming_origin
from agentrl.config.problems import naming_file
from agentrl.engines.sglang.servers.directory import ServerDirectory
from agentrl.errors import AgentRLError, ConfigError, RankError
from agentrl.trainer.components import check_names_and_engine, prepare_components
from agentrl.trainer.interruption import request_stop
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.setup.huggingface import quiet_libraries
from agentrl.trainer.setup.plugins import Given, Plugins, load_plugins
from agentrl.trainer.setup.preflight import check_run, claim_prepared, with_absolute_paths
from agentrl.trainer.setup.prepare import prepare_run
from agentrl.trainer.state.summary import Summary
from agentrl.trainer.trainer import Trainer
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.rank_status import RankStatus

if TYPE_CHECKING:
    from agentrl.cluster.handles import ClusterHandles


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that passed all checks and has joined its ranks."""

    config: RunConfig
    world: World
    run_logger: RunLogger
    plugins: Plugins


@contextmanager
def open_run(file: RunFile, console: Console | None = None) -> Iterator[PreparedRun]:
    """Join the ranks of a run for the `with` block, after the checks that need torch."""
    quiet_libraries()
    config = with_absolute_paths(file.config)
    world = start_world(config.trainer.device, timeout_s=config.trainer.collective_timeout_s)
    run_logger = RunLogger(config.trainer, is_main=world.is_main, console=console)
    run_logger.show_stages(world.status)
    try:
        if file.report is not None:
            run_logger.info(f"{file.path}: {file.report.summarize()}")
        run_logger.notes(file.notes)
        with world.status.explain_errors():
            with naming_origin(file.overrides, file.report), naming_file(file.path):
                check_names_and_engine(config, purpose=file.purpose)
            yield PreparedRun(config, world, run_logger, file.plugins)
    finally:
        run_logger.close()
        stop_world()


@contextmanager
def freeze_objects() -> Iterator[None]:
    """Leave the objects that exist now out of garbage collection during the `with` block.

    Libraries make half a million objects, which takes a third of a second to search. transformers
    collects garbage each time the engine frees its cache. What the caller has frozen stays so.
    """
    gc.collect()
    was_frozen = gc.get_freeze_count() > 0
    if not was_frozen:
        gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def train_from_file(
    file: RunFile,
    cluster: "ClusterHandles | None" = None,
    *,
    on_joined: Callable[[RankStatus], None] = lambda _: None,
) -> Summary:
    """Prepare what is missing, train, and print the result.

    Args:
        file: The checked run file.
        cluster: The processes of a run on Ray that this rank may call.
        on_joined: Called when the rank has joined the others, with what shows its stage.
    """
    with open_run(file) as run:
        on_joined(run.world.status)
        components = prepare_components(
            run.config,
            run.world,
            run.run_logger,
            run.plugins,
            Given(servers=find_servers(run.config, cluster)),
            cluster=cluster,
        )
        trainer = Trainer(run.config, components)
        with freeze_objects():
            summary = trainer.fit()
        store = run.config.trainer.default_remote_dir
        where = f"{trainer.folder} and {store}" if store else trainer.folder
        run.run_logger.info(summary.describe(where))
        return summary


def find_servers(config: RunConfig, cluster: "ClusterHandles | None") -> ServerDirectory | None:
    """Return the directory of the SGLang servers that the cluster starts; None if it has none."""
    if cluster is None or not cluster.servers:
        return None
    from agentrl.cluster.servers import RayServers

    return RayServers(cluster.servers, shares_devices=config.servers_share_devices)


class TrainingRank:
    """A training rank on a Ray cluster: what torchrun would start as a process.

    Args:
        file: The run file as the driver has read it, without its plug-ins: they are built here.
    """

    def __init__(self, file: RunFile) -> None:
        self._file = file
        self._status: RankStatus | None = None
        self._reserved: socket.socket | None = None

    def free_port(self) -> int:
        """Return a free port of this node, at which the ranks can meet.

        No other process is given the port while this process lives. The store of the ranks can
        still bind it, because both sockets have SO_REUSEADDR and this one does not listen.
        """
        self._reserved = socket.socket()
        self._reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved.bind(("", 0))
        return self._reserved.getsockname()[1]

    def run(self, place: RankPlace, cluster: "ClusterHandles") -> RankEnd:
        """Train to the end; errors are printed to this rank's log and returned."""
        os.environ.update(place.environment)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        try:
            return train_on_rank(
                self._file, cluster, world_size=place.world_size, on_joined=self._watch
            )
        except KeyboardInterrupt as stop:
            return RankEnd("interrupted", ": ".join(map(str, stop.args)), 130)
        except RankError as error:
            print(f"rank {place.rank}: error: {error}", flush=True)
            return RankEnd("lost", str(error), 2, is_cause=False)
        except (AgentRLError, OSError) as error:
            print(f"rank {place.rank}: error: {error}", flush=True)
            return RankEnd("failed", str(error), 2)
        except BaseException as error:  # noqa: BLE001 - the error boundary of the process
            traceback.print_exc()
            return RankEnd("failed", f"{type(error).__name__}: {error}", 1)

    def load(self) -> dict[str, str]:
        """Return what this rank does, for its heartbeats."""
        return {} if self._status is None else {"stage": self._status.stage}

    def _watch(self, status: RankStatus) -> None:
        self._status = status

    def stop(self) -> None:
        """Stop as SIGTERM does: release tools, save the last completed step."""
        request_stop()


def train_on_rank(
    file: RunFile,
    cluster: "ClusterHandles",
    *,
    world_size: int,
    on_joined: Callable[[RankStatus], None],
) -> RankEnd:
    """Train as one rank, after the checks that a command does before it starts."""
    from agentrl.cluster.plugin_actors import connect_plugins

    remotes = connect_plugins(cluster.plugins, start_timeout_s=file.config.cluster.start_timeout_s)
    checked = check_run(
        file.config,
        world_size=world_size,
        file=file.path,
        purpose=file.purpose,
        build=partial(load_plugins, remotes=remotes),
    )
    summary = train_from_file(replace(file, plugins=checked.plugins), cluster, on_joined=on_joined)
    return RankEnd("done", str(summary.steps))


def sft_from_file(file: RunFile) -> None:
    """Run a run file's supervised warm-up, and prepare what it needs.

    Raises:
        ConfigError: if the file has no warm-up.
    """
    with open_run(file) as run:
        if run.config.prepare.sft is None:
            raise ConfigError(
                "the file has no warm-up",
                file=file.path,
                key="prepare.sft",
                expected="model_path, train_file, out_dir",
            )
        claim_prepared(run.config)
        with run.world.raise_on_all_ranks():
            run.run_logger.lock_folder()
        now = datetime.now()
        prepare_run(run.config, run.world, run.run_logger, run.plugins.tools, now=now)
