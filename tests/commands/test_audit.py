"""`agentrl audit`: untouched runs have no differences, and every tampering is one."""

import dataclasses
import json
import random
import shutil
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from PIL import Image

from agentrl import Trainer
from agentrl.commands.audit.report import run_checks
from agentrl.commands.audit.resample import LIMITS, Resampled, TurnChoice, resample
from agentrl.commands.audit.saved_run import Check, read_run
from agentrl.config import load_config, parse_config
from agentrl.config.schema.run import RolloutConfig, TrainerConfig
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import DataError
from agentrl.remote_io import Location
from agentrl.rollout.records import MALFORMED_CALL
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.seeding import draw_seed
from agentrl.trainer.components import start_components
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.rollouts.digests import (
    DIGESTS_FILE,
    add_digest,
    add_weight_digest,
    drop_digests,
    read_digests,
)
from agentrl.trainer.rollouts.files import TrajectorySummary, read_rollouts
from agentrl.trainer.rollouts.pictures import PictureCollector, write_pictures
from agentrl.trainer.setup.rollout_setup import make_manager
from agentrl.workers.distributed import stop_world
from tests.fakes.runs import (
    CALL,
    put,
    read_lines,
    run_agentrl,
    scripted,
    tiny_run,
    write_jsonl,
    write_yaml,
)
from tests.fakes.torchrun import ranks_of
from tests.fakes.vision_runs import vision_run
from tests.trainer.test_branch_runs import LOOP

WORDS = ("#### 42", "well 17", "no 3 or 4", CALL, "#### 5 6 7", "it is 8")
Line = dict[str, Any]
SEED = RolloutConfig().seed


def train(home: Path, folder: Path, *, is_scripted: bool = True, **changes: Any) -> Path:
    """Train a tiny run that saves its rollouts, and return its folder."""
    changes = {
        "trainer__rollout_data_dir": str(folder / "rollouts"),
        "trainer__compress_rollouts": False,
    } | changes
    config = parse_config(tiny_run(home, folder, **changes))
    parts = start_components(config)
    if is_scripted:

        def answer(ids: Any, sampling: Any, request_id: str, turn: int) -> str:
            return WORDS[(sum(map(ord, request_id)) + 3 * turn) % len(WORDS)]

        engine = ScriptedEngine(answer, tokenizer=parts.setup.tokenizer, max_model_len=1024)
        manager = make_manager(config, parts.setup, engine)
        parts = dataclasses.replace(parts, engine=engine, manager=manager)
    Trainer(config, parts).fit()
    stop_world()
    return folder


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A scorer whose rewards differ within a group."""
    path = tmp_path_factory.mktemp("scorer") / "scorer.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, **_):\n"
        "    return (sum(map(ord, solution_str)) % 7) / 7\n"
    )
    return {"reward__custom_reward_function": {"path": str(path)}}


@pytest.fixture(scope="module")
def original(
    tiny_home: Path, tmp_path_factory: pytest.TempPathFactory, scored: dict[str, Any]
) -> Path:
    folder = tmp_path_factory.mktemp("audit") / "run"
    return train(
        tiny_home, folder, **scored, trainer__validation_data_dir=str(folder / "validation")
    )


@pytest.fixture
def run(original: Path, tmp_path: Path) -> Path:
    return copy_run(original, tmp_path)


def copy_run(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may change. Its rollouts are those of the copy."""
    copy = tmp_path / "run"
    shutil.copytree(original, copy, ignore=shutil.ignore_patterns("trained"))
    for file in copy.glob("starts/*/resolved.yaml"):
        file.write_text(file.read_text().replace(str(original), str(copy)))
    return copy


def found(run: Path) -> dict[str, str]:
    """The first difference of each check that has one."""
    checks = run_checks(read_run(run))
    return {one.name: str(one.differences[0].args[0]) for one in checks if one.differences}


