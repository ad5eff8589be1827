from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.commands.rescore import read_reward_config, rescore, rescore_from_file
from agentrl.config.schema.reward import CustomRewardConfig, RewardConfig
from agentrl.errors import ConfigError, DataError, Fault, PluginError
from agentrl.rollout.records import Failure
from agentrl.rollout.states import RequestState, StopReason
from agentrl.trainer.rollouts.files import read_trajectories, save_rollouts
from tests.fakes.requests import build_request, said
from tests.fakes.runs import run_agentrl, write_yaml


def answered(text, reward, **fields):
    request = build_request(
        said(2, text=text), data_source="openai/gsm8k", ground_truth="5", **fields
    )
    request.reward, request.reward_extra_info = reward, {"acc": reward}
    return request


def failed_by_reward():
    request = build_request(said(2, text="#### 5"), data_source="openai/gsm8k", ground_truth="5")
    failure = Failure(fault=Fault.REWARD, kind="ChatError", message="the judge was down", turn=1)
    request.fail_scoring(failure)
    return request


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Two answers that were scored the wrong way round, one whose judge was down, and others."""
    shaped = answered("#### 5", 1.0)
    shaped.reward_extra_info["overlong_reward"] = -0.75
    unknown = answered("#### 5", 1.0)
    unknown.data_source = "mine"
    late = build_request(said(1), stop_reason=StopReason.WALL_CLOCK, data_source="openai/gsm8k")
    requests = [
        answered("#### 5", 0.0), answered("#### 6", 1.0), failed_by_reward(), shaped, late, unknown,
    ]  # fmt: skip
    path = tmp_path / "step_000007.jsonl"
    save_rollouts(path, requests, step=7)
    return path


def test_saved_rollouts_are_scored_again_and_the_input_stays(saved: Path, tmp_path: Path):
    before = saved.read_bytes()
    out = tmp_path / "new.jsonl"
    changes = rescore(saved, RewardConfig(), out=out)
    assert saved.read_bytes() == before
    old, new = ([one.request for one in read_trajectories(path)] for path in (saved, out))
    assert [request.reward for request in new] == [1.0, 0.0, 1.0, 1.0, None, None]
    assert new[0].reward_extra_info["success"] == 1.0
    assert new[3].reward_extra_info["overlong_reward"] == -0.75
    assert new[2].state is RequestState.COMPLETED
    assert new[2].error is None
    assert new[5].error.fault is Fault.REWARD
    assert new[4] == old[4]
    for ours, theirs in zip(new, old, strict=True):
        assert ours.response_ids == theirs.response_ids
        assert ours.turns == theirs.turns
    gsm8k, mine = changes["openai/gsm8k"], changes["mine"]
    assert (gsm8k.num, gsm8k.num_changed, gsm8k.num_not_scored) == (5, 3, 1)
    assert (sum(gsm8k.old), sum(gsm8k.new)) == (2.0, 3.0)
    assert (mine.num, mine.num_changed, len(mine.failures)) == (1, 1, 1)


@pytest.mark.parametrize(
    ("launches", "calls"),
    [
        (True, ["a+a", "b+b", "b+b", "a+a", "a+a", "a+a"]),
        (False, ["a+b+b+a"] * 4 + ["a+a"] * 2),
    ],
)
def test_a_scorer_that_compares_gets_the_groups_that_it_had_in_training(
    tmp_path: Path, launches: bool, calls: list[str]
):
    scorer = tmp_path / "mine.py"
    scorer.write_text("def compute_score(data_sources, solution_strs, ground_truths,"
                      " extra_infos):\n"
                      "    uids = '+'.join(info['uid'] for info in extra_infos)\n"
                      "    return [{'score': 1.0, 'uids': uids}] * len(extra_infos)\n")  # fmt: skip
    lines = b""
    for step, uids in ((7, "abba"), (8, "aa")):
        requests = [answered("#### 5", 0.0, uid=uid, extra_info={"uid": uid}) for uid in uids]
        save_rollouts(tmp_path / "one.jsonl", requests, step=step)
        lines += (tmp_path / "one.jsonl").read_bytes()
    both, out = tmp_path / "both.jsonl", tmp_path / "new.jsonl"
    both.write_bytes(lines)
    custom = CustomRewardConfig(path=str(scorer))
    config = RewardConfig(
        manager="batch", custom_reward_function=custom, launch_reward_fn_async=launches
    )
    rescore(both, config, out=out)
    uids = [one.request.reward_extra_info["uids"] for one in read_trajectories(out)]
    assert uids == calls


def test_nothing_is_written_over(saved: Path, tmp_path: Path):
    for out in (saved, tmp_path):
        with pytest.raises(ConfigError, match="exists already"):
            rescore(saved, RewardConfig(), out=out)
    with pytest.raises(DataError, match="no such rollout file"):
        rescore(tmp_path / "none.jsonl", RewardConfig())


def test_what_stops_a_rescoring_leaves_no_half_file(saved: Path, tmp_path: Path):
    saved.write_text(saved.read_text() + "{damaged\n")
    with pytest.raises(DataError, match="line: 7"):
        rescore(saved, RewardConfig(), out=tmp_path / "new.jsonl")
    assert not (tmp_path / "new.jsonl").exists()
    custom = CustomRewardConfig(path="no_such_module")
    with pytest.raises(PluginError):
        rescore(saved, RewardConfig(custom_reward_function=custom))


def test_the_command_reads_a_run_files_rewards_and_prints_a_table(saved: Path, tmp_path: Path):
    scorer = tmp_path / "mine.py"
    scorer.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
                      "    return len(solution_str)\n")  # fmt: skip
    content = {
        "data": {"train_files": ["none.parquet"]},
        "model": {"path": "none"},
        "reward": {"custom_reward_function": {"path": str(scorer)}},
    }
    run_file = write_yaml(tmp_path / "run.yaml", content)
    console = Console(record=True, width=120)
    rescore_from_file(saved, run_file, [], console)
    table = console.export_text()
    assert "openai/gsm8k" in table
    assert "6.0000" in table
    console = Console(record=True, width=120)
    rescore_from_file(saved, None, ["reward.manager=prime", "reward.num_workers=1"], console)
    assert "0.7500" in console.export_text()


def test_overrides_of_other_sections_and_contradictions_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="does not change the scoring"):
        read_reward_config(None, ["data.seed=3"])
    with pytest.raises(ConfigError, match=r"reward\.managr|unknown"):
        read_reward_config(None, ["reward.managr=prime"])
    with pytest.raises(ConfigError, match="did you mean 'math'"):
        read_reward_config(None, ["reward.functions=[{name: maths}]"])
    assert read_reward_config(None, ["reward.timeout_s=3"]).timeout_s == 3.0


def test_a_table_that_is_piped_cuts_no_name(saved: Path):
    console = Console(record=True, width=80)
    rescore_from_file(saved, None, [], console)
    assert "openai/gsm8k" in console.export_text()


def test_the_command_fails_where_nothing_could_be_scored(saved: Path, capsys: Any):
    assert run_agentrl(capsys, "reward", "rescore", saved).code == 0
    broken = "reward.custom_reward_function.path=tests.fakes.scorers"
    name = "reward.custom_reward_function.name=Counter"
    assert run_agentrl(capsys, "reward", "rescore", saved, broken, name).code == 0
    named = "reward.custom_reward_function.name=no_number"
    assert run_agentrl(capsys, "reward", "rescore", saved, broken, named).code == 1
