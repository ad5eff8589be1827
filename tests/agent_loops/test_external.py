"""External agents: what they get, how they end, and that they lose nothing but their own request.

The agents here are small programs of the standard library, so that a test starts many of them.
"""

import asyncio
import json
import os
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.request import proxy_bypass

import numpy as np
import psutil
import pytest
from pydantic import ValidationError

from agentrl.agent_loops import agent_program
from agentrl.agent_loops.agent_record import AgentRecord, visible_row
from agentrl.agent_loops.external import ExternalAgent, check_external
from agentrl.agent_loops.gateway import Gateway
from agentrl.config.schema.agent import AgentConfig
from agentrl.errors import ConfigError, EngineError, Fault, PluginError
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState, StopReason
from agentrl.sandbox.factory import unavailable_reason
from tests.fakes.plugins import make_context, make_engine, make_request

ASK = """
import http.client, json, os, sys, time
from urllib.parse import urlsplit

def post(path, body):
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    client = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
               "Content-Type": "application/json"}
    client.request("POST", url.path + path, json.dumps(body), headers)
    response = client.getresponse()
    text = response.read()
    if response.status != 200:
        sys.exit(f"the policy answered {response.status}")
    return json.loads(text)

row = json.load(open("row.json"))
messages = row["prompt"]
def ask(*more):
    global messages
    messages = messages + [{"role": "user", "content": text} for text in more]
    reply = post("/chat/completions", {"model": "m", "messages": messages})
    messages = messages + [reply["choices"][0]["message"]]
"""
"""A client of the standard library."""


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway() as made:
        yield made


async def run(
    gateway: Gateway, *answers: Any, request: AsyncRolloutRequest | None = None, **keys: Any
) -> AsyncRolloutRequest:
    context = make_context(make_engine(*(answers or ("said",))))
    return await drive(gateway, context, request or make_request(), **keys)


async def drive(
    gateway: Gateway, context: RolloutContext, *requests: AsyncRolloutRequest, **keys: Any
) -> AsyncRolloutRequest:
    agent = ExternalAgent(AgentConfig(**keys), gateway)
    try:
        await asyncio.gather(*(agent(request, context, context.engine) for request in requests))
    finally:
        await agent.close()
    return requests[0]


def program(tmp_path: Path, source: str) -> list[str]:
    file = tmp_path / "agent.py"
    file.write_text(ASK + textwrap.dedent(source), encoding="utf-8")
    return ["python", str(file)]


async def run_program(
    gateway: Gateway, tmp_path: Path, source: str, **keys: Any
) -> AsyncRolloutRequest:
    return await run(gateway, command=program(tmp_path, source), **keys)


# Programs.


async def test_program_that_asks_twice_has_two_sampled_turns(gateway, tmp_path):
    request = await run_program(gateway, tmp_path, "ask()\nask('More?')\nprint('done')")
    assert request.stop_reason is StopReason.ANSWERED
    assert request.num_assistant_turns == 2
    assert request.agent_run is not None
    assert (request.agent_run.end, request.agent_run.exit_code) == ("ok", 0)
    assert request.agent_run.stdout == "done\n"
    assert request.agent_reward is None


async def test_program_gets_the_row_and_the_gateway_in_every_documented_way(gateway, tmp_path):
    source = """
    ask()
    names = ["AGENTRL_BASE_URL", "AGENTRL_API_KEY", "AGENTRL_MODEL", "AGENTRL_REQUEST_ID",
             "OPENAI_API_BASE", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "EXTRA"]
    print(json.dumps([[os.environ[name] for name in names], sys.argv[1:], json.load(sys.stdin),
                      open("notes.txt").read()]))
    """
    (tmp_path / "notes.txt").write_text("noted", encoding="utf-8")
    request = make_request("What?", request_id="r-1", extra_info={"level": 3, "answer": "7"})
    arguments = [
        "{base_url}",
        "{key}",
        "{model}",
        "{row}",
        '{"a": 1}',
        "--url={anthropic_base_url}",
    ]
    await run(
        gateway,
        request=request,
        command=[*program(tmp_path, source), *arguments],
        env={"EXTRA": "more"},
        files=[tmp_path / "notes.txt"],
    )
    assert request.agent_run is not None
    variables, argv, row, notes = json.loads(request.agent_run.stdout)
    root, key = gateway.address, variables[1]
    url = f"{root}/v1"
    assert variables == [root, key, "policy", "r-1", url, root, key, "more"]
    assert argv == [url, key, "policy", "row.json", '{"a": 1}', f"--url={root}"]
    assert row["prompt"] == [{"role": "user", "content": "What?"}]
    assert row["extra_info"] == {"level": 3}
    assert notes == "noted"


