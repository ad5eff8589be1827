"""The driver of a run of which the nodes have no file: `python -m ... FOLDER RUN_FILE`.

Nodes of a cluster on one machine see all its files. So this driver takes the inputs for missing,
and renames the folder with them when every rank has started, before the first one reads an input.
"""

import sys
from pathlib import Path
from typing import Any

from agentrl.cli import main
from agentrl.cluster import shipping
from agentrl.cluster.driver import ClusterRun


def run(folder: Path, file: str) -> None:
    mine = str(folder)
    probe = shipping.find_missing

    def find_missing(config: Any, paths: Any, pools: Any) -> dict[str, Path]:
        assert probe(config, paths, pools) == {}, "nodes of one machine see every file"
        return {key: path for key, path in paths.items() if str(path).startswith(mine)}

    shipping.find_missing = find_missing
    start = ClusterRun._run_ranks

    def hide_and_start(self: ClusterRun, *arguments: Any) -> Any:
        folder.rename(folder.with_name("gone"))
        return start(self, *arguments)

    ClusterRun._run_ranks = hide_and_start
    main(["train", file])


if __name__ == "__main__":
    run(Path(sys.argv[1]), sys.argv[2])
