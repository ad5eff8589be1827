# pyright: reportIncompatibleMethodOverride=false
"""Where tools run: a tool that blocks or never returns costs its own call."""

import asyncio
import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentrl.errors import ConfigError
from agentrl.messages import CallOutcome
from agentrl.plugins import load_class
from agentrl.plugins.watchdog import LoopWatchdog
from agentrl.tools import BaseTool
from agentrl.tools.runtime.instance import ToolSettings
from agentrl.tools.runtime.process import _Worker
from agentrl.tools.runtime.session import ToolSession
from tests.fakes.tools import BlockingTool, CountingProcessTool, call, schema
from tests.plugins.test_call import Clock


def session_of(tool: BaseTool, **kwargs: Any) -> ToolSession:
    return ToolSession({tool.name: tool}, instance_id="r", **kwargs)


async def longest_silence(of: "asyncio.Future[Any]") -> float:
    """Return for how long the event loop was held up, at most, until a future is done."""
    longest = last = 0.0
    last = time.monotonic()
    while not of.done():
        await asyncio.sleep(0.005)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


async def test_blocking_code_on_a_thread_delays_no_other_and_times_out():
    tool = BlockingTool({"isolation": "thread", "block_s": 0.5})
    running = asyncio.ensure_future(
        session_of(tool, timeout_s=0.2).execute([call("blocking", i) for i in range(2)])
    )
    silence = await longest_silence(running)
    outcomes = running.result()
    assert [o.outcome for o in outcomes] == [CallOutcome.TIMEOUT] * 2
    assert max(o.seconds for o in outcomes) < 0.45
    assert silence < 0.4, "less than the half second that the tool blocks"


BROKEN = """
import json
from agentrl.tools import BaseTool

class Broken(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return self.load("{")

    def load(self, text):
        return json.loads(text)
"""


@pytest.mark.parametrize("isolation", ["none", "thread", "process"])
async def test_a_crash_is_reported_with_its_request_and_the_users_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, isolation: str
):
    source = tmp_path / "my_tools.py"
    source.write_text(BROKEN)
    caplog.set_level(logging.INFO, "agentrl.tools.runtime.instance")
    tool = load_class(f"{source}:Broken", BaseTool)({"isolation": isolation}, schema("broken"))
    session = session_of(tool, timeout_s=20)
    await session.create()
    [outcome] = await session.execute([call("broken")])
    await session.release()
    assert outcome.outcome is CallOutcome.CRASHED
    [message] = [
        r.getMessage() for r in caplog.records if r.name == "agentrl.tools.runtime.instance"
    ]
    assert message.startswith("request r, tool 'broken', call call_0: ")
    assert "JSONDecodeError" in message
    assert "my_tools.py:10" in message
    assert 'my_tools.py", line 10, in load' in outcome.traceback
    assert outcome.traceback.count("JSONDecodeError") >= 1
    assert "my_tools" not in (outcome.response.text or "")


async def test_a_thread_that_awaits_for_ever_is_ended():
    class Waiting(BaseTool):
        ended = threading.Event()

        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> str:
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.set()
            return ""

    tool = Waiting({"isolation": "thread"}, schema("waiting"))
    [outcome] = await session_of(tool, timeout_s=0.1).execute([call("waiting")])
    assert outcome.outcome is CallOutcome.TIMEOUT
    assert Waiting.ended.wait(2)


async def test_a_plain_def_runs_off_the_loop_and_its_abandoned_thread_frees_its_place():
    class Plain(BaseTool):
        def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> str:
            time.sleep(parameters["seconds"])
            return str(threading.current_thread().daemon)

    tool = Plain({}, schema("plain"))
    session = session_of(tool, timeout_s=0.15, max_parallel_calls=1)
    outcomes = await session.execute([call("plain", 0, seconds=0.6), call("plain", 1, seconds=0.0)])
    assert [o.outcome for o in outcomes] == [CallOutcome.TIMEOUT, CallOutcome.OK]
    assert outcomes[1].response.text == "True"


