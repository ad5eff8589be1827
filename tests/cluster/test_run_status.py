"""The driver writes what it knows of a run's processes to the run folder."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from agentrl.cluster.host import HostInfo
from agentrl.cluster.monitor import Monitor
from agentrl.cluster.pools import NodeResources, make_pools
from agentrl.cluster.run_status import STATUS_FILE, RunStatus, StatusWriter, read_run_status
from agentrl.config import parse_config

NODES = [
    NodeResources(f"node{i}", f"10.0.0.{i}", {"CPU": 4.0, "memory": 1e9}, {"CPU": 1.0})
    for i in (1, 2)
]


def info(name: str, process: int, node: int = 1, role: Any = "train") -> HostInfo:
    return HostInfo(
        name=name, role=role, pool="main", node_id=f"node{node}", address=f"10.0.0.{node}",
        process=process, devices=("0",), num_starts=1,
    )  # fmt: skip


class Run:
    """A monitor in this process, and nodes that may leave."""

    def __init__(self, folder: Path) -> None:
        self.monitor = Monitor()
        self.nodes = list(NODES)
        self.answers = True
        config = parse_config({"data": {}, "model": {"path": "m"}, "trainer": {"nnodes": 2}})
        self.file = folder / "logs" / STATUS_FILE
        self.writer = StatusWriter(
            path=self.file,
            run_id="r",
            folder=folder,
            pools=make_pools(config, "CPU"),
            total_steps=5,
            heartbeat_s=1.0,
            snapshot=lambda: self.monitor.snapshot() if self.answers else None,
            list_nodes=lambda: self.nodes,
            period_s=0.02,
        )

    def write(self) -> RunStatus:
        self.writer.write()
        return read_run_status(self.file)


def test_processes_are_listed_with_node_load_and_restarts(tmp_path: Path):
    run = Run(tmp_path)
    run.monitor.beat(info("rollout_10", 5, node=2, role="rollout"), {"cpu_percent": 7.0})
    run.monitor.beat(info("rollout_9", 6, role="rollout"), {})
    run.monitor.beat(info("rank_0", 7), {"stage": "gen of step 1", "node_cpu_percent": 50.0})
    status = run.write()
    assert [one.name for one in status.processes] == ["rank_0", "rollout_9", "rollout_10"]
    assert [one.restarts for one in status.processes] == [0, 0, 0]
    assert status.processes[0].stage == "gen of step 1"
    assert [node.cpu_percent for node in status.nodes] == [50.0, None]
    assert status.nodes[0].resources == {"CPU": 4.0}
    assert (status.pools[0].name, status.pools[0].nodes) == ("main", 2)
    run.monitor.beat(info("rollout_9", 66, role="rollout"), {})
    assert [one.restarts for one in run.write().processes] == [0, 1, 0]


def test_silent_and_ended_processes_and_lost_nodes_are_marked(tmp_path: Path):
    run = Run(tmp_path)
    run.monitor.beat(info("rank_0", 1), {})
    run.monitor.beat(info("rank_1", 2, node=2), {})
    run.write()
    run.monitor.snapshot().beats["rank_0"].received -= 60
    run.monitor.forget("rank_1", "it was killed")
    del run.nodes[1]
    status = run.write()
    assert [(one.state, one.reason) for one in status.processes] == [
        ("silent", None), ("ended", "it was killed"),
    ]  # fmt: skip
    assert [node.is_alive for node in status.nodes] == [True, False]


def test_without_an_answer_of_the_monitor_the_last_known_processes_grow_older(tmp_path: Path):
    run = Run(tmp_path)
    run.monitor.announce({"state": "training"})
    run.monitor.beat(info("rank_0", 1), {})
    before = run.write()
    run.answers = False
    after = run.write()
    assert after.state == "training"
    assert after.processes[0].heartbeat_age_s > before.processes[0].heartbeat_age_s


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, "finished", None),
        (KeyboardInterrupt(), "stopped", "Ctrl-C or SIGTERM"),
        (ValueError("rank_1 died\nlines"), "failed", "rank_1 died"),
    ],
)
def test_the_last_version_says_how_the_run_ended(
    tmp_path: Path, error: BaseException | None, state: str, reason: str | None
):
    run = Run(tmp_path)
    run.monitor.beat(info("rank_0", 1), {})
    with nullcontext() if error is None else pytest.raises(type(error)), run.writer.writing():
        assert read_run_status(run.file).state == "starting"
        if error is not None:
            raise error
    status = read_run_status(run.file)
    assert (status.state, status.reason) == (state, reason)
    assert status.processes[0].state == "ended"


def test_a_full_disk_does_not_end_the_run(tmp_path: Path):
    run = Run(tmp_path)
    (tmp_path / "logs").write_text("no folder")
    with run.writer.writing():
        pass
