"""The page for users of verl names keys and commands that there are."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli import app
from agentrl.config.problems import known_keys
from agentrl.config.verl.table import find_key, is_section

PAGE = (Path(__file__).resolve().parents[3] / "docs/from_verl.md").read_text(encoding="utf-8")
OF_KEYS = PAGE.partition("\n## Tools, interactions")[0]
SECTIONS = (
    "", "actor_rollout_ref.", "actor_rollout_ref.rollout.", "actor_rollout_ref.rollout.multi_turn.",
    "actor_rollout_ref.actor.", "algorithm.", "rollout.", "rollout.multi_turn.",
)  # fmt: skip
"""Below which the page writes keys without the words before them."""
DOTTED = sorted(
    {
        name
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:[=:][^`]*)?`", OF_KEYS)
        if not name.startswith(("verl.", "agentrl.", "turns.", "extra_info."))
        and Path(name).suffix not in (".yaml", ".py", ".jsonl")
    }
)


def is_key(name: str) -> bool:
    return name in known_keys() or find_key(name) is not None or is_section(name)


@pytest.mark.parametrize("name", DOTTED)
def test_a_key_that_the_page_names_is_one_of_verls_or_ours(name: str):
    assert any(is_key(f"{section}{name}") for section in SECTIONS)


def test_the_page_names_keys():
    assert len(DOTTED) > 30


@pytest.mark.parametrize("command", sorted(set(re.findall(r"agentrl ((?:[a-z-]+ )+)", OF_KEYS))))
def test_a_command_that_the_page_names_is_there(command: str):
    words = [word for word in command.split() if word in ("train", "config", "check", "from-verl")]
    if words:
        assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0
