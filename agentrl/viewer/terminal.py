"""The lists of the viewer as tables in a terminal."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.errors import printable
from agentrl.viewer.queries import Filters, list_runs, list_trajectories
from agentrl.viewer.runs import RunReader
from agentrl.viewer.steps import describe_step


def print_lists(
    runs: Sequence[RunReader], filters: Filters, console: Console, *, limit: int = 20
) -> None:
    """Print the runs; for each run its newest step, or that of the filters, and trajectories."""
    console.print(_runs_table(runs))
    for run in runs:
        labels = list(run.find_files())
        if not labels:
            console.print(f"{printable(run.name)}: no saved rollouts (trainer.rollout_data_dir)")
            continue
        file = filters.file or labels[0]
        if file not in labels:
            console.print(f"{printable(run.name)}: no file {printable(file)}", markup=False)
            continue
        chosen = replace(filters, file=file)
        for table in _step_tables(run, file):
            console.print(table)
        console.print(_trajectories_table(run, chosen, limit))


def _table(title: str, *columns: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(title=Text(title), title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left")
    return table


def _cells(*values: object) -> list[Text]:
    return [Text(printable(_shown(value))) for value in values]


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _runs_table(runs: Sequence[RunReader]) -> Table:
    table = _table("Runs", "run", "state", "step", "files", "folder", numbers=("step", "files"))
    for row in list_runs(runs)["runs"]:
        files = len(row["files"])
        table.add_row(*_cells(row["name"], row["state"], row["step"], files, row["folder"]))
    return table


def _step_tables(run: RunReader, file: str) -> list[Table]:
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
    numbers = ("calls", "queue s", "work s", "longest s")
    tools = _table("Tools", "tool", "outcomes", *numbers, numbers=numbers)
    for row in step["tools"]:
        outcomes = ", ".join(f"{outcome} {count}" for outcome, count in row["outcomes"])
        times = (row["queue_s"], row["work_s"], row["max_work_s"])
        tools.add_row(*_cells(row["tool"], outcomes, row["calls"], *times))
    failures = _table("Failures", "fault", "number", "message", numbers=("number",))
    for row in step["failures"]:
        failures.add_row(*_cells(row["fault"], row["num"], row["message"][:200]))
    return [table for table in (values, ends, tools, failures) if table.row_count]


def _trajectories_table(run: RunReader, filters: Filters, limit: int) -> Table:
    found = list_trajectories(run, filters, limit=limit)
    columns = ("reward", "advantage", "turns", "tokens", "calls", "seconds")
    title = f"Trajectories: {len(found['rows'])} of {found['total']}"
    table = _table(title, "request", "end", *columns, "last answer", numbers=columns)
    for row in found["rows"]:
        answer = row["excerpt"][-60:]
        numbers = (row[key] for key in columns)
        table.add_row(*_cells(row["request_id"], row["end"], *numbers, answer))
    return table