def test_an_untouched_run_has_no_difference(
    original: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = run_checks(read_run(original))
    assert {one.name: one.differences for one in checks} == {one.name: [] for one in checks}
    assert all(one.num > 0 for one in checks), [(one.name, one.not_done) for one in checks]
    output = run_agentrl(capsys, "audit", original)
    assert output.code == 0
    assert "advantages" in output.out


# Files that were changed: found by their digests.


def change_a_byte(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    index = draw.randrange(len(content))
    content[index] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def cut(path: Path, draw: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def change_lines(path: Path, draw: random.Random) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    one, other = draw.sample(range(len(lines)), 2)
    match draw.choice(["drop", "double", "swap"]):
        case "drop":
            del lines[one]
        case "double":
            lines.append(lines[one])
        case _:
            lines[one], lines[other] = lines[other], lines[one]
    path.write_bytes(b"".join(lines))


def remove(path: Path, _: random.Random) -> None:
    path.unlink()


def exchange(path: Path, _: random.Random) -> None:
    others = [one for one in path.parent.glob(f"*{path.suffix}") if one != path]
    path.write_bytes(others[0].read_bytes())


def change_a_metric(path: Path, draw: random.Random) -> None:
    file = path.parent.parent / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    line = draw.choice([one for one in lines if "rollout/reward/mean" in one])
    name = draw.choice(
        ["rollout/reward/mean", "critic/advantages/max", "response_length/mean",
         "rollout/tool_calls/ok", "num_turns/mean", "rollout/mask_ones_ratio"]
    )  # fmt: skip
    line[name] += draw.choice([-0.25, 0.01, 1.0])
    file.write_text("".join(json.dumps(one) + "\n" for one in lines))


TAMPERINGS: list[Callable[[Path, random.Random], None]] = [
    change_a_byte, change_a_byte, cut, change_lines, remove, exchange, change_a_metric,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_random_tamperings_are_found(run: Path, tmp_path: Path) -> None:
    draw, missed = random.Random(0), list[str]()
    kept = tmp_path / "kept"
    shutil.copytree(run, kept)
    for number in range(100):
        tamper = draw.choice(TAMPERINGS)
        files = sorted((run / "rollouts").glob("step_*"))
        if tamper is change_lines:
            files = [file for file in files if file.suffix == ".jsonl"]
        file = draw.choice(files)
        before = {one: one.read_bytes() for one in [*files, run / "metrics.jsonl"]}
        tamper(file, draw)
        after = {one: one.read_bytes() if one.exists() else b"" for one in before}
        assert before != after
        if not found(run):
            missed.append(f"{number}: {tamper.__name__} of {file.name}")
        shutil.rmtree(run)
        shutil.copytree(kept, run)
    assert missed == []


def test_a_missing_line_and_a_changed_line_of_digests_are_found(run: Path) -> None:
    file = run / "rollouts" / DIGESTS_FILE
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[1:]))
    assert "does not continue the chain" in found(run)["digests"]
    file.write_text("".join(lines[:-1]))
    assert found(run) == {
        "weights": "the weights after a step have no digest",
        "versions": "turns were sampled by weights without a digest",  # those of validation
    }
    file.write_text("".join(lines[:-2]))
    assert "has no digest" in found(run)["digests"]
    file.write_text("".join(lines).replace('"step": 1', '"step": 2', 1))
    assert "does not continue the chain" in found(run)["digests"]


def test_the_last_step_cannot_be_removed_with_its_digests(run: Path) -> None:
    folder = run / "rollouts"
    for file in folder.glob("step_000002*"):
        file.unlink()
    lines = (folder / DIGESTS_FILE).read_text().splitlines(keepends=True)
    (folder / DIGESTS_FILE).write_text("".join(line for line in lines if '"step": 2' not in line))
    assert found(run)["lines"] == "the step has no file of rollouts"


def test_a_checkpoint_of_other_weights_is_found(run: Path) -> None:
    add_weight_digest(run / "rollouts", 2, "0" * 64)
    assert found(run) == {"weights": "the weights are not those that the run had after the step"}


def test_a_damaged_checkpoint_is_found(run: Path) -> None:
    (file,) = (run / "checkpoints/global_step_2").glob("rank_*.safetensors")
    content = bytearray(file.read_bytes())
    content[-40] ^= 1
    file.write_bytes(content)
    assert "is damaged" in found(run)["weights"]


def test_damaged_digests_are_reported_and_stop_no_run(run: Path) -> None:
    file = run / "rollouts" / DIGESTS_FILE
    file.write_bytes(b"\xff\n" + file.read_bytes())
    assert "damaged line" in found(run)["digests"]
    drop_digests(file.parent, after=0)  # as a resume does
    logger = RunLogger(TrainerConfig(default_local_dir=run))
    with logger.ignoring_write_errors("rollouts"):
        add_digest(run / "rollouts/step_000001.jsonl", 1)


def test_a_line_that_a_killed_run_wrote_in_part_is_written_again(run: Path) -> None:
    file = run / "rollouts" / DIGESTS_FILE
    last = read_digests(file.parent)[-1]
    file.write_text(file.read_text()[:-20])
    add_weight_digest(file.parent, last.step, last.digest)
    assert found(run) == {}


def test_tokens_that_a_killed_run_wrote_without_a_digest_are_no_difference(run: Path) -> None:
    """The run was killed between the files of step 2, whose rollouts have a digest."""
    file = run / "rollouts" / DIGESTS_FILE
    lines = file.read_text().splitlines(keepends=True)
    last = next(n for n, line in enumerate(lines) if "step_000002.tokens" in line)
    file.write_text("".join(lines[:last]))
    shutil.rmtree(run / "checkpoints/global_step_2")
    (run / f"validation/{DIGESTS_FILE}").unlink()
    for one in run.glob("validation/val_*"):
        one.unlink()
    rewrite_metrics(run, lambda lines: lines.pop())
    checks = {one.name: one for one in run_checks(read_run(run))}
    assert checks["digests"].differences == []
    assert "tokens.parquet has no digest: the run ended" in checks["digests"].not_done


def test_a_damaged_picture_is_a_difference_and_not_the_end(run: Path) -> None:
    picture = Image.new("RGB", (8, 6), "red")
    collector = PictureCollector()
    entry = collector.plain(picture)
    write_pictures(run / "rollouts", collector.take())

    def change(lines: list[Line]) -> None:
        lines[0]["request"]["multi_modal_data"] = {"image": [entry]}

    rewrite(run, change)
    assert "digests" not in found(run)
    file = run / "rollouts" / entry["path"]
    content = file.read_bytes()
    for index in (0, 20, len(content) // 2):  # the signature, the header, the pixels
        damaged = bytearray(content)
        damaged[index] ^= 1
        file.write_bytes(damaged)
        difference = found(run)
        assert "the picture cannot be read" in difference["lines"]
    file.write_bytes(content)
    assert "lines" not in found(run)


# Rows that were changed together with their digests: found by what follows from them.


def rewrite(run: Path, change: Callable[[list[Line]], Any], step: int = 2) -> None:
    """Change the lines of a step, and write the digests again."""
    file = run / f"rollouts/step_{step:06d}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    change(lines)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    add_digests(run)


def rewrite_tokens(run: Path, name: str, change: Callable[[list[Any]], Any] | None = None) -> None:
    """Change a column of step 2, by default its first value, and write the digests again."""
    file = run / "rollouts/step_000002.tokens.parquet"
    table = pq.read_table(file)
    rows = table[name].to_pylist()
    if change is not None:
        change(rows)
    else:
        rows[0][0] += 1.0 if name != "response_mask" else -1.0
    column = pa.array(rows, table.schema.field(name).type)
    table = table.set_column(table.column_names.index(name), name, column)
    pq.write_table(table, file)
    add_digests(run)


def rewrite_metrics(run: Path, change: Callable[[list[Line]], Any]) -> None:
    """Change the lines of the metrics."""
    file = run / "metrics.jsonl"
    lines = read_lines(file)
    change(lines)
    write_jsonl(file, lines)


def add_digests(run: Path, weights_of_start: str | None = None) -> None:
    """Write the digests again, with their chain; those of missing files are dropped."""
    for folder in (run / "rollouts", run / "validation"):
        before = read_digests(folder) if folder.is_dir() else []
        (folder / DIGESTS_FILE).unlink(missing_ok=True)
        for one in before:
            if one.is_of_weights:
                changed = None if one.step else weights_of_start
                add_weight_digest(folder, one.step, changed or one.digest)
            elif (folder / one.file).is_file():
                add_digest(folder / one.file, one.step)


def change_request(name: str, value: Any) -> Callable[[list[Line]], None]:
    def change(lines: list[Line]) -> None:
        request = lines[0]["request"]
        request[name] = value(request[name]) if callable(value) else value

    return change


def change_a_version(lines: list[Line]) -> None:
    turns = lines[0]["request"]["turns"]
    spans = next(turn["weight_versions"] for turn in turns if turn["weight_versions"])
    spans[0][0] = 7


def change_the_row(lines: list[Line]) -> None:
    request = lines[0]["request"]
    plan, step, row, index = request["uid"].split("-")
    request["uid"] = "-".join((plan, step, str((int(row) + 1) % 8), index))
    request["request_id"] = f"{request['uid']}-{request['rollout_offset']}"
    request["seed"] = draw_seed(f"{SEED}:{request['uid']}:{request['rollout_offset']}")


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda lines: lines.pop(), "lines"),
        (lambda lines: lines.append(lines[0]), "lines"),
        (change_request("reward", lambda reward: reward + 0.5), "rewards"),
        (change_request("loss_mask", lambda mask: [1 - mask[0], *mask[1:]]), "lines"),
        (change_request("response_ids", lambda ids: [ids[0] + 1, *ids[1:]]), "template"),
        (change_request("rollout_log_probs", lambda logs: [logs[0] - 1, *logs[1:]]), "advantages"),
        (lambda lines: lines[0].update(combined_reward=9.0), "rewards"),
        (change_a_version, "versions"),
        (change_the_row, "order"),
    ],
)
def test_changed_rows_are_found(run: Path, change: Callable[[list[Line]], Any], check: str) -> None:
    rewrite(run, change)
    assert check in found(run)


