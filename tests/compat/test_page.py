"""docs/from_verl.md lists the modules of the stand-in."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/from_verl.md").read_text(encoding="utf-8")
ROOT = Path(__file__).parents[2] / "agentrl/compat/verl"


def rows() -> list[list[str]]:
    """Names in the first column of the table of modules, one list for each row."""
    lines = PAGE[PAGE.index("| module of verl's") :].splitlines()[2:]
    table = lines[: lines.index("")]
    return [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in table]


def named() -> list[str]:
    """The modules of the table; `.x` is beside the first one of its row."""
    found: list[str] = []
    for first, *others in rows():
        parent = first.rpartition(".")[0] if "." in first else first
        found += [first, *(parent + other if other.startswith(".") else other for other in others)]
    return found


@pytest.mark.parametrize("name", named())
def test_a_module_of_the_page_is_there(name: str):
    importlib.import_module(f"agentrl.compat.{name}")


def test_every_module_is_on_the_page():
    for file in ROOT.rglob("*.py"):
        if file.name == "__init__.py" or file.parent == ROOT:
            continue
        assert file.stem in PAGE or file.parent.name in PAGE, file
