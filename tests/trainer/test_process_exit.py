"""How a command ends, whatever the code of users does in its process."""

import subprocess
import sys
import time

import pytest


def spawn(*lines: str) -> "subprocess.CompletedProcess[str]":
    """Run a command of the library in a process in which a plug-in has done something."""
    source = "\n".join(
        [
            "import sys, threading, time, os, agentrl.trainer.process_exit as leaving",
            "from agentrl.cli import main",
            "from agentrl.cli.app import app",
            "leaving.MAX_WAIT_S = 0.1",
            *lines,
            "main()",
        ]
    )
    return subprocess.run(
        [sys.executable, "-c", source, "--version"], capture_output=True, text=True, timeout=30
    )


@pytest.mark.parametrize("code", [0, 3])
def test_a_thread_that_never_ends_holds_up_no_finished_command(code: int):
    started = time.monotonic()
    done = spawn(
        "threading.Thread(target=time.sleep, args=(60,), name='of a tool').start()",
        f"import agentrl.cli as cli; cli._run = lambda _: sys.exit({code})",
    )
    assert time.monotonic() - started < 20
    assert done.returncode == code
    assert "threads that do not end: of a tool" in done.stderr


def test_a_command_with_ended_threads_prints_nothing_about_them():
    done = spawn("threading.Thread(target=time.sleep, args=(0.01,)).start()")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("agentrl ")


@pytest.mark.parametrize(("code", "seen"), [(0, 1), (7, 7)])
def test_a_plug_in_that_ends_the_process_does_not_look_like_success(code: int, seen: int):
    done = spawn(f"import agentrl.cli as cli; cli._run = lambda _: os._exit({code})")
    assert done.returncode == seen
    assert ("os._exit(0)" in done.stderr) == (code == 0)


def test_a_copy_of_the_process_may_end_as_it_likes():
    done = spawn(
        "def run(_):",
        "    pid = os.fork()",
        "    if pid == 0: os._exit(0)",
        "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
        "import agentrl.cli as cli; cli._run = run",
    )
    assert (done.returncode, done.stderr) == (0, "")
