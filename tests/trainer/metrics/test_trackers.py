"""Trackers: the real packages offline, read back; fake ones that are slow, hang, raise or crash."""

import dataclasses
import io
import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from rich.console import Console

from agentrl import Trainer
from agentrl.config import parse_config
from agentrl.config.schema.run import TrainerConfig
from agentrl.errors import MissingExtraError
from agentrl.trainer.metrics import run_logger, trackers
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.metrics.tracker_process import TrackedRun
from agentrl.trainer.metrics.trackers import Generation, TrackerSink
from agentrl.trainer.setup.preflight import check_run
from agentrl.trainer.state.run_folder import write_start
from agentrl.workers.rank_status import open_rank_status
from tests.fakes.runs import ROOT, read_lines, tiny_run

SECRET = "sk-judge-0123456789"
ROWS = [Generation(0, 3, "2+2=", "<b>4</b>\n\u0645\x07\ud800", 1.5, "answered")]
SHOWN = [one._replace(response=one.response.replace("\ud800", "?")) for one in ROWS]
"""A lone surrogate is replaced: trackio cannot store one."""

FAKE = """
import json, os, pathlib, sys, time
FOLDER = pathlib.Path(os.environ["TRACKIO_DIR"])
def write(kind, *values):
    with (FOLDER / "calls.jsonl").open("a") as file:
        file.write(json.dumps([kind, *values]) + "\\n")
class Table:
    def __init__(self, columns, data):
        self.rows = [dict(zip(columns, row)) for row in data]
class Run:
    def log(self, values, step):
        {log}
        write("log", step, {{k: v.rows if isinstance(v, Table) else v for k, v in values.items()}})
    def finish(self):
        {finish}
        write("finish")
def init(project, name, config, resume, embed):
    print("chatter"); print(input if False else "")
    {init}
    write("init", project, name, config["trainer"]["seed"], config["start"]["num_ranks"])
    return Run()
"""

MakeFake = Callable[..., Path]


@pytest.fixture
def make_fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeFake:
    """Install a fake `trackio` for child processes; returns the file of the calls that it got."""

    def make(*, init: str = "pass", log: str = "pass", finish: str = "pass") -> Path:
        folder = tmp_path / "fake"
        folder.mkdir()
        (folder / "trackio.py").write_text(FAKE.format(init=init, log=log, finish=finish))
        monkeypatch.syspath_prepend(folder)
        monkeypatch.setenv("TRACKIO_DIR", str(folder))
        return folder / "calls.jsonl"

    return make


class Started(NamedTuple):
    sink: TrackerSink
    lines: list[str]
    run: TrackedRun


def start(
    folder: Path, tracker: str = "trackio", *, is_resumed: bool = False, **changes: Any
) -> Started:
    """Start a tracker of a run with a secret in its configuration."""
    content = tiny_run(Path("/home"), folder, trainer__seed=7)
    content["reward"] = {
        "custom_reward_function": {
            "path": "score.py", "reward_kwargs": {"api_key": SECRET, "url": f"http://h/?k={SECRET}"}
        }
    }  # fmt: skip
    name = write_start(folder, parse_config(content), num_ranks=3)
    fields = {
        "tracker": tracker,
        "project": "sums",
        "experiment": "first",
        "folder": str(folder),
        "start": str(folder / name),
        "record": str(folder / "trackers" / f"{tracker}.json"),
        "is_resumed": is_resumed,
    }
    run, lines = TrackedRun(**fields | changes), list[str]()
    return Started(TrackerSink(run, lines.append), lines, run)


def log_steps(sink: TrackerSink, steps: Iterator[int] | range, offset: float = 0.0) -> None:
    for step in steps:
        sink.log_generations(step, "val/sums/generations", ROWS)
        sink.log(step, {"actor/loss": step + offset, "val/sums/success": 0.25})