async def test_the_watchdog_names_the_tool_that_blocks_the_loop(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    tool = BlockingTool({"block_s": 0.25})
    with LoopWatchdog(threshold_s=0.08) as watchdog:
        await asyncio.sleep(0.03)
        await session_of(tool).execute([call("blocking"), call("blocking", 1)])
    assert watchdog.blocked_s["tool:blocking"] > 0.08
    warnings = [
        r.getMessage() for r in caplog.records if "blocked the event loop" in r.getMessage()
    ]
    assert len(warnings) == 1
    assert warnings[0].startswith("tool:blocking ")
    assert "tools.py" in warnings[0]


async def test_the_watchdog_blames_no_tool_for_what_is_not_its_doing():
    with LoopWatchdog(threshold_s=0.05) as watchdog:
        await asyncio.sleep(0.02)
        time.sleep(0.15)  # noqa: ASYNC251 - the loop is to be blocked
        await asyncio.sleep(0.02)
    assert watchdog.blocked_s == {}


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="threads start by another function")
async def test_the_watchdog_blames_no_tool_for_a_thread_that_starts_late(
    monkeypatch: pytest.MonkeyPatch,
):
    class Plain(BaseTool):
        def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> str:
            return ""

    real = threading._start_new_thread  # pyright: ignore[reportAttributeAccessIssue]

    def late(function: Any, arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            return real(function, arguments)
        return real(lambda *given: (time.sleep(0.2), function(*given)), arguments)

    with LoopWatchdog(threshold_s=0.05) as watchdog:
        monkeypatch.setattr(threading, "_start_new_thread", late)
        [done] = await session_of(Plain({}, schema("plain"))).execute([call("plain")])
        monkeypatch.undo()
    assert done.outcome is CallOutcome.OK
    assert watchdog.blocked_s == {}


async def test_the_watchdog_blames_no_tool_for_the_work_of_many():
    class Brief(BaseTool):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> str:
            time.sleep(0.01)  # noqa: ASYNC251 - a little work of its own
            return ""

    tool = Brief({}, schema("brief"))
    with LoopWatchdog(threshold_s=0.1) as watchdog:
        await asyncio.sleep(0.02)
        sessions = [session_of(tool) for _ in range(40)]  # one turn of the loop, 0.4 s long
        await asyncio.gather(*(session.execute([call("brief")]) for session in sessions))
    assert watchdog.blocked_s == {}


def life_of(log: Path) -> list[str]:
    return log.read_text().split()


async def test_a_process_keeps_its_state_from_create_to_release(tmp_path: Path):
    log = tmp_path / "log"
    tool = CountingProcessTool({"isolation": "process", "log": str(log)})
    kwargs = {"counting": {"create_kwargs": {"start": 10}}}
    session = session_of(tool, tools_kwargs=kwargs)
    await session.create()
    outcomes = await session.execute([call("counting", i) for i in range(3)])
    assert sorted(o.response.text or "" for o in outcomes) == ["11", "12", "13"]
    assert await session.calc_rewards() == {"counting": 13.0}
    assert await session.release() == []
    assert tool.counts == {}, "the run's own object is untouched"
    assert life_of(log) == ["create", "execute", "execute", "execute", "release"]


SLOW_TO_BUILD = """
import subprocess, time
from agentrl.tools import BaseTool

class Slow(BaseTool):
    def __init__(self, config, tool_schema=None):
        super().__init__(config, tool_schema)
        time.sleep(config["build_s"])

    def execute(self, instance_id, parameters, **kwargs):
        return subprocess.check_output(["bash", "-c", "trap -p PIPE XFSZ; echo 1"], text=True)
"""


@pytest.mark.parametrize("is_lost", [False, True])
async def test_a_tool_is_built_in_its_process_in_a_time_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_lost: bool
):
    """As one that loads a model; the programs that it starts handle signals by default."""
    (source := tmp_path / "slow.py").write_text(SLOW_TO_BUILD)
    config = {"isolation": "process", "timeout_s": 60, "build_s": 0.0}
    tool = load_class(f"{source}:Slow", BaseTool)(config, schema("slow"))
    clock, start = Clock(monkeypatch), _Worker.start

    def start_slowly(worker: _Worker) -> None:
        asyncio.run(clock.move(100))
        start(worker)

    monkeypatch.setattr(_Worker, "start", start_slowly)
    session = session_of(tool)
    await session.create()
    if is_lost:
        await vars(vars(session)["_instances"]["slow"])["_executor"].close()
    [outcome] = await session.execute([call("slow")])
    assert (outcome.outcome, outcome.response.text) == (CallOutcome.OK, "1\n")
    assert await session.release() == []


