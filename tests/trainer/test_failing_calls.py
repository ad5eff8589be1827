"""Runs whose tool or scorer fails: reported once a step, and ended where too much fails."""

import shutil
from pathlib import Path

import pytest

from agentrl.trainer.rollouts.files import read_trajectories
from agentrl.trainer.rollouts.line_files import find_rollout_files
from tests.fakes.fault_runs import TOOL, Train
from tests.fakes.runs import read_lines

pytestmark = pytest.mark.usefixtures("alone")

ANSWER = '        return f"{drawn}"\n'


def break_tool(plugin_folder: Path, condition: str) -> None:
    """Let the tool raise in calls for which an expression over `instance_id` holds."""
    broken = f"        if {condition}:\n            raise ConnectionError('lost')\n{ANSWER}"
    (plugin_folder / "counting.py").write_text(TOOL.replace(ANSWER, broken))


def test_tool_that_fails_in_every_call_ends_the_run_without_a_line_for_each(
    train: Train, plugin_folder: Path, tmp_path: Path
):
    break_tool(plugin_folder, "True")
    output = train()
    assert output.code == 2
    assert "error: tool 'calculator' failed in 18 of 18 calls: ConnectionError: lost" in output.err
    assert "(at counting.py:30)" in output.err
    assert "rollout.failure.max_failed_calls_frac" in output.err
    assert output.err.count("lost") == 1
    [saved] = find_rollout_files(tmp_path / "run/skipped", "step")
    assert f"the rollouts that end the run: {saved.path}" in output.out
    assert next(read_trajectories(saved.path)).request.turns[0].calls[0].outcome == "crashed"


def test_tool_that_returns_a_wrong_type_is_named_with_its_class_and_file(
    train: Train, plugin_folder: Path
):
    (plugin_folder / "counting.py").write_text(TOOL.replace(ANSWER, "        return drawn\n"))
    output = train()
    assert output.code == 2
    assert "TypeError: tool 'calculator' (Counting in counting.py) returned 0." in output.err
    assert "str, dict or tuple (response, reward, metrics)" in output.err


def test_tool_that_changes_the_directory_does_not_move_what_the_run_writes(
    train: Train,
    plugin_folder: Path,
    tmp_path: Path,
    tiny_home: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    (plugin_folder / "counting.py").write_text(
        TOOL.replace(ANSWER, f"        os.chdir('/')\n{ANSWER}")
    )
    shutil.copytree(tiny_home / "policy", tmp_path / "policy")
    monkeypatch.chdir(tmp_path)
    output = train(
        model__path="policy",
        trainer__default_local_dir="here",
        trainer__rollout_data_dir="here/rollouts",
        trainer__save_freq=1,
        trainer__total_training_steps=2,
    )
    assert output.code == 0, output.err
    written = {path.name for path in (tmp_path / "here").iterdir()}
    assert {"metrics.jsonl", "rollouts", "checkpoints", "trained", "summary.json"} <= written
    monkeypatch.chdir(tmp_path)
    again = train(
        model__path="policy", trainer__default_local_dir="here", trainer__total_training_steps=2
    )
    assert "resumed from" in again.out


def test_failures_of_tool_and_scorer_are_one_line_a_step_and_columns(
    train: Train, plugin_folder: Path, tmp_path: Path
):
    break_tool(plugin_folder, "int(instance_id.split('-')[-2]) == 1")
    (plugin_folder / "score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': {5: 1.0}[len(extra_info['question'])]}\n"
    )
    output = train(rollout__failure__max_failed_frac=1.0, trainer__total_training_steps=1)
    assert output.code == 0, output.err
    assert "lost" not in output.err
    lines = [line for line in output.out.splitlines() if "tool 'calculator' failed in" in line]
    assert [line.split(":")[0].strip() for line in lines] == ["step 0", "step 1"]
    # A step's line counts its training and its validation.
    assert "failed in 2 of 6 calls: ConnectionError: lost (at counting.py:30)" in lines[1]
    assert "6 of 6 requests failed: 6 x reward: KeyError: the reward function" in lines[1]
    assert "(at score.py:2)" in lines[1]
    [header] = [line for line in output.out.splitlines() if "grad" in line]
    assert {"tools", "scorer"} <= set(header.split())
    line = read_lines(tmp_path / "run/metrics.jsonl")[1]
    assert line["rollout/tool_calls/failed_frac"] == 0.25
    assert line["rollout/failures/reward"] == 1.0
