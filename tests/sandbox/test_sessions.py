"""What a session keeps from call to call, and what it says of what went wrong."""

import asyncio
import signal
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from agentrl.errors import SandboxError
from agentrl.sandbox import ExecutionEnd, Sandbox
from tests.sandbox.conftest import MakeSandbox, descendants


async def test_names_and_files_stay_from_call_to_call(sandbox: Sandbox):
    session = await sandbox.open_python()
    await session.run("x = 20\nopen('a', 'w').write('2')")
    done = await session.run("print(x + int(open('a').read()))")
    assert (done.end, done.stdout, done.stderr) == (ExecutionEnd.OK, "22\n", "")


async def test_sessions_share_neither_names_nor_files_nor_processes(sandbox: Sandbox):
    one, other = await sandbox.open_python(), await sandbox.open_python()
    found = await one.run("import os; x = 1; open('mark', 'w').close(); print(os.getpid())")
    source = (
        "import os\n"
        "found = [os.path.join(at, name) for at, _, names in os.walk('/tmp') for name in names]\n"
        f"try: os.kill({found.stdout.strip()}, 0); shares = os.getpid() != {found.stdout.strip()}\n"
        "except OSError: shares = False\n"
        "print('x' in globals(), found, shares)"
    )
    assert (await other.run(source)).stdout == "False [] False\n"


async def test_file_of_the_code_may_have_any_name(sandbox: Sandbox):
    session = await sandbox.open_python()
    for name in ("limits", "watch", "frames", "kernel", "guest"):
        done = await session.run(f"open('{name}.py', 'w').write('x = 7')\nimport {name}; {name}.x")
        assert done.is_ok, done


async def test_shell_keeps_its_files_and_tells_its_exit_code(sandbox: Sandbox):
    shell = await sandbox.open_shell()
    await shell.run("mkdir d; echo hello > d/a; X=1")
    done = await shell.run("cat d/a; echo $X; ls -la d >/dev/null; exit 3")
    assert (done.end, done.stdout, done.exit_code) == (ExecutionEnd.ERROR, "hello\n\n", 3)
    assert done.stderr == ""


async def test_program_sees_its_files_and_its_input(sandbox: Sandbox):
    main = "import sys, sub.part\nprint(sub.part.X, sys.argv[1:], input())"
    files = {"main.py": main, "sub/part.py": "X = 7"}
    done = await sandbox.run_program(["python", "main.py", "a b"], files=files, stdin="in")
    assert (done.end, done.stdout, done.exit_code) == (ExecutionEnd.OK, "7 ['a b'] in\n", 0)


@pytest.mark.parametrize("path", ["/tmp/x", "../x", "a/../../x"])
async def test_file_outside_the_folder_is_refused(sandbox: Sandbox, path: str):
    done = await sandbox.run_program(["python", "-c", "1"], files={path: ""})
    assert done.end is ExecutionEnd.ERROR
    assert "inside the folder" in done.stderr


async def test_program_that_is_not_there_is_the_codes_fault(sandbox: Sandbox):
    done = await sandbox.run_program(["nonesuch"])
    assert (done.end, done.exit_code) == (ExecutionEnd.ERROR, 127)
    assert done.stderr == "nonesuch: No such file or directory\n"


async def test_traceback_shows_the_codes_lines_and_no_path_of_the_machine(sandbox: Sandbox):
    session = await sandbox.open_python()
    done = await session.run("import json\ndef f():\n    return json.loads('{')\nf()")
    assert done.end is ExecutionEnd.ERROR
    assert '  File "<code>", line 3, in f\n    return json.loads' in done.stderr
    assert 'File "json/decoder.py"' in done.stderr
    assert not any(path in done.stderr for path in (sys.base_prefix, "/mnt", "/tmp", "guest"))


@pytest.mark.parametrize(
    ("source", "end"),
    [
        ("import os; os._exit(0)", ExecutionEnd.KILLED),
        ("import ctypes; ctypes.string_at(0)", ExecutionEnd.KILLED),
        ("while True: pass", ExecutionEnd.TIMEOUT),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", ExecutionEnd.TIMEOUT),
    ],
)
async def test_files_outlive_the_interpreter_and_names_do_not(
    sandbox: Sandbox, source: str, end: ExecutionEnd
):
    session = await sandbox.open_python()
    await session.run("x = 1; open('a', 'w').write('kept')")
    assert (await session.run(source, timeout_s=1)).end is end
    done = await session.run("print('x' in globals(), open('a').read())")
    assert done.stdout == "False kept\n"
    assert done.stderr == "[a new interpreter: names are gone, files are still there]\n"
    assert (await session.run("1")).stderr == ""


