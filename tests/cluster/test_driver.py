"""Runs on Ray, each on a cluster of its own on this machine: results, Ctrl-C, lost processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file

from agentrl.commands.status import show_status
from tests.fakes.ray_nodes import POOLS, ray_nodes, wait_until
from tests.fakes.runs import ROOT, read_lines, tiny_run, write_yaml
from tests.fakes.torchrun import ranks_of

pytest.importorskip("ray")

SCORES = """
import os, pathlib, time

HERE = pathlib.Path(__file__).parent


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if os.environ.get("RANK") == "1" and (HERE / "armed").exists():
        (HERE / "reached").touch()
        {deed}
    return float(len(solution_str) % 5)
"""
KILL_ONCE = "(HERE / 'armed').unlink(); os.kill(os.getpid(), 9)"
CLOCKS = ("timing_s/", "perf/", "weight_sync/")


def without_clocks(value: Any) -> Any:
    """Return a value of a rollout file without the seconds in it."""
    if isinstance(value, dict):
        clean = {key: without_clocks(item) for key, item in value.items()}
        return {key: item for key, item in clean.items() if "second" not in key}
    return [without_clocks(item) for item in value] if isinstance(value, list) else value


def run_file(home: Path, folder: Path, *, deed: str = "pass", **changes: Any) -> Path:
    (folder / "score.py").write_text(SCORES.format(deed=deed))
    run = tiny_run(
        home,
        folder / "run",
        **{
            "rollout__deterministic": True,
            "rollout__n": 3,
            "reward__custom_reward_function": {"path": f"{folder}/score.py"},
            "trainer__val_before_train": False,
            "trainer__save_freq": 1,
            "trainer__n_gpus_per_node": 2,
            "trainer__collective_timeout_s": 60,
            "cluster__address": "local",
            "cluster__object_store_bytes": 100_000_000,
            "cluster__heartbeat_s": 0.5,
        }
        | changes,
    )
    return write_yaml(folder / "run.yaml", run)


@pytest.fixture
def ray_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A short path for Ray's sockets; its processes have it on their command lines."""
    folder = Path(f"/tmp/rt-{os.getpid()}-{time.time_ns() % 10**6}")
    folder.mkdir()
    yield folder
    left = processes_of(folder)
    for process in left:
        process.kill()
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def processes_of(folder: Path) -> list[psutil.Process]:
    """The processes that inherited Ray's folder of one test."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == str(folder):
                found.append(process)
        except psutil.Error:
            pass
    return found


def spawn(file: Path, ray_folder: Path, *changes: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "agentrl", "train", str(file), *changes],
        cwd=ROOT,
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_TMPDIR": str(ray_folder),
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def await_file(file: Path, process: "subprocess.Popen[str]", timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not file.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, f"{file} never came"
        time.sleep(0.05)


def await_none(folder: Path, timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while left := processes_of(folder):
        assert time.monotonic() < end, [one.cmdline() for one in left]
        time.sleep(0.2)


def status_of(folder: Path, *, code: int) -> dict[str, Any]:
    """What `agentrl status` reports."""
    texts: list[str] = []
    assert show_status(folder, as_json=True, say=texts.append) == code
    return json.loads(texts[0])


@pytest.mark.slow
def test_two_ranks_on_ray_end_with_the_weights_of_torchrun(
    tiny_home: Path, tmp_path: Path, ray_folder: Path
):
    file = run_file(tiny_home, tmp_path, rollout__num_workers=1)
    process = spawn(file, ray_folder)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, out + err
    other = f"trainer.default_local_dir={tmp_path}/other"
    with ranks_of("agentrl", "train", str(file), other) as ranks:
        outputs = [rank.wait() for rank in ranks]
    assert [rank.code for rank in outputs] == [0, 0], outputs
    folders = (tmp_path / "run", tmp_path / "other")
    one, two = (load_file(folder / "trained/model.safetensors") for folder in folders)
    assert all(torch.equal(one[name], two[name]) for name in one)
    one, two = (read_lines(folder / "metrics.jsonl") for folder in folders)
    for of_one, of_two in zip(one, two, strict=True):
        names = [name for name in of_one if not name.startswith(CLOCKS) and "seconds" not in name]
        assert {name: of_one[name] for name in names} == {name: of_two[name] for name in names}
    for line in read_lines(tmp_path / "run/metrics.jsonl"):
        shares = {name: line[name] for name in line if name.startswith("perf/pool/main/")}
        busy = shares.pop("perf/pool/main/busy_frac")
        assert 0.5 < busy <= 1
        assert busy == pytest.approx(sum(shares.values()))
        assert line["perf/rollout_workers/sent_bytes"] > 1000
        assert line["perf/rollout_workers/received_bytes"] > 1000
    assert "2 steps in" in out
    assert "pool main: 1 node x 3 CPU" in out
    assert "2 steps in" in (tmp_path / "run/logs/rank_0.log").read_text()
    assert (tmp_path / "run/logs/rank_1.log").exists()
    shown = status_of(tmp_path / "run", code=0)
    assert (shown["state"], shown["step"], shown["total_steps"]) == ("finished", 2, 2)
    ranks = shown["cluster"]["processes"]
    assert [(one["name"], one["pool"], one["state"]) for one in ranks] == [
        ("rank_0", "main", "ended"), ("rank_1", "main", "ended"), ("rollout_0", "main", "ended"),
    ]  # fmt: skip
    assert shown["cluster"]["nodes"][0]["is_alive"]
    await_none(ray_folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ranks_and_workers_on_three_nodes_train_on_the_batches_of_torchrun(
    tiny_home: Path, tmp_path: Path
):
    """Ranks on two nodes, a worker on each of three. Under torchrun ranks run their requests."""
    workers = {
        "name": "workers", "devices_per_node": 0, "roles": ["rollout"],
        "resources": {"worker_node": 0.1},
    }  # fmt: skip
    with ray_nodes("train_node", "train_node", "worker_node") as nodes:
        file = run_file(
            tiny_home,
            tmp_path,
            cluster__address=nodes.address,
            cluster__pools=[POOLS[0] | {"roles": ["train", "rollout"]}, workers],
            rollout__num_workers=3,
            trainer__rollout_data_dir=str(tmp_path / "rollouts"),
        )
        done = subprocess.run(
            [sys.executable, "-m", "agentrl", "train", str(file)],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        wait_until(lambda: not nodes.processes(), seconds=30)
    logs = {log.name for log in (tmp_path / "run/logs").glob("*.log")}
    assert logs == {"rank_0.log", "rank_1.log", *(f"rollout_{index}.log" for index in range(3))}
    others = (
        f"trainer.default_local_dir={tmp_path}/other",
        f"trainer.rollout_data_dir={tmp_path}/other_rollouts",
    )
    with ranks_of("agentrl", "train", str(file), *others) as ranks:
        outputs = [rank.wait() for rank in ranks]
    assert [rank.code for rank in outputs] == [0, 0], outputs
    for step in (1, 2):
        name = f"step_{step:06d}.jsonl.zst"
        one, two = (
            [without_clocks(line) for line in read_lines(tmp_path / folder / name)]
            for folder in ("rollouts", "other_rollouts")
        )
        assert len(one) == 12
        assert one == two
    folders = (tmp_path / "run", tmp_path / "other")
    one, two = (load_file(folder / "trained/model.safetensors") for folder in folders)
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "send"),
    [(signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill), (signal.SIGTERM, os.killpg)],
    ids=["ctrl-c", "sigterm", "sigterm to the process group"],
)
def test_ctrl_c_saves_the_last_step_and_leaves_no_process(
    tiny_home: Path,
    tmp_path: Path,
    ray_folder: Path,
    number: signal.Signals,
    send: Callable[[int, int], None],
):
    file = run_file(tiny_home, tmp_path, deed="time.sleep(0.5)", trainer__save_freq=-1,
                    trainer__total_training_steps=50)  # fmt: skip
    process = spawn(file, ray_folder)
    await_file(tmp_path / "run/metrics.jsonl", process)
    while not (tmp_path / "run/metrics.jsonl").stat().st_size:  # the first step is not complete
        assert process.poll() is None
        time.sleep(0.05)
    send(process.pid, number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "interrupted" in out
    assert [path.name[:11] for path in (tmp_path / "run/checkpoints").iterdir()] == ["global_step"]
    await_none(ray_folder)


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_ranks(
    tiny_home: Path, tmp_path: Path, ray_folder: Path
):
    file = run_file(tiny_home, tmp_path, deed="os.kill(os.getpid(), 19)")  # SIGSTOP
    (tmp_path / "armed").touch()
    process = spawn(file, ray_folder, "cluster.stop_timeout_s=150")
    await_file(tmp_path / "reached", process)
    process.send_signal(signal.SIGINT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, out + err
    await_none(ray_folder)


@pytest.mark.slow
def test_a_lost_rank_ends_the_run_and_is_named_with_its_log(
    tiny_home: Path, tmp_path: Path, ray_folder: Path
):
    file = run_file(tiny_home, tmp_path, deed=KILL_ONCE)
    (tmp_path / "armed").touch()
    process = spawn(file, ray_folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, out + err
    assert "error: training rank rank_1 (process" in err
    assert "last_lines" in err
    assert "trainer.max_restarts=0" in err
    await_none(ray_folder)


@pytest.mark.slow
def test_a_lost_rank_is_replaced_and_the_run_resumes(
    tiny_home: Path, tmp_path: Path, ray_folder: Path
):
    # The second rank scores six rollouts of a step: it dies in the second step.
    deed = (
        "calls = HERE / 'calls'; calls.open('a').write('x')\n"
        "        if calls.stat().st_size >= 8: " + KILL_ONCE.replace("()", "(missing_ok=True)", 1)
    )
    file = run_file(tiny_home, tmp_path, deed=deed, trainer__max_restarts=1)
    (tmp_path / "armed").touch()
    process = spawn(file, ray_folder)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert "restart 1 of 1 from the last checkpoint" in out
    ranks = status_of(tmp_path / "run", code=0)["cluster"]["processes"]
    assert [one["restarts"] for one in ranks] == [1, 1]
    assert "resumed from" in out
    assert [line["step"] for line in read_lines(tmp_path / "run/metrics.jsonl")] == [1, 2]
    await_none(ray_folder)


@pytest.mark.slow
def test_a_killed_driver_leaves_no_process(tiny_home: Path, tmp_path: Path, ray_folder: Path):
    deed = "import subprocess; subprocess.Popen(['sleep', '1000'], start_new_session=True)"
    file = run_file(tiny_home, tmp_path, deed=f"{deed}; time.sleep(30)")
    (tmp_path / "armed").touch()
    process = spawn(file, ray_folder)
    await_file(tmp_path / "reached", process)
    assert len(processes_of(ray_folder)) > 3
    shown = status_of(tmp_path / "run", code=0)
    assert (shown["state"], shown["pid"]) == ("running", process.pid)
    assert shown["snapshot_age_s"] < 10
    assert {one["state"] for one in shown["cluster"]["processes"]} == {"alive"}
    process.kill()
    process.communicate()
    assert status_of(tmp_path / "run", code=3)["state"] == "dead"
    await_none(ray_folder, timeout_s=60)


@pytest.mark.slow
def test_an_error_of_a_rank_is_printed_once_and_keeps_its_exit_code(
    tiny_home: Path, tmp_path: Path, ray_folder: Path
):
    file = run_file(tiny_home, tmp_path, data__max_prompt_length=8)
    process = spawn(file, ray_folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 2, out + err
    assert out.count("error:") == 1, out
    assert "Traceback" not in out + err
    await_none(ray_folder)


@pytest.mark.slow
def test_more_nodes_than_the_cluster_has_are_refused_at_once(
    tiny_home: Path, tmp_path: Path, ray_folder: Path
):
    file = run_file(tiny_home, tmp_path, trainer__nnodes=3)
    process = spawn(file, ray_folder)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2, out + err
    assert "pool main asks for 3 x (2 CPU), and 1 of 1 nodes has it" in err
    assert "fewer resources" in status_of(tmp_path / "run", code=1)["detail"]
    await_none(ray_folder)
