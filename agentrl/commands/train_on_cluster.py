"""`agentrl train` of a run on Ray: the driver. It needs no torch; its ranks do."""

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from agentrl.commands.run_file import RunFile
from agentrl.config import RunConfig
from agentrl.plugins.environment import require_package
from agentrl.trainer.setup.plugins import find_placed
from agentrl.trainer.setup.preflight import with_absolute_paths

if TYPE_CHECKING:
    from agentrl.cluster.driver import ClusterRun
    from agentrl.cluster.handles import RemoteHost

RANK = "agentrl.commands.train:TrainingRank"
SERVER = "agentrl.cluster.servers:HostedServer"
WORKER = "agentrl.trainer.rollout_worker:RolloutWorker"


def train_on_cluster(file: RunFile) -> None:
    """Place and supervise the processes of a run.

    Raises:
        MissingExtraError: if ray is not installed.
        ClusterError: if the cluster has too little for the run, or a rank was lost once too often.
        SystemExit: with the exit code of a rank that failed.
        KeyboardInterrupt: if the run was asked to stop.
    """
    require_package("ray", extra="cluster", what="a run on several devices")
    from agentrl.cluster.driver import open_cluster
    from agentrl.cluster.handles import ClusterHandles
    from agentrl.cluster.ranks import RankFailedError

    config = with_absolute_paths(file.config)
    placed = find_placed(file.plugins, config)
    try:
        with open_cluster(config, say=_say, plugins=placed) as run:
            config = run.config  # with the paths that inputs have on the nodes
            sent = replace(file, config=config).without_plugins()
            servers = start_servers(run, config)
            workers = run.start_workers(WORKER, lambda index: (f"rollout worker {index}",))
            plugins = run.start_plugins(find_placed(file.plugins, config))
            handles = ClusterHandles(
                workers=tuple(workers), servers=tuple(servers), plugins=tuple(plugins)
            )
            run.train(RANK, (sent,), handles)
            run.close_plugins(plugins)
    except RankFailedError as failure:
        sys.exit(failure.exit_code)


def start_servers(run: "ClusterRun", config: RunConfig) -> "list[RemoteHost]":
    """Start the processes of the SGLang servers, if the cluster has them. They wait for the ranks,
    which know the model: `prepare` may make it first.
    """
    engine = config.rollout.engine
    if not config.has_own_servers:
        return []
    tp_size = engine.sglang.tp_size
    limit_s = engine.sglang_server.start_timeout_s
    arguments: list[tuple[Any, ...]] = []
    for pool in config.pools:
        if "engine" in pool.roles:
            shares_gpus = "train" in pool.roles and config.trainer.device != "cpu"
            for _ in range(pool.nodes):
                for first in range(0, pool.devices_per_node - tp_size + 1, tp_size):
                    arguments.append((limit_s, first if shares_gpus else None, tp_size))
    return run.start_servers(SERVER, arguments.__getitem__, devices_per_server=tp_size)


def _say(text: str) -> None:
    print(text, flush=True)
