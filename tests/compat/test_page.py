"""docs/from_verl.md lists the modules that agentrl has under verl's names."""

import importlib
import re
from pathlib import Path

import pytest

from agentrl.compat.verl import MODULES

PAGE = (Path(__file__).parents[2] / "docs/from_verl.md").read_text(encoding="utf-8")


def rows() -> list[list[str]]:
    """Names in the first column of the table of modules, one list for each row."""
    lines = PAGE[PAGE.index("| module of verl's") :].splitlines()[2:]
    table = lines[: lines.index("")]
    return [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in table]


def named() -> list[str]:
    """The modules of the table; `.x` is next to the first one of its row."""
    found: list[str] = []
    for first, *others in rows():
        parent = first.rpartition(".")[0] if "." in first else first
        found += [first, *(parent + other if other.startswith(".") else other for other in others)]
    return found


@pytest.mark.parametrize("name", named())
def test_a_module_of_the_page_is_there(name: str):
    importlib.import_module(f"agentrl.compat.{name}")


def test_every_module_is_on_the_page():
    for name in MODULES:
        parent, _, last = name.rpartition(".")
        assert last in PAGE or parent.rpartition(".")[2] in PAGE, name
