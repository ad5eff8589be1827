"""What hostile code tries, and does not reach; and that the page on trust says what is."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

import pytest

from agentrl.sandbox.choice import why_not
from agentrl.sandbox.settings import LocalProvider, sandlock_folder
from tests.fakes_probes import PROBES, stopped

ROOT = Path(__file__).resolve().parents[2]
TRUST = (ROOT / "docs/trust.md").read_text(encoding="utf-8")
PROVIDERS: tuple[LocalProvider, ...] = get_args(LocalProvider)
WALLS: tuple[LocalProvider, ...] = ("sandlock", "bubblewrap")
NOT_STOPPED = {"sandlock": {"look_at_processes"}, "bubblewrap": set[str]()}
"""What gets through, as the page says too."""

measured = functools.cache(stopped)


def skip_without(provider: LocalProvider) -> None:
    if reason := why_not(provider):
        pytest.skip(f"{provider}: {reason}")


@pytest.mark.parametrize("probe", [probe.name for probe in PROBES])
@pytest.mark.parametrize("provider", WALLS)
def test_probe_is_stopped(provider: LocalProvider, probe: str):
    skip_without(provider)
    assert measured(provider)[probe] == (probe not in NOT_STOPPED[provider])


def table() -> dict[str, dict[str, bool]]:
    """Read the page's table: what each provider stops, by the words of the probe."""
    rows = re.findall(r"^\| ([^|]+) \| (\w+) \| (\w+) \| (\w+) \|$", TRUST, re.M)
    return {
        what: dict(zip(PROVIDERS, [cell == "stopped" for cell in cells], strict=True))
        for what, *cells in rows
        if what != "the code tries to"
    }


def test_page_on_trust_lists_every_probe_once():
    assert list(table()) == [probe.what for probe in PROBES]


@pytest.mark.parametrize("provider", [*WALLS, pytest.param("subprocess", marks=pytest.mark.slow)])
def test_page_on_trust_says_what_is_measured(provider: LocalProvider):
    if provider in WALLS:
        skip_without(provider)
    elif os.geteuid() != 0:
        pytest.skip("what a process with limits alone may do is told for root")
    said = table()
    found = measured(provider)
    assert {probe.name: said[probe.what][provider] for probe in PROBES} == found


@pytest.mark.slow
@pytest.mark.parametrize("provider", WALLS)
def test_probes_are_stopped_without_root_too(provider: LocalProvider):
    python = other_users_python()
    if os.geteuid() != 0 or python is None:
        pytest.skip("this is no root, or no interpreter is open to others")
    skip_without(provider)
    folder = tempfile.mkdtemp(dir="/var/tmp")
    try:
        os.chmod(folder, 0o755)
        for name in ("agentrl", "tests"):
            shutil.copytree(ROOT / name, f"{folder}/{name}")
        program = (
            "import json; from tests.fakes_probes import stopped;"
            f"print(json.dumps(stopped({provider!r})))"
        )
        done = subprocess.run(
            [python, "-c", program],
            cwd=folder,
            env={"PYTHONPATH": f"{folder}:{sandlock_folder()}", "PATH": "/usr/bin:/bin"},
            user=65534,
            group=65534,
            extra_groups=[],
            capture_output=True,
            text=True,
        )
    finally:
        shutil.rmtree(folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name for name, is_stopped in found.items() if not is_stopped} == NOT_STOPPED[provider]


def other_users_python() -> str | None:
    """Find an interpreter of this version that every user may run."""
    for path in (sys.executable, f"/usr/bin/python3.{sys.version_info[1]}"):
        real = Path(path).resolve()
        if real.exists() and all(parent.stat().st_mode & 1 for parent in real.parents):
            return path
    return None