async def test_agent_does_not_see_what_scores_it():
    request = make_request(
        ground_truth="42",
        columns={"ability": "math", "label": "42", "reward_model": {"ground_truth": "42"}},
        extra_info={
            "index": 3,
            "answer": "6 * 7 = 42",
            "nested": [{"solution": "42", "kept": "yes", "copy": "42"}],
            "tools_kwargs": {"check": {"create_kwargs": {"ground_truth": "42"}}},
            "interaction_kwargs": {"ground_truth": "42"},
        },
    )
    row = visible_row(request, ["ground_truth", "answer", "solution"])
    assert "42" not in json.dumps(row)
    assert row["ability"] == "math"
    assert row["extra_info"] == {"index": 3, "nested": [{"kept": "yes"}]}


async def test_exit_code_is_the_agents_fault_and_its_output_is_kept(gateway, tmp_path):
    request = await run_program(gateway, tmp_path, "ask()\nraise KeyError('no such tool')")
    assert (request.stop_reason, request.state) == (StopReason.FAILED, RequestState.FAILED)
    assert request.error is not None
    assert request.error.fault is Fault.AGENT
    assert "exit code 1" in request.error.message
    assert "KeyError: 'no such tool'" in request.error.message
    assert request.agent_run is not None
    assert request.agent_run.exit_code == 1
    assert "KeyError" in request.agent_run.stderr
    assert not request.is_trained


async def test_crash_can_be_configured_to_be_scored(gateway, tmp_path):
    source = "ask()\nsys.exit(3)"
    request = await run_program(gateway, tmp_path, source, on_failure="score")
    assert request.stop_reason is StopReason.ANSWERED
    assert request.is_trained
    silent = await run_program(gateway, tmp_path, "sys.exit(3)", on_failure="score")
    assert silent.error is not None
    assert silent.error.fault is Fault.AGENT


async def test_late_program_ends_as_wall_clock(gateway, tmp_path):
    started = time.monotonic()
    request = await run_program(gateway, tmp_path, "ask()\ntime.sleep(60)", timeout_s=1.0)
    assert time.monotonic() - started < 20
    assert request.stop_reason is StopReason.WALL_CLOCK
    assert request.error is not None
    assert request.error.fault is Fault.LIMIT
    assert request.agent_run is not None
    assert request.agent_run.end == "timeout"


async def test_budget_of_the_request_bounds_the_program_too(gateway, tmp_path):
    request = make_request()
    request.budgets = request.budgets.model_copy(update={"timeout_s": 1.0})
    await run(gateway, request=request, command=program(tmp_path, "ask()\ntime.sleep(60)"))
    assert request.stop_reason is StopReason.WALL_CLOCK


async def test_engine_error_stays_the_engines_fault(gateway, tmp_path):
    context = make_context(make_engine(EngineError("the engine is gone")))
    request = await drive(gateway, context, make_request(), command=program(tmp_path, "ask()"))
    assert request.error is not None
    assert request.error.fault is Fault.ENGINE
    assert request.agent_run is not None
    assert request.agent_run.exit_code == 1


async def test_agent_that_never_calls_the_policy_fails(gateway, tmp_path):
    request = await run_program(gateway, tmp_path, "print('I know it already', file=sys.stderr)")
    assert request.error is not None
    assert request.error.fault is Fault.AGENT
    assert "without a completion of the policy" in request.error.message
    assert "I know it already" in request.error.message


