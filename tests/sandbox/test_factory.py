"""The choice of a provider, and the error if none can isolate code."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.errors import MissingExtraError, SandboxError
from agentrl.sandbox import make_sandbox, spawner_client
from agentrl.sandbox.factory import unavailable_reason
from agentrl.sandbox.inside import attacks
from agentrl.sandbox.local import LocalSandbox
from agentrl.sandbox.spawner_client import SPAWNER, AgentAccess
from agentrl.sandbox.syscall_filter import syscall_filter


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget the trial runs of providers, before and after."""
    unavailable_reason.cache_clear()
    yield
    unavailable_reason.cache_clear()


def nothing_installed(patch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    patch.setattr(importlib.util, "find_spec", lambda n: None if n == "sandlock" else find(n))
    patch.setattr(shutil, "which", lambda _: None)


def chosen() -> str:
    sandbox = make_sandbox(SandboxConfig())
    assert isinstance(sandbox, LocalSandbox)
    return sandbox.provider


@pytest.mark.usefixtures("fresh")
def test_missing_providers_are_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    nothing_installed(monkeypatch)
    with pytest.raises(SandboxError) as raised:
        make_sandbox(SandboxConfig())
    message = str(raised.value)
    assert "pip install 'sandlock<" in message
    assert "bubblewrap: it is not installed" in message


@pytest.mark.usefixtures("fresh")
def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    nothing_installed(monkeypatch)
    with pytest.raises(MissingExtraError, match=r"pip install .sandlock"):
        make_sandbox(SandboxConfig(provider="sandlock"))


@pytest.mark.usefixtures("fresh")
def test_the_next_best_provider_is_taken(monkeypatch: pytest.MonkeyPatch):
    if unavailable_reason("bubblewrap"):
        pytest.skip("bubblewrap cannot run here")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "sandlock" else find(n))
    unavailable_reason.cache_clear()
    sandbox = make_sandbox(SandboxConfig())
    assert isinstance(sandbox, LocalSandbox)
    assert sandbox.provider == "bubblewrap"


@pytest.mark.parametrize("broken", ["import nonesuch", "raise ValueError('no')", "def ("])
@pytest.mark.usefixtures("fresh")
def test_a_package_that_fails_to_import_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
):
    (tmp_path / "sandlock").mkdir()
    (tmp_path / "sandlock/__init__.py").write_text(broken)
    monkeypatch.delitem(sys.modules, "sandlock", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    if unavailable_reason("bubblewrap"):
        pytest.skip("bubblewrap cannot run here")
    assert unavailable_reason("sandlock")
    assert "Error" in (unavailable_reason("sandlock") or "")
    assert chosen() == "bubblewrap"


@pytest.mark.parametrize("found", [ModuleNotFoundError, ValueError])
@pytest.mark.usefixtures("fresh")
def test_a_package_that_cannot_even_be_looked_for_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, found: type[Exception]
):
    def refuse(name: str) -> None:
        raise found(name)

    monkeypatch.setattr(importlib.util, "find_spec", refuse)
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not here")
    assert chosen() == "bubblewrap"
    assert unavailable_reason("sandlock")


