"""`agentrl view`: the terminal's lists, the export, and mistakes."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import ConfigError
from tests.fakes.viewer_runs import write_view_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_view_run(tmp_path / "run")


def view(*arguments: object) -> str:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["view", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


def test_the_terminal_shows_the_newest_step(folder: Path):
    shown = view(folder, "--terminal", "--limit", 3)
    assert "rollouts/step_000003, 16 trajectories" in shown
    assert "Trajectories: 3 of 16" in shown
    assert "calculator" in shown


def test_the_terminal_sorts_and_filters(folder: Path):
    shown = view(folder, "--terminal", "--step", 2, "--text", "it is 7.")
    assert "rollouts/step_000002" in shown
    assert "Trajectories: 1 of 1" in shown
    assert "train-2-7" in shown


def test_the_terminal_compares_two_steps(folder: Path):
    shown = view(folder, "--terminal", "--step", 3, "--step", 1)
    steps, figures = shown.split("Compared")
    assert "entropy" in steps
    reward = next(line for line in figures.splitlines() if line.strip().startswith("reward"))
    here, there, change = (float(cell) for cell in reward.split()[1:])
    assert change == pytest.approx(here - there, abs=1e-3)


def test_the_terminal_shows_how_configurations_differ(folder: Path, tmp_path: Path):
    other = write_view_run(tmp_path / "other", num_steps=2, seed=1)
    shown = view(folder, other, "--terminal", "--limit", 1)
    assert re.search(r"actor\.lr +1e-06 +2e-06", shown)


def test_control_characters_do_not_reach_the_terminal(folder: Path):
    path = folder / "rollouts" / "step_000003.jsonl"
    text = re.sub(r'It is 4\.[^"]*', r"\\u001b[2J\\u202eevil", path.read_text())
    path.write_text(text)
    shown = view(folder, "--terminal")
    assert "\\x1b[2J\\u202eevil" in shown
    assert "\x1b[2J" not in shown


def test_an_export_says_what_is_left_out(folder: Path, tmp_path: Path):
    shown = view(folder, "--export", tmp_path / "pages", "--limit", 10)
    assert "10 trajectories" in shown
    assert "left out: 6 trajectories" in shown
    assert (tmp_path / "pages" / "index.html").is_file()


def test_a_wrong_folder_or_step_is_refused(folder: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="no folder"):
        view(tmp_path / "none")
    with pytest.raises(ConfigError, match="no rollouts of step 9"):
        view(folder, "--terminal", "--step", 9)