@pytest.mark.parametrize(
    ("line", "reward"),
    [
        ('{"reward": 0.5}', 0.5),
        ('{"reward": 1, "why": "tests pass"}', 1.0),
        ('{"reward": 0.5}\n{"reward": 0.25}\nbye', 0.25),
        ('{"reward": null}', None),
        ("reward: 0.5", None),
        ('{"reward"', None),
        ('[{"reward": 1}]', None),
    ],
)
async def test_reward_is_the_last_json_line_that_has_one(gateway, tmp_path, line, reward):
    request = await run_program(gateway, tmp_path, f"ask()\nprint({line!r})")
    assert request.stop_reason is StopReason.ANSWERED
    assert request.agent_reward == reward


async def test_reward_and_error_after_much_output_are_found(gateway, tmp_path):
    much = "ask()\nprint('{\"reward\": 1}')\nfor _ in range(9): print('x' * 100_000)\n"
    request = await run_program(gateway, tmp_path, much + "print('{\"reward\": 0.5}')")
    assert request.agent_reward == 0.5
    assert request.agent_run is not None
    assert request.agent_run.num_cut_bytes > 600_000
    failed = await run_program(gateway, tmp_path, much + "raise KeyError('no such tool')")
    assert failed.error is not None
    assert "KeyError: 'no such tool'" in failed.error.message


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", '"0.5"', "true", "1e305", "1" + "0" * 400, "[1]"]
)
async def test_reward_that_is_no_number_fails_the_request(gateway, tmp_path, value):
    line = '{"reward": ' + value + "}"
    request = await run_program(gateway, tmp_path, f"ask()\nprint({line!r})")
    assert request.error is not None
    assert request.error.fault is Fault.AGENT
    assert "a finite number" in request.error.message
    assert request.agent_reward is None


async def test_posted_reward_counts_unless_a_line_is_printed(gateway, tmp_path):
    request = await run_program(gateway, tmp_path, "ask()\npost('/reward', {'reward': 0.75})")
    assert request.agent_reward == 0.75
    posts = "ask()\npost('/reward', {'reward': 0.75})\npost('/reward', {'reward': 0.5})"
    assert (await run_program(gateway, tmp_path, posts)).agent_reward == 0.5
    both = f"{posts}\nprint('{{\"reward\": 0.25}}')"
    assert (await run_program(gateway, tmp_path, both)).agent_reward == 0.25


async def test_processes_that_the_agent_leaves_are_killed(gateway, tmp_path):
    source = """
    import subprocess
    ask()
    child = subprocess.Popen(["sleep", "300"])
    daemon = subprocess.Popen(["sleep", "300"], start_new_session=True)
    print(json.dumps([child.pid, daemon.pid]))
    """
    request = await run_program(gateway, tmp_path, source)
    assert request.stop_reason is StopReason.ANSWERED
    assert request.agent_run is not None
    assert not any(psutil.pid_exists(pid) for pid in json.loads(request.agent_run.stdout))


async def test_flood_is_stopped_and_its_first_part_kept(gateway, tmp_path):
    request = await run_program(gateway, tmp_path, "ask()\nwhile True: print('x' * 65536)")
    assert request.error is not None
    assert request.error.fault is Fault.AGENT
    assert request.agent_run is not None
    assert len(request.agent_run.stdout) < 5000
    assert request.agent_run.num_cut_bytes > 1_000_000


async def test_output_that_is_no_text_does_no_harm(gateway, tmp_path):
    source = "ask()\nsys.stdout.buffer.write(bytes(range(256)) * 10 + b'\\xed\\xa0\\x80')"
    request = await run_program(gateway, tmp_path, source)
    assert request.stop_reason is StopReason.ANSWERED
    again = AsyncRolloutRequest.model_validate_json(request.model_dump_json())
    assert again == request


async def test_cancelled_request_kills_its_program(gateway, tmp_path):
    pids = tmp_path / "pid"
    source = f"ask()\nopen({str(pids)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)"
    context = make_context(make_engine("said"))
    request = make_request()
    command = program(tmp_path, source)
    task = asyncio.create_task(drive(gateway, context, request, command=command))
    for _ in range(200):
        if pids.exists() and pids.read_text():
            break
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert request.stop_reason is StopReason.ABORTED
    pid = int(pids.read_text())
    for _ in range(100):
        if not psutil.pid_exists(pid):
            break
        await asyncio.sleep(0.05)
    assert not psutil.pid_exists(pid)