async def test_memory_that_is_refused_is_an_error_of_the_code_and_ends_nothing(make: MakeSandbox):
    session = await make(memory_bytes=128 * 1024**2).open_python()
    await session.run("x = 1")
    assert (await session.run("bytearray(10**11)")).end is ExecutionEnd.MEMORY
    assert (await session.run("print(x)")).stdout == "1\n"


async def test_cpu_seconds_end_an_interpreter(make: MakeSandbox):
    session = await make(cpu_s=1).open_python()
    done = await session.run("while True: pass", timeout_s=20)
    assert done.end is ExecutionEnd.CPU
    assert done.seconds < 15


async def test_time_out_is_kept(sandbox: Sandbox):
    session = await sandbox.open_python()
    await session.run("import time")
    started = time.monotonic()
    done = await session.run("time.sleep(60)", timeout_s=1)
    assert done.end is ExecutionEnd.TIMEOUT
    assert time.monotonic() - started < 30


async def test_output_is_cut_and_what_is_cut_is_counted(make: MakeSandbox):
    session = await make(max_output_bytes=1000).open_python()
    done = await session.run("print('x' * 5000)")
    assert (done.stdout, done.num_cut_bytes) == ("x" * 1000, 4001)
    one_call = await session.run("print('x' * 500_000)", max_output_bytes=600_000)
    assert (len(one_call.stdout), one_call.num_cut_bytes) == (500_001, 0)


async def test_ten_gigabytes_of_output_take_no_memory_and_no_time(sandbox: Sandbox):
    session = await sandbox.open_python()
    source = "import os\nfor _ in range(10**4): os.write(1, bytes(10**6))"
    done = await session.run(source, timeout_s=60)
    assert done.end is ExecutionEnd.KILLED
    assert "wrote more than" in done.stderr
    assert len(done.stdout) + len(done.stderr) < 70_000
    assert done.seconds < 20


async def test_output_of_what_the_code_starts_is_the_codes(sandbox: Sandbox):
    session = await sandbox.open_python()
    done = await session.run("import subprocess; subprocess.run(['echo', 'there'])")
    assert done.stdout == "there\n"


async def test_copy_of_the_interpreter_answers_nothing(sandbox: Sandbox):
    session = await sandbox.open_python()
    await session.run("import os, time\nchild = os.fork()\nif not child: time.sleep(0.05)")
    for number in range(5):
        assert (await session.run(f"print({number})")).stdout == f"{number}\n"


async def test_many_processes_of_the_code_can_share_work(sandbox: Sandbox):
    source = (
        "import multiprocessing\n"
        "def square(x): return x * x\n"
        "with multiprocessing.get_context('fork').Pool(2) as pool:\n"
        "    print(pool.map(square, range(5)))"
    )
    session = await sandbox.open_python()
    done = await session.run(source)
    assert (done.stdout, done.stderr) == ("[0, 1, 4, 9, 16]\n", "")


async def test_invalid_text_is_returned_as_text(sandbox: Sandbox):
    session = await sandbox.open_python()
    done = await session.run("import os; os.write(1, b'\\xff'); raise ValueError('\\ud800')")
    assert done.stdout == "\ufffd"
    done.stderr.encode()


async def test_what_is_installed_is_there_where_it_was_asked_for(make: MakeSandbox):
    source = "import numpy; print(numpy.ones(3).sum())"
    there = await make(site_packages=True, memory_bytes=2 * 1024**3).open_python()
    away = await make().open_python()
    assert (await there.run(source)).stdout == "3.0\n"
    assert "No module named 'numpy'" in (await away.run(source)).stderr


async def test_closed_session_and_closed_sandbox_refuse(sandbox: Sandbox):
    session, other = await sandbox.open_python(), await sandbox.open_python()
    await session.run("1")
    await session.close()
    await session.close()
    with pytest.raises(SandboxError, match="session is closed"):
        await session.run("1")
    await sandbox.close()
    await sandbox.close()
    with pytest.raises(SandboxError, match="sandbox is closed"):
        await other.run("1")


async def test_event_loop_goes_on_while_code_runs(sandbox: Sandbox):
    session = await sandbox.open_python()
    await session.run("import time")
    running = asyncio.create_task(session.run("time.sleep(0.5)"))
    ticks = 0
    while not running.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert ticks > 15