# Forgeries: several files are changed so that they agree, and their digests are written again.


def first_trained(request: Line) -> int:
    """Index of the first trained token of a response."""
    return request["loss_mask"].index(1)


def forge_log_probs(run: Path) -> None:
    """Change a log-probability in the line and in its row of tokens."""
    line = read_lines(run / "rollouts/step_000002.jsonl")[0]["request"]
    at = first_trained(line)

    def change(lines: list[Line]) -> None:
        lines[0]["request"]["rollout_log_probs"][at] -= 1

    def change_row(rows: list[Any]) -> None:
        names = pq.read_table(run / "rollouts/step_000002.tokens.parquet")["request_id"]
        rows[names.to_pylist().index(line["request_id"])][at] -= 1

    rewrite(run, change)
    rewrite_tokens(run, "rollout_log_probs", change_row)


def exchange_lines_of_steps(run: Path) -> None:
    other = read_lines(run / "rollouts/step_000001.jsonl")
    first = other[0]

    def change(lines: list[Line]) -> None:
        lines[0], other[0] = first, lines[0]

    rewrite(run, change)
    rewrite(run, lambda lines: lines.__setitem__(slice(None), other), 1)


def exchange_rewards(run: Path) -> None:
    """Exchange the rewards of two samples of a group."""

    def change(lines: list[Line]) -> None:
        group = [line for line in lines if line["request"]["batch_data_id"] == draw]
        for name in ("reward", "reward_extra_info"):
            first, second = (line["request"] for line in group)
            first[name], second[name] = second[name], first[name]
        first, second = group
        first["combined_reward"], second["combined_reward"] = (
            second["combined_reward"], first["combined_reward"],
        )  # fmt: skip

    rewards: dict[int, set[float]] = {}
    for line in read_lines(run / "rollouts/step_000002.jsonl"):
        rewards.setdefault(line["request"]["batch_data_id"], set()).add(line["combined_reward"])
    draw = next(index for index, values in rewards.items() if len(values) == 2)
    rewrite(run, change)