async def test_first_prompt_that_does_not_fit_fails_the_request(gateway):
    function = f"{__file__}:call"
    request = make_request(budgets=Budgets(max_model_len=20))
    await run(gateway, request=request, python=function)
    assert request.stop_reason is StopReason.FAILED
    assert not request.in_baseline


def test_program_does_not_inherit_secrets(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "sk-judge")
    monkeypatch.setenv("PLAIN_NAME", "kept")
    assert "JUDGE_API_KEY" not in agent_program._inherited()
    assert agent_program._inherited()["PLAIN_NAME"] == "kept"


def test_program_that_does_not_exist_is_an_error_at_start():
    with pytest.raises(ConfigError, match="'no-such-agent' is not found"):
        ExternalAgent(AgentConfig(command=["no-such-agent"]), Gateway())


def test_script_that_does_not_exist_is_an_error_at_start():
    with pytest.raises(ConfigError, match=r"no file solver\.py") as caught:
        check_external(AgentConfig(command=["python", "solver.py", "{row}"]))
    assert caught.value.details["key"] == "rollout.agent.command"


def test_script_may_be_one_of_the_files_and_other_arguments_any_text(tmp_path):
    script = tmp_path / "solver.py"
    script.write_text("")
    for arguments in (["solver.py"], ["-c", "{}", "{'a': 1}", "{question}"], ["-m", "x", "y.py"]):
        check_external(AgentConfig(command=["python3", *arguments], files=[script]))
    check_external(AgentConfig(command=[sys.executable, str(script), "{row}"]))


def test_program_of_another_machine_is_not_looked_for():
    check_external(AgentConfig(command=["no-such-agent"]), runs_here=False)


def test_sandbox_that_isolates_nothing_must_be_declared():
    with pytest.raises(ValidationError, match="trusted: true"):
        AgentConfig.model_validate({"command": ["a"], "sandbox": {"provider": "subprocess"}})


def test_file_that_does_not_exist_is_an_error_at_start(tmp_path):
    config = AgentConfig(command=["python"], files=[tmp_path / "notes.txt"])
    with pytest.raises(ConfigError, match=r"notes.txt cannot be read"):
        ExternalAgent(config, Gateway())


# Functions.


async def call(record: AgentRecord) -> None:
    import aiohttp

    headers = {"Authorization": f"Bearer {record.key}"}
    body = {"model": record.model, "messages": record.row["prompt"]}
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.post(f"{record.base_url}/chat/completions", json=body) as response,
    ):
        response.raise_for_status()
        await response.read()


async def rewarding(record: AgentRecord) -> dict[str, float]:
    await call(record)
    return {"reward": 0.5}


def plain(record: AgentRecord) -> float:
    asyncio.run(call(record))
    return 0.25


async def raising(record: AgentRecord) -> None:
    await call(record)
    raise KeyError("price")


def exiting(record: AgentRecord) -> None:
    asyncio.run(call(record))
    sys.exit(2)


def hanging(record: AgentRecord) -> None:
    asyncio.run(call(record))
    time.sleep(3)


async def waiting(record: AgentRecord) -> None:
    await call(record)
    await asyncio.sleep(300)


async def returning_nonsense(record: AgentRecord) -> str:
    await call(record)
    return "good"


async def cancelling(record: AgentRecord) -> None:
    await call(record)
    raise asyncio.CancelledError


async def proxied(record: AgentRecord) -> np.float32:
    await call(record)
    is_exempt = proxy_bypass("127.0.0.1") and proxy_bypass("internal.example")
    return np.float32(is_exempt)


HERE = "tests.agent_loops.test_external"


@pytest.mark.parametrize(("function", "reward"), [("rewarding", 0.5), ("plain", 0.25)])
async def test_function_returns_its_reward(gateway, function, reward):
    request = await run(gateway, python=f"{HERE}:{function}")
    assert request.stop_reason is StopReason.ANSWERED
    assert request.num_assistant_turns == 1
    assert request.agent_reward == reward


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raising", "KeyError: 'price'"),
        ("exiting", "SystemExit"),
        ("returning_nonsense", "the reward 'good'"),
        ("cancelling", "CancelledError"),
    ],
)
async def test_function_that_fails_is_the_agents_fault(gateway, function, said):
    request = await run(gateway, python=f"{HERE}:{function}")
    assert request.error is not None
    assert request.error.fault is Fault.AGENT
    assert said in request.error.message


