"""Code that attacks the guest, forges its answers, or tries to outlive its session."""

import asyncio
import json
import struct

from agentrl.sandbox import ExecutionEnd, Sandbox
from tests.sandbox.conftest import descendants

FORGED = json.dumps({"end": "ok", "stdout": "forged", "stderr": "", "exit_code": 0}).encode()
FORGE = f"""
import os
frame = {struct.pack(">I", len(FORGED)) + FORGED!r}
for descriptor in range(64):
    try: os.write(descriptor, frame)
    except OSError: pass
"""


async def test_program_cannot_forge_how_it_ended(sandbox: Sandbox):
    done = await sandbox.run_program(["python", "-c", FORGE + "os._exit(5)"])
    assert (done.end, done.exit_code) == (ExecutionEnd.ERROR, 5)


async def test_forged_answer_of_an_interpreter_harms_its_own_session_alone(sandbox: Sandbox):
    session, other = await sandbox.open_python(), await sandbox.open_python()
    await other.run("x = 1")
    await session.run(FORGE)
    assert (await session.run("print(3)", timeout_s=2)).stdout in ("3\n", "")
    assert (await other.run("print(x)")).stdout == "1\n"


async def test_flood_of_answers_ends_the_interpreter_and_not_the_guest(sandbox: Sandbox):
    session = await sandbox.open_python()
    flood = (
        "import os\n"
        "for descriptor in range(3, 64):\n"
        "    try:\n"
        "        while True: os.write(descriptor, b'x' * 9999)\n"
        "    except OSError: pass"
    )
    assert (await session.run(flood, timeout_s=2)).end is not ExecutionEnd.OK
    assert (await session.run("print(1)")).stdout == "1\n"


async def test_guest_that_is_killed_or_stopped_ends_its_session_alone(sandbox: Sandbox):
    session, other = await sandbox.open_python(), await sandbox.open_python()
    await other.run("x = 1")
    for signal in ("SIGKILL", "SIGSTOP"):
        source = f"import os, signal\nos.kill(os.getppid(), signal.{signal})\nprint('on')"
        await session.run(source, timeout_s=0.2)
        done = await session.run("print(2)", timeout_s=2)
        assert done.stdout in ("2\n", "")
        assert (await session.run("print(3)")).stdout == "3\n"
    assert (await other.run("print(x)")).stdout == "1\n"


async def test_shell_leaves_no_process_to_the_next_call(sandbox: Sandbox):
    shell = await sandbox.open_shell()
    await shell.run("true")
    before = set(descendants())
    done = await shell.run("(sleep 1000 </dev/null >/dev/null 2>&1 &) ; echo started")
    assert done.stdout == "started\n"
    assert set(descendants()) <= before


async def processes_of_an_open_session(sandbox: Sandbox) -> set[int]:
    """List the processes that run before the sessions of a test."""
    session = await sandbox.open_python()
    await session.run("1")
    return set(descendants())


async def test_sandboxes_of_one_spawner_reach_nothing_of_each_other(sandbox: Sandbox):
    before = await processes_of_an_open_session(sandbox)
    one, other = await sandbox.open_python(), await sandbox.open_python()
    execution = await one.run(OPEN)
    assert execution.is_ok, execution
    # As the machine numbers them, and as the sandbox does.
    pids = [*(set(descendants()) - before), *map(int, execution.stdout.split())]
    done = await other.run(f"PIDS = {pids}\n{REACH_OUT}", timeout_s=10)
    assert (done.stdout, done.stderr) == ("[]\n", "")


OPEN = """
import os, socket, time
open('secret', 'w').write('SECRET')
os.chmod('.', 0o777); os.chmod('secret', 0o666)
kept = []
for address in ('/tmp/door', '\\0agentrl-door'):
    try:
        kept.append(socket.socket(socket.AF_UNIX))
        kept[-1].bind(address)
        kept[-1].listen()
    except OSError: pass
if os.fork() == 0:
    time.sleep(1000)
print(os.getpid(), os.getppid())
"""
REACH_OUT = """
import ctypes, os, socket
libc, found, own = ctypes.CDLL(None), [], {os.getpid(), os.getppid()}
def goes(what, work):
    try:
        if work() is not False: found.append(what)
    except OSError: pass
for at, names, files in os.walk('/tmp'):
    found += [name for name in [*names, *files]]
for pid in {*PIDS} - own:
    goes(f'signal {pid}', lambda: os.kill(pid, 0))
    goes(f'trace {pid}', lambda: libc.ptrace(16, pid, 0, 0) == 0)
    for name in ('environ', 'mem', 'maps', 'cmdline', 'cwd/secret', 'root/tmp/secret'):
        goes(f'{name} of {pid}', lambda: open(f'/proc/{pid}/{name}', 'rb').read(1))
    goes(f'descriptors of {pid}', lambda: os.listdir(f'/proc/{pid}/fd'))
for address in ('/tmp/door', '\\0agentrl-door'):
    goes(address, lambda: socket.socket(socket.AF_UNIX).connect(address))
print(found)
"""


async def test_daemon_dies_with_its_session(sandbox: Sandbox):
    before = await processes_of_an_open_session(sandbox)
    session = await sandbox.open_python()
    source = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    try: os.setsid()\n"
        "    except OSError: pass\n"
        "    if os.fork() == 0: time.sleep(1000)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    done = await session.run(source)
    assert done.is_ok, done
    assert len(set(descendants()) - before) >= 3
    await session.close()
    # A dying process is listed for a moment.
    for _ in range(100):
        if set(descendants()) <= before:
            return
        await asyncio.sleep(0.02)
    assert set(descendants()) <= before