async def test_a_process_that_never_returns_is_killed_and_made_again(tmp_path: Path):
    log = tmp_path / "log"
    tool = CountingProcessTool({"isolation": "process", "log": str(log), "timeout_s": 2})
    session = session_of(tool)
    await session.create()
    [spun] = await session.execute([call("counting", do="spin")])
    [after] = await session.execute([call("counting")])
    assert spun.outcome is CallOutcome.TIMEOUT
    assert 2 <= spun.seconds < 60
    assert (after.outcome, after.response.text) == (CallOutcome.OK, "1")
    assert await session.release() == []
    assert life_of(log).count("create") == life_of(log).count("release") == 2
    assert not _children_named("tool:counting")


@pytest.mark.parametrize(
    ("do", "outcome", "text"),
    [
        ("tool_error", CallOutcome.TOOL_ERROR, "not so"),
        ("own_tool_error", CallOutcome.TOOL_ERROR, "no key 3 in stars"),
        ("raise", CallOutcome.CRASHED, "Error executing tool 'counting': internal error"),
        ("unpicklable", CallOutcome.CRASHED, "Error executing tool 'counting': internal error"),
        ("die", CallOutcome.CRASHED, "Error executing tool 'counting': internal error"),
        ("be_killed", CallOutcome.CRASHED, "Error executing tool 'counting': internal error"),
        ("take_all_memory", CallOutcome.CRASHED, "Error executing tool 'counting': internal error"),
    ],
)
async def test_what_happens_in_a_process_comes_out_of_it(
    tmp_path: Path, do: str, outcome: CallOutcome, text: str
):
    tool = CountingProcessTool({"isolation": "process", "log": str(tmp_path / "log")})
    session = session_of(tool)
    await session.create()
    [first] = await session.execute([call("counting", do=do)])
    [second] = await session.execute([call("counting")])
    assert (first.outcome, first.response.text) == (outcome, text)
    assert second.response.text == "1"
    assert await session.release() == []


async def test_a_tool_error_of_users_own_is_not_repeated_in_a_process(tmp_path: Path):
    log = tmp_path / "log"
    retry = {"max_attempts": 3, "wait_initial_s": 0.0, "wait_jitter_s": 0.0}
    tool = CountingProcessTool({"isolation": "process", "log": str(log), "retry": retry})
    session = session_of(tool)
    await session.create()
    [outcome] = await session.execute([call("counting", do="own_tool_error")])
    await session.release()
    assert outcome.num_attempts == life_of(log).count("execute") == 1


async def test_cancelling_a_request_kills_its_process_and_releases(tmp_path: Path):
    log = tmp_path / "log"
    tool = CountingProcessTool({"isolation": "process", "log": str(log)})
    session = session_of(tool)
    await session.create()
    running = asyncio.create_task(session.execute([call("counting", do="spin")]))
    while "execute" not in life_of(log):  # noqa: ASYNC110 - written by another process
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    [failure] = await session.release()
    assert "KeyError" in str(failure), "the new process never saw create"
    assert life_of(log) == ["create", "execute", "release"]
    assert not _children_named("tool:counting")


async def test_a_tool_from_a_file_finds_its_way_into_a_process(tmp_path: Path):
    source = tmp_path / "my_tool.py"
    source.write_text(
        "import os\n"
        "from agentrl.tools import BaseTool\n"
        "class Mine(BaseTool):\n"
        "    async def execute(self, instance_id, parameters):\n"
        "        return str(os.getpid())\n"
    )
    tool = load_class(f"{source}:Mine", BaseTool)({"isolation": "process"}, schema("mine"))
    session = session_of(tool)
    await session.create()
    [outcome] = await session.execute([call("mine")])
    await session.release()
    assert outcome.outcome is CallOutcome.OK
    assert outcome.response.text != str(os.getpid())


@pytest.mark.parametrize(
    ("config", "key"), [({"isolation": "jail"}, "isolation"), ({"timeout_s": 0}, "timeout_s")]
)
def test_a_setting_that_cannot_be_meant_names_its_key(config: dict[str, Any], key: str):
    with pytest.raises(ConfigError) as error:
        ToolSettings.check(config, file="tools.yaml", key="tools[0].config")
    assert error.value.details["key"] == f"tools[0].config.{key}"


