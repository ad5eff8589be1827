"""The console's table: one line per step, readable in a terminal and in a log file."""

import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from agentrl.messages import CallOutcome
from agentrl.progress import format_duration
from agentrl.trainer.metrics.sinks import REWARD_KEYS, has_no_signal


class Column(NamedTuple):
    """One number of the console's line: the first of `keys` that the step has."""

    title: str
    keys: tuple[str, ...]
    width: int
    form: str


_VAL = "val"
"""Key of the success on the first validation set."""
COLUMNS = (
    Column("reward", REWARD_KEYS, 7, ".3f"),
    Column("val", (_VAL,), 6, ".3f"),
    Column("length", ("response_length/mean",), 7, ".1f"),
    Column("turns", ("num_turns/mean",), 6, ".2f"),
    Column("kl", ("actor/ppo_kl",), 9, ".1e"),
    Column("grad", ("actor/grad_norm",), 9, ".3g"),
    Column("tools", ("rollout/tool_calls/failed_frac",), 6, ".0%"),
    Column("scorer", ("rollout/failures/reward",), 7, ".0%"),
    Column("seconds", ("timing_s/step",), 8, ".1f"),
)
"""The columns; docs/runs.md defines each. `tools` and `scorer` are fractions that failed. All other
metrics are in `metrics.jsonl`."""

_STEP_WIDTH = 7
_LEFT_WIDTH = 7
_LINES_PER_HEADER = 25


class ConsoleSink:
    """Prints one line per step with the most important metrics.

    Args:
        console: The console to print to.
        total_steps: Steps of the run, for `3/24` and the time that is left.
        clock: Returns seconds.
    """

    def __init__(
        self,
        console: Console,
        total_steps: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console
        self._total_steps = total_steps
        self._width = max(_STEP_WIDTH, 2 * len(str(total_steps)) + 2)
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._num_lines = 0
        self._num_without_signal = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the step's line, a header if due, and lines that belong to the step.

        These lines list all validation sets, and report the first and the last of consecutive steps
        without a learning signal.
        """
        success = {
            name.removeprefix("val/").removesuffix("/success"): value
            for name, value in metrics.items()
            if name.startswith("val/") and name.endswith("/success")
        }
        if self._num_lines % _LINES_PER_HEADER == 0:
            titles = "".join(f"{column.title:>{column.width}}" for column in COLUMNS)
            header = f"{'step':>{self._width}}{titles}{'left':>{_LEFT_WIDTH}}"
            self._print(Text(header, style="bold"))
        self._num_lines += 1
        first = {_VAL: next(iter(success.values()))} if success else {}
        self._print(self._step_line(step, {**metrics, **first}))
        if len(success) > 1:
            sets = ", ".join(f"{name} {value:.3f}" for name, value in success.items())
            self._print_below(f"validation: {sets}", style="dim")
        if has_no_signal(metrics):
            self._num_without_signal += 1
            if self._num_without_signal == 1:
                self._print_below("no group had a learning signal: every advantage is 0")
                self._print_refused_calls(metrics)
            return
        if self._num_without_signal > 1:
            self._print_below(
                f"a learning signal after {self._num_without_signal} steps without one"
            )
        self._num_without_signal = 0

    def close(self) -> None:
        """Do nothing: there are no resources to release."""

    def _step_line(self, step: int, metrics: Mapping[str, float]) -> Text:
        number = f"{step}/{self._total_steps}" if self._total_steps else str(step)
        line = Text(f"{number:>{self._width}}")
        for column in COLUMNS:
            value = next((metrics[key] for key in column.keys if key in metrics), None)
            text = "-" if value is None else format(value, column.form)
            style = "dim" if value is None else "" if math.isfinite(value) else "bold red"
            line.append(f"{text:>{column.width}}", style=style)
        now = self._clock()
        first, begun = self._first = self._first or (step, now)
        left = "-"
        if step > first:
            seconds_per_step = (now - begun) / (step - first)
            left = format_duration(seconds_per_step * max(0, self._total_steps - step))
        return line.append(f"{left:>{_LEFT_WIDTH}}")

    def _print_refused_calls(self, metrics: Mapping[str, float]) -> None:
        """Print the fraction of refused tool calls if it is more than half."""
        # `mean` leaves out the calls of a context that was summarized; the outcomes have all calls.
        calls = {
            outcome: metrics.get(f"rollout/tool_calls/{outcome}", 0.0) for outcome in CallOutcome
        }
        total = sum(calls.values())
        malformed, errors = calls[CallOutcome.MALFORMED], calls[CallOutcome.TOOL_ERROR]
        if 2 * (malformed + errors) > total:
            shares = f"{malformed / total:.0%} malformed, {errors / total:.0%} with a ToolError"
            self._print_below(f"tool calls: {shares}")

    def _print_below(self, text: str, style: str = "yellow") -> None:
        self._print(Text(f"{'':>{_STEP_WIDTH}}  {text}", style=style))

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)
