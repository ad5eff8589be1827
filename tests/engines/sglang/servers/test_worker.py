"""One server of a cluster: its address, its log, and that it ends with its process."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.servers.launch import ServeOptions, ServerPlan
from agentrl.engines.sglang.servers.worker import ServerWorker
from tests.fakes.serve_command import are_gone
from tests.fakes.sglang_server_process import FakePlan, plan_fakes

NEEDS = SGLangNeeds(model_path="none", max_model_len=100, max_requests=1)


def wait_for(condition: Callable[[], Any], *, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def ended() -> list[str]:
    return []


@pytest.fixture
def make_worker(tmp_path: Path, ended: list[str]) -> Iterator[Callable[..., ServerWorker]]:
    workers: list[ServerWorker] = []

    def make(**settings: Any) -> ServerWorker:
        chosen = {"plan": plan_fakes, "on_end": ended.append} | settings
        worker = ServerWorker(host="127.0.0.1", log_path=tmp_path / "logs/server-0.log", **chosen)
        workers.append(worker)
        return worker

    yield make
    for worker in workers:
        worker.end()


@pytest.fixture
def children() -> Callable[[], list[psutil.Process]]:
    """The processes that this test has started; others may be from earlier tests."""
    earlier = {process.pid for process in psutil.Process().children()}
    return lambda: [one for one in psutil.Process().children() if one.pid not in earlier]


def test_it_reports_its_address_when_it_answers_and_ends_without_a_report(
    make_worker: Callable[..., ServerWorker],
    ended: list[str],
    children: Callable[[], list[psutil.Process]],
):
    worker = make_worker()
    assert not worker.report().has_needs
    worker.start(NEEDS)
    worker.start(NEEDS)
    assert worker.report().problem == "it is starting"
    wait_for(lambda: worker.report().address)
    assert worker.log_lines() == ("the fake server answers",)
    [process] = children()
    worker.end()
    assert are_gone([process])
    assert worker.report().address is None
    assert not ended


def test_a_killed_server_is_reported_with_the_last_lines_of_its_log(
    make_worker: Callable[..., ServerWorker],
    ended: list[str],
    children: Callable[[], list[psutil.Process]],
):
    worker = make_worker()
    worker.start(NEEDS)
    wait_for(lambda: worker.report().address)
    [process] = children()
    process.kill()
    wait_for(lambda: ended)
    report = worker.report()
    assert report.address is None
    assert "ended with -9" in report.problem
    assert report.log_lines == ("the fake server answers",)


class BrokenPlan(FakePlan):
    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", "import sys; sys.exit('no memory for the weights')"]


def plan_broken(needs: SGLangNeeds, options: ServeOptions) -> list[ServerPlan]:
    return [BrokenPlan(host="127.0.0.1", port=1, arguments={})]


def test_a_server_that_does_not_start_reports_why(
    make_worker: Callable[..., ServerWorker], ended: list[str]
):
    worker = make_worker(plan=plan_broken)
    worker.start(NEEDS)
    wait_for(lambda: ended)
    assert "did not start" in ended[0]
    assert worker.report().log_lines == ("no memory for the weights",)


def test_a_server_that_is_late_is_ended(
    make_worker: Callable[..., ServerWorker],
    ended: list[str],
    children: Callable[[], list[psutil.Process]],
):
    worker = make_worker(start_timeout_s=0.01)
    worker.start(NEEDS)
    wait_for(lambda: ended)
    assert "was not ready after 0.01 s" in ended[0]
    assert not children()


@pytest.mark.slow
def test_a_server_ends_with_a_process_that_is_killed(tmp_path: Path):
    script = f"""
        import time
        from pathlib import Path
        from tests.engines.sglang.servers.test_worker import NEEDS, plan_fakes
        from agentrl.engines.sglang.servers.worker import ServerWorker
        worker = ServerWorker(
            host="127.0.0.1", log_path=Path({str(tmp_path / "log")!r}), plan=plan_fakes
        )
        worker.start(NEEDS)
        while worker.report().address is None:
            time.sleep(0.05)
        print("ready", flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        servers = psutil.Process(process.pid).children(recursive=True)
        assert servers
        os.kill(process.pid, signal.SIGKILL)
    assert are_gone(servers)
