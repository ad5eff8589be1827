"""Lists, curves, steps, trajectories and tokens of a run's folder."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.errors import ConfigError, DataError
from agentrl.rollout.states import StopReason
from agentrl.trainer.rollouts.files import read_trajectories
from agentrl.viewer import queries, trajectories
from agentrl.viewer.index import index_file
from agentrl.viewer.queries import Filters
from agentrl.viewer.runs import RecordedConfig, RunReader, find_differences
from agentrl.viewer.steps import describe_step, histogram
from agentrl.viewer.trajectories import describe_trajectory, list_tokens
from tests.fakes.viewer_runs import (
    QUESTIONS,
    append_metrics,
    conversation,
    make_line,
    write_view_run,
)

STEP = "rollouts/step_000002"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_view_run(tmp_path / "run")


@pytest.fixture
def run(folder: Path) -> RunReader:
    reader = RunReader(folder)
    for label in reader.find_files():
        reader.index(label)
    return reader


def listed(run: RunReader, **given: Any) -> list[dict[str, Any]]:
    return queries.list_trajectories(run, Filters(**given), limit=100)["rows"]


def test_the_fake_run_is_one_that_the_library_reads(folder: Path):
    for path in (folder / "rollouts").glob("*.jsonl"):
        assert len(list(read_trajectories(path))) == 16


def test_a_list_has_all_trajectories_and_is_paged(run: RunReader):
    page = queries.list_trajectories(run, Filters(), offset=40, limit=5)
    assert (page["total"], len(page["rows"]), page["files"]) == (48, 5, 3)
    assert page["rows"][0]["id"] == "rollouts/step_000001:8"


def test_filters_keep_what_they_say(run: RunReader):
    assert {row["end"] for row in listed(run, end="failed")} == {"failed"}
    assert {row["source"] for row in listed(run, source="gsm8k")} == {"gsm8k"}
    assert all(0.2 <= row["reward"] <= 0.4 for row in listed(run, min_reward=0.2, max_reward=0.4))
    assert {row["bad_calls"] for row in listed(run, outcome="timeout")} == {1}
    assert [row["id"] for row in listed(run, text="IT IS 7.", file=STEP)] == [f"{STEP}:7"]
    assert not listed(run, tool="no_such_tool")


def test_missing_rewards_are_last_in_both_orders(folder: Path):
    path = folder / "rollouts" / "step_000002.jsonl"
    lines = path.read_text().splitlines()
    first = json.loads(lines[0])
    first["combined_reward"] = first["request"]["reward"] = None
    path.write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    run = RunReader(folder)
    for sort in ("reward", "-reward"):
        rewards = [row["reward"] for row in listed(run, file=STEP, sort=sort)]
        assert rewards[-1] is None
        assert rewards[:-1] == sorted(rewards[:-1], reverse=sort == "-reward")


def test_equal_rewards_are_in_the_order_of_advantages_then_of_the_file(folder: Path):
    path = folder / "rollouts" / "step_000002.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["combined_reward"] = line["request"]["reward"] = 0.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunReader(folder)
    index = run.index(STEP)
    (unknown, *_), names = index.advantages, [one.request_id for one in index.entries]
    del index.advantages[unknown]
    for sort, sign in (("reward", 1), ("-reward", -1)):
        rows = listed(run, file=STEP, sort=sort)
        ranked = sorted(names, key=lambda name: sign * index.advantages.get(name, sign * 9))
        assert [row["request_id"] for row in rows] == ranked
    worst = [row["id"] for row in listed(run, file=STEP, sort="reward")]
    around = describe_trajectory(run, worst[3])["around"]
    assert (around["worse"], around["better"]) == (worst[2], worst[4])
    path.with_suffix(".tokens.parquet").unlink()
    rows = listed(RunReader(folder), file=STEP, sort="reward")
    assert [row["request_id"] for row in rows] == names


def test_seconds_of_tools_are_those_of_the_chosen_tool(folder: Path):
    path = folder / "rollouts" / "step_000002.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        turn = line["request"]["turns"][0]
        calls = (("search", 16 - number), ("calculator", 100 * (number % 3)), ("search", 0.5))
        turn["calls"] = [{**turn["calls"][0], "name": name, "seconds": s} for name, s in calls]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = listed(RunReader(folder), file=STEP, tool="search", sort="tool_seconds")
    assert [row["tool_seconds"] for row in rows] == [number + 1.5 for number in range(16)]
    (first, *_) = listed(RunReader(folder), file=STEP, sort="-tool_seconds")
    assert (first["id"], first["tool_seconds"]) == (f"{STEP}:2", 214.5)


def test_columns_with_one_value_are_hidden(run: RunReader):
    def hidden(**given: str) -> list[str]:
        return queries.list_trajectories(run, Filters(**given))["hidden"]

    assert hidden() == []
    assert hidden(file=STEP) == ["step"]
    assert hidden(file=STEP, source="gsm8k") == ["step", "source"]


def test_an_unknown_order_is_refused():
    with pytest.raises(DataError, match="unknown order 'size'"):
        Filters.of({"sort": "size"})
    with pytest.raises(DataError, match="min_reward is 'x'"):
        Filters.of({"min_reward": "x"})


def test_a_damaged_line_is_counted_and_the_others_are_read(folder: Path):
    path = folder / "rollouts" / "step_000002.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{damaged", *lines[1:]]) + "\n")
    index = RunReader(folder).index(STEP)
    assert index.damaged == [2]
    assert len(index.entries) == 16


DAMAGES = (
    ("request", "data_source", None), ("request", "stop_reason", 5), ("request", "reward", "x"),
    ("request", "uid", [1]), ("request", "reward", 10**400), ("summary", "num_turns", "2"),
)  # fmt: skip


@pytest.mark.parametrize(("part", "key", "value"), DAMAGES)
def test_a_line_with_a_value_of_another_type_is_damaged(
    folder: Path, part: str, key: str, value: Any
):
    path = folder / "rollouts" / "step_000002.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    first = json.loads(lines[0])
    first["combined_reward"] = None
    first[part][key] = value
    path.write_text("".join([json.dumps(first) + "\n", *lines[1:]]))
    run = RunReader(folder)
    assert run.index(STEP).damaged == [1]
    assert len(listed(run, file=STEP, sort="end", text="it is")) == 15
    assert describe_step(run, STEP)["num"] == 15


def test_a_line_that_is_cut_off_is_damaged(folder: Path):
    path = folder / "rollouts" / "step_000002.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    run = RunReader(folder)
    assert run.index(STEP).damaged == [16]
    assert queries.list_trajectories(run, Filters(file=STEP))["damaged"] == 1
    other = "rollouts/step_000001"
    run.index(other)
    assert queries.list_trajectories(run, Filters(file=other))["damaged"] == 0


def test_a_file_that_is_damaged_after_it_was_read_has_no_match(folder: Path):
    run = RunReader(folder)
    index = run.index(STEP)
    entry = replace(index.entries[0], text=None)
    assert index.contains(entry, "let me")
    index.path.write_text("x" * 100_000)
    assert not index.contains(entry, "let me")


@pytest.mark.parametrize("name", [f"{STEP}:99", "rollouts/step_000099:1", "nothing"])
def test_an_unknown_trajectory_is_named(run: RunReader, name: str):
    with pytest.raises(LookupError, match=f"the trajectory '{name}'"):
        describe_trajectory(run, name)
    with pytest.raises(LookupError, match="the rollout file 'nothing'"):
        listed(run, file="nothing")


def test_a_run_names_the_folder_that_its_rollouts_had(folder: Path):
    shutil.rmtree(folder / "rollouts")
    (row,) = queries.list_runs([RunReader(folder)])["runs"]
    assert (row["files"], row["rollout_folder"]) == ([], str(folder / "rollouts"))


def test_rewards_of_any_size_are_described(folder: Path):
    path = folder / "rollouts" / "step_000002.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for number, line in enumerate(lines):
        line["combined_reward"] = (-1) ** number * 1e308
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    step = describe_step(RunReader(folder), STEP)
    assert step["histograms"][0]["missing"] == 0
    assert json.loads(queries.to_json(step))["num"] == 16


def test_a_bar_of_the_rewards_lists_what_it_counts(run: RunReader):
    bins = describe_step(run, STEP)["histograms"][0]
    edges, last = bins["edges"], len(bins["counts"]) - 1
    for number, count in enumerate(bins["counts"]):
        limits = {} if number == last else {"max_reward": edges[number + 1]}
        assert len(listed(run, file=STEP, min_reward=edges[number], **limits)) == count


def test_a_policy_that_calls_many_names_gets_a_bounded_table(folder: Path):
    path = folder / "rollouts" / "step_000002.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    call = lines[0]["request"]["turns"][0]["calls"][0]
    for number, line in enumerate(lines):
        line["request"]["turns"][0]["calls"] = [
            {**call, "name": f"{number}_{one}_" + "x" * 10_000} for one in range(10)
        ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = RunReader(folder)
    rows = describe_step(run, STEP)["tools"]
    assert [row["tool"] for row in rows[50:]] == [None]
    assert sum(row["calls"] for row in rows) == 160
    assert {len(row["tool"]) for row in rows[:50]} == {100}
    assert len(queries.list_choices(run, STEP)["tools"]) == 50
    assert len(listed(run, file=STEP, tool=rows[0]["tool"])) == 1


def test_texts_are_kept_up_to_a_limit(folder: Path):
    path = folder / "rollouts" / "step_000002.jsonl"
    kept = index_file(path, STEP, max_text_bytes=1000)
    assert 0 < kept.text_bytes <= 1000
    assert sum(entry.text is None for entry in kept.entries) > 8
    assert all(kept.contains(entry, "let me compute") for entry in kept.entries)


def test_a_damaged_file_of_tokens_gives_no_advantages(folder: Path):
    path = folder / "rollouts" / "step_000002.tokens.parquet"
    path.write_bytes(path.read_bytes()[:-100])
    run = RunReader(folder)
    assert run.index(STEP).advantages == {}
    assert "cannot be read" in list_tokens(run, f"{STEP}:0")["note"]


def test_the_index_equals_what_the_lines_hold(run: RunReader):
    index = run.index(STEP)
    for entry in index.entries:
        saved = index.read(entry)
        assert entry.request_id == saved["request"]["request_id"]
        assert entry.reward == saved["combined_reward"]
        assert index.contains(entry, "let me compute")


def test_long_conversations_are_searched_in_their_file(folder: Path):
    long = conversation("Q", "x" * 100_000 + " needle", "A")
    path = folder / "rollouts" / "step_000002.jsonl"
    path.write_text(make_line(long, "A", reason=StopReason.ANSWERED))
    run = RunReader(folder)
    assert run.index(STEP).entries[0].text is None
    assert len(listed(run, file=STEP, text="Needle")) == 1
    assert not listed(run, file=STEP, text="thread")


def test_only_new_lines_of_metrics_are_read(folder: Path, run: RunReader):
    before = run.metrics()[0]
    append_metrics(folder, 4, random.Random(1))
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5')
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
    assert run.metrics()[0] is before


def test_metrics_of_a_resumed_run_are_read_again(folder: Path, run: RunReader):
    run.metrics()
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text(lines[0])
    assert [line["step"] for line in run.metrics()] == [1]


def test_metrics_of_a_replaced_file_are_read_again(folder: Path, run: RunReader):
    run.metrics()
    longer = [json.dumps({"step": step, "reward": 10 * step}) for step in range(1, 99)]
    (folder / "draft").write_text("\n".join(longer) + "\n")
    (folder / "draft").rename(folder / "metrics.jsonl")
    assert run.metrics()[0] == {"step": 1, "reward": 10}
    assert len(run.metrics()) == 98


def test_a_run_without_a_configuration_yet_is_read_when_it_has_one(tmp_path: Path):
    folder = write_view_run(tmp_path / "run")
    (folder / "rollouts").rename(tmp_path / "elsewhere")
    file = folder / "starts" / "0001" / "resolved.yaml"
    config = yaml.safe_load(file.read_text())
    config["trainer"]["rollout_data_dir"] = str(tmp_path / "elsewhere")
    file.unlink()
    run = RunReader(folder)
    assert (run.tokenizer, run.find_files()) == (None, {})
    file.write_text(yaml.safe_dump(config))
    assert run.tokenizer is not None
    assert len(run.find_files()) == 3


def test_the_configured_folder_is_first_and_skipped_is_last(folder: Path, tmp_path: Path):
    for name in ("skipped", "val_rollouts"):
        shutil.copytree(folder / "rollouts", folder / name)
    shutil.copytree(folder / "rollouts", tmp_path / "rollouts")
    file = folder / "starts" / "0001" / "resolved.yaml"
    config = yaml.safe_load(file.read_text())
    config["trainer"]["rollout_data_dir"] = str(tmp_path / "rollouts")
    file.write_text(yaml.safe_dump(config))
    found = RunReader(folder).find_files()
    newest = [f"{name}/step_000003" for name in ("rollouts", "val_rollouts", "skipped")]
    assert list(found)[:3] == newest
    assert found["rollouts/step_000003"].parent == tmp_path / "rollouts"


def test_a_copied_run_shows_its_own_files(folder: Path, tmp_path: Path):
    copy = shutil.copytree(folder, tmp_path / "other" / "copy")
    (copy / "rollouts" / "step_000003.jsonl").unlink()
    run = RunReader(copy)
    assert list(run.find_files()) == ["rollouts/step_000002", "rollouts/step_000001"]
    assert {path.parent for path in run.find_files().values()} == {copy / "rollouts"}
    shutil.rmtree(folder)
    assert RunReader(copy).tokenizer is not None


def test_the_tokenizer_of_a_model_of_the_hub_is_found_in_its_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cached = tmp_path / "cache" / "models--owner--name"
    snapshot = cached / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    shutil.copy(folder / "model" / "tokenizer.json", snapshot)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    file = folder / "starts" / "0001" / "resolved.yaml"
    for model in ({"path": "owner/name"}, {"path": "gone", "tokenizer_path": "owner/name"}):
        config = {**yaml.safe_load(file.read_text()), "model": model}
        file.write_text(yaml.safe_dump(config))
        assert RunReader(folder).tokenizer is not None


def test_curves_have_four_axes(run: RunReader):
    trained = sum(entry.trained for entry in run.index("rollouts/step_000001").entries)
    axes = queries.read_axes(run)
    assert axes["step"] == [1, 2, 3]
    assert axes["tokens"] == [5000, 10000, 15000]
    assert axes["trained"][0] == trained
    assert 10 <= axes["time"][0] <= 11
    assert queries.read_curve(run, "rollout/reward/mean")["at"] == [0, 1, 2]


def test_a_step_has_distributions_groups_and_failures(run: RunReader):
    step = describe_step(run, STEP)
    assert step["num"] == 16
    assert all(sum(one["counts"]) + one["missing"] == 16 for one in step["histograms"])
    assert sum(number for _, number in step["ends"]) == 16
    assert [len(group["samples"]) for group in step["groups"]] == [8, 8]
    sample = step["groups"][0]["samples"][0]
    assert sample["advantage"] == pytest.approx(sample["reward"] - 0.5, abs=1e-6)
    assert sum(tool["calls"] for tool in step["tools"]) == 16
    assert step["tools"][0]["tool"] == "search"


@pytest.mark.parametrize(
    "values",
    [[1.0], [2, 2, 2], [0.5, 0.25], [None, 1], [1e-3, 1e9], [1e17], [1e308, -1e308], [1e308] * 9],
)
def test_a_histogram_counts_every_value(values: list[float | None]):
    bins = histogram(values)
    assert sum(bins["counts"]) + bins["missing"] == len(values)
    assert len(bins["edges"]) == len(bins["counts"]) + 1


def test_a_trajectory_has_neighbors_by_reward(run: RunReader):
    ranked = listed(run, file=STEP, sort="reward")
    around = describe_trajectory(run, ranked[3]["id"])["around"]
    assert (around["worse"], around["better"]) == (ranked[2]["id"], ranked[4]["id"])


def test_the_same_row_is_found_in_other_steps(run: RunReader):
    shown = describe_trajectory(run, f"{STEP}:0")
    assert {one["step"] for one in shown["same_row"]} == {1, 3}
    assert len(shown["group"]) == 8


def test_tokens_have_text_mask_and_what_training_computed(run: RunReader):
    tokens = list_tokens(run, f"{STEP}:0")
    columns = tokens["columns"]
    assert {len(values) for values in columns.values()} == {tokens["num"]}
    assert "".join(columns["text"]).startswith("Let me compute.")
    sampled = [i for i, one in enumerate(columns["mask"]) if one]
    assert all(columns["ratio"][i] is not None for i in sampled)
    assert columns["version"][0] == 0


def test_tokens_are_shown_as_ids_without_a_tokenizer(folder: Path):
    (folder / "model" / "tokenizer.json").unlink()
    assert "text" not in list_tokens(RunReader(folder), f"{STEP}:0")["columns"]


def test_tokens_of_another_attempt_are_not_shown(folder: Path):
    path = folder / "rollouts" / "step_000002.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    for key, value in (("loss_mask", 1), ("response_ids", 65), ("rollout_log_probs", -1.0)):
        line["request"][key].append(value)
    path.write_text(json.dumps(line) + "\n")
    tokens = list_tokens(RunReader(folder), f"{STEP}:0")
    assert tokens["note"] == "the sequence was not in the batch"
    assert "ratio" not in tokens["columns"]


def test_tokens_of_a_sequence_are_paged(run: RunReader, monkeypatch: pytest.MonkeyPatch):
    whole = list_tokens(run, f"{STEP}:0")["columns"]
    monkeypatch.setattr(trajectories, "MAX_TOKENS", 10)
    page = list_tokens(run, f"{STEP}:0", start=20)
    assert page["columns"] == {key: values[20:30] for key, values in whole.items()}


def test_tokens_of_the_prompt_are_observed(run: RunReader, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(trajectories, "MAX_TOKENS", 20)
    pages = [list_tokens(run, f"{STEP}:0", start=start, part="prompt") for start in (0, 20, 60)]
    question = QUESTIONS[0]
    assert {page["num"] for page in pages} == {len(question)}
    texts = ["".join(page["columns"]["text"]) for page in pages]
    assert texts == [question[:20], question[20:40], question[60:]]
    assert [set(page["columns"]) for page in pages] == [{"id", "mask", "text"}] * 3
    assert not any(one for page in pages for one in page["columns"]["mask"])
    with pytest.raises(DataError, match="no part 'answer'"):
        list_tokens(run, f"{STEP}:0", part="answer")


def differences(*configs: dict[str, Any], directory: str = "/home/me") -> dict[str, list[str]]:
    return dict(find_differences([RecordedConfig(config, directory) for config in configs]))


def config_in(folder: str, **sections: Any) -> dict[str, Any]:
    return {"trainer": {"default_local_dir": folder}, **sections}


def test_differences_name_the_keys_that_differ():
    first, second = {"a": {"b": 1, "c": 2}}, {"a": {"b": 3, "c": 2}, "d": None}
    assert differences(first, second) == {"a.b": ["1", "3"], "d": ["not set", "null"]}


def test_files_in_the_own_folder_of_each_run_are_no_difference():
    first, second = (
        config_in(f"/home/me/runs/{name}", model={"path": f"/home/me/runs/{name}/policy"}, d=data)
        for name, data in (("a", ["runs/ab/x"]), ("b", ["runs/b/x"]))
    )
    assert differences(first, second) == {"d": ['["runs/ab/x"]', '["runs/b/x"]']}


def test_different_files_in_the_own_folders_are_shown_relative_to_them():
    first, second = (
        config_in(f"/runs/{name}", model={"path": f"/runs/{name}/{policy}"})
        for name, policy in (("a", "policy"), ("b", "trained"))
    )
    own = "${trainer.default_local_dir}"
    assert differences(first, second) == {
        "model.path": [f'"{own}/policy"', f'"{own}/trained"']
    }  # fmt: skip


def test_relative_paths_in_the_own_folder_are_no_difference():
    first, second = (
        {
            "trainer": {"default_local_dir": f"/home/me/runs/{name}", "experiment_name": name},
            "data": [f"runs/{name}/data", f"./runs/{name}/data"],
        }
        for name in "ab"
    )
    assert differences(first, second) == {"trainer.experiment_name": ['"a"', '"b"']}


def test_the_same_file_is_no_difference_in_the_folder_of_one_of_the_runs():
    """The second run is started from the saved configuration of the first one."""
    first = config_in("/home/me/runs/a", train=["runs/a/train", "own/a"], lr=1, name="x/y")
    saved = config_in("/home/me/runs/b", train=["/home/me/runs/a/train", "own/a"], lr=2, name="x/y")
    assert differences(first, saved) == {"lr": ["1", "2"]}
    relative = {**saved, "train": ["runs/a/train", "own/a"]}
    assert differences(first, relative) == {"lr": ["1", "2"]}


def test_the_directory_of_relative_paths_is_read_from_the_last_start(tmp_path: Path):
    runs = list[RunReader]()
    for name, data in (("a", "runs/a/data"), ("b", str(tmp_path / "runs" / "a" / "data"))):
        folder = write_view_run(tmp_path / "runs" / name, num_steps=1)
        start = folder / "starts" / "0001"
        config = config_in(str(folder), data=data)
        (start / "resolved.yaml").write_text(yaml.safe_dump(config))
        (start / "run.json").write_text(json.dumps({"directory": str(tmp_path)}))
        runs.append(RunReader(folder))
    assert queries.list_runs(runs)["differences"] == []
    (runs[0].folder / "starts" / "0001" / "run.json").write_text("{")
    assert [key for key, _ in queries.list_runs(runs)["differences"]] == ["data"]


def test_numbers_that_are_not_finite_become_text():
    assert queries.to_json({"a": [float("nan"), (1.5,)]}) == '{"a": ["nan", [1.5]]}'


def test_a_folder_without_a_run_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="not the folder of a run"):
        RunReader(tmp_path).check()
    with pytest.raises(ConfigError, match="no folder"):
        RunReader(tmp_path / "none").check()
    write_view_run(tmp_path / "inner")
    with pytest.raises(ConfigError) as error:
        RunReader(tmp_path).check()
    assert error.value.details["runs_in_it"] == "inner"