@pytest.mark.parametrize("function", ["hanging", "waiting"])
async def test_late_function_ends_as_wall_clock(gateway, function):
    started = time.monotonic()
    request = await run(gateway, python=f"{HERE}:{function}", timeout_s=0.5)
    assert time.monotonic() - started < 2.5
    assert request.stop_reason is StopReason.WALL_CLOCK


AGENT_FILE = """
def solve(record):
    import http.client, json, os
    from urllib.parse import urlsplit
    url = urlsplit(record.openai["base_url"])
    client = http.client.HTTPConnection(url.hostname, url.port)
    headers = {"Authorization": "Bearer " + record.key, "Content-Type": "application/json"}
    body = {"model": record.model, "messages": record.row["prompt"]}
    client.request("POST", url.path + "/chat/completions", json.dumps(body), headers)
    assert client.getresponse().status == 200
    if record.row["extra_info"].get("hang"):
        while True:
            pass
    if "value" in record.row["extra_info"]:
        return record.row["extra_info"]["value"]
    print('{"reward": 7}', "x" * 300_000, sep="\\n")
    return {"reward": Half()}


class Half:
    def __float__(self):
        return 0.5
"""


async def test_function_in_a_process_can_be_killed(gateway, tmp_path):
    file = tmp_path / "my_agent.py"
    file.write_text(AGENT_FILE, encoding="utf-8")
    keys = {"python": f"{file}:solve", "isolation": "process", "timeout_s": 2.0}
    request = await run(gateway, **keys)
    assert (request.stop_reason, request.agent_reward) == (StopReason.ANSWERED, 0.5)
    late = await run(gateway, request=make_request(extra_info={"hang": True}), **keys)
    assert late.stop_reason is StopReason.WALL_CLOCK
    wrong = await run(gateway, request=make_request(extra_info={"value": "high"}), **keys)
    assert wrong.error is not None
    assert wrong.error.fault is Fault.AGENT
    assert "the agent returned the reward 'high'" in wrong.error.message


async def test_calls_of_the_gateway_use_no_proxy(gateway, tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "internal.example")
    monkeypatch.setenv("no_proxy", "")
    source = "import os\nfrom urllib.request import getproxies_environment as get\nask()\n"
    source += "print(os.environ['no_proxy'], get()['no'])"
    request = await run_program(gateway, tmp_path, source)
    assert request.agent_run is not None
    hosts = "internal.example,127.0.0.1,localhost"
    assert request.agent_run.stdout == f"{hosts} {hosts}\n"
    ran = await run(gateway, python=f"{HERE}:proxied")
    assert ran.agent_reward == 1.0, ran.error


def test_function_that_does_not_exist_is_an_error_at_start():
    with pytest.raises(PluginError, match="has no 'solv'"):
        ExternalAgent(AgentConfig(python=f"{HERE}:solv"), Gateway())
    with pytest.raises(ConfigError, match="a function that takes an AgentRecord"):
        ExternalAgent(AgentConfig(python=f"{HERE}:ASK"), Gateway())
    with pytest.raises(ConfigError, match="cannot be called with one argument: too many"):
        ExternalAgent(AgentConfig(python=f"{HERE}:takes_nothing"), Gateway())
    with pytest.raises(PluginError, match="is no path to a Python object"):
        ExternalAgent(AgentConfig(python="my_agent.py"), Gateway())


def takes_nothing():
    """An agent that cannot be called with a record."""


# Isolated programs.

BUBBLEWRAP = {"provider": "bubblewrap", "memory_bytes": 4 << 30}
needs_bubblewrap = pytest.mark.skipif(
    unavailable_reason("bubblewrap") is not None, reason="bubblewrap cannot isolate code here"
)