def calls_of(file: Path) -> list[list[Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def steps_of(file: Path) -> list[int]:
    logs = [call for call in calls_of(file) if call[0] == "log"]
    return [step for _, step, values in logs if "actor/loss" in values]


def has_ended(process: int) -> bool:
    try:
        os.killpg(process, 0)
    except ProcessLookupError:
        return True
    return False


# What a tracker gets.


def test_metrics_table_configuration_and_environment_arrive_in_order(make_fake, tmp_path):
    calls = make_fake()
    sink, lines, _ = start(tmp_path / "run")
    log_steps(sink, range(2))
    sink.log_generations(2, "val/sums/generations", ROWS)  # of a step that ended early
    sink.close()
    [first, *rest] = calls_of(calls)
    name = first[2]
    assert first == ["init", "sums", name, 7, 3]
    assert name.startswith("first-")
    table = [{"step": 0} | SHOWN[0]._asdict()]
    assert rest[:2] == [
        ["log", 0, {"val/sums/generations": table}],
        ["log", 0, {"actor/loss": 0.0, "val/sums/success": 0.25}],
    ]
    assert [call[:2] for call in rest[2:]] == [["log", 1], ["log", 1], ["log", 2], ["finish"]]
    assert lines == [f"note: trackio: run {name} of project sums"]
    assert "chatter" in (tmp_path / "run/logs/trackio.log").read_text()


def test_resume_continues_the_same_run_and_keeps_the_steps_that_are_there(make_fake, tmp_path):
    calls = make_fake()
    first = start(tmp_path / "run")
    log_steps(first.sink, range(4))
    first.sink.close()
    resumed = start(tmp_path / "run", is_resumed=True)
    log_steps(resumed.sink, range(2, 6), offset=0.5)
    resumed.sink.close()
    names = [call[2] for call in calls_of(calls) if call[0] == "init"]
    assert names[0] == names[1]
    logs = [call for call in calls_of(calls) if call[0] == "log" and "actor/loss" in call[-1]]
    assert [(step, values["actor/loss"]) for _, step, values in logs] == [
        (0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5), (5, 5.5),
    ]  # fmt: skip
    assert "the same run as before; it has the steps up to 3" in resumed.lines[1]


def test_new_run_in_the_same_folder_is_another_run_of_the_tracker(make_fake, tmp_path):
    calls = make_fake()
    for _ in range(2):
        sink = start(tmp_path / "run").sink
        log_steps(sink, range(1))
        sink.close()
    names = [call[2] for call in calls_of(calls) if call[0] == "init"]
    assert len(set(names)) == 2
    assert steps_of(calls) == [0, 0]


def test_run_resumes_on_another_machine_by_the_record_in_the_store(make_fake, tmp_path):
    calls = make_fake()
    record = f"file://{tmp_path}/store/trackers/trackio.json"
    for folder, is_resumed in (("here", False), ("there", True)):
        sink = start(tmp_path / folder, record=record, is_resumed=is_resumed).sink
        log_steps(sink, range(2))
        sink.close()
    names = [call[2] for call in calls_of(calls) if call[0] == "init"]
    assert names[0] == names[1]
    assert steps_of(calls) == [0, 1]


# Failures.


def test_missing_package_is_an_error_at_the_start_that_names_the_extra(monkeypatch, tmp_path):
    for name in trackers.TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
        run = tiny_run(tmp_path, tmp_path / "run", trainer__logger=["jsonl", name])
        with pytest.raises(MissingExtraError, match=f"trainer.logger: {name} needs") as caught:
            check_run(parse_config(run))
        assert name in str(caught.value.details["install"])


def test_tracker_that_does_not_start_is_reported_once_and_costs_nothing(make_fake, tmp_path):
    calls = make_fake(init="raise ConnectionError('no key:\\n  log in first')")
    sink, lines, _ = start(tmp_path / "run")
    log_steps(sink, range(100))
    sink.close()
    assert lines == [
        "note: trackio: not started, and the run continues without it: ConnectionError: no key: "
        "log in first"
    ]
    assert not calls.exists()


def test_failing_steps_are_reported_once_and_later_steps_arrive(make_fake, tmp_path):
    calls = make_fake(log="assert step > 2, 'the server is away'")
    sink, lines, _ = start(tmp_path / "run")
    log_steps(sink, range(5))
    sink.close()
    assert steps_of(calls) == [3, 4]
    assert [line for line in lines if "the server is away" in line] == lines[1:]
    assert lines[1:] == [
        "note: trackio: step 0 is not logged in full: AssertionError: the server is away"
    ]


def test_package_that_ends_its_process_is_reported(make_fake, tmp_path):
    make_fake(log="os._exit(3)")
    sink, lines, _ = start(tmp_path / "run")
    log_steps(sink, range(100))
    sink.close()
    assert "its process ended with code 3, and the run continues without it" in lines[-1]
    assert len(lines) == 2


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_tracker_that_hangs_delays_no_step_and_is_ended_at_close(
    make_fake, tmp_path, monkeypatch, where
):
    make_fake(**{where: "time.sleep(600)"})
    monkeypatch.setattr(trackers, "CLOSE_S", 2.0)
    sink, lines, _ = start(tmp_path / "run")
    began = time.monotonic()
    log_steps(sink, range(10))
    assert time.monotonic() - began < 300
    sink.close()
    assert time.monotonic() - began < 300
    assert "did not finish in 2 s, and is ended" in lines[-1]
    assert sink._process is not None
    assert has_ended(sink._process.pid)
    assert not sink._sender.is_alive()


def test_end_of_a_run_waits_for_all_trackers_together_and_closes_every_sink(
    make_fake, tmp_path, monkeypatch
):
    make_fake(finish="time.sleep(600)")
    monkeypatch.setattr(trackers, "CLOSE_S", 3.0)
    monkeypatch.setattr(run_logger, "LONG_CLOSE_S", 0.2)
    out, closed = io.StringIO(), list[str]()
    logger = RunLogger(TrainerConfig(default_local_dir=tmp_path), console=Console(file=out))
    status = open_rank_status(None, rank=0, size=1, timeout_s=60.0)
    logger.show_stages(status)
    hanging = [start(tmp_path / name).sink for name in ("a", "b", "c")]
    logger._sinks = [FailingSink(), *hanging, ClosingSink(closed)]
    began = time.monotonic()
    with pytest.raises(OSError, match="no space"):
        logger.close()
    assert time.monotonic() - began < 7  # one after the other: 9
    assert out.getvalue() == "waiting for trackio, trackio, trackio (at most 60 s)\n"
    assert status.stage == "waiting for trackers"
    assert not any(sink._sender.is_alive() for sink in hanging)
    assert closed == ["closed"]


class ClosingSink:
    def __init__(self, closed: list[str]) -> None:
        self._closed = closed

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        self._closed.append("closed")


class FailingSink:
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def close(self) -> None:
        raise OSError("no space left on device")


def test_queue_of_a_slow_tracker_is_bounded_and_drops_with_one_note(
    make_fake, tmp_path, monkeypatch
):
    make_fake(init="time.sleep(600)")
    monkeypatch.setattr(trackers, "MAX_QUEUED", 8)
    monkeypatch.setattr(trackers, "CLOSE_S", 0.5)
    sink, lines, _ = start(tmp_path / "run")
    rows = [ROWS[0]._replace(prompt="x" * 100_000)]  # a pipe holds less
    for step in range(50):
        sink.log_generations(step, "rollout/generations", rows)
    assert lines == ["note: trackio: too slow: 8 messages wait, and further ones are dropped"]
    sink.close()
    assert not sink._sender.is_alive()


def test_no_file_for_the_log_stops_no_run(make_fake, tmp_path):
    make_fake()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/logs").write_text("not a folder")
    sink, lines, _ = start(tmp_path / "run")
    log_steps(sink, range(100))
    sink.close()
    assert len(lines) == 1
    assert "not started, and the run continues without it" in lines[0]


KILLED = """
import sys, time
from pathlib import Path
from agentrl.trainer.metrics.trackers import TrackerSink
from agentrl.trainer.metrics.tracker_process import TrackedRun
import json
sink = TrackerSink(TrackedRun(**json.loads(sys.argv[1])), print)
for step in range(3):
    sink.log(step, {"actor/loss": float(step)})
sink.log_generations(3, "val/sums/generations", [])
while True:
    time.sleep(0.1)
"""


def test_tracker_of_a_killed_run_gets_what_was_queued_and_ends(make_fake, tmp_path):
    calls = make_fake()
    first = start(tmp_path / "run")
    first.sink.close()
    calls.unlink()
    fields = json.dumps(dataclasses.asdict(first.run))
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "fake"), str(ROOT)])}
    run = subprocess.Popen(
        [sys.executable, "-c", KILLED, fields], env=env, stdout=subprocess.DEVNULL
    )
    end = time.monotonic() + 60
    while not calls.exists() and time.monotonic() < end:
        time.sleep(0.05)
    run.send_signal(signal.SIGKILL)
    run.wait()
    while calls_of(calls)[-1] != ["finish"] and time.monotonic() < end:
        time.sleep(0.05)
    assert steps_of(calls) == [0, 1, 2]
    logs = [call for call in calls_of(calls) if call[0] == "log"]
    assert len(logs) == 3  # the resumed run sends the table of step 3
    assert calls_of(calls)[-1] == ["finish"]


