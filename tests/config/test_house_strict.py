"""What pyright checks strictly is there: a path that is not checks nothing, and says nothing."""

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STRICT = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["strict"]


@pytest.mark.parametrize("path", STRICT)
def test_a_path_of_the_strict_list_exists(path: str) -> None:
    found = ROOT / path
    assert found.is_file() if found.suffix else any(found.rglob("*.py"))


@pytest.mark.parametrize("name", ["config", "data", "plugins", "rewards", "tools", "interactions"])
def test_where_no_torch_is_imported_types_are_strict(name: str) -> None:
    assert f"agentrl/{name}" in STRICT