async def test_a_process_gives_its_descriptors_back_at_once(tmp_path: Path):
    tool = CountingProcessTool({"isolation": "process", "log": str(tmp_path / "log")})

    async def live(do: str) -> None:
        session = session_of(tool, timeout_s=0.3)
        await session.create()
        await session.execute([call("counting", do=do)])
        await session.release()

    await live("count")
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        for do in ("count", "raise", "die", "spin"):
            await live(do)
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()


def test_a_process_that_is_killed_before_it_starts_never_does(tmp_path: Path):
    tool = CountingProcessTool({"isolation": "process", "log": str(tmp_path / "log")})
    before = len(os.listdir("/proc/self/fd"))
    worker = _Worker(tool)
    worker.kill()
    worker.start()
    assert not _children_named("tool:counting")
    assert len(os.listdir("/proc/self/fd")) == before


async def test_a_copy_that_a_tool_forks_does_not_answer_for_it(tmp_path: Path):
    source = tmp_path / "forking.py"
    source.write_text(FORKING)
    tool = load_class(f"{source}:Forking", BaseTool)({"isolation": "process"}, schema("forking"))
    session = session_of(tool, timeout_s=20)
    await session.create()
    answers: list[str | None] = []
    for index in range(3):
        [outcome] = await session.execute([call("forking", index)])
        answers.append(outcome.response.text)
        await asyncio.sleep(0.1)  # the copy has come to its end
    await session.release()
    assert answers == ["call 1 of the tool", "call 2 of the tool", "call 3 of the tool"]


FORKING = """
import os
from agentrl.tools import BaseTool

class Forking(BaseTool):
    num_calls = 0

    async def execute(self, instance_id, parameters, **kwargs):
        self.num_calls += 1
        is_copy = os.fork() == 0
        return f"call {self.num_calls} of the {'copy' if is_copy else 'tool'}"
"""


def test_the_main_module_is_imported_once_for_all_processes(tmp_path: Path):
    script = tmp_path / "main.py"
    script.write_text(
        "import asyncio, os\n"
        "from pathlib import Path\n"
        "from agentrl.tools.runtime.session import ToolSession\n"
        "from tests.fakes.tools import CountingProcessTool, call\n"
        "async def live(folder, name):\n"
        "    tool = CountingProcessTool({'isolation': 'process', 'log': folder + '/log'})\n"
        "    session = ToolSession({'counting': tool}, instance_id=name)\n"
        "    await session.create()\n"
        "    [outcome] = await session.execute([call('counting')])\n"
        "    await session.release()\n"
        "    print(outcome.outcome)\n"
        "async def main(folder):\n"
        "    for name in 'abc':\n"
        "        await live(folder, name)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main(os.environ['FOLDER']))\n"
        "else:\n"
        "    Path(os.environ['FOLDER'], 'imports').open('a').write('x')\n"
    )
    root = str(Path(__file__).resolve().parents[3])
    environment = os.environ | {"FOLDER": str(tmp_path), "PYTHONPATH": root}
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["ok"] * 3
    assert (tmp_path / "imports").read_text() == "x"


def _children_named(name: str) -> list[Any]:
    return [child for child in multiprocessing.active_children() if child.name == name]


def test_no_tool_outlives_a_trainer_that_was_killed() -> None:
    code = (
        "import asyncio, os\n"
        "from agentrl.tools.runtime.session import ToolSession\n"
        "from tests.fakes.tools import CountingProcessTool, call\n"
        "async def main():\n"
        "    tool = CountingProcessTool({'isolation': 'process', 'log': os.devnull})\n"
        "    session = ToolSession({tool.name: tool}, instance_id='r', timeout_s=100.0)\n"
        "    await session.create()\n"
        "    print('up', flush=True)\n"
        "    await session.execute([call(tool.name, do='spin')])\n"
        "if __name__ == '__main__': asyncio.run(main())\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "up\n"
        time.sleep(0.5)
        children = psutil.Process(trainer.pid).children(recursive=True)
        trainer.kill()
    assert len(children) >= 3
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