@needs_bubblewrap
async def test_isolated_program_reaches_the_gateway_and_nothing_else(gateway, tmp_path):
    """It asks twice; its own files are writable, others and other processes are not there."""
    source = """
    import glob, socket
    ask()
    ask('More?')
    def is_refused(work):
        try:
            work()
        except OSError:
            return True
    open("made.txt", "w").write("mine")
    print(json.dumps({
        "secret": is_refused(lambda: open(SECRET)),
        "home": is_refused(lambda: os.listdir(os.path.dirname(SECRET) + "/elsewhere")),
        "write": is_refused(lambda: open(sys.argv[0], "a")),
        "network": is_refused(lambda: socket.create_connection(("127.0.0.1", OTHER), 2)),
        "pids": len([p for p in glob.glob("/proc/[0-9]*")]) < 6,
        "reward": 0.5,
    }))
    """
    secret = tmp_path / "secret.txt"
    secret.write_text("hidden")
    (tmp_path / "elsewhere").mkdir()
    other = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    source = source.replace("SECRET", repr(str(secret))).replace("OTHER", str(port))
    async with other:
        request = await run_program(gateway, tmp_path, source, sandbox=BUBBLEWRAP)
    assert request.stop_reason is StopReason.ANSWERED, (request.error, request.agent_run)
    assert request.num_assistant_turns == 2
    assert request.agent_run is not None
    found = json.loads(request.agent_run.stdout)
    assert found == dict.fromkeys(["secret", "home", "write", "network", "pids"], True) | {
        "reward": 0.5
    }


@needs_bubblewrap
async def test_isolated_program_keeps_its_exit_code_and_output(gateway, tmp_path):
    source = "ask()\nprint('said', flush=True)\nsys.exit(3)"
    request = await run_program(gateway, tmp_path, source, sandbox=BUBBLEWRAP)
    assert request.agent_run is not None
    assert (request.agent_run.exit_code, request.agent_run.stdout) == (3, "said\n")
    assert request.stop_reason is StopReason.FAILED


@needs_bubblewrap
async def test_isolated_program_that_is_late_is_killed_with_its_children(gateway, tmp_path):
    source = "ask()\nif os.fork() == 0: os.setsid()\ntime.sleep(300)"
    request = await run_program(gateway, tmp_path, source, sandbox=BUBBLEWRAP, timeout_s=3.0)
    assert request.stop_reason is StopReason.WALL_CLOCK

    def left() -> list[Any]:
        return [one for one in psutil.process_iter(["cmdline"])
                if str(tmp_path) in " ".join(one.info["cmdline"] or ())]  # fmt: skip

    async with asyncio.timeout(5):
        while left():  # noqa: ASYNC110 - of the system, which tells nobody
            await asyncio.sleep(0.05)


@needs_bubblewrap
async def test_isolated_program_cannot_make_its_own_files_writable(gateway, tmp_path):
    """As root too: every read-only file system stays so, and no capability is left."""
    source = """
    import ctypes
    ask()
    libc = ctypes.CDLL(None)
    mounts = [line.split()[1].encode() for line in open("/proc/self/mounts")]
    print([path for path in mounts if libc.mount(None, path, None, 32 | 4096, None) == 0])
    with open(sys.argv[0], "a") as file:
        file.write("changed")
    """
    command = program(tmp_path, source)
    file = tmp_path / "agent.py"
    file.chmod(0o666)
    before = file.read_text()
    request = await run(gateway, command=command, sandbox=BUBBLEWRAP)
    assert request.agent_run is not None
    assert request.agent_run.stdout == "[]\n", request.agent_run
    assert "Read-only file system" in request.agent_run.stderr
    assert file.read_text() == before


def test_only_commands_are_isolated():
    with pytest.raises(ValueError, match="isolates a `command` only"):
        AgentConfig.model_validate({"python": "a:b", "sandbox": BUBBLEWRAP})
    with pytest.raises(ValueError, match="write bubblewrap"):
        AgentConfig.model_validate({"command": ["python"], "sandbox": {"provider": "auto"}})


def test_time_of_an_agent_is_not_a_limit_of_its_sandbox():
    with pytest.raises(ValueError, match=r"an agent's time is `rollout\.agent\.timeout_s`"):
        AgentConfig.model_validate({"command": ["a"], "sandbox": BUBBLEWRAP | {"timeout_s": 3.0}})