def exclude_as_malformed(run: Path) -> None:
    """Exclude a turn without a malformed call, in the line and in its summary."""

    def change(lines: list[Line]) -> None:
        request = lines[0]["request"]
        turn = request["turns"][0]
        turn["excluded"] = MALFORMED_CALL
        request["loss_mask"][: turn["end"]] = [0] * turn["end"]
        saved = AsyncRolloutRequest.model_validate(request)
        lines[0]["summary"] = TrajectorySummary.of(saved).model_dump()

    rewrite(run, change)


def flip_a_call(run: Path) -> None:
    def change(lines: list[Line]) -> None:
        turns = [turn for line in lines for turn in line["request"]["turns"] if turn["calls"]]
        turns[0]["calls"][0]["outcome"] = "tool_error"

    rewrite(run, change)


def change_version_by_one(run: Path) -> None:
    def change(lines: list[Line]) -> None:
        turns = lines[0]["request"]["turns"]
        spans = next(turn["weight_versions"] for turn in turns if turn["weight_versions"])
        spans[0][0] -= 1

    rewrite(run, change)


def raise_a_reward(run: Path) -> None:
    """Raise a reward and the combined reward that follows from it."""

    def change(lines: list[Line]) -> None:
        lines[0]["request"]["reward"] += 0.5
        lines[0]["combined_reward"] += 0.5

    rewrite(run, change)


def change_the_prompt(run: Path) -> None:
    def change(lines: list[Line]) -> None:
        message = next(m for m in lines[0]["request"]["messages"] if m["role"] == "user")
        message["content"] += " please"

    rewrite(run, change)


def change_the_data(run: Path) -> None:
    """Change a ground truth in the data file, which the copy of the run names."""
    file = run.parent / "train.parquet"
    start = run / "starts/0001/resolved.yaml"
    config = yaml.safe_load(start.read_text())
    rows = pq.read_table(config["data"]["train_files"][0]).to_pylist()
    for row in rows:
        row["reward_model"]["ground_truth"] = "0"
    pq.write_table(pa.Table.from_pylist(rows), file)
    config["data"]["train_files"] = [str(file)]
    start.write_text(yaml.safe_dump(config))