# A run.


@pytest.mark.usefixtures("alone")
def test_run_logs_every_step_with_tables_and_continues_after_it_ended(
    make_fake, tmp_path, tiny_home
):
    calls = make_fake()
    changes = {
        "trainer__logger": ["jsonl", "trackio"],
        "trainer__log_val_generations": 2,
        "trainer__log_train_generations": 5,
        "trainer__project_name": "sums",
    }
    for steps in (1, 2):
        run = tiny_run(tiny_home, tmp_path / "run", trainer__total_training_steps=steps, **changes)
        Trainer(parse_config(run)).fit()
    made = calls_of(calls)
    names = [call[2] for call in made if call[0] == "init"]
    assert len(names) == 2
    assert len(set(names)) == 1
    logs = [(step, values) for kind, step, *rest in filter(lambda c: c[0] == "log", made)
            for values in rest]  # fmt: skip
    metrics = [{"step": step} | values for step, values in logs if "timing_s/validate" in values]
    assert metrics == read_lines(tmp_path / "run/metrics.jsonl")
    tables = {(step, name): rows for step, values in logs for name, rows in values.items()
              if name.endswith("/generations")}  # fmt: skip
    val, train = "val/arithmetic/generations", "rollout/generations"
    assert list(tables) == [(0, val), (1, train), (1, val), (2, train), (2, val)]
    assert [(row["sample"], row["row"]) for row in tables[1, train]] == [
        (0, 0), (0, 1), (0, 2), (0, 3), (1, 0),
    ]  # fmt: skip
    assert [row["row"] for row in tables[1, val]] == [0, 1]
    [shown, _] = tables[0, val]
    assert "<|im_start|>user" in shown["prompt"]
    assert shown["stop_reason"] in {"turn_length", "answered", "response_length", "max_turns"}
    assert shown["reward"] == 0.0