ORDINARY = """
import asyncio, concurrent.futures, multiprocessing, os, resource, shutil, sqlite3, subprocess
async def echo():
    started = await asyncio.create_subprocess_exec("echo", "hi", stdout=subprocess.PIPE)
    return (await started.communicate())[0]
assert asyncio.run(echo()) == b"hi\\n"
forks = multiprocessing.get_context("fork")
with concurrent.futures.ProcessPoolExecutor(2, mp_context=forks) as pool:
    assert list(pool.map(abs, [-1, 2])) == [1, 2]
shell = "nice -n 1 touch a && chmod +x a && cp -p a b && mkdir -p d && mv b d && ls d"
done = subprocess.run(shell, shell=True, capture_output=True, text=True)
assert (done.stdout, done.stderr) == ("b\\n", ""), done
with sqlite3.connect("numbers.db") as numbers:
    numbers.execute("create table numbers (number)")
shutil.copy("numbers.db", "copy.db")
os.sched_setaffinity(0, os.sched_getaffinity(0))
resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
print("done")
"""


async def test_calls_that_ordinary_programs_need_are_not_refused(make: MakeSandbox):
    session = await make(memory_bytes=1024**3).open_python()
    done = await session.run(ORDINARY)
    assert (done.stdout, done.stderr) == ("done\n", "")


BURNERS = """
import os, threading, time
def burn():
    while True: pass
threading.Thread(target=burn, daemon=True).start()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: burn()
    os._exit(0)
os.wait()
"""


def used_cpu_s(pids: set[int]) -> float:
    """Sum the processor seconds of processes that run on."""
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


async def test_what_a_call_leaves_running_waits_for_the_next_call(sandbox: Sandbox):
    before = set(descendants())
    session = await sandbox.open_python()
    assert (await session.run(BURNERS)).is_ok
    pids = set(descendants()) - before
    used_s = used_cpu_s(pids)
    await asyncio.sleep(0.5)
    assert used_cpu_s(pids) - used_s < 0.1
    assert (await session.run("time.sleep(0.5); print(threading.active_count())")).stdout == "2\n"
    assert used_cpu_s(pids) - used_s > 0.1


async def test_code_that_closes_its_descriptors_is_not_said_to_use_memory(sandbox: Sandbox):
    session = await sandbox.open_python()
    done = await session.run("import os, time; os.closerange(3, 64); time.sleep(60)")
    assert done.end is ExecutionEnd.KILLED
    assert "the interpreter's own descriptors" in done.stderr
    assert (await session.run("print(1)")).stdout == "1\n"


SHOW = "trap -p; python3 -c 'import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, ()))'"
"""Shows the signals that a shell ignores from its start, and those that are blocked."""
FROM_PYTHON = (
    f"import subprocess; print(subprocess.check_output(['bash', '-c', {SHOW!r}], text=True))"
)


@pytest.fixture
def odd_signals() -> Iterator[None]:
    """Ignore and block signals in this process, as a program that started it may have done."""
    ignored = {signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGRTMIN + 2}
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGALRM})
    yield
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2, signal.SIGALRM})
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("how", ["shell", "program", "python", "program of python"])
async def test_programs_handle_signals_by_default(odd_signals: None, make: MakeSandbox, how: str):
    sandbox = make()
    match how:
        case "shell":
            done = await (await sandbox.open_shell()).run(SHOW)
        case "python":
            done = await (await sandbox.open_python()).run(FROM_PYTHON)
        case "program":
            done = await sandbox.run_program(["bash", "-c", SHOW])
        case _:
            done = await sandbox.run_program(["python", "-c", FROM_PYTHON])
    assert done.is_ok, done
    assert done.stdout.strip() == ""


async def test_a_writer_into_a_closed_pipe_ends_without_an_error(sandbox: Sandbox):
    shell = await sandbox.open_shell()
    done = await shell.run("yes | head -n 1; seq 1000000 | head -n 1")
    assert (done.end, done.stdout, done.stderr) == (ExecutionEnd.OK, "y\n1\n", "")


BOTH_HOLD = "import os, time; held = b'x' * ((15 if os.fork() else 14) << 23)"


@pytest.mark.parametrize("number", ["KILL", "TERM", "SEGV"])
async def test_code_that_kills_itself_is_not_said_to_have_used_memory(
    sandbox: Sandbox, number: str
):
    shell = await sandbox.open_shell()
    done = await shell.run(f"kill -{number} $$")
    assert done.end is ExecutionEnd.KILLED
    assert f"SIG{number}" in done.stderr
    assert "memory" not in done.stderr
    done = await (await sandbox.open_python()).run(f"import os; os.kill(os.getpid(), {9})")
    assert done.end is ExecutionEnd.KILLED


async def test_code_that_is_killed_for_its_memory_is_told_so_and_only_then(make: MakeSandbox):
    shell = await make(memory_bytes=160 << 20, timeout_s=90.0).open_shell()
    done = await shell.run(f'exec python3 -c "{BOTH_HOLD}; time.sleep(80)"')
    assert done.end is ExecutionEnd.MEMORY, done
    assert done.stderr.endswith("[killed: it used more memory than it may]\n")
    assert (await shell.run("kill -9 $$")).end is ExecutionEnd.KILLED
