"""Life of a local sandbox: what it starts, what it keeps ready, and that nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import SandboxError
from agentrl.sandbox import Execution, Sandbox, make_sandbox
from agentrl.sandbox.inside import folders
from agentrl.sandbox.spawner_client import LocalProvider
from tests.sandbox.conftest import MakeSandbox, descendants
from tests.sandbox.test_hostile import processes_of_an_open_session


def shared_by_all() -> set[str]:
    """System V's objects, which outlive their processes: sandlock keeps some for each user."""
    kinds = [Path(f"/proc/sysvipc/{kind}") for kind in ("shm", "sem", "msg")]
    rows = [row.split()[:2] for path in kinds for row in path.read_text().splitlines()]
    return {" ".join(row) for row in rows}


def left_in(temporary: Path) -> list[Path]:
    """The folders of spawners; a closed spawner leaves none."""
    return list(temporary.glob("agentrl-sandbox-*"))


def num_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until(is_so: Callable[[], bool], what: str) -> None:
    """Wait a short time for an event outside this process."""
    for _ in range(400):
        if is_so():
            return
        await asyncio.sleep(0.025)
    pytest.fail(what)


async def test_session_that_was_not_used_starts_nothing(sandbox: Sandbox):
    before = set(descendants())
    sessions = [await sandbox.open_python() for _ in range(50)]
    for session in sessions:
        await session.close()
    assert set(descendants()) == before


