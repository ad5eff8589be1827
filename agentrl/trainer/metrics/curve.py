"""Draw the learning curve of one run, or of several runs with different seeds.

The left plot shows the training reward: for one run each step (thin) and a running mean (thick),
for several runs the running mean of each (thin) and of all (thick). The right plot shows the
success on each validation set; points mark the first and the last measurement.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from agentrl.atomic_io import atomic_file
from agentrl.errors import DataError
from agentrl.trainer.metrics.sinks import REWARD_KEYS, MetricsLine, read_metrics

_SUCCESS = re.compile(r"^val/(?P<name>.+)/success$")
_REWARD_COLOR = "#2f4b7c"
_SET_COLORS = ("#d1495b", "#2a9d8f", "#e09f3e", "#6d597a", "#577590", "#90a955")
_INK, _FAINT = "#222222", "#d9d9d9"


class Series(NamedTuple):
    """One metric over the steps of one run."""

    steps: tuple[float, ...]
    values: tuple[float, ...]


class Curves(NamedTuple):
    """The curves of one run."""

    reward: Series
    """Mean reward of each training step."""
    success: dict[str, Series]
    """By validation set: the mean success of its requests."""


def plot_curve(
    metrics: Path | Sequence[Path], out: Path, *, title: str = "", dpi: int = 160
) -> None:
    """Draw the learning curve of one run, or of several seeds of one experiment.

    Args:
        metrics: One or more `metrics.jsonl`.
        out: The picture; written whole or not at all.
        title: The title above the picture.
        dpi: Pixels per inch; the picture is 9 by 3.6 inches.

    Raises:
        DataError: if no run has a reward or a validation to draw, or a line is damaged.
    """
    paths = [metrics] if isinstance(metrics, Path) else list(metrics)
    runs = [read_curves(path) for path in paths]
    if not any(run.reward.steps or run.success for run in runs):
        raise DataError("no reward and no validation to draw", file=", ".join(map(str, paths)))
    figure = draw_curves(runs, title=title)
    with atomic_file(out) as draft:
        figure.savefig(draft, format="png", dpi=dpi, metadata={"Software": None})


def read_curves(path: Path) -> Curves:
    """Read the curves of one run."""
    lines = list(read_metrics(path))
    names = dict.fromkeys(
        match["name"] for line in lines for key in line.metrics if (match := _SUCCESS.match(key))
    )
    return Curves(
        reward=_series(lines, REWARD_KEYS),
        success={name: _series(lines, (f"val/{name}/success",)) for name in names},
    )


def _series(lines: Iterable[MetricsLine], keys: Sequence[str]) -> Series:
    points = {}
    for line in lines:
        value = next((line.metrics[key] for key in keys if key in line.metrics), math.nan)
        if math.isfinite(value):
            points[line.step] = value
    return Series(tuple(sorted(points)), tuple(points[step] for step in sorted(points)))


def draw_curves(runs: Sequence[Curves], *, title: str = "") -> Figure:
    """Draw the figure, without touching pyplot's global state."""
    layout = ConstrainedLayoutEngine(wspace=0.06, h_pad=0.08)
    figure = Figure(figsize=(9, 3.6), layout=layout, facecolor="white")
    FigureCanvasAgg(figure)
    reward, success = figure.subplots(1, 2)
    _frame(reward, "Training reward", "mean reward of a trajectory")
    _frame(success, "Validation, before \N{RIGHTWARDS ARROW} after", "success")
    _draw_reward(reward, [run.reward for run in runs])
    _draw_success(success, [run.success for run in runs])
    if title:
        figure.suptitle(
            _literal(title), x=0.01, ha="left", fontsize=12, fontweight="bold", color=_INK
        )
    return figure


def _frame(axes: Axes, title: str, unit: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    axes.set_xlabel("training step", fontsize=9.5, color=_INK)
    axes.set_ylabel(unit, fontsize=9.5, color=_INK)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.tick_params(labelsize=9, length=0, colors="#555555")
    axes.grid(axis="y", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")


def _draw_reward(axes: Axes, runs: Sequence[Series]) -> None:
    drawn = [run for run in runs if run.steps]
    if not drawn:
        _write_empty(axes)
        return
    single = len(drawn) == 1
    thin = _draw_thin(axes, drawn if single else [running_mean(run) for run in drawn])
    main = running_mean(mean_series(drawn))
    thick = axes.plot(main.steps, main.values, color=_REWARD_COLOR, linewidth=2.2)
    names = (
        ["each step", "running mean"] if single else [f"each of {len(drawn)} seeds", "their mean"]
    )
    _add_legend(axes, [thin[0], thick[0]], names)


def _draw_success(axes: Axes, runs: Sequence[Mapping[str, Series]]) -> None:
    by_set: dict[str, list[Series]] = defaultdict(list)
    for run in runs:
        for name, series in run.items():
            by_set[name] += [series] if series.steps else []
    values = [v for drawn in by_set.values() for series in drawn for v in series.values]
    is_share = all(0 <= value <= 1 for value in values)
    if is_share:  # otherwise success is a mean reward of another range
        axes.set_ylim(-0.02, 1.02)
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    if not any(by_set.values()):
        _write_empty(axes)
        return
    for number, (name, drawn) in enumerate(by_set.items()):
        color = _SET_COLORS[number % len(_SET_COLORS)]
        _draw_set(axes, name, drawn, color, form=".1%" if is_share else ".3g")
    handles, names = axes.get_legend_handles_labels()
    _add_legend(axes, handles, names)


def _draw_set(axes: Axes, name: str, drawn: Sequence[Series], color: str, *, form: str) -> None:
    main = mean_series(drawn)
    if len(drawn) > 1:
        _draw_thin(axes, drawn, color)
    if not main.steps:
        return
    before, after = main.values[0], main.values[-1]
    label = f"{_literal(name)}: {before:{form}} \N{RIGHTWARDS ARROW} {after:{form}}"
    axes.plot(main.steps, main.values, color=color, linewidth=2.2, label=label)
    axes.plot(
        (main.steps[0], main.steps[-1]), (before, after), "o", color=color, markersize=7,
        markeredgecolor="white", markeredgewidth=1.5, clip_on=False, zorder=5,
    )  # fmt: skip


def _draw_thin(axes: Axes, drawn: Sequence[Series], color: str = _REWARD_COLOR) -> list[Line2D]:
    return [
        axes.plot(series.steps, series.values, color=color, linewidth=0.9, alpha=0.4)[0]
        for series in drawn
    ]


def _add_legend(axes: Axes, handles: Sequence[Artist], names: Sequence[str]) -> None:
    axes.legend(
        handles, names, loc="best", fontsize=9, frameon=False, handlelength=1.4, labelcolor=_INK
    )


def _literal(text: str) -> str:
    return text.replace("$", r"\$")  # otherwise matplotlib draws a formula


def _write_empty(axes: Axes) -> None:
    axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#999999")


def running_mean(series: Series, share: float = 0.1) -> Series:
    """Average each value with its neighbours: a `share` of the run, at least one on each side."""
    count = len(series.values)
    reach = max(1, round(count * share / 2))
    windows = [series.values[max(0, index - reach) : index + reach + 1] for index in range(count)]
    return Series(series.steps, tuple(sum(window) / len(window) for window in windows))


def mean_series(runs: Sequence[Series]) -> Series:
    """Average runs at the steps that all of them have."""
    tables = [dict(zip(run.steps, run.values, strict=True)) for run in runs]
    common = sorted(set.intersection(*map(set, tables))) if tables else []
    means = tuple(sum(table[step] for table in tables) / len(tables) for step in common)
    return Series(tuple(common), means)
