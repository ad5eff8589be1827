import json
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.collate import collate
from agentrl.config.schema.reward import RewardConfig, RewardWeightsConfig
from agentrl.config.schema.run import DataConfig, ModelConfig, RunConfig, TrainerConfig
from agentrl.errors import DataError
from agentrl.rollout.states import StopReason
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.metrics.trackers import Generation
from agentrl.trainer.rollouts.files import (
    RolloutFiles,
    TrajectorySummary,
    read_rollouts,
    read_trajectories,
    rollout_path,
    save_rollouts,
)
from agentrl.workers.update import BrokenRow, SkippedStep
from tests.fakes.finished_requests import finished_requests, make_tool_request


class TwoRanks:
    """The main one of two ranks, each with the same rollouts; what they exchange is pickled."""

    is_main = True

    def gather_on_main(self, items: list[Any]) -> list[Any]:
        return 2 * pickle.loads(pickle.dumps(list(items)))


def dump(request):
    return request.model_dump(mode="json")


def test_values_that_cannot_be_sent_are_saved_as_text(tmp_path: Path):
    config = RunConfig(
        data=DataConfig(),
        model=ModelConfig(path="policy"),
        trainer=TrainerConfig(default_local_dir=tmp_path, rollout_data_dir=tmp_path / "rollouts"),
    )
    run_logger = RunLogger(config.trainer)
    world: Any = TwoRanks()
    files = RolloutFiles(config, world, run_logger, decode=str)
    first, second = make_tool_request(), make_tool_request()
    first.batch_data_id, second.batch_data_id = 1, 0
    first.reward_extra_info["lock"] = threading.Lock()
    files.save_step(3, [first, second], collate([first, second], pad_token_id=0))
    path = rollout_path(tmp_path / "rollouts", 3, compressed=True)
    saved = [one.request for one in read_trajectories(path)]
    assert [one.batch_data_id for one in saved] == [0, 0, 1, 1]
    assert "lock object" in saved[2].reward_extra_info["lock"]
    rows = (BrokenRow(first.request_id, {"log_probs": (1,)}),)
    skip = SkippedStep("actor", update=2, mini_batch=0, loss=math.nan, grad_norm=1.0, rows=rows)
    files.save_skipped(3, [first], [skip])
    skipped = list(read_trajectories(rollout_path(tmp_path / "skipped", 3, compressed=True)))
    assert [one.skipped.not_finite for one in skipped if one.skipped] == 2 * [{"log_probs": [1]}]


class Shown:
    """A run logger that keeps the tables for trackers."""

    def __init__(self) -> None:
        self.tables: list[tuple[int, str, list[Generation]]] = []

    def log_generations(self, step: int, name: str, rows: list[Generation]) -> None:
        self.tables.append((step, name, rows))


def test_trackers_get_the_first_samples_of_the_first_prompts_of_all_ranks(tmp_path: Path):
    config = RunConfig(
        data=DataConfig(),
        model=ModelConfig(path="policy"),
        trainer=TrainerConfig(
            default_local_dir=tmp_path, logger=["jsonl", "trackio"], log_val_generations=3
        ),
    )
    world: Any = TwoRanks()
    shown: Any = Shown()
    files = RolloutFiles(config, world, shown, decode=lambda ids: "é" * 30_000 + str(len(ids)))
    requests = [make_tool_request(reward=float(index)) for index in range(4)]
    for index, request in enumerate(requests):
        request.batch_data_id, request.rollout_offset = divmod(index, 2)
    files.save_step(7, requests, collate(requests, pad_token_id=0))
    files.save_validation(7, requests, "sums")
    [(step, name, rows)] = shown.tables
    assert (step, name) == (7, "val/sums/generations")
    assert [(row.sample, row.row, row.reward) for row in rows] == [
        (0, 0, 0.0), (0, 0, 0.0), (0, 1, 2.0),
    ]  # fmt: skip
    num_ids = len(requests[0].prompt_ids)
    left_out = 10_000 + len(str(num_ids))
    assert f"é [{left_out} characters left out] é" in rows[0].prompt
    assert rows[0].prompt.endswith(f"é{num_ids}")
    assert rows[0].stop_reason == str(requests[0].stop_reason)


def test_files_are_named_by_step(tmp_path):
    assert rollout_path(tmp_path, 10).name == "step_000010.jsonl"
    assert rollout_path(tmp_path, 10, "val").name == "val_000010.jsonl"


def test_a_line_holds_the_reward_that_training_uses(tmp_path: Path):
    request = make_tool_request(reward=0.0)
    request.tool_rewards = {"calculator": 0.5}
    reward = RewardConfig(weights=RewardWeightsConfig(tool=1.0))
    path = tmp_path / "step_000001.jsonl"
    save_rollouts(path, [request], step=1, reward=reward)
    assert [one.combined_reward for one in read_trajectories(path)] == [0.5]


def test_a_line_is_complete_and_says_what_follows_from_it(tmp_path):
    path = rollout_path(tmp_path / "rollouts", 7)
    assert save_rollouts(path, [make_tool_request(reward=1.0), make_tool_request()], step=7) == 2
    line = json.loads(path.read_text().splitlines()[0])
    assert (line["version"], line["step"]) == (1, 7)
    assert line["summary"] == {
        "num_turns": 4,
        "num_assistant_turns": 2,
        "num_user_turns": 0,
        "num_tool_calls": 1,
        "num_prompt_tokens": 6,
        "num_response_tokens": 12,
        "num_trained_tokens": 9,
        "mask_ones_ratio": 0.75,
        "reward_index": 11,
        "num_sequences": 1,
    }
    assert line["request"]["reward"] == 1.0
    assert [turn["role"] for turn in line["request"]["turns"]] == ["assistant", "tool", "assistant"]
    assert line["request"]["turns"][0]["calls"][0]["seconds"] == 0.5


