"""`agentrl train` of a run on Ray: the driver. It needs no torch; its ranks do."""

import sys
from dataclasses import replace

from agentrl.commands.run_file import RunFile
from agentrl.plugins.environment import require_package
from agentrl.trainer.setup.preflight import with_absolute_paths

RANK = "agentrl.commands.train:TrainingRank"


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
    with open_cluster(config, say=_say) as run:
        sent = replace(file, config=config).without_plugins()
        try:
            run.train(RANK, (sent,), ClusterHandles())
        except RankFailedError as failure:
            sys.exit(failure.exit_code)


def _say(text: str) -> None:
    print(text, flush=True)
