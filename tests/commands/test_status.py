"""`agentrl status` says what a run does, from its folder alone."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from agentrl.cluster.run_status import (
    STATUS_FILE,
    DriverStatus,
    NodeStatus,
    PoolStatus,
    ProcessStatus,
    RunStatus,
    this_driver,
)
from agentrl.config import parse_config
from agentrl.trainer.metrics.sinks import METRICS_FILE, JsonlSink
from agentrl.trainer.state.run_folder import RunLock, write_start
from tests.fakes.runs import run_agentrl

GONE = DriverStatus(host=this_driver().host, pid=2**22 - 7, pid_started=0.0)


def make_start(folder: Path, **trainer: Any) -> None:
    config = parse_config({"data": {}, "model": {"path": "m"}, "trainer": trainer})
    write_start(folder, config, num_ranks=1)


def process(name: str, role: Any, **changes: Any) -> ProcessStatus:
    given: dict[str, Any] = {
        "name": name, "role": role, "pool": "main", "node": "10.0.0.1", "node_id": "abcdef01",
        "pid": 12, "devices": (), "state": "alive", "heartbeat_age_s": 1.0, "restarts": 0,
    }  # fmt: skip
    return ProcessStatus(**(given | changes))


def put_status(folder: Path, **changes: Any) -> None:
    """Write what the driver of a run on Ray writes."""
    given: dict[str, Any] = {
        "run_id": "r", "folder": str(folder), "driver": this_driver(), "state": "training",
        "started": time.time() - 300, "written": time.time(), "total_steps": 9,
        "pools": [PoolStatus(name="main", nodes=1, roles=("train",), resources={"GPU": 8.0})],
        "nodes": [
            NodeStatus(node_id="abcdef01", address="10.0.0.1", is_alive=True,
                       resources={"GPU": 8.0}, available={}, cpu_percent=37.0),
        ],
        "processes": [
            process("rank_0", "train", stage="gen of step 3", cpu_percent=99.0),
            process("rollout_0", "rollout", restarts=2, state="silent", heartbeat_age_s=70.0),
        ],
    }  # fmt: skip
    file = folder / "logs" / STATUS_FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(RunStatus(**(given | changes)).model_dump_json())


def read(capsys: Any, folder: Path, *, code: int) -> dict[str, Any]:
    output = run_agentrl(capsys, "status", folder, "--json")
    assert output.code == code, output
    return json.loads(output.out)


def test_run_without_ray_shows_its_process_and_its_last_step(capsys: Any, tmp_path: Path):
    make_start(tmp_path, total_training_steps=30)
    with RunLock(tmp_path):
        sink = JsonlSink(tmp_path / METRICS_FILE)
        sink.log(4, {"reward": 1.0})
        sink.close()
        found = read(capsys, tmp_path, code=0)
        output = run_agentrl(capsys, "status", tmp_path)
    assert (found["state"], found["pid"], found["step"]) == ("running", os.getpid(), 4)
    assert (found["total_steps"], found["cluster"]) == (30, None)
    assert f"process {os.getpid()} on" in output.out
    assert "Ray" not in output.out
    assert re.search(r"last logged step: 4 of 30, \d s ago", output.out)


def test_run_without_ray_that_ended_is_finished_or_stopped(capsys: Any, tmp_path: Path):
    make_start(tmp_path)
    with RunLock(tmp_path):
        pass
    assert read(capsys, tmp_path, code=1)["state"] == "stopped"
    (tmp_path / "summary.json").write_text("{}")
    assert read(capsys, tmp_path, code=0)["state"] == "finished"


def test_killed_run_without_ray_is_dead(capsys: Any, tmp_path: Path):
    make_start(tmp_path)
    with RunLock(tmp_path):
        text = json.loads((tmp_path / "run.lock").read_text())
    (tmp_path / "run.lock").write_text(json.dumps(text | {"process": GONE.pid}))
    assert read(capsys, tmp_path, code=3)["state"] == "dead"


def test_run_on_ray_shows_pools_nodes_processes_and_heartbeats(capsys: Any, tmp_path: Path):
    put_status(tmp_path)
    output = run_agentrl(capsys, "status", tmp_path)
    assert output.code == 0, output
    lines = [line.split() for line in output.out.splitlines()]
    assert ["main", "1", "8", "GPU", "train"] in lines
    assert ["abcdef", "10.0.0.1", "alive", "0/8", "GPU", "37%", "2"] in lines
    assert "rank_0 is in: gen of step 3" in output.out
    (worker,) = [line for line in lines if line[:1] == ["rollout_0"]]
    assert worker[1:] == ["main", "abcdef", "12", "silent", "70", "s", "ago", "2"]


@pytest.mark.parametrize(
    ("changes", "state", "code"),
    [
        ({"driver": GONE}, "dead", 3),
        ({"driver": GONE, "state": "finished"}, "finished", 0),
        ({"driver": GONE, "state": "failed", "reason": "rank_1 was lost"}, "failed", 1),
        ({"driver": GONE, "state": "stopped", "reason": "Ctrl-C"}, "stopped", 1),
        ({"written": time.time() - 100}, "running", 0),
        ({"driver": DriverStatus(host="far", pid=1, pid_started=0.0)}, "running", 0),
        (
            {
                "driver": DriverStatus(host="far", pid=1, pid_started=0.0),
                "written": time.time() - 100,
            },
            "dead",
            3,
        ),
    ],
)
def test_state_of_a_run_on_ray(
    capsys: Any, tmp_path: Path, changes: dict[str, Any], state: str, code: int
):
    put_status(tmp_path, **changes)
    found = read(capsys, tmp_path, code=code)
    assert found["state"] == state
    assert changes.get("reason", "") in found["detail"]


def test_processes_of_a_dead_driver_are_not_shown_as_alive(capsys: Any, tmp_path: Path):
    put_status(tmp_path, driver=GONE)
    output = run_agentrl(capsys, "status", tmp_path)
    assert output.code == 3, output
    (rank,) = [line for line in output.out.splitlines() if line.startswith("rank_0")]
    assert "unknown" in rank


def test_start_without_ray_after_one_on_ray_is_the_one_that_is_shown(capsys: Any, tmp_path: Path):
    put_status(tmp_path, state="finished", written=time.time() - 100)
    make_start(tmp_path)
    with RunLock(tmp_path):
        assert read(capsys, tmp_path, code=0)["cluster"] is None


def test_without_a_folder_the_newest_run_is_shown(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    output = run_agentrl(capsys, "status")
    assert output.code == 2
    assert f"no run in {tmp_path}/runs" in output.err
    for name, age_s in (("old", 500), ("new", 0)):
        put_status(Path("runs") / name)
        os.utime(f"runs/{name}/logs/{STATUS_FILE}", (0, time.time() - age_s))
    output = run_agentrl(capsys, "status", "--json")
    assert json.loads(output.out)["folder"] == "runs/new"


def test_wrong_folder_names_the_runs_in_it(capsys: Any, tmp_path: Path):
    put_status(tmp_path / "mine")
    output = run_agentrl(capsys, "status", tmp_path)
    assert output.code == 2
    assert "is not the folder of a run" in output.err
    assert "runs_in_it: mine" in output.err
    output = run_agentrl(capsys, "status", tmp_path / "nowhere")
    assert (output.code, f"no folder {tmp_path}/nowhere" in output.err) == (2, True)


@pytest.mark.parametrize("name", [f"logs/{STATUS_FILE}", METRICS_FILE])
def test_damaged_file_is_named(capsys: Any, tmp_path: Path, name: str):
    put_status(tmp_path)
    (tmp_path / name).write_text('{"state": 1\n')
    output = run_agentrl(capsys, "status", tmp_path)
    assert output.code == 2
    assert name in output.err


def test_half_written_last_line_is_ignored(capsys: Any, tmp_path: Path):
    put_status(tmp_path)
    (tmp_path / METRICS_FILE).write_text('{"step": 6}\n{"step": 7, "rew')
    assert read(capsys, tmp_path, code=0)["step"] == 6