@settings(max_examples=60)
@given(st.lists(finished_requests(), max_size=3))
def test_what_is_read_is_what_was_saved(tmp_path_factory, requests):
    path = tmp_path_factory.mktemp("r") / "step.jsonl"
    save_rollouts(path, requests, step=1)
    back = list(read_rollouts(path))
    assert [dump(request) for request in back] == [dump(request) for request in requests]
    for saved, request in zip(back, requests, strict=True):
        assert saved.rollout_log_probs == request.rollout_log_probs
        assert saved.turns == request.turns
        assert (saved.state, saved.stop_reason, saved.error) == (
            request.state,
            request.stop_reason,
            request.error,
        )


def test_the_reward_sits_on_the_last_trained_token():
    request = make_tool_request()
    request.exclude_turn(2, "malformed")
    assert TrajectorySummary.of(request).reward_index == 3
    assert TrajectorySummary.of(make_tool_request(StopReason.FAILED)).reward_index is None


def test_what_json_cannot_hold_is_written_as_the_nearest(tmp_path):
    request = make_tool_request(columns={"image": b"\xff", "lone": "\ud800", "array": np.arange(2)})
    request.turns[0].calls[0].metrics = {"score": np.float32(0.5), "huge": math.inf}
    path = tmp_path / "a.jsonl"
    save_rollouts(path, [request], step=1)
    (back,) = read_rollouts(path)
    assert back.columns == {"image": "_w==", "lone": "\ud800", "array": [0, 1]}
    assert back.turns[0].calls[0].metrics == {"score": 0.5, "huge": math.inf}


def test_other_scripts_are_readable_in_the_file(tmp_path):
    path = tmp_path / "a.jsonl"
    save_rollouts(path, [make_tool_request(prompt="你好")], step=1)
    assert "你好" in path.read_text(encoding="utf-8")


def test_writing_streams_and_appears_whole(tmp_path):
    path = tmp_path / "step.jsonl"
    save_rollouts(path, [make_tool_request()], step=1)
    before = path.read_bytes()

    def requests():
        yield make_tool_request()
        assert path.read_bytes() == before, "the earlier file stands until the new one is whole"
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        save_rollouts(path, requests(), step=1)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_reading_streams(tmp_path):
    path = tmp_path / "step.jsonl"
    save_rollouts(path, [make_tool_request()], step=1)
    path.write_bytes(path.read_bytes() + b"{torn")
    rollouts = read_rollouts(path)
    assert next(rollouts).num_response_tokens == 12
    with pytest.raises(DataError) as caught:
        next(rollouts)
    assert (caught.value.file, caught.value.line) == (path, 2)


def damage(line, place, value):
    *way, last = place.split(".")
    inner = line
    for key in way:
        inner = inner[key]
    inner[last] = value
    return line


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        ("version", 2, "version 2, not 1"),
        ("request.version", 99, "version 99, not 1"),
        ("request.loss_mask", [1], "different lengths"),
        ("request.turns", [], "do not cover"),
        ("request.state", "dreaming", "state: Input should be 'pending'"),
        ("request.invented", 1, "invented"),
        ("summary.reward_index", 3, "does not match the request"),
        ("request", None, "request"),
    ],
)
def test_a_line_of_another_version_or_damaged_is_named(tmp_path, place, value, said):
    path = tmp_path / "step.jsonl"
    save_rollouts(path, [make_tool_request()], step=1)
    path.write_text(json.dumps(damage(json.loads(path.read_text()), place, value)) + "\n")
    with pytest.raises(DataError, match=said) as caught:
        list(read_trajectories(path))
    assert caught.value.line == 1


@pytest.mark.parametrize("missing", ["request", "summary", "version", "request.turns"])
def test_a_line_with_something_missing_is_named(tmp_path, missing):
    path = tmp_path / "step.jsonl"
    save_rollouts(path, [make_tool_request()], step=1)
    line = json.loads(path.read_text())
    *way, last = missing.split(".")
    del (line[way[0]] if way else line)[last]
    path.write_text(json.dumps(line))
    with pytest.raises(DataError, match=last):
        list(read_rollouts(path))


@pytest.mark.parametrize("text", [b"[]\n", b"\xff\xfe\n", b"\n", b"7\n"])
def test_lines_that_are_no_trajectory_are_named(tmp_path, text):
    path = tmp_path / "step.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError):
        list(read_rollouts(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl"):
        list(read_rollouts(tmp_path / "nowhere.jsonl"))


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path):
    file = tmp_path / "rollouts.jsonl"
    file.write_text("[" * 200_000)
    with pytest.raises(DataError, match="RecursionError"):
        list(read_rollouts(file))


def test_a_line_is_json_for_strict_readers_and_reads_back_equal(tmp_path: Path):
    texts = ["NaN", "Infinity", "-Infinity", 'a "NaN" \\u004eaN, Infinity', "\ud800 NaN"]
    extra = {"texts": texts, "low": -math.inf, "high": [math.inf], "no": math.nan, "NaN": 1.0}
    request = make_tool_request(columns={"deep": {"Infinity": extra}})
    request.reward_extra_info = extra
    path = tmp_path / "a.jsonl"
    save_rollouts(path, [request], step=1)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = json.loads(path.read_bytes(), parse_constant=refuse)
    read = line["request"]["reward_extra_info"]
    assert [read["low"], read["high"], read["no"]] == ["-Infinity", ["Infinity"], "NaN"]
    (back,) = read_rollouts(path)
    no = back.reward_extra_info.pop("no")
    assert math.isnan(no)
    assert back.reward_extra_info == {key: extra[key] for key in extra if key != "no"}
