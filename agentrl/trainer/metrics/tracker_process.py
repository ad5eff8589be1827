"""The program of a tracker's child process: it reads lines and calls the tracker's package.

Each line of the input is a JSON object: first a `TrackedRun`, then the metrics or a table of a step
(`step`, and `metrics` or `table`), and `{"closed": true}` when the run closes. If the input ends
without that line, the run was killed. Each line of the output is a message for the user. What the
packages print goes to standard error, which is the tracker's log file.
"""

import json
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import yaml

from agentrl.messages import dump_json
from agentrl.remote_io import locate, write_whole

ORPHAN_S = 60.0
"""Seconds that the process has to send the rest after the run was killed."""
_POLL_S = 1.0
_MAX_MESSAGE_CHARS = 400
_NOT_IN_MLFLOW_NAMES = re.compile(r"[^\w\-. :/]")


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """What a tracker needs to know of a run."""

    tracker: str
    project: str
    experiment: str
    folder: str
    """The run's folder."""
    start: str
    """Folder with the record of this start of the run."""
    record: str
    """Path or URL of the file with the tracker's id of the run and the last logged step."""
    is_resumed: bool

    @cached_property
    def config(self) -> dict[str, Any]:
        """Every key of the configuration, without secrets."""
        return yaml.safe_load((Path(self.start) / "resolved.yaml").read_text(encoding="utf-8"))

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Command, git revisions, packages and hardware."""
        return json.loads((Path(self.start) / "run.json").read_text(encoding="utf-8"))


class Table(NamedTuple):
    """Rows with the same columns."""

    name: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]


class Tracker(Protocol):
    """A started run of a tracker."""

    id: str
    """Identifies the run when it is resumed."""
    shown_at: str
    """Where the user finds the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step, after its tables."""
        ...

    def log_table(self, step: int, table: Table) -> None:
        """Log a table of a step."""
        ...

    def finish(self, *, is_closed: bool) -> None:
        """Send the rest, and mark the run as finished, or as killed if it was not closed."""
        ...


class _Wandb:
    """Weights & Biases. `WANDB_MODE=offline` writes to `wandb/` in the run's folder."""

    def __init__(self, run: TrackedRun, known_id: str | None) -> None:
        self._wandb = wandb = import_module("wandb")
        self.id = known_id or _new_id()
        self._run = wandb.init(
            project=run.project,
            name=run.experiment,
            id=self.id,
            resume="allow",
            dir=os.environ.get("WANDB_DIR") or run.folder,
            config=run.config | {"start": run.environment},
            settings=wandb.Settings(console="off"),
        )
        self.shown_at = self._run.url or str(Path(self._run.dir).parent)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step, commit=True)

    def log_table(self, step: int, table: Table) -> None:
        data = [list(row) for row in table.rows]
        content = self._wandb.Table(columns=list(table.columns), data=data)
        self._run.log({table.name: content}, step=step)

    def finish(self, *, is_closed: bool) -> None:
        self._run.finish(exit_code=0 if is_closed else 1)