@needs_bubblewrap
def test_program_that_its_own_user_cannot_read_is_an_error_at_start(tmp_path):
    command = program(tmp_path, "")
    (tmp_path / "agent.py").chmod(0o600)
    config = AgentConfig.model_validate({"command": command, "sandbox": BUBBLEWRAP})
    if os.geteuid() != 0:
        pytest.skip("only root gives an agent a user of its own")
    with pytest.raises(ConfigError, match=r"agent\.py can be read by its owner alone"):
        ExternalAgent(config, Gateway())


@needs_bubblewrap
async def test_isolated_program_gets_no_variable_of_the_trainer(gateway, tmp_path, monkeypatch):
    """Its address can be a secret, and no rule for names finds that."""
    monkeypatch.setenv("DATABASE_URL", "postgres://user:password@host/db")
    source = "ask()\nprint(os.environ.get('DATABASE_URL'), os.environ['MINE'])"
    request = await run_program(
        gateway, tmp_path, source, sandbox=BUBBLEWRAP, env={"MINE": "given"}
    )
    assert request.agent_run is not None
    assert request.agent_run.stdout == "None given\n"


@needs_bubblewrap
async def test_isolated_program_makes_more_calls_than_it_has_processes(gateway, tmp_path):
    """The relay uses none of them, whatever number of connections is open."""
    source = """
    from urllib.parse import urlsplit
    import socket
    url = urlsplit(os.environ["OPENAI_BASE_URL"])
    opened = [socket.create_connection((url.hostname, url.port)) for _ in range(20)]
    for each in opened:
        each.sendall(b"GET /v1/models HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
    print({each.recv(12) for each in opened})
    ask()
    """
    limits = BUBBLEWRAP | {"max_processes": 2}
    request = await run_program(gateway, tmp_path, source, sandbox=limits)
    assert request.agent_run is not None
    assert request.stop_reason is StopReason.ANSWERED, request.agent_run
    assert request.agent_run.stdout.count("HTTP/1.1") == 1


# Many at once.

KINDS = {
    "fine": "ask()\nprint(json.dumps({'reward': 1.0}))",
    "crash": "ask()\nos.abort()",
    "exit": "sys.exit(1)",
    "hang": "ask()\ntime.sleep(300)",
    "flood": "ask()\nwhile True: os.write(1, b'x' * 65536)",
    "fork": "ask()\nfor _ in range(20):\n  if os.fork() == 0: time.sleep(300)\nos.kill(0, 9)",
    "daemon": "ask()\nif os.fork() == 0:\n  os.setsid()\n  if os.fork() == 0: time.sleep(300)",
    "garbage": "post('/chat/completions', None); os.write(1, os.urandom(65536)); sys.exit(9)",
    "rewrite": "ask('One?')\nmessages = row['prompt']\nask('Two?')",
}
EXPECTED = {
    "fine": StopReason.ANSWERED,
    "crash": StopReason.FAILED,
    "exit": StopReason.FAILED,
    "hang": StopReason.WALL_CLOCK,
    "flood": StopReason.FAILED,
    "fork": StopReason.FAILED,
    "daemon": StopReason.ANSWERED,
    "garbage": StopReason.FAILED,
    "rewrite": StopReason.ANSWERED,
}


@pytest.mark.slow
async def test_each_of_64_agents_that_misbehave_loses_its_own_request_only(gateway, tmp_path):
    kinds = [kind for kind in KINDS if kind != "fine"]
    chosen = [*kinds, *["fine"] * (64 - len(kinds))]
    source = "kind = row['extra_info']['kind']\n"
    for kind, body in KINDS.items():
        source += f"if kind == {kind!r}:\n{textwrap.indent(body, '    ')}\n"
    context = make_context(make_engine("said"))
    requests = [make_request(extra_info={"kind": kind}) for kind in chosen]
    command = program(tmp_path, source)
    await drive(gateway, context, *requests, command=command, timeout_s=30.0)
    for kind, request in zip(chosen, requests, strict=True):
        assert request.stop_reason is EXPECTED[kind], (kind, request.error)
        assert kind != "fine" or request.agent_reward == 1.0
        assert len(request.branches) == (kind == "rewrite")
        if request.error is not None and request.stop_reason is StopReason.FAILED:
            assert request.error.fault is Fault.AGENT
    left = [one for one in psutil.process_iter(["cmdline"])
            if str(tmp_path) in " ".join(one.info["cmdline"] or ())]  # fmt: skip
    assert not left