def change_key(path: str, value: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        start = run / "starts/0001/resolved.yaml"
        config = yaml.safe_load(start.read_text())
        put(config, path, value)
        start.write_text(yaml.safe_dump(config))

    return change


def drop_a_weight_digest(run: Path, step: int = 1) -> None:
    folder = run / "rollouts"
    before = read_digests(folder)
    (folder / DIGESTS_FILE).unlink()
    for one in before:
        if one.is_of_weights and one.step != step:
            add_weight_digest(folder, one.step, one.digest)
        elif not one.is_of_weights:
            add_digest(folder / one.file, one.step)


def change_validation(change: Callable[[list[Line]], Any]) -> Callable[[Path], None]:
    def forge(run: Path) -> None:
        file = run / "validation/val_arithmetic_000002.jsonl"
        lines = read_lines(file)
        change(lines)
        write_jsonl(file, lines)
        add_digests(run)

    return forge


def drop_validation(run: Path) -> None:
    (run / "validation/val_arithmetic_000002.jsonl").unlink()
    add_digests(run)


def drop_the_last_step(run: Path) -> None:
    for file in run.glob("*/*_000002*"):
        file.unlink()
    add_digests(run)
    rewrite_metrics(run, lambda lines: lines.pop())


def validated_reward(lines: list[Line]) -> None:
    lines[0]["request"]["reward"] += 0.5
    lines[0]["combined_reward"] += 0.5


def field_of_line(name: str, value: Any) -> Callable[[Path], None]:
    return lambda run: rewrite(run, change_request(name, value))


FORGERIES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "log-probability": (forge_log_probs, "metrics"),
    "lines of two steps": (exchange_lines_of_steps, "lines"),
    "rewards of a group": (exchange_rewards, "advantages"),
    "exclusion": (exclude_as_malformed, "lines"),
    "outcome of a call": (flip_a_call, "metrics"),
    "version": (change_version_by_one, "versions"),
    "reward and its total": (raise_a_reward, "rewards"),
    "prompt": (change_the_prompt, "data"),
    "data file": (change_the_data, "data"),
    "ground truth": (field_of_line("ground_truth", "0"), "data"),
    "seed": (field_of_line("seed", lambda seed: seed + 1), "lines"),
    "temperature": (
        field_of_line("sampling", lambda sampling: sampling | {"temperature": 0.7}),
        "lines",
    ),
    "step of a line": (lambda run: rewrite(run, lambda lines: lines[0].update(step=1)), "lines"),
    "estimator": (change_key("algorithm.adv_estimator", "rloo"), "advantages"),
    "seed of the run": (change_key("rollout.seed", 7), "lines"),
    "order": (change_key("data.seed", 7), "order"),
    "group of tokens": (
        lambda run: rewrite_tokens(run, "uid", lambda rows: rows.reverse()),
        "advantages",
    ),
    "weight digest": (drop_a_weight_digest, "weights"),
    "reward of validation": (change_validation(validated_reward), "metrics"),
    "line of validation": (change_validation(lambda lines: lines.pop()), "metrics"),
    "file of validation": (drop_validation, "lines"),
    "last step": (drop_the_last_step, "weights"),
    "metric of validation": (
        lambda run: rewrite_metrics(
            run, lambda lines: lines[-1].update({"val/arithmetic/success": 2.0})
        ),
        "metrics",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("forgery", FORGERIES)
def test_forgeries_are_found(run: Path, forgery: str) -> None:
    forge, check = FORGERIES[forgery]
    forge(run)
    assert check in found(run)


def test_a_difference_names_request_file_and_both_values(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(lines: list[Line]) -> None:
        lines[3]["combined_reward"] = 9.0

    line = read_lines(run / "rollouts/step_000002.jsonl")[3]
    rewrite(run, change)
    output = run_agentrl(capsys, "audit", run)
    assert output.code == 1
    assert "rewards: the combined reward does not follow from its parts" in output.out
    for text in (
        f"file: {run}/rollouts/step_000002.jsonl",
        f"request: {line['request']['request_id']}",
        "saved: 9.0",
        f"expected: {line['combined_reward']}",
    ):
        assert text in output.out


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("advantages", "advantages"),
        ("returns", "advantages"),
        ("response_mask", "advantages"),
        ("token_level_scores", "rewards"),
        ("rollout_log_probs", "advantages"),
        ("old_log_probs", "metrics"),
    ],
)
def test_changed_tokens_are_found(run: Path, name: str, check: str) -> None:
    rewrite_tokens(run, name)
    assert check in found(run)


def test_tokens_without_a_column_are_a_difference_and_not_the_end(run: Path) -> None:
    file = run / "rollouts/step_000002.tokens.parquet"
    pq.write_table(pq.read_table(file).drop_columns(["uid"]), file)
    add_digests(run)
    (difference,) = next(
        one.differences for one in run_checks(read_run(run)) if one.name == "advantages"
    )
    assert difference.args[0].startswith("cannot be checked: KeyError")
    assert difference.details["file"] == file


@pytest.mark.parametrize(
    "change",
    [
        lambda line: line.pop("rollout/num_requests"),
        lambda line: line.update({"filter_groups/num_gen_batches": None}),
    ],
)
def test_a_step_without_its_metrics_is_a_difference_and_not_the_end(
    run: Path, change: Callable[[Line], Any]
) -> None:
    rewrite_metrics(run, lambda lines: change(lines[-1]))
    assert "the step has no rollout metrics" in found(run)["order"]


def test_the_reason_of_a_check_that_was_not_done_is_shown_as_it_is(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_key("data.train_files", ["/[/red]/train.parquet"])(run)
    output = run_agentrl(capsys, "audit", run)
    assert output.code == 0, output.out
    assert "[/red]" in output.out


def test_templates_that_write_the_date_have_that_of_the_run(
    tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = json.loads((tiny_home / "policy/tokenizer_config.json").read_text()).get("chat_template")
    own = own or (tiny_home / "policy/chat_template.jinja").read_text()
    dated = "{{ strftime_now('%Y') }}" + own
    run = train(tiny_home, tmp_path / "run", model__custom_chat_template=dated)

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Later":
            return cls(2099, 1, 1)

    monkeypatch.setattr("agentrl.rollout.templates.template.datetime", Later)
    assert "template" not in found(run)


def test_the_given_folder_of_a_copied_run_is_audited(
    original: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(original, copy)
    assert run_agentrl(capsys, "audit", copy).code == 0
    file = copy / "rollouts/step_000002.jsonl"
    file.write_text(file.read_text().replace("{", "[", 1))
    output = run_agentrl(capsys, "audit", copy)
    assert output.code == 1
    assert str(file) in output.out
    shutil.rmtree(copy / "rollouts")
    output = run_agentrl(capsys, "audit", copy)
    assert output.code == 2
    assert "no training rollouts are in the folder" in output.err
    assert str(copy / "rollouts") in output.err


def test_a_run_without_saved_rollouts_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DataError, match="no record of a start"):
        read_run(tmp_path)
    output = run_agentrl(capsys, "audit", tmp_path)
    assert output.code == 2
    assert "is not the folder of a run" in output.err


def test_a_run_without_metrics_or_with_a_damaged_start_is_an_error(run: Path) -> None:
    start = run / "starts/0001/resolved.yaml"
    content = start.read_text()
    start.write_text("trainer: [")
    with pytest.raises(DataError, match="the record of a start cannot be read"):
        read_run(run)
    start.write_text(content)
    (run / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match="the run has no metrics"):
        read_run(run)


# Log-probabilities, computed again.


@pytest.fixture(scope="module")
def sampled(
    tiny_home: Path, tmp_path_factory: pytest.TempPathFactory, scored: dict[str, Any]
) -> Path:
    """A run whose tokens its policy sampled; two of three steps have a checkpoint."""
    folder = tmp_path_factory.mktemp("sampled") / "run"
    changes: dict[str, Any] = {"trainer__save_freq": 2, "trainer__total_training_steps": 3}
    return train(tiny_home, folder, is_scripted=False, **scored, **changes)


def resampled(run: Path, num: int = 1000) -> Check:
    """Compare the log-probabilities of turns; all by default."""
    saved = read_run(run)
    choice = TurnChoice(num, {0: None, **saved.checkpoints}, random.Random(0))
    checks = run_checks(saved, choice)
    stop_world()
    return checks[-1]


def test_log_probs_computed_again_are_those_at_sampling(
    sampled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = run_agentrl(capsys, "audit", sampled, "--resample", 5, "--seed", 3)
    stop_world()
    assert output.code == 0, output.out
    assert "no checkpoint of weights of version 1" in output.out
    check = resampled(sampled)
    assert check.num >= 16
    assert check.differences == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_one_step_earlier_are_found(
    tiny_home: Path, tmp_path: Path, scored: dict[str, Any], dtype: str
) -> None:
    changes = {"trainer__save_freq": 1, "trainer__max_ckpt_to_keep": None, "model__dtype": dtype}
    run = read_run(train(tiny_home, tmp_path / "run", is_scripted=False, **scored, **changes))

    def resampled_with(checkpoint: Location | None) -> Resampled:
        choice = TurnChoice(100, {1: checkpoint}, random.Random(0))
        choice.offer(run.rollouts, list(read_rollouts(run.rollouts / "step_000002.jsonl")))
        result = resample(run, choice, {})
        stop_world()
        return result

    assert resampled_with(run.checkpoints[1]).differences == []
    earlier = resampled_with(None)  # the model before training
    limits = LIMITS[getattr(torch, dtype)]
    assert earlier.largest_mean > limits.mean
    if dtype == "bfloat16":  # no token alone shows it
        assert earlier.largest < limits.token
        assert "on average" in str(earlier.differences[0])
    else:
        assert "another log-probability" in str(earlier.differences[0])


def test_the_seed_chooses_the_turns(sampled: Path) -> None:
    def chosen(seed: int, num: int = 4) -> list[tuple[str, int]]:
        choice = TurnChoice(num, {0: None, 1: None, 2: None}, random.Random(seed))
        for file in sorted((sampled / "rollouts").glob("step_*.jsonl")):
            choice.offer(file, list(read_rollouts(file)))
        return [(one.sequence.request_id, one.turn) for one in choice.chosen]

    assert chosen(1) == chosen(1) != chosen(2)
    assert len(set(chosen(1, 10_000))) == len(chosen(1, 10_000)) == 24


def test_a_forged_log_prob_is_found(sampled: Path, tmp_path: Path) -> None:
    run = copy_run(sampled, tmp_path)
    rewrite(run, change_request("rollout_log_probs", lambda logs: [logs[0] - 0.01, *logs[1:]]), 1)
    (difference,) = resampled(run).differences
    assert "another log-probability" in str(difference)
    assert {"request", "turn", "token", "saved", "expected"} <= difference.details.keys()


def test_other_weights_than_the_recorded_ones_are_not_used(sampled: Path, tmp_path: Path) -> None:
    run = copy_run(sampled, tmp_path)
    add_digests(run, weights_of_start="0" * 64)
    (difference,) = resampled(run).differences
    assert difference.args[0] == "the weights of version 0 are not those that the run had"


# Untouched runs of other kinds.

KINDS: dict[str, dict[str, Any]] = {
    "embedded": {"is_scripted": False},
    "rloo": {"algorithm__adv_estimator": "rloo"},
    "remax": {"algorithm__adv_estimator": "remax"},
    "kl in reward": {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__kl_coef": 0.1},
    "rejection": {
        "is_scripted": False,
        "algorithm__rollout_correction": {
            "rollout_is": "token",
            "rollout_rs": "seq_mean_k3",
            "rollout_rs_threshold": 1e-16,
        },
    },
    "gae": {"algorithm__adv_estimator": "gae", "critic__ppo_mini_batch_size": 2},
    "groups": {"algorithm__filter_groups": {"enable": True, "metric": "score"}},
    "two epochs": {"trainer__total_training_steps": 5},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_untouched_runs_of_all_kinds_have_no_difference(
    tiny_home: Path, tmp_path: Path, scored: dict[str, Any], kind: str
) -> None:
    assert found(train(tiny_home, tmp_path / "run", **scored, **KINDS[kind])) == {}


@pytest.mark.slow
def test_a_resumed_run_has_no_difference(
    tiny_home: Path, tmp_path: Path, scored: dict[str, Any]
) -> None:
    changes: dict[str, Any] = {**scored, "trainer__save_freq": 1}
    train(tiny_home, tmp_path / "run", trainer__total_training_steps=3, **changes)
    shutil.rmtree(tmp_path / "run/checkpoints/global_step_3")
    run = train(tiny_home, tmp_path / "run", trainer__total_training_steps=4, **changes)
    assert found(run) == {}


@pytest.mark.slow
def test_each_step_is_checked_with_the_configuration_of_its_start(
    tiny_home: Path, tmp_path: Path, scored: dict[str, Any]
) -> None:
    run, changes = tmp_path / "run", {**scored, "trainer__max_ckpt_to_keep": None}
    starts: list[dict[str, Any]] = [
        {}, {"trainer__weight_digests": False, "rollout__n": 3}, {"data__train_batch_size": 2},
    ]  # fmt: skip
    for steps, start in enumerate(starts, start=1):
        train(tiny_home, run, trainer__total_training_steps=steps, **changes, **start)
    assert found(run) == {}
    folder = run / "rollouts"
    recorded = [one.step for one in read_digests(folder) if one.is_of_weights]
    assert recorded == [0, 1, 2, 3]  # the third start recorded those that it resumed from
    drop_a_weight_digest(run, 2)
    assert found(run) == {}  # no start has taken step 2 and recorded its digest
    drop_a_weight_digest(run, 1)
    assert "no digest" in found(run)["weights"]


@pytest.mark.slow
def test_a_resumed_run_may_have_other_folders_forms_and_validation_sets(
    tiny_home: Path, tmp_path: Path, scored: dict[str, Any]
) -> None:
    """Step 2 is repeated after a resume, compressed and in other folders."""
    run = tmp_path / "run"
    changes: dict[str, Any] = {**scored, "trainer__save_freq": 1, "trainer__test_freq": 1}
    first: dict[str, Any] = {"trainer__validation_data_dir": str(run / "validation")}
    train(tiny_home, run, trainer__total_training_steps=2, **changes, **first)
    shutil.rmtree(run / "checkpoints/global_step_2")
    second: dict[str, Any] = {
        "trainer__rollout_data_dir": str(run / "later"),
        "trainer__validation_data_dir": str(run / "later"),
        "trainer__compress_rollouts": True,
        "data__val_files": {"sums": str(tiny_home / "data/val.parquet")},
    }
    train(tiny_home, run, trainer__total_training_steps=3, **changes, **second)
    saved = read_run(run)
    checks = {one.name: one for one in run_checks(saved)}
    assert {one.name: one.differences for one in checks.values()} == {name: [] for name in checks}
    assert "no data file" not in checks["data"].not_done
    assert [(one.path.parent.name, one.label) for one in saved.files if one.kind == "step"] == [
        ("rollouts", "step_000001"),
        ("later", "step_000002"),
        ("later", "step_000003"),
    ]
    (run / "rollouts/step_000001.jsonl").unlink()
    assert {"digests", "lines"} <= found(run).keys()


@pytest.mark.slow
def test_a_resumed_run_may_compress_the_files_that_it_writes_again(
    tiny_home: Path, tmp_path: Path, scored: dict[str, Any]
) -> None:
    run = tmp_path / "run"
    changes: dict[str, Any] = {**scored, "trainer__save_freq": 1}
    train(tiny_home, run, **changes)
    shutil.rmtree(run / "checkpoints/global_step_2")
    train(tiny_home, run, **changes, trainer__compress_rollouts=True)
    names = [one.path.name for one in read_run(run).files]
    assert names == ["step_000001.jsonl", "step_000002.jsonl.zst"]
    assert found(run) == {}
    file = run / "rollouts" / names[1]
    content, draw = file.read_bytes(), random.Random(0)
    for tamper in (change_a_byte, cut, remove):
        tamper(file, draw)
        assert "digests" in found(run)
        file.write_bytes(content)
    assert found(run) == {}


def test_a_validation_set_that_its_configuration_does_not_name_has_no_rows(run: Path) -> None:
    change_key("data.val_files", {})(run)
    checks = {one.name: one for one in run_checks(read_run(run))}
    assert checks["data"].not_done == "not done: no data file of arithmetic"
    assert checks["data"].differences == []


def test_a_step_that_the_run_did_not_complete_is_left_out(run: Path) -> None:
    rewrite_metrics(run, lambda lines: lines.pop())
    assert found(run) == {"weights": "the step of a checkpoint has no metrics"}
    shutil.rmtree(run / "checkpoints/global_step_2")
    assert found(run) == {}


@pytest.mark.slow
def test_a_run_with_compaction_has_no_difference(
    tiny_home: Path, tmp_path: Path, scored: dict[str, Any]
) -> None:
    compaction = {
        "trigger_tokens": 230,
        "max_summary_tokens": 20,
        "instruction": "Sum up.",
    }
    run = train(
        tiny_home,
        tmp_path / "run",
        **scored,
        is_scripted=False,
        data__max_response_length=400,
        rollout__engine=scripted(CALL, CALL, "42"),
        rollout__multi_turn__max_tokens_per_turn=60,
        rollout__multi_turn__compaction=compaction,
    )
    assert found(run) == {}
    lines = read_lines(run / "rollouts/step_000001.jsonl")
    assert any(line["summary"]["num_sequences"] > 1 for line in lines)


@pytest.mark.slow
def test_a_run_of_an_agent_loop_has_no_difference(
    tiny_home: Path, tmp_path: Path, scored: dict[str, Any]
) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    entry = {"name": "parts", "_target_": f"{tmp_path}/loop.py:Parts"}
    agent = {
        "default_agent_loop": "parts",
        "agent_loop_config_path": str(write_yaml(tmp_path / "loops.yaml", [entry])),
    }
    changes = {"rollout__agent": agent, "data__val_files": None} | scored
    run = train(tiny_home, tmp_path / "run", **changes, is_scripted=False)
    assert found(run) == {}
    names = pq.read_table(run / "rollouts/step_000002.tokens.parquet")["request_id"]
    assert len(names) > len(read_lines(run / "rollouts/step_000002.jsonl"))


@pytest.mark.slow
def test_a_run_on_two_ranks_has_no_difference(
    tiny_home: Path, tmp_path: Path, scored: dict[str, Any]
) -> None:
    folder = tmp_path / "run"
    changes: dict[str, Any] = {
        "trainer__rollout_data_dir": str(folder / "rollouts"),
        "trainer__collective_timeout_s": 60,
    }
    file = write_yaml(tmp_path / "run.yaml", tiny_run(tiny_home, folder, **scored, **changes))
    with ranks_of("agentrl", "train", str(file)) as ranks:
        outputs = [rank.wait() for rank in ranks]
    assert [rank.code for rank in outputs] == [0, 0], "\n".join(rank.err for rank in outputs)
    assert found(folder) == {}


@pytest.mark.slow
def test_a_run_with_pictures_has_no_difference(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    Trainer(load_config(vision_run(tmp_path))).fit()
    stop_world()
    run = read_run(tmp_path / "run")
    choice = TurnChoice(6, {0: None, **run.checkpoints}, random.Random(0))
    checks = run_checks(run, choice)
    stop_world()
    assert checks[-1].num == 6
    assert [str(error) for one in checks for error in one.differences] == []
    template = next(one.not_done for one in checks if one.name == "template")
    assert template.endswith("left out: they have images, or the run did not check them")
    pictures = [
        path for path in (tmp_path / "rollouts/media").iterdir() if "small" not in path.stem
    ]
    pictures[0].write_bytes(pictures[1].read_bytes())
    assert found(tmp_path / "run")["digests"] == "the picture was changed"
    torch.set_num_threads(threads)