# The real packages, offline.


class Logged(NamedTuple):
    metrics: dict[int, dict[str, float]]
    tables: dict[int, list[dict[str, Any]]]
    config: dict[str, Any]
    """By dotted key."""
    ids: set[str]
    environment: dict[str, Any]


def read_records(file: Path) -> Iterator[bytes]:
    """Read the records of a file in LevelDB's log format, after a header of seven bytes."""
    content, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield record
            record = b""


def read_wandb(folder: Path) -> Logged:
    from wandb.proto import wandb_internal_pb2

    logged = Logged({}, {}, {}, set(), {})
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in read_records(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                logged.ids.add(record.run.run_id)
                for item in record.run.config.update:
                    value = json.loads(item.value_json)
                    logged.config.update({item.key: value} if item.key != "start" else {})
                    logged.environment.update(value if item.key == "start" else {})
            values: dict[str, Any] = {}
            for item in record.history.item:
                name = "|".join(item.nested_key) or item.key
                values[name] = json.loads(item.value_json)
            if values:
                step = int(values["_step"])
                assert step not in logged.metrics
                logged.metrics[step] = {k: v for k, v in values.items() if k in METRICS}
                path = values["val/sums/generations|path"]
                table = json.loads((file.parent / "files" / path).read_text())
                rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
                logged.tables[step] = rows
    return logged


def read_mlflow(folder: Path) -> Logged:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    experiment = client.get_experiment_by_name("sums")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    run, logged = runs[0], Logged({}, {}, {}, {one.info.run_id for one in runs}, {})
    for name in METRICS:
        for point in client.get_metric_history(run.info.run_id, name):
            assert name not in logged.metrics.setdefault(point.step, {})
            logged.metrics[point.step][name] = point.value
    assert run.info.run_name == "first"
    assert run.info.status == "FINISHED"
    artifacts = folder / "mlartifacts" / run.info.run_id / "artifacts"
    for file in artifacts.glob("val/sums/generations/*.json"):
        table = json.loads(file.read_text())
        rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
        logged.tables[int(file.stem)] = rows
    logged.config["trainer"] = {"seed": json.loads(run.data.params["trainer.seed"])}
    assert "mlflow.source.git.commit" in run.data.tags
    logged.environment.update(json.loads((artifacts / "starts/0002/run.json").read_text()))
    return logged


def read_swanlab(folder: Path) -> Logged:
    from swanlab.proto.swanlab.record.v1 import record_pb2

    logged = Logged({}, {}, {}, set(), {})
    for file in sorted(folder.glob("swanlog/run-*/*.swanlab")):
        for data in read_records(file):
            record = record_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("start"):
                assert record.start.project == "sums"
                assert record.start.name == "first"
                logged.ids.add(record.start.id)
            if record.HasField("scalar") and record.scalar.key in METRICS:
                values = logged.metrics.setdefault(record.scalar.step, {})
                assert record.scalar.key not in values
                values[record.scalar.key] = record.scalar.value.number
            if record.HasField("media"):
                [item] = record.media.value.items
                table = json.loads((file.parent / "media/echarts" / item.filename).read_text())
                logged.tables[record.media.step] = table["rowData"]
        saved = yaml.safe_load((file.parent / "files/config.yaml").read_text())
        logged.config.update({key: item["value"] for key, item in saved.items()})
    logged.environment.update(logged.config.pop("start"))
    return logged


def read_trackio(folder: Path) -> Logged:
    logged = Logged({}, {}, {}, set(), {})
    with sqlite3.connect(folder / "trackio/sums.db") as database:
        rows = database.execute("select run_id, step, metrics from metrics order by id").fetchall()
        [config] = database.execute("select config from configs").fetchall()
    database.close()
    for run_id, step, text in rows:
        logged.ids.add(run_id)
        for name, value in json.loads(text).items():
            if name in METRICS:
                assert name not in logged.metrics.setdefault(step, {})
                logged.metrics[step][name] = value
            else:
                logged.tables[step] = value["_value"]
    logged.config.update(json.loads(config[0]))
    logged.environment.update(logged.config.pop("start"))
    return logged


METRICS = ("actor/loss", "val/sums/success")
READERS: dict[str, Callable[[Path], Logged]] = {
    "wandb": read_wandb, "mlflow": read_mlflow, "swanlab": read_swanlab, "trackio": read_trackio
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the packages that read
@pytest.mark.parametrize("name", READERS)
def test_real_tracker_offline_has_all_of_a_run_and_of_its_resume(name, tmp_path, monkeypatch):
    pytest.importorskip(name)
    folder = tmp_path / "run"
    for variable in ("HOME", "WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(variable, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(folder / "trackio"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    lines: list[str] = []
    for steps, is_resumed in ((range(4), False), (range(2, 6), True)):
        sink, said, _ = start(folder, name, is_resumed=is_resumed)
        log_steps(sink, steps, offset=0.5 if is_resumed else 0.0)
        sink.close()
        lines += said
    assert len(lines) == 3, lines
    logged = READERS[name](folder)
    assert len(logged.ids) == 1
    losses = {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 4.5, 5: 5.5}
    assert logged.metrics == {
        step: {"actor/loss": loss, "val/sums/success": 0.25} for step, loss in losses.items()
    }
    assert logged.tables == {step: [{"step": step} | SHOWN[0]._asdict()] for step in losses}
    assert logged.config["trainer"]["seed"] == 7
    started = json.loads((folder / "starts/0002/run.json").read_text())
    for key in ("command", "git", "packages", "num_ranks"):
        assert logged.environment[key] == started[key]
    secret = SECRET.encode()
    leaks = [file for file in tmp_path.rglob("*") if file.is_file() and secret in file.read_bytes()]
    assert leaks == []
