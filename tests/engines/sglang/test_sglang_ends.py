"""How SGLang in a process's keep ends: told to, killed, or with its process."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.fakes.engines import tiny_model
from tests.fakes.sglang_policy import save_policy

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

SCRIPT = """
import asyncio, os, signal, subprocess, sys
import psutil
from agentrl.engines.protocol import SamplingParams
from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from agentrl.errors import EngineError
from tests.fakes.sglang_policy import letter_tokenizer

def main(folder, way):
    needs = SGLangNeeds(model_path=folder, max_model_len=256, max_requests=8, dtype="float32")
    bystander = subprocess.Popen(["sleep", "600"])
    engine = SGLangEngine.start(needs, letter_tokenizer())
    print("pids", *engine._host.pids, flush=True)
    asyncio.run(run(engine, way))
    assert bystander.poll() is None, "SGLang ended a process that is not its own"
    bystander.kill()
    bystander.wait()

async def run(engine, way):
    endless = SamplingParams(max_new_tokens=200, temperature=3.0)
    call = asyncio.create_task(engine.generate([1, 2, 3], endless, request_id="a"))
    await asyncio.sleep(0.1)
    if way == "wait":
        print("waiting", flush=True)
        await asyncio.sleep(600)
    if way == "kill":
        psutil.Process(engine._host.pids[0]).kill()
    if way == "close":
        await engine.close()
    for work in (call, engine.generate([1], endless, request_id="b")):
        try:
            await work
        except EngineError as error:
            print("error", error.args[0], flush=True)
    await engine.close()
    await engine.close()

if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.fixture
def start(tmp_path: Path):
    folder = save_policy(tiny_model(), tmp_path / "policy")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    started: list[subprocess.Popen[str]] = []

    def run(way: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, str(script), str(folder), way],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        with process:  # closes its pipe
            process.kill()


def pids_of(process: subprocess.Popen[str]) -> list[int]:
    assert process.stdout is not None
    word, *pids = process.stdout.readline().split()
    assert word == "pids"
    assert len(pids) >= 2
    return [int(pid) for pid in pids]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline, "processes of SGLang are left behind"
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("way", "message"), [("close", "the engine was closed"), ("kill", "has ended unexpectedly")]
)
def test_engine_that_ends_fails_its_calls_and_leaves_no_process(start, way: str, message: str):
    process = start(way)
    pids = pids_of(process)
    out, _ = process.communicate(timeout=200)
    errors = [line for line in out.splitlines() if line.startswith("error")]
    assert process.returncode == 0
    assert len(errors) == 2
    assert all(message in error for error in errors)
    wait_until_gone(pids)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_process_that_ends_takes_its_engine_along(start, how: signal.Signals):
    process = start("wait")
    pids = pids_of(process)
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(how)
    process.wait(timeout=60)
    wait_until_gone(pids)
