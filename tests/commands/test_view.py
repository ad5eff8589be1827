"""`agentrl view`: the terminal's lists, the export, and mistakes."""

import json
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from agentrl.cli.app import app
from agentrl.errors import ConfigError
from agentrl.viewer.server import ViewServer
from tests.fakes.runs import read_lines
from tests.fakes.viewer_runs import write_view_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_view_run(tmp_path / "run")


def view(*arguments: object, columns: int = 200) -> str:
    result = CliRunner(env={"COLUMNS": str(columns)}).invoke(app, ["view", *map(str, arguments)])
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
    assert "Trajectories: 1 of 1" in shown
    assert "train-2-7" in shown


def test_a_filtered_list_is_printed_alone(folder: Path):
    shown = view(folder, "--terminal", "--sort", "reward", "--limit", 2)
    assert shown.startswith("Trajectories: 2 of 16")
    assert "Ends" in view(folder, "--terminal")


def test_the_terminal_filters_as_the_page_does(folder: Path):
    rows = [row["request"] for row in read_lines(folder / "rollouts/step_000003.jsonl")]
    high = sum(row["reward"] >= 0.5 for row in rows)
    assert f" of {high} " in view(folder, "--terminal", "--min-reward", 0.5)
    assert f" of {16 - high} " in view(folder, "--terminal", "--max-reward", 0.5)
    calls = [[call for turn in row["turns"] for call in turn["calls"]] for row in rows]
    bad = sum(any(call["outcome"] != "ok" for call in one) for one in calls)
    outcome = next(call["outcome"] for one in calls for call in one if call["outcome"] != "ok")
    assert f" of {bad} " in view(folder, "--terminal", "--outcome", outcome)
    with pytest.raises(ConfigError, match="no trajectory has the tool 'none'"):
        view(folder, "--terminal", "--tool", "none")


def test_a_narrow_terminal_leaves_columns_out_and_cuts_none(folder: Path):
    shown = view(folder, "--terminal", "--sort", "id", columns=60)
    row = read_lines(folder / "rollouts/step_000003.jsonl")[0]["request"]
    assert f" {row['request_id']} " in shown
    assert f" {row['stop_reason']} " in shown
    assert "last answer" not in shown
    assert max(map(len, shown.splitlines())) <= 60


def test_the_terminal_prints_a_trajectory(folder: Path):
    row = read_lines(folder / "rollouts/step_000003.jsonl")[0]["request"]
    shown = view(folder, "--terminal", "--request", row["request_id"])
    assert f"=== request {row['request_id']}" in shown
    assert "--- end" in shown
    (folder / "rollouts/step_000009.jsonl.zst").write_bytes(b"damaged")
    assert "--- end" in view(folder, "--terminal", "--request", row["request_id"])
    with pytest.raises(ConfigError, match="no saved rollout of request 'none'"):
        view(folder, "--terminal", "--request", "none")
    with pytest.raises(ConfigError, match="--request prints one trajectory"):
        view(folder, "--terminal", "--request", row["request_id"], "--sort", "reward")


def test_the_terminal_compares_two_steps(folder: Path):
    shown = view(folder, "--terminal", "--step", 3, "--step", 1)
    steps, figures = shown.split("Compared")
    assert "entropy" in steps
    reward = next(line for line in figures.splitlines() if line.strip().startswith("reward"))
    here, there, change = (float(cell) for cell in reward.split()[1:])
    assert change == pytest.approx(here - there, abs=1e-3)


def test_the_terminal_compares_two_runs(folder: Path, tmp_path: Path):
    other = write_view_run(tmp_path / "other")
    shown = view(folder, other, "--terminal", "--step", 2)
    assert shown.count("Compared") == 1
    assert "other: step_000002" in shown


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
    with pytest.raises(ConfigError, match=r"(?s)no rollouts of step 9.*one of 1, 2, 3"):
        view(folder, "--terminal", "--step", 9)
    with pytest.raises(
        ConfigError, match=r"(?s)no trajectory has the end 'foo'.*one of .*answered"
    ):
        view(folder, "--terminal", "--end", "foo")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--terminal", "--export", "pages"), "exclude each other"),
        (("--sort", "reward"), "--sort needs --terminal"),
        (("--end", "failed"), "--end needs --terminal"),
        (("--text", "x", "--export", "pages"), "--text needs --terminal"),
        (("--step", 2), "--step needs --export or --terminal"),
        (("--limit", 5), "--limit needs --export or --terminal"),
        (("--port", 8800, "--export", "pages"), "--port does not work with --export"),
        (("--port", 0, "--terminal"), "--port does not work with --terminal"),
        (("--terminal", "--step", 1, "--step", 2, "--step", 3), "compares two steps"),
    ],
)
def test_options_that_do_not_fit_are_refused(folder: Path, options: Any, reason: str):
    with pytest.raises(ConfigError, match=reason):
        view(folder, *options)


def test_runs_with_other_folders_of_rollouts_are_printed_for_one_step(folder: Path, tmp_path: Path):
    other = write_view_run(tmp_path / "other", num_steps=2, seed=1)
    (other / "rollouts").rename(other / "validation")
    shown = view(folder, other, "--terminal", "--step", 2)
    assert "rollouts/step_000002, 16 trajectories" in shown
    assert "validation/step_000002, 16 trajectories" in shown
    assert "other: no rollouts of step 3" in view(folder, other, "--terminal", "--step", 3)


def test_a_port_in_use_is_reported(folder: Path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^port {port} is in use\n"):
            view(folder, "--port", port)


def test_ctrl_c_ends_the_server_without_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch):
    async def interrupt(self: ViewServer) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(ViewServer, "start", interrupt)
    assert "interrupted" not in view(folder)


def test_a_run_without_rollouts_is_printed(folder: Path):
    (folder / "rollouts").rename(folder / "moved")
    assert "no saved rollouts" in view(folder, "--terminal", "--end", "failed")


def test_names_that_the_policy_writes_do_not_reach_the_terminal(folder: Path):
    path = folder / "rollouts" / "step_000003.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        request = line["request"]
        evil = "\x1b[2J\u202e" + "x" * 10_000
        request["stop_reason"] = request["data_source"] = request["request_id"] = evil
        request["turns"][0]["calls"][0].update(name=evil, outcome=evil)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = view(folder, "--terminal")
    assert "\\x1b[2J" in shown
    assert not {"\x1b", "\u202e"} & set(shown)
    assert len(shown) < 200_000


def test_the_terminal_names_damaged_lines_groups_and_slow_requests(folder: Path):
    with (folder / "rollouts" / "step_000003.jsonl").open("a") as file:
        file.write("{\n")
    shown = view(folder, "--terminal")
    assert "16 trajectories" in shown
    assert "1 damaged line left out" in shown
    slowest, groups = shown.partition("Slowest requests")[2].split("Groups with the largest spread")
    assert "train-3-" in slowest
    assert len(re.findall(r"train-3-[01] ", groups.partition("Trajectories")[0])) == 2
