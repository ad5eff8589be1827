"""How the house stands: lint, format, types and floors, as part of the tests."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHECKS = {
    "ruff check": ["ruff", "check", "."],
    "ruff format": ["ruff", "format", "--check", "."],
    "layers": ["lint-imports"],
    "types": ["pyright", "--pythonpath", sys.executable],
}


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SLOW if name == "types" else ()) for name in CHECKS]
)
def test_house_stands(name: str) -> None:
    command, *arguments = CHECKS[name]
    found = shutil.which(command, path=f"{Path(sys.executable).parent}") or shutil.which(command)
    assert found is not None, f"{command} is not installed: pip install -e '.[dev]'"
    done = subprocess.run([found, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
