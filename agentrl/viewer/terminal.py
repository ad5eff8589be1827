"""The lists of the viewer as tables in a terminal, and one trajectory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.config.schema.reward import RewardConfig
from agentrl.errors import ConfigError, DataError, printable
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.rollouts.transcript import Decode, print_transcript, read_transcript
from agentrl.viewer.index import Entry, FileIndex
from agentrl.viewer.queries import Filters, list_runs, list_trajectories
from agentrl.viewer.runs import RunReader
from agentrl.viewer.steps import describe_step, tool_name

_METRICS = {
    "reward": ("rollout/combined_reward/mean", "rollout/reward/mean"),
    "length": ("response_length/mean",),
    "turns": ("num_turns/mean",),
    "entropy": ("actor/entropy",),
    "kl": ("actor/ppo_kl",),
    "grad": ("actor/grad_norm",),
    "seconds": ("timing_s/step",),
}
"""Columns of the table of steps, and the metrics of which each shows the first that there is."""
_MAX_ANSWER = 24
"""Characters of the last answer."""
_LEFT_OUT = ("last answer", "tools s", "calls", "seconds", "turns", "advantage")
"""Columns of trajectories that a narrow terminal does not show, in this order."""
_GAP = 2
"""Spaces between columns."""
_MAX_CELL = 200
"""Characters of a cell."""
_MAX_GROUPS = 10
_MAX_STEPS = 24
"""Lines of the table of steps; of a longer run, lines at equal distances."""


def print_lists(
    runs: Sequence[RunReader],
    filters: Filters,
    console: Console,
    *,
    limit: int = 20,
    steps: Sequence[int] = (),
) -> None:
    """Print the runs, and for each run its metrics, one step and its trajectories.

    With filters or an order, only the trajectories are printed. Further runs are compared with the
    first one.

    Args:
        runs: The runs.
        filters: Those of the trajectories.
        console: Where to print.
        limit: Trajectories of a run.
        steps: The step to print, and one to compare it with; none: the last one.
    """
    is_list = filters != Filters()
    tables: list[Table | Text] = [] if is_list else [*_run_tables(runs)]
    first: tuple[RunReader, str] | None = None
    for run in runs:
        if not is_list:
            tables.append(_metrics_table(run))
        file, *others = run.find_steps(steps)
        if file is None:
            tables.append(Text(printable(f"{run.name}: {_describe_missing(run, steps)}")))
            continue
        first = first or (run, file)
        if not is_list:
            tables += _step_tables(run, file)
            compared = [(run, others[0])] if others and others[0] is not None else []
            tables += [
                _compared_table((run, file), other)
                for other in [*compared, *([] if run is first[0] else [first])]
            ]
        tables.append(_trajectories_table(run, replace(filters, file=file), limit, console.width))
    for table in tables:
        console.print(table)


def _describe_missing(run: RunReader, steps: Sequence[int]) -> str:
    if run.find_files():
        return f"no rollouts of step {steps[0]}"
    if (folder := run.rollout_folder) is not None:
        return f"no saved rollouts: {folder} is missing or empty"
    return "no saved rollouts: trainer.rollout_data_dir is not set"


def print_trajectory(runs: Sequence[RunReader], request_id: str, console: Console) -> None:
    """Print the conversation of a trajectory with its tokens, calls, end and reward.

    Raises:
        ConfigError: If no saved rollout has the request.
        DataError: If its line is damaged.
    """
    for run in runs:
        for label in run.find_files():
            try:
                index = run.index(label)
            except DataError:
                continue  # a damaged file; the others are searched
            for entry in index.entries:
                if entry.request_id == request_id:
                    request = _read_request(index, entry)
                    reward = RewardConfig.model_validate(run.config.get("reward") or {})
                    console.print(Text(f"{run.folder}: {label}"))
                    print_transcript(console, read_transcript(request, _decoder(run), reward))
                    return
    raise ConfigError(
        f"no saved rollout of request {request_id!r}",
        key="--request",
        expected="a value of the column request",
    )


def _read_request(index: FileIndex, entry: Entry) -> AsyncRolloutRequest:
    try:
        return AsyncRolloutRequest.model_validate(index.read(entry)["request"])
    except (ValueError, LookupError, TypeError) as error:
        raise DataError(f"a line that cannot be read: {error}", file=index.path) from error


def _decoder(run: RunReader) -> Decode:
    """Return how tokens become text; without the tokenizer, their ids are shown."""
    if (tokenizer := run.tokenizer) is None:
        return lambda ids: "".join(f"{one} " for one in ids)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        is_number = name in numbers
        table.add_column(
            Text(printable(name)),
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number or name in ("request", "end"),
        )
    return table


def _cells(*values: object) -> list[Text]:
    return [Text(printable(_shown(value)[:_MAX_CELL])) for value in values]


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _run_tables(runs: Sequence[RunReader]) -> list[Table]:
    table = _table("Runs", "run", "state", "step", "files", "folder", numbers=("step", "files"))
    described = list_runs(runs)
    for row in described["runs"]:
        files = len(row["files"])
        table.add_row(*_cells(row["name"], row["state"], row["step"], files, row["folder"]))
    if not described["differences"]:
        return [table]
    keys = _table("Keys in which the configurations differ", "key", *(run.name for run in runs))
    for key, values in described["differences"]:
        keys.add_row(*_cells(key, *(value[:60] for value in values)))
    return [table, keys]


def _metrics_table(run: RunReader) -> Table:
    table = _table(f"{printable(run.name)}: steps", "step", *_METRICS, numbers=("step", *_METRICS))
    rows = list[list[Any]]()
    for line in run.metrics():
        values = [_first(line, names) for names in _METRICS.values()]
        if any(value is not None for value in values):
            rows.append([line.get("step"), *values])
    every = max(1, -(-len(rows) // _MAX_STEPS))
    for row in rows[::-1][::every][::-1]:
        table.add_row(*_cells(*row))
    return table


def _first(line: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((line[name] for name in names if line.get(name) is not None), None)


def _compared_table(here: tuple[RunReader, str], there: tuple[RunReader, str]) -> Table:
    sides = (here, there)
    first, second = (dict(describe_step(run, label)["summary"]) for run, label in sides)
    columns = [label.rpartition("/")[2] for _, label in sides]
    if here[0] is not there[0]:
        columns = [f"{run.name}: {name}" for (run, _), name in zip(sides, columns, strict=True)]
    table = _table("Compared", "figure", *columns, "change", numbers=(*columns, "change"))
    for name in dict.fromkeys((*first, *second)):
        default = 0.0 if name.endswith("share") else None
        values = first.get(name, default), second.get(name, default)
        change = None if None in values else f"{values[0] - values[1]:+.4g}"
        table.add_row(*_cells(name, *values, change))
    return table


def _end_of(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_ANSWER else f"…{line[1 - _MAX_ANSWER :]}"


def _step_tables(run: RunReader, file: str) -> list[Table | Text]:
    step = describe_step(run, file)
    numbers = ("mean", "min", "median", "p95", "max")
    head = f"{printable(run.name)}: {file}, {step['num']} trajectories"
    values = _table(head, "value", *numbers, numbers=numbers)
    for one in step["histograms"]:
        unit = f" ({one['unit']})" if one["unit"] not in ("", one["name"]) else ""
        values.add_row(*_cells(one["name"] + unit, *(one.get(key) for key in numbers)))
    ends = _table("Ends", "end", "number", numbers=("number",))
    for end, count in step["ends"]:
        ends.add_row(*_cells(end or "none", count))
    numbers = ("calls", "queue s", "work s", "longest s", "sum s")
    tools = _table("Tools", "tool", "outcomes", *numbers, numbers=numbers)
    for row in step["tools"]:
        outcomes = ", ".join(f"{outcome} {count}" for outcome, count in row["outcomes"])
        times = (row["queue_s"], row["work_s"], row["max_work_s"], row["total_s"])
        tools.add_row(*_cells(tool_name(row["tool"]), outcomes, row["calls"], *times))
    failures = _table("Failures", "fault", "number", "message", numbers=("number",))
    for row in step["failures"]:
        failures.add_row(*_cells(row["fault"], row["num"], row["message"][:200]))
    tables = (values, ends, tools, _slowest_table(step), failures, _groups_table(step))
    shown: list[Table | Text] = [table for table in tables if table.row_count]
    if number := len(step["damaged"]):
        shown.append(Text(f"{number} damaged line{'s' if number > 1 else ''} left out"))
    return shown


def _slowest_table(step: Mapping[str, Any]) -> Table:
    numbers = ("seconds", "tokens", "turns")
    table = _table("Slowest requests", "request", *numbers, "end", numbers=numbers)
    for row in step["slowest"]:
        table.add_row(*_cells(row["request_id"], *(row[key] for key in numbers), row["end"]))
    return table


def _groups_table(step: Mapping[str, Any]) -> Table:
    numbers = ("mean", "spread")
    columns = ("group", *numbers, "rewards of its samples")
    table = _table("Groups with the largest spread", *columns, numbers=numbers)
    for row in step["groups"][:_MAX_GROUPS]:
        rewards = " ".join(_shown(one["reward"]) for one in row["samples"])
        table.add_row(*_cells(row["uid"], row["mean"], row["spread"], rewards))
    return table


def _trajectories_table(run: RunReader, filters: Filters, limit: int, width: int) -> Table:
    found = list_trajectories(run, filters, limit=limit)
    shown = ("reward", "advantage", "turns", "tokens", "calls", "seconds", "tool_seconds")
    numbers = [name.replace("tool_seconds", "tools s") for name in shown]
    columns = {
        "request": _cells(*(row["request_id"] for row in found["rows"])),
        "end": _cells(*(row["end"] for row in found["rows"])),
        **{
            name: _cells(*(row[key] for row in found["rows"]))
            for name, key in zip(numbers, shown, strict=True)
        },
        "last answer": _cells(*(_end_of(row["excerpt"]) for row in found["rows"])),
    }
    widths = {
        name: _GAP + max(cell_len(name), *(cell.cell_len for cell in cells), 0)
        for name, cells in columns.items()
    }
    for name in _LEFT_OUT:
        if sum(widths.values()) + 1 > width:
            del columns[name], widths[name]
    title = f"Trajectories: {len(found['rows'])} of {found['total']}"
    table = _table(title, *columns, numbers=numbers)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table
