"""Hostile code does not reach what docs/trust.md says is stopped."""

import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import pytest

from agentrl.sandbox.factory import unavailable_reason
from agentrl.sandbox.inside import kernel
from agentrl.sandbox.spawner_client import LocalProvider, sandlock_folder
from tests.fakes.probes import PROBES, Use, stopped
from tests.fakes.user_modes import NO_ENTRY

ROOT = Path(__file__).resolve().parents[2]
TRUST = (ROOT / "docs/trust.md").read_text(encoding="utf-8")
PROVIDERS: tuple[LocalProvider, ...] = get_args(LocalProvider)
ISOLATING: tuple[LocalProvider, ...] = ("sandlock", "bubblewrap")
WITHOUT_NAMESPACES = "sandlock without namespaces"
AGENT = "agent in bubblewrap"
COLUMNS = ("sandlock", WITHOUT_NAMESPACES, "bubblewrap", AGENT, "subprocess")
"""Of the page's table."""

OWN_NETWORK = ("tcp_listen", "tcp_memory")
"""What an agent can do in its own network, by which it reaches the gateway."""

measured = functools.cache(stopped)


def skip_without(provider: LocalProvider) -> None:
    if reason := unavailable_reason(provider):
        pytest.skip(f"{provider}: {reason}")


@pytest.mark.parametrize("probe", [probe.name for probe in PROBES])
@pytest.mark.parametrize("provider", ISOLATING)
def test_probe_is_stopped(provider: LocalProvider, probe: str):
    skip_without(provider)
    assert measured(provider)[probe]


@pytest.mark.parametrize("probe", [probe.name for probe in PROBES])
def test_probe_of_an_agent_is_stopped_unless_it_is_about_its_own_network(probe: str):
    skip_without("bubblewrap")
    assert measured("bubblewrap", "agent")[probe] is (probe not in OWN_NETWORK)


def table() -> dict[str, dict[str, bool]]:
    """Read the page's table: what each column stops, by the words of the probe."""
    rows = re.findall(r"^\| ([^|]+) \|" + r" (\w+) \|" * len(COLUMNS) + "$", TRUST, re.M)
    return {
        what: dict(zip(COLUMNS, [cell == "stopped" for cell in cells], strict=True))
        for what, *cells in rows
    }


def stopped_by(column: str) -> dict[str, bool]:
    """Read a column of the page's table, by the names of the probes."""
    said = table()
    assert [*said] == [probe.what for probe in PROBES]
    return {probe.name: said[probe.what][column] for probe in PROBES}


def test_page_on_trust_lists_every_probe_once():
    assert list(table()) == [probe.what for probe in PROBES]


@pytest.mark.parametrize(
    ("provider", "use", "column"),
    [
        ("sandlock", "session", "sandlock"),
        ("bubblewrap", "session", "bubblewrap"),
        ("bubblewrap", "agent", AGENT),
        pytest.param("sandlock", "program", "sandlock", marks=pytest.mark.slow),
        pytest.param("bubblewrap", "program", "bubblewrap", marks=pytest.mark.slow),
        pytest.param("subprocess", "session", "subprocess", marks=pytest.mark.slow),
        pytest.param("subprocess", "agent", "subprocess", marks=pytest.mark.slow),
    ],
)
def test_page_on_trust_says_what_is_measured(provider: LocalProvider, use: Use, column: str):
    if provider in ISOLATING:
        skip_without(provider)
    elif os.geteuid() != 0:
        pytest.skip("the page says what a process with limits alone can do as root")
    assert stopped_by(column) == measured(provider, use)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "use", "mode", "column"),
    [
        ("sandlock", "session", "user", "sandlock"),
        ("bubblewrap", "session", "user", "bubblewrap"),
        ("bubblewrap", "program", "user", "bubblewrap"),
        ("bubblewrap", "agent", "user", AGENT),
        ("sandlock", "session", "user with covered /proc", "sandlock"),
        ("sandlock", "session", "user without namespaces", WITHOUT_NAMESPACES),
        ("sandlock", "session", "root without namespaces", WITHOUT_NAMESPACES),
    ],
)
def test_page_on_trust_says_what_is_measured_in_other_modes(
    provider: LocalProvider, use: Use, mode: str, column: str
):
    skip_without(provider)
    imports = "import json\nfrom tests.fakes.probes import stopped\n"
    program = f"{imports}print(json.dumps(stopped({provider!r}, {use!r})))"
    expected = stopped_by(column)
    if mode == "root without namespaces":  # where each sandbox has a user who owns no other file
        expected["change_outside"] = True
    if mode == "user with covered /proc":  # where there is no PID namespace
        expected["look_at_processes"] = False
    assert json.loads(run_in(mode, program)) == expected


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["user without namespaces", "root without namespaces"])
def test_sandlock_without_namespaces_runs_only_if_it_is_asked_for(mode: str):
    skip_without("sandlock")
    program = (
        "from agentrl.sandbox.factory import unavailable_reason\n"
        "print(unavailable_reason('sandlock'))\n"
        "print(unavailable_reason('sandlock', is_asked_for=True))"
    )
    refused, asked_for = run_in(mode, program).splitlines()
    assert refused.startswith("it has no namespaces here: ")
    assert asked_for == "None"


@pytest.mark.slow
def test_root_without_namespaces_keeps_conversations_apart():
    skip_without("sandlock")
    error, output, before, after = json.loads(run_in("root without namespaces", TWO_SESSIONS))
    assert "Permission denied" in error
    assert output == "1\n"
    assert after == before


TWO_SESSIONS = """
import asyncio, json
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.sandbox import make_sandbox
def shared_by_all():
    return sorted(row for kind in ("shm", "sem", "msg") for row in open(f"/proc/sysvipc/{kind}"))
async def main():
    sandbox = make_sandbox(SandboxConfig(provider="sandlock", num_warm=0))
    before = shared_by_all()
    one, other = await sandbox.open_python(), await sandbox.open_python()
    execution = await other.run("import os; open('x', 'w').write('1'); print(os.environ['HOME'])")
    reach = await one.run(f"import os; os.chmod({execution.stdout.strip()!r}, 0)")
    read = await other.run("print(open('x').read())")
    await sandbox.close()
    print(json.dumps([reach.stderr, read.stdout, before, shared_by_all()]))
asyncio.run(main())
"""


def run_in(mode: str, program: str) -> str:
    """Run Python code in a mode of `tests.fakes.user_modes`, and return what it prints."""
    python = other_users_python()
    if os.geteuid() != 0 or python is None or platform.machine() != "x86_64":
        pytest.skip("this is no root, or no interpreter is open to others, or no filter is known")
    folder = tempfile.mkdtemp(dir="/var/tmp")
    try:
        os.chmod(folder, 0o755)
        for name in ("agentrl", "tests"):
            shutil.copytree(ROOT / name, f"{folder}/{name}")
        done = subprocess.run(
            [python, "-m", "tests.fakes.user_modes", mode, program],
            cwd=folder,
            env={"PYTHONPATH": f"{folder}:{sandlock_folder()}", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            timeout=100,
        )
    finally:
        shutil.rmtree(folder)
        kernel.remove_shared_objects(NO_ENTRY)  # what sandlock keeps for each user
    assert done.returncode == 0, done.stderr
    return done.stdout


def other_users_python() -> str | None:
    """Find an interpreter of this version that every user may run."""
    for path in (sys.executable, f"/usr/bin/python3.{sys.version_info[1]}"):
        real = Path(path).resolve()
        if real.exists() and all(parent.stat().st_mode & 1 for parent in real.parents):
            return path
    return None