async def test_nothing_is_left_of_what_ran(
    make: MakeSandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    processes, files = set(descendants()), num_files()
    shared = shared_by_all()
    sandbox = make(num_warm=2)
    sessions = [await sandbox.open_python() for _ in range(4)]
    await asyncio.gather(*(session.run("open('a', 'w').write('x')") for session in sessions))
    await sandbox.run_program(["python", "-c", "print(1)"])
    await sessions[0].close()
    await sandbox.close()
    assert set(descendants()) == processes
    assert num_files() <= files + 1  # the event loop's own, once
    assert left_in(tmp_path) == []
    assert shared_by_all() <= shared


async def test_warm_interpreters_are_each_one_sessions(make: MakeSandbox):
    sandbox = make(num_warm=3)
    seen: set[str] = set()
    for _ in range(6):
        session = await sandbox.open_python()
        done = await session.run("import os; print('mark' in globals(), os.listdir('.'))")
        assert done.stdout == "False []\n"
        await session.run("mark = 1; open('mark', 'w').close()")
        seen.add(done.stdout)
        await session.close()
    assert seen == {"False []\n"}


def newest_spawner() -> psutil.Process:
    spawners = [
        each for each in psutil.Process().children() if "spawner.py" in command_of(each.pid)
    ]
    return max(spawners, key=lambda each: each.create_time())


def below_each_supervisor() -> list[set[int]]:
    """List the processes of each sandbox of the newest spawner, the oldest first."""
    supervisors = sorted(newest_spawner().children(), key=lambda each: each.pid)
    return [
        {each.pid for each in supervisor.children(recursive=True)} for supervisor in supervisors
    ]


async def until_filled(num_warm: int) -> list[set[int]]:
    """Wait until the pool is full after a session was used."""

    def is_filled() -> bool:
        sizes = [len(each) for each in below_each_supervisor()]
        return len(sizes) == 1 + num_warm and min(sizes) == max(sizes)

    await until(is_filled, "the pool is not filled")
    return below_each_supervisor()


async def test_pool_is_filled_after_the_first_call(make: MakeSandbox):
    session = await make(num_warm=2).open_python()
    await session.run("1")
    await until_filled(2)


async def test_warm_guest_that_died_is_not_handed_out(make: MakeSandbox):
    sandbox = make(num_warm=1)
    session = await sandbox.open_python()
    await session.run("1")
    for pid in (await until_filled(1))[1]:
        with suppress(ProcessLookupError):  # the first of a namespace takes the others with it
            os.kill(pid, signal.SIGKILL)
    await asyncio.sleep(0.1)
    other = await sandbox.open_python()
    assert (await other.run("print(1)")).stdout == "1\n"


async def test_sandbox_that_is_closed_while_sessions_start_ends_at_once(make: MakeSandbox):
    before = set(descendants())
    sandbox = make(num_warm=2)
    sessions = [await sandbox.open_python() for _ in range(8)]
    runs = [asyncio.create_task(session.run("1")) for session in sessions]
    await asyncio.sleep(0.05)
    started = time.monotonic()
    await sandbox.close()
    assert time.monotonic() - started < 25  # a start may take 30
    done = await asyncio.gather(*runs, return_exceptions=True)
    assert all(isinstance(one, Execution | SandboxError) for one in done), done
    await until(lambda: set(descendants()) <= before, "a guest runs on")


async def test_session_that_is_closed_while_it_starts_keeps_no_guest(sandbox: Sandbox):
    before = await processes_of_an_open_session(sandbox)
    session = await sandbox.open_python()
    run = asyncio.create_task(session.run("1"))
    await asyncio.sleep(0)
    await session.close()
    with pytest.raises(SandboxError, match="the session is closed"):
        await run
    await until(lambda: set(descendants()) <= before, "its guest runs on")


async def test_cancelling_kills_what_runs(sandbox: Sandbox):
    before = await processes_of_an_open_session(sandbox)
    session = await sandbox.open_python()
    await session.run("import time")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await session.run("time.sleep(1000)")
    await until(lambda: set(descendants()) <= before, "cancelled code runs on")
    done = await session.run("print(1)")
    assert done.stdout == "1\n"
    assert "a new sandbox" in done.stderr


@pytest.mark.parametrize("method", ["abort", "close"])
async def test_ended_guest_has_no_open_socket(sandbox: Sandbox, method: str):
    session = await sandbox.open_python()
    await session.run("1")
    guest = vars(session)["_guest"]
    writers = vars(guest)["_writer"], vars(guest)["_control"][1]
    sockets = [writer.get_extra_info("socket") for writer in writers]
    await getattr(guest, method)()
    assert [each.fileno() for each in sockets] == [-1, -1]


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0: time.sleep(1000)
    os._exit(0)
os.wait()
"""


async def test_killed_supervisor_leaves_no_process(sandbox: Sandbox):
    before = set(descendants())
    session = await sandbox.open_python()
    await session.run(DAEMON)
    spawner = newest_spawner()
    started = set(descendants()) - before - {spawner.pid}
    spawner.children()[0].kill()
    await until(lambda: not any(map(is_running, started)), "a process outlives its supervisor")
    other = await sandbox.open_python()
    assert (await other.run("print(1)")).stdout == "1\n"


async def test_killed_spawner_is_started_again(sandbox: Sandbox):
    session = await sandbox.open_python()
    await session.run("x = 1")
    spawners = [pid for pid in descendants() if "spawner.py" in command_of(pid)]
    os.kill(spawners[0], signal.SIGKILL)
    assert (await session.run("print(x)")).stdout == "1\n"
    other = await sandbox.open_python()
    assert (await other.run("print(2)")).stdout == "2\n"


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8")
    except OSError:
        return ""


TRAINER = """
import asyncio, sys
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.sandbox import make_sandbox
async def main():
    sandbox = make_sandbox(SandboxConfig(provider={provider!r}, num_warm=1))
    session = await sandbox.open_python()
    await session.run("import os, time\\nif os.fork() == 0: time.sleep(1000)")
    print("ready", flush=True)
    await session.run("while True: pass", timeout_s=1000)
asyncio.run(main())
"""


def test_killed_trainer_leaves_no_process_and_no_file(provider: LocalProvider, tmp_path: Path):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER.format(provider=provider)],
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"ready\n"
    started = below(trainer.pid)
    assert len(started) >= 4
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    deadline = time.monotonic() + 10
    while (left := [pid for pid in started if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left == []
    assert [path for path in left_in(tmp_path) if list(path.iterdir())] == []


def below(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task")
    own = [int(n) for t in path.iterdir() for n in (t / "children").read_text().split()]
    return own + [each for child in own for each in below(child)]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def folders_are_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every folder as old enough to delete."""
    monkeypatch.setattr(folders, "_MIN_AGE_S", 0.0)


def test_folder_of_a_dead_spawner_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    beginning = str(tmp_path / "mine-")
    stale, held, other = (tmp_path / name for name in ("mine-1", "mine-2", "other"))
    for path in (stale / "3" / "tmp" / "closed", held, other):
        path.mkdir(parents=True)
    closed = stale / "3" / "tmp" / "closed"
    (closed / "file").touch()
    closed.chmod(0)
    (stale / "out").symlink_to(other)
    descriptor = folders.lock(str(held))
    folders.delete_abandoned(beginning)
    assert stale.exists()  # too young: its spawner may be about to lock it
    monkeypatch.setattr(folders, "_MIN_AGE_S", 0.0)
    folders.delete_abandoned(beginning)
    assert set(tmp_path.iterdir()) == {held, other}
    os.close(descriptor)
    folders.delete_abandoned(beginning)
    assert list(tmp_path.iterdir()) == [other]


@pytest.mark.usefixtures("folders_are_old")
def test_folder_that_cannot_be_deleted_does_not_prevent_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(path: str) -> None:
        deleted.append(path)
        raise RecursionError(path)

    deleted: list[str] = []
    monkeypatch.setattr(folders, "delete", fail)
    stale = {str(tmp_path / f"mine-{number}") for number in range(2)}
    for path in stale:
        os.mkdir(path)
    folders.delete_abandoned(str(tmp_path / "mine-"))
    assert set(deleted) == stale


@pytest.fixture
def deep_path() -> Iterator[Path]:
    """A folder that is deleted however deep it is: pytest's own clean-up recurses."""
    path = Path(tempfile.mkdtemp())
    yield path
    subprocess.run(["rm", "-rf", str(path)], check=True)


def test_folder_is_deleted_however_deep_it_is(deep_path: Path):
    outside, top = deep_path / "outside", deep_path / "top"
    for path in (outside, top):
        path.mkdir()
    (outside / "kept").touch()
    here = os.getcwd()
    try:
        os.chdir(top)
        for depth in range(1100):
            os.mkdir("inner")
            if depth % 100 == 0:
                os.symlink(outside, "out")
                os.mkdir("closed", 0)
            os.chdir("inner")
    finally:
        os.chdir(here)
    folders.delete(str(top))
    assert list(deep_path.iterdir()) == [outside]
    assert list(outside.iterdir()) == [outside / "kept"]


def test_what_cannot_be_deleted_keeps_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def unlink(name: str, *, dir_fd: int) -> None:
        if name == "stuck":
            raise PermissionError(name)
        delete(name, dir_fd=dir_fd)

    delete = os.unlink
    monkeypatch.setattr(os, "unlink", unlink)
    inner = tmp_path / "top" / "inner"
    (inner / "deeper").mkdir(parents=True)
    for path in (inner / "a", inner / "stuck", inner / "z", inner / "deeper" / "b"):
        path.touch()
    with pytest.raises(OSError, match="not empty"):
        folders.delete(str(tmp_path / "top"))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [inner / "stuck"]


async def test_deep_folders_of_code_prevent_no_later_sandbox(
    deep_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(deep_path))
    nest = "import os\nfor _ in range(1100): os.mkdir('inner'); os.chdir('inner')"
    for source in (nest, "1"):
        # The provider that keeps its folders on the disk.
        sandbox = make_sandbox(SandboxConfig(provider="subprocess", trusted=True, num_warm=0))
        session = await sandbox.open_python()
        assert (await session.run(source)).is_ok
        await sandbox.close()
        assert left_in(deep_path) == []
