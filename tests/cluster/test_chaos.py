"""kill -9 of a rank, a rollout worker, a server, a node and the driver at random instants.

`AGENTRL_CHAOS_INSTANTS` (default 1) is the number of instants of each kind; `make test-chaos` takes
five. `AGENTRL_CHAOS_SEED` repeats the instants of an earlier run, which prints its seed.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fakes.ray_nodes import (
    POOLS,
    SERVERS,
    Nodes,
    process_with_log,
    ray_nodes,
    wait_until,
)
from tests.fakes.runs import ROOT, read_lines, tiny_run, write_yaml

pytest.importorskip("ray")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
INSTANTS = int(os.environ.get("AGENTRL_CHAOS_INSTANTS", "1"))
SEED = int(os.environ.get("AGENTRL_CHAOS_SEED", random.SystemRandom().randrange(10**6)))
STEPS = 12
NODE_STEPS = 100
"""Steps of a run whose node is killed: its processes see the end of their raylet after seconds."""
LIMIT_S = 240.0
"""No run may take longer, whatever is killed."""
GONE_S = 30.0
"""After the end of a run, its processes have so long to end."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes for training."""
    with ray_nodes("train_node", "train_node") as nodes:
        yield nodes


class Run:
    """A run in a process of its own."""

    def __init__(
        self, nodes: Nodes, home: Path, folder: Path, steps: int = STEPS, **changes: Any
    ) -> None:
        self.folder, self.nodes, self.steps = folder, nodes, steps
        sections: dict[str, Any] = {
            "trainer__total_training_steps": steps,
            "trainer__save_freq": 1,
            "trainer__max_ckpt_to_keep": 2,
            "trainer__max_restarts": 1,
            "trainer__rollout_data_dir": str(folder / "rollouts"),
            "trainer__collective_timeout_s": 300,
            "cluster": {"address": nodes.address, "pools": POOLS, "heartbeat_timeout_s": 30},
        } | changes
        config = tiny_run(home, folder, **sections)
        self.file = write_yaml(folder.with_suffix(".yaml"), config)
        self.output = folder.with_suffix(".txt")
        self.process = self.start()

    def start(self) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "agentrl", "train", str(self.file)]
        with self.output.open("ab") as output:
            return subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)

    def victim(self, name: str) -> psutil.Process:
        log = self.folder / "logs" / f"{name}.log"
        return wait_until(lambda: process_with_log(log), seconds=LIMIT_S)

    def kill_node(self, name: str) -> None:
        """Kill the raylet of the node of a process."""
        raylet = self.victim(name).parent()
        assert raylet is not None
        assert "raylet" in raylet.name()
        raylet.kill()

    def wait_for_step(self) -> None:
        metrics = self.folder / "metrics.jsonl"

        def has_step() -> bool:
            assert self.process.poll() is None, self.output.read_text()
            return metrics.is_file() and bool(read_lines(metrics))

        wait_until(has_step, seconds=LIMIT_S)

    def wait(self) -> int:
        """Return the exit status. Nothing may be left after it."""
        try:
            status = self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it hangs: {self.output.read_text()}") from None
        deadline = time.monotonic() + GONE_S
        while left := self.nodes.processes():
            assert time.monotonic() < deadline, (left, self.output.read_text())
            time.sleep(0.1)
        return status

    def samples(self) -> Counter[tuple[int, str, int]]:
        """How often each sample was trained: (step, row, sample)."""
        found: Counter[tuple[int, str, int]] = Counter()
        for path in sorted((self.folder / "rollouts").glob("step_*.jsonl.zst")):
            for line in read_lines(path):
                request = line["request"]
                row = str(request["batch_data_id"])
                found[line["step"], row, request["rollout_offset"]] += 1
        return found

    def check_samples(self) -> None:
        """Every step has each of its samples once, and steps follow each other."""
        found = self.samples()
        assert set(found.values()) == {1}
        per_step = Counter(step for step, _, _ in found)
        assert per_step == dict.fromkeys(range(1, self.steps + 1), 8)
        steps = [line["step"] for line in read_lines(self.folder / "metrics.jsonl")]
        trained = [step for step in steps if step > 0]
        assert sorted(set(trained)) == list(range(1, self.steps + 1))
        assert len(trained) == len(set(trained))


@pytest.fixture(params=range(INSTANTS))
def instant(request: pytest.FixtureRequest) -> float:
    """Seconds after the first step at which a process is killed."""
    seconds = random.Random(f"{SEED} {request.node.name}").uniform(0, 1.2)
    print(f"AGENTRL_CHAOS_SEED={SEED}: killed {seconds:.2f} s after the first step")
    return seconds


