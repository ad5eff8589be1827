"""`agentrl status`: what a run does now, read from its folder. It needs neither Ray nor torch."""

import json
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from agentrl.cluster.run_status import (
    STATUS_FILE,
    DriverStatus,
    NodeStatus,
    ProcessStatus,
    RunStatus,
    read_run_status,
)
from agentrl.config.schema.run import TrainerConfig
from agentrl.errors import ConfigError, DataError
from agentrl.messages import dump_json
from agentrl.trainer.metrics.sinks import METRICS_FILE
from agentrl.trainer.state.run_folder import (
    LOCK_FILE,
    RUN_SIGNS,
    SILENCE_S,
    Owner,
    check_run_folder,
    is_run,
)

STALE_S = 60.0
"""A driver on another host that has not written for so many seconds counts as dead."""
_TAIL_BYTES = 1 << 20


class State(StrEnum):
    """What a run does."""

    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    """Ended by Ctrl-C or SIGTERM; without Ray, also by an error."""
    FAILED = "failed"
    DEAD = "dead"
    """Its process was killed, or its machine is gone."""

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return {State.STOPPED: 1, State.FAILED: 1, State.DEAD: 3}.get(self, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What is known of a run; the fields are those of `--json`."""

    folder: str
    state: State
    detail: str
    """A sentence about the state."""
    host: str | None
    pid: int | None
    """The process that supervises the run; without Ray, the main rank."""
    started: float | None
    """Unix time, as all times."""
    step: int | None
    """The last step with metrics."""
    total_steps: int | None
    step_age_s: float | None
    """Seconds since the last line of `metrics.jsonl`."""
    snapshot_age_s: float | None
    """Seconds since the driver wrote what is in `cluster`; None without Ray."""
    cluster: RunStatus | None
    """None: the run does not use Ray."""


def show_status(folder: Path | None, *, as_json: bool, say: Callable[[str], None]) -> int:
    """Print what a run does.

    Args:
        folder: The run's folder; None: the newest one next to the default folder of runs.
        as_json: Print one JSON object instead of tables.
        say: Prints a text.

    Returns:
        The exit code: 0 if the run is running or finished, 1 if it was stopped or failed, 3 if its
        process is dead.

    Raises:
        ConfigError: if the folder is not that of a run.
        DataError: if a file of it is damaged.
    """
    report = examine_folder(find_newest() if folder is None else folder)
    if as_json:
        cluster = None if report.cluster is None else report.cluster.model_dump(mode="json")
        say(dump_json({**asdict(report), "cluster": cluster}, indent=1))
    else:
        say(describe(report))
    return report.state.exit_code


def find_newest() -> Path:
    """Find the run that has written last, next to the default of `trainer.default_local_dir`.

    Raises:
        ConfigError: if there is none.
    """
    home = TrainerConfig().default_local_dir.parent
    found = [path for path in home.glob("*") if is_run(path)]
    if not found:
        raise ConfigError(
            f"no run in {home.absolute()}",
            expected="agentrl status FOLDER, with the folder of a run (trainer.default_local_dir)",
        )
    return max(found, key=lambda path: max(_time_of(path / sign) for sign in RUN_SIGNS))


def examine_folder(folder: Path) -> Report:
    """Collect what a run's folder says about the run.

    Raises:
        ConfigError: if the folder is not that of a run.
        DataError: if a file of it is damaged.
    """
    check_run_folder(folder)
    file = folder / "logs" / STATUS_FILE
    cluster = read_run_status(file) if file.is_file() else None
    start = _newest_start(folder)
    # A later start without Ray leaves the file of an earlier run on Ray. A rank records its start
    # some periods after the driver's last report, on a busy machine.
    if cluster is not None and cluster.written + 3 * cluster.period_s >= _time_of(start):
        return _examine_cluster(folder, cluster)
    return _examine_lock(folder, start)


def _examine_cluster(folder: Path, status: RunStatus) -> Report:
    age_s = max(0.0, time.time() - status.written)
    driver = status.driver
    if status.state in ("finished", "stopped", "failed"):
        state, detail = State(status.state), status.reason or f"after {_span(_seconds_of(status))}"
    elif _is_gone(driver, age_s):
        state = State.DEAD
        detail = f"the driver, process {driver.pid} on {driver.host}, was killed or lost its node"
    else:
        state = State.RUNNING
        detail = f"{status.state}, started {_span(time.time() - status.started)} ago"
    return Report(
        folder=str(folder),
        state=state,
        detail=detail,
        host=driver.host,
        pid=driver.pid,
        started=status.started,
        total_steps=status.total_steps,
        snapshot_age_s=age_s,
        cluster=status,
        **_read_step(folder, since=status.started),
    )


def _examine_lock(folder: Path, start: Path | None) -> Report:
    """Examine a run without Ray: its lock names the main rank."""
    file, owner = folder / LOCK_FILE, None
    with suppress(FileNotFoundError), file.open(encoding="utf-8") as lock:
        owner = Owner.read(lock)
    if owner is not None:
        silent_s = time.time() - _time_of(file)
        is_dead = owner.has_ended() if owner.is_here else silent_s > SILENCE_S
        state = State.DEAD if is_dead else State.RUNNING
        detail = f"process {owner.process} on {owner.host}, started {owner.started}"
        detail += ", was killed" if is_dead else ""
    elif _time_of(folder / "summary.json") > _time_of(start):
        state, detail = State.FINISHED, "summary.json has its result"
    else:
        state, detail = State.STOPPED, "it ended before its last step, or has not begun"
    return Report(
        folder=str(folder),
        state=state,
        detail=detail,
        host=None if owner is None else owner.host,
        pid=None if owner is None else owner.process,
        started=_time_of(start) or None,
        total_steps=_read_total_steps(start),
        snapshot_age_s=None,
        cluster=None,
        **_read_step(folder, since=_time_of(start)),
    )


def _is_gone(driver: DriverStatus, age_s: float) -> bool:
    if driver.host != socket.gethostname():
        return age_s > STALE_S
    try:
        return abs(psutil.Process(driver.pid).create_time() - driver.pid_started) > 1
    except psutil.Error:
        return True


def _read_step(folder: Path, *, since: float) -> dict[str, Any]:
    """Read the number of the last logged step, and its age if it was logged since the start."""
    file = folder / METRICS_FILE
    if not file.is_file():
        return {"step": None, "step_age_s": None}
    with file.open("rb") as metrics:
        metrics.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        lines = metrics.read().splitlines(keepends=True)
    whole = [line for line in lines if line.endswith(b"\n")]
    try:
        step = int(json.loads(whole[-1])["step"]) if whole else None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError("the last line is damaged", file=file, expected="a JSON object") from error
    written = _time_of(file)
    return {"step": step, "step_age_s": time.time() - written if written >= since else None}


def _newest_start(folder: Path) -> Path | None:
    return max(folder.glob("starts/[0-9]*/run.json"), default=None)


def _read_total_steps(start: Path | None) -> int | None:
    """Read `trainer.total_training_steps` of a start; None if the run counts epochs."""
    with suppress(OSError, yaml.YAMLError, KeyError, TypeError):
        if start is not None:
            text = start.with_name("resolved.yaml").read_text(encoding="utf-8")
            return yaml.safe_load(text)["trainer"]["total_training_steps"]
    return None


def _time_of(path: Path | None) -> float:
    with suppress(OSError):
        return path.stat().st_mtime if path is not None else 0.0
    return 0.0


def _seconds_of(status: RunStatus) -> float:
    return status.written - status.started


# What is printed.


def describe(report: Report) -> str:
    """Describe a run: a few lines, and the tables of a run on Ray."""
    lines = [f"{report.folder}: {report.state.value} ({report.detail})", _describe_step(report)]
    status = report.cluster
    if status is None:
        return "\n".join(lines)
    lines.append(
        f"driver: process {report.pid} on {report.host}; status written "
        f"{_span(report.snapshot_age_s or 0)} ago"
    )
    pools = [
        (pool.name, pool.nodes, _amounts(pool.resources), ", ".join(pool.roles))
        for pool in status.pools
    ]
    return "\n".join([
        *lines,
        _table(("pool", "nodes", "reserved on each", "roles"), pools),
        _table(_NODE, [_node_row(one, status) for one in status.nodes]),
        _table(_PROCESS, [_process_row(one, report) for one in status.processes]),
        *(f"{one.name} ended: {one.reason}" for one in status.processes if one.reason),
        f"logs: {Path(report.folder) / 'logs'}",
    ])  # fmt: skip


def _describe_step(report: Report) -> str:
    if report.step is None:
        text = "no step is complete"
    else:
        of = f" of {report.total_steps}" if report.total_steps is not None else ""
        ago = "" if report.step_age_s is None else f", {_span(report.step_age_s)} ago"
        text = f"last logged step: {report.step}{of}{ago}"
    processes = () if report.cluster is None else report.cluster.processes
    main = next((one for one in processes if one.stage), None)
    if main is None or report.state is not State.RUNNING:
        return text
    return f"{text}; {main.name} is in: {main.stage}"


_NODE = ("node", "address", "state", "free/total", "cpu", "memory", "processes")
_PROCESS = (
    "process", "pool", "node", "pid", "state", "heartbeat", "restarts", "cpu", "memory", "calls",
    "stage",
)  # fmt: skip


def _node_row(node: NodeStatus, status: RunStatus) -> Sequence[object]:
    free = ", ".join(
        f"{node.available.get(name, 0.0):g}/{amount:g} {name}"
        for name, amount in node.resources.items()
    )
    here = sum(one.node_id == node.node_id and one.state != "ended" for one in status.processes)
    return (
        node.node_id[:6], node.address, "alive" if node.is_alive else "lost", free,
        _percent(node.cpu_percent), _percent(node.memory_percent), here,
    )  # fmt: skip


def _process_row(one: ProcessStatus, report: Report) -> Sequence[object]:
    # Ray ends the processes of a dead driver, and no one is left to write it down.
    state = "unknown" if report.state is State.DEAD else one.state
    age_s = one.heartbeat_age_s + (report.snapshot_age_s or 0.0)
    memory = "" if one.memory_bytes is None else f"{one.memory_bytes / 1e9:.2f} GB"
    return (
        one.name, one.pool, one.node_id[:6], one.pid, state,
        f"{_span(age_s)} ago", one.restarts, _percent(one.cpu_percent), memory,
        "" if one.calls is None else one.calls, one.stage or "",
    )  # fmt: skip


def _table(names: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Render rows as a table that is as wide as the terminal, or as wide as it needs in a file."""
    table = Table(*names, box=None, pad_edge=False, header_style="")
    for row in rows:
        table.add_row(*map(str, row))
    console = Console(width=None if sys.stdout.isatty() else 200, markup=False)
    with console.capture() as capture:
        console.print()
        console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}%"


def _span(seconds: float) -> str:
    """Write a duration in its largest unit."""
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86_400:.0f} days"