class _Mlflow:
    """MLflow. Without `MLFLOW_TRACKING_URI` it writes to `mlflow.db` in the run's folder."""

    def __init__(self, run: TrackedRun, known_id: str | None) -> None:
        folder = Path(run.folder)
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None if uri else (folder / "mlartifacts").as_uri()
        tracking = import_module("mlflow.tracking")
        self._client = client = tracking.MlflowClient(uri or f"sqlite:///{folder / 'mlflow.db'}")
        if known_id is None:
            known = client.get_experiment_by_name(run.project)
            experiment = (
                known.experiment_id
                if known
                else client.create_experiment(run.project, artifact_location=artifacts)
            )
            self.id = client.create_run(experiment, run_name=run.experiment).info.run_id
            self._log_config(run)
        else:
            self.id = known_id
            client.update_run(self.id, status="RUNNING")
        client.set_tag(self.id, "mlflow.source.name", " ".join(run.environment["command"]))
        if (commit := run.environment["git"]["directory"]) is not None:
            client.set_tag(self.id, "mlflow.source.git.commit", commit)
        client.log_artifacts(self.id, run.start, f"starts/{Path(run.start).name}")
        self.shown_at = f"run {self.id} in {client.tracking_uri}"

    def _log_config(self, run: TrackedRun) -> None:
        """Log the configuration as parameters. MLflow refuses to change them when a run resumes."""
        entities = import_module("mlflow.entities")
        params = [entities.Param(_mlflow_name(key), value) for key, value in _leaves(run.config)]
        for start in range(0, len(params), 100):  # the limit of a request
            self._client.log_batch(self.id, params=params[start : start + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        make, now = import_module("mlflow.entities").Metric, int(time.time() * 1000)
        values = [make(_mlflow_name(name), n, now, step) for name, n in metrics.items()]
        for start in range(0, len(values), 1000):  # the limit of a request
            self._client.log_batch(self.id, metrics=values[start : start + 1000])

    def log_table(self, step: int, table: Table) -> None:
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        self._client.log_dict(self.id, content, f"{table.name}/{step:06d}.json")

    def finish(self, *, is_closed: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if is_closed else "KILLED")


class _Swanlab:
    """SwanLab. `SWANLAB_MODE=offline` writes to `swanlog/` in the run's folder."""

    def __init__(self, run: TrackedRun, known_id: str | None) -> None:
        self._swanlab = swanlab = import_module("swanlab")
        self.id = known_id or _new_id()
        has_folder = os.environ.get("SWANLAB_LOGDIR") or os.environ.get("SWANLAB_LOG_DIR")
        self._run = swanlab.init(
            project=run.project,
            name=run.experiment,
            id=self.id,
            resume="allow",
            log_dir=None if has_folder else str(Path(run.folder) / "swanlog"),
            config=run.config | {"start": run.environment},
            settings=swanlab.Settings(interactive=False, terminal={"proxy_type": "none"}),
        )
        is_online = self._run.mode == "online"
        self.shown_at = self._run.url if is_online else f"run {self.id} ({self._run.mode})"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._swanlab.log(dict(metrics), step=step)

    def log_table(self, step: int, table: Table) -> None:
        content = self._swanlab.echarts.Table()
        content.add(list(table.columns), [list(row) for row in table.rows])
        self._swanlab.log({table.name: content}, step=step)

    def finish(self, *, is_closed: bool) -> None:
        if is_closed:
            self._swanlab.finish()
        else:
            self._swanlab.finish(state="crashed", error="the run was killed")


class _Trackio:
    """trackio. It writes to `TRACKIO_DIR`, by default a folder of the user, which it also shows.

    trackio finds the run to resume by its name alone, so the name has an id.
    """

    def __init__(self, run: TrackedRun, known_id: str | None) -> None:
        self._trackio = trackio = import_module("trackio")
        self.id = known_id or f"{run.experiment}-{_new_id()}"
        config = run.config | {"start": run.environment}
        self._run = trackio.init(
            run.project, name=self.id, config=config, resume="allow", embed=False
        )
        self.shown_at = f"run {self.id} of project {run.project}"

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_table(self, step: int, table: Table) -> None:
        content = self._trackio.Table(
            columns=list(table.columns), data=[list(row) for row in table.rows]
        )
        self._run.log({table.name: content}, step=step)

    def finish(self, *, is_closed: bool) -> None:
        self._run.finish()


_TRACKERS = {"wandb": _Wandb, "mlflow": _Mlflow, "swanlab": _Swanlab, "trackio": _Trackio}


class _Output:
    """Sends messages to the run; of the failures of steps only the first one."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._has_failed = False

    def say(self, text: str) -> None:
        line = " ".join(text.split())[:_MAX_MESSAGE_CHARS]
        with suppress(OSError):  # nobody reads if the run was killed
            os.write(self._file, f"{line}\n".encode(errors="replace"))

    def fail_once(self, what: str, error: BaseException) -> None:
        if not self._has_failed:
            self._has_failed = True
            self.say(f"{what}: {type(error).__name__}: {error}")


def main() -> None:
    """Log a run, from the lines of standard input, until the run closes or was killed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # schedulers send it to all, and the run closes
    lines, output = _take_streams()
    threading.Thread(target=_end_as_orphan, args=(os.getppid(),), daemon=True).start()
    run = TrackedRun(**json.loads(next(lines)))
    try:
        known_id, last_step = _read_record(run)
        tracker = _TRACKERS[run.tracker](run, known_id)
        _write_record(run, tracker, last_step)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker never stops a run
        output.fail_once("not started, and the run continues without it", error)
        return
    output.say(tracker.shown_at)
    if last_step >= 0:
        output.say(f"the same run as before; it has the steps up to {last_step} and keeps them")
    is_closed = _follow(run, tracker, lines, output, last_step=last_step)
    try:
        tracker.finish(is_closed=is_closed)
    except (Exception, SystemExit) as error:  # noqa: BLE001
        output.fail_once("the run is not marked as finished", error)


def _follow(
    run: TrackedRun, tracker: Tracker, lines: Iterator[str], output: _Output, *, last_step: int
) -> bool:
    """Log each step after `last_step`; return whether the run closed, and was not killed.

    Tables wait for the metrics of their step: a killed run repeats a step without metrics.
    """
    tables: list[dict[str, Any]] = []
    for line in lines:
        message = json.loads(line)
        if "table" in message:
            tables.append(message)
            continue
        for one in [*tables, message]:
            if (step := one.get("step", -1)) > last_step:
                try:
                    _log(run, tracker, step, one)
                except (Exception, SystemExit) as error:  # noqa: BLE001
                    output.fail_once(f"step {step} is not logged in full", error)
        tables.clear()
        if "closed" in message:
            return True
    return False


def _log(run: TrackedRun, tracker: Tracker, step: int, message: dict[str, Any]) -> None:
    if "table" in message:
        tracker.log_table(step, Table(**message["table"]))
    else:
        tracker.log(step, message["metrics"])
        _write_record(run, tracker, step)


def _take_streams() -> tuple[Iterator[str], _Output]:
    """Take standard input and output away from the packages: no prompt, no text among messages."""
    lines = os.fdopen(os.dup(sys.stdin.fileno()), encoding="utf-8")
    output = _Output(os.dup(sys.stdout.fileno()))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return lines, output


def _end_as_orphan(parent: int) -> None:
    """End this process group some time after the run's process has ended."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    time.sleep(ORPHAN_S)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _read_record(run: TrackedRun) -> tuple[str | None, int]:
    """Return the tracker's id of the resumed run, and the last step that it has."""
    if not run.is_resumed:
        return None, -1
    try:
        record = json.loads(locate(run.record).read_bytes())
    except FileNotFoundError:
        return None, -1
    return str(record["id"]), int(record["last_step"])


def _write_record(run: TrackedRun, tracker: Tracker, last_step: int) -> None:
    record = {"id": tracker.id, "last_step": last_step}
    write_whole(locate(run.record), f"{json.dumps(record)}\n".encode())


def _new_id() -> str:
    return uuid.uuid4().hex[:12]


def _leaves(tree: Any, key: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for name, value in tree.items():
            yield from _leaves(value, f"{key}.{name}" if key else str(name))
    else:
        yield key, tree if isinstance(tree, str) else dump_json(tree, default=str)


def _mlflow_name(name: str) -> str:
    return _NOT_IN_MLFLOW_NAMES.sub("_", name)[:250]


if __name__ == "__main__":
    main()