@pytest.mark.slow
def test_a_killed_rank_costs_one_restart(
    nodes: Nodes, tiny_home: Path, tmp_path: Path, instant: float
):
    run = Run(nodes, tiny_home, tmp_path / "run")
    run.wait_for_step()
    time.sleep(instant)
    run.victim("rank_1").kill()
    assert run.wait() == 0, run.output.read_text()
    text = run.output.read_text()
    assert "training rank rank_1" in text
    assert "restart 1 of 1 from the last checkpoint" in text
    run.check_samples()


@pytest.mark.slow
def test_a_killed_rollout_worker_is_replaced_while_the_run_goes_on(
    nodes: Nodes, tiny_home: Path, tmp_path: Path, instant: float
):
    (pool,) = POOLS
    run = Run(
        nodes,
        tiny_home,
        tmp_path / "run",
        rollout__num_workers=2,
        trainer__max_restarts=0,
        cluster__pools=[pool | {"roles": ["train", "rollout"]}],
    )
    run.wait_for_step()
    time.sleep(instant)
    victim = run.victim("rollout_1")
    victim.kill()
    assert run.wait() == 0, run.output.read_text()
    assert "restart 1" not in run.output.read_text()
    run.check_samples()


@pytest.mark.slow
def test_the_run_goes_on_at_another_node_if_that_of_a_rank_is_killed(
    tiny_home: Path, tmp_path: Path, instant: float
):
    with ray_nodes("train_node", "train_node", "train_node") as three:
        run = Run(three, tiny_home, tmp_path / "run", NODE_STEPS)
        run.wait_for_step()
        time.sleep(instant)
        run.kill_node("rank_1")
        assert run.wait() == 0, run.output.read_text()
        assert "restart 1 of 1 from the last checkpoint" in run.output.read_text()
        run.check_samples()


@pytest.mark.slow
def test_a_run_ends_and_names_the_shortfall_if_no_node_replaces_a_killed_one(
    tiny_home: Path, tmp_path: Path, instant: float
):
    with ray_nodes("train_node", "train_node") as two:
        run = Run(two, tiny_home, tmp_path / "run", NODE_STEPS)
        run.wait_for_step()
        time.sleep(instant)
        run.kill_node("rank_1")
        assert run.wait() == 2, run.output.read_text()
        text = run.output.read_text()
        assert "pool train asks for 2 x (1 CPU, 0.1 train_node), and 1 of 2 nodes has it" in text
        assert "after: training rank" in text


@pytest.mark.slow
def test_a_silent_rank_is_ended_also_after_the_monitor_was_killed(
    nodes: Nodes, tiny_home: Path, tmp_path: Path
):
    cluster = {"address": nodes.address, "pools": POOLS, "heartbeat_timeout_s": 6}
    run = Run(nodes, tiny_home, tmp_path / "run", cluster=cluster | {"heartbeat_s": 1})
    run.wait_for_step()
    rank = run.victim("rank_1")
    os.kill(rank.pid, signal.SIGSTOP)
    (monitor,) = nodes.find("ray::Monitor")
    monitor.kill()
    assert run.wait() == 0, run.output.read_text()
    text = run.output.read_text()
    assert f"rank_1 (process {rank.pid}" in text
    assert "has sent no heartbeat for" in text
    assert "restart 1 of 1 from the last checkpoint" in text
    run.check_samples()


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_and_the_run_resumes(
    nodes: Nodes, tiny_home: Path, tmp_path: Path, instant: float
):
    run = Run(nodes, tiny_home, tmp_path / "run")
    run.wait_for_step()
    time.sleep(instant)
    run.process.kill()
    assert run.wait() == -signal.SIGKILL
    run.process = run.start()
    assert run.wait() == 0, run.output.read_text()
    run.check_samples()


def is_server(process: psutil.Process) -> bool:
    """Whether a process was started as an SGLang server."""
    return "agentrl.engines.sglang.processes" in process.cmdline()


@pytest.mark.sglang
@pytest.mark.parametrize("victim", ["server", "actor"])
def test_a_killed_sglang_server_is_replaced_while_the_run_goes_on(
    tiny_home: Path, tmp_path: Path, instant: float, victim: str
):
    with ray_nodes("train_node", "train_node", "serve_node") as three:
        run = Run(
            three,
            tiny_home,
            tmp_path / "run",
            trainer__max_restarts=0,
            rollout__engine={"name": "sglang_server"},
            cluster__pools=[*POOLS, SERVERS],
        )
        run.wait_for_step()
        time.sleep(instant)
        actor = run.victim("server_0")
        if victim == "server":
            (server,) = [one for one in actor.children() if is_server(one)]
            server.kill()
        else:
            actor.kill()
        assert run.wait() == 0, run.output.read_text()
        text = run.output.read_text()
        assert "was lost and replaced" in text, text
        assert "restart 1" not in text
        run.check_samples()