@pytest.mark.usefixtures("fresh")
def test_provider_that_is_there_and_does_not_run_is_not_taken(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/false")
    reason = unavailable_reason("bubblewrap")
    assert reason is not None
    with pytest.raises(SandboxError, match="no sandbox provider on this machine"):
        make_sandbox(SandboxConfig(provider="bubblewrap"))


def test_limits_alone_are_for_code_that_is_trusted():
    with pytest.raises(SandboxError, match="keeps nothing secret") as raised:
        make_sandbox(SandboxConfig(provider="subprocess"))
    assert "trusted: true" in str(raised.value)
    assert "bubblewrap" in str(raised.value)


async def test_code_that_is_trusted_runs_with_limits():
    sandbox = make_sandbox(SandboxConfig(provider="subprocess", trusted=True, num_warm=0))
    session = await sandbox.open_python()
    try:
        assert (await session.run("print(6 * 7)")).stdout == "42\n"
        done = await session.run("while True: pass", timeout_s=0.5)
        assert done.end == "timeout"
    finally:
        await sandbox.close()


async def test_program_needs_a_name():
    sandbox = make_sandbox(SandboxConfig(provider="subprocess", trusted=True))
    with pytest.raises(ValueError, match="argv is empty"):
        await sandbox.run_program([])


def test_jumps_of_the_filter_stay_inside():
    for machine in ("x86_64", "aarch64"):
        data = syscall_filter(machine)
        assert len(data) % 8 == 0
        count = len(data) // 8
        assert count < 4096
        for at in range(count):
            then, is_not = data[at * 8 + 2], data[at * 8 + 3]
            assert at + 1 + max(then, is_not) < count or data[at * 8] == 6


def test_filter_of_an_unknown_machine_is_an_error():
    with pytest.raises(SandboxError, match="sparc"):
        syscall_filter("sparc")


@pytest.mark.usefixtures("fresh")
def test_sandlock_without_namespaces_is_not_taken_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def why(
        provider: str, *, is_asked_for: bool = False, access: AgentAccess | None = None
    ) -> str | None:
        return None if is_asked_for else f"{provider} has no namespaces"

    monkeypatch.setattr("agentrl.sandbox.factory.unavailable_reason", why)
    with pytest.raises(SandboxError, match="sandlock has no namespaces"):
        make_sandbox(SandboxConfig())
    sandbox = make_sandbox(SandboxConfig(provider="sandlock"))
    assert isinstance(sandbox, LocalSandbox)
    assert "sandlock has no namespaces" in caplog.text
    with pytest.raises(SandboxError, match="bubblewrap has no namespaces"):
        make_sandbox(SandboxConfig(provider="bubblewrap"))


NO_FILTER = ("guest.py", "is not None:\n        kernel", "== 0:\n        kernel")
HOLES = {
    "read a file of the trainer": [
        ("filesystem_view.py", '"/mnt", *SYSTEM', '"/mnt", "/var", *SYSTEM'),
        ("backends.py", "*further,", '*further, "--bind", "/var/tmp", "/var/tmp",'),
    ],
    "connect to a port": [
        ("backends.py", '"--unshare-all"', '"--unshare-all", "--share-net"'),
        ("namespaces.py", " | kernel.CLONE_NEWNET", ""),
    ],
    "keep a capability": [("backends.py", "--cap-drop", "--cap-add")],
    "run without a filter of system calls": [NO_FILTER],
    "make a read-only file system writable": [  # the options that agents had
        ("backends.py", '"--unshare-user", "--disable-userns", ', ""),
        ("backends.py", '"--uid", "65534", "--gid", "65534", ', ""),
        ("backends.py", "--cap-drop", "--cap-add"),
        ("supervisor.py", "if os.geteuid() == 0 and", "if os.geteuid() < 0 and"),
        NO_FILTER,
    ],
    "open more files than it may": [("processes.py", "setrlimit(kind, (", "getrlimit(kind) or ((")],
    "start more processes than it may": [
        ("backends.py", '"RLIMIT_NPROC": max_processes', '"RLIMIT_NPROC": 4096')
    ],
    "write more than it may": [
        ("supervisor.py", 'self._user, self._settings["disk_bytes"]', "self._user, 2**30")
    ],
    "use memory that no limit counts": [NO_FILTER],
    "open a user namespace": [
        ("backends.py", '"--disable-userns", ', ""),
        NO_FILTER,
    ],
}
"""Changes of the programs in `inside` that open a hole, by the attack that finds it."""


@pytest.mark.parametrize("attack", HOLES)
@pytest.mark.usefixtures("fresh")
def test_a_sandbox_with_a_hole_is_not_used(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    if attack == "make a read-only file system writable" and os.geteuid() != 0:
        pytest.skip("only root has this hole")
    access = AgentAccess() if attack == "connect to a port" else None
    if unavailable_reason("bubblewrap", access=access):
        pytest.skip("bubblewrap cannot run here")
    unavailable_reason.cache_clear()
    shutil.copytree(SPAWNER.parent, tmp_path / "inside")
    for name, text, changed in HOLES[attack]:
        file = tmp_path / "inside" / name
        source = file.read_text(encoding="utf-8")
        assert source.count(text) == 1
        file.write_text(source.replace(text, changed), encoding="utf-8")
    monkeypatch.setattr(spawner_client, "SPAWNER", tmp_path / "inside/spawner.py")
    monkeypatch.setattr(spawner_client, "_INSIDE", tmp_path / "inside")
    reason = unavailable_reason("bubblewrap", access=access)
    assert reason is not None
    assert f"'{attack}'" in reason or f'"{attack}"' in reason


WITHOUT_NAMESPACES = """
import os, sys
sys.path.insert(0, sys.argv[1])
import kernel, namespaces, filesystem_view
def refuse(_): raise PermissionError(1, "unshare: Operation not permitted")
kernel.unshare = refuse
print(namespaces.find_namespace_error(has_pids=False))
print(*(filesystem_view.find_closed_folder([path]) for path in ("/usr", sys.argv[2])))
"""


def test_missing_namespaces_and_closed_folders_are_found(tmp_path: Path):
    tmp_path.chmod(0o700)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_NAMESPACES, str(SPAWNER.parent), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    expected = f"[Errno 1] unshare: Operation not permitted\nNone {tmp_path}\n"
    assert done.stdout == expected, done.stderr


def test_a_process_of_the_sandbox_with_the_number_of_the_trainer_is_not_the_trainer():
    """A trainer that is the first process of a container has the number of the guest."""
    mine = os.readlink("/proc/self/ns/pid")
    assert attacks._signals(os.getpid(), mine)  # pyright: ignore[reportPrivateUsage]
    assert not attacks._signals(os.getpid(), "pid:[1]")  # pyright: ignore[reportPrivateUsage]
