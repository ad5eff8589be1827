"""Warnings in words about the metrics of a run, and the command or URL that gets them."""

import itertools
import logging
import math
import re
import statistics
import subprocess
import threading
import urllib.request
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.config.schema.run import AlertRule, AlertsConfig
from agentrl.config.tables import load_table
from agentrl.errors import did_you_mean
from agentrl.messages import dump_json
from agentrl.trainer.metrics.sinks import REWARD_KEYS, ZERO_SIGNAL, has_no_signal, read_metrics

ENTROPY = "actor/entropy"
FAILED, TRUNCATED = "rollout/failed_frac", "response_length/clip_ratio"
DRIFT = "rollout_corr/k3_kl"
NO_SIGNAL = "no signal"
JUMP = 0.2
"""A share that is so much above its lowest mean has jumped."""
MIN_CHANGES = 3
"""Changes of the reward from step to step from which its noise is estimated."""
NUM_ERRORS = 5
"""Standard errors by which a fall of the reward exceeds its noise. They are many, because the best
of a run is the largest of many means."""
_MEANINGS = Path(__file__).with_name("meanings.yaml")
CALL_TIMEOUT_S = 30.0
"""Seconds that a command or a request of an alert may take."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Alert:
    """One warning; what the command and the URL get, as JSON."""

    run: str
    step: int
    metric: str
    value: float
    message: str


class Alerts:
    """Checks the metrics of each step. A warning is given once, until its reason is over.

    Args:
        config: The thresholds, and what is called.
        run: The run's folder, to name the run.
    """

    def __init__(self, config: AlertsConfig, run: Path) -> None:
        self._config = config
        self._run = str(run)
        self._histories = defaultdict[str, _History](lambda: _History(config.window))
        self._active: dict[str, str] = {}
        """The metric of each reason that a warning was given for, and that is not over."""

    def replay(self, file: Path, resumed_step: int) -> None:
        """Learn the metrics of the steps before a resume, without warnings.

        Raises:
            DataError: If a line cannot be read.
        """
        for line in read_metrics(file):
            if line.step <= resumed_step:
                self._find_new(line.metrics)

    def check(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Check the metrics of a step, call for the new warnings, and return their lines."""
        lines = list[str]()
        for name, metric, message in self._find_new(metrics):
            alert = Alert(self._run, step, metric, float(metrics[metric]), message)
            if name != NO_SIGNAL:  # the console has its own line for these steps
                lines.append(f"warning: step {step}: {message}")
            self._call(alert)
        return lines

    def _find_new(self, metrics: Mapping[str, float]) -> list[tuple[str, str, str]]:
        """Return the reasons that the step before did not have.

        A reason is not over in a step that lacks its metric: not every step is validated.
        """
        found = list(self._find(metrics))
        new = [one for one in found if one[0] not in self._active]
        absent = {
            name: metric
            for name, metric in self._active.items()
            if not math.isfinite(metrics.get(metric, math.nan))
        }
        self._active = absent | {name: metric for name, metric, _ in found}
        return new

    def _find(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        """Yield name, metric and message of each reason to warn."""
        yield from self._find_fallen(metrics)
        if has_no_signal(metrics) and self._config.no_signal:
            text = "no group has a learning signal: all samples of each group have the same reward"
            yield NO_SIGNAL, ZERO_SIGNAL, text
        yield from self._find_high_shares(metrics)
        for rule, text in self._rules():
            value = metrics.get(rule.metric)
            if value is not None and rule.is_met(value):
                yield rule.describe(), rule.metric, text.format(value=value, rule=rule.describe())

    def _find_fallen(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        config = self._config
        reward = next((key for key in REWARD_KEYS if key in metrics), REWARD_KEYS[0])
        rewards, entropies = self._histories[reward], self._histories[ENTROPY]
        mean, entropy = rewards.add(metrics.get(reward)), entropies.add(metrics.get(ENTROPY))
        share = config.reward_fall
        if mean is not None and share is not None and rewards.has_fallen(mean, share):
            message = f"the mean reward of the last {rewards.num_steps} steps is {mean:.3g}"
            yield "reward", reward, f"{message}; its best was {rewards.best:.3g}"
        share, first = config.entropy_fall, entropies.first
        if entropy is not None and share is not None and entropy < (1 - share) * first:
            message = f"the entropy of the policy is {entropy:.2g} nats per token"
            yield "entropy", ENTROPY, f"{message}; in the first steps it was {first:.2g}"

    def _find_high_shares(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        """Find the shares that are high, or that have jumped.

        The share of the step is compared with the limit. If its lowest mean over a window is itself
        above the limit, or more than `JUMP` below it, the limit is `JUMP` above that mean.
        """
        config = self._config
        for metric, limit, text in (
            (FAILED, config.failed_frac, "of the requests failed"),
            (TRUNCATED, config.truncated_frac, "of the responses were cut"),
        ):
            name, value, lowest = metric, metrics.get(metric, 0.0), self._histories[metric].lowest
            if limit is not None and lowest > limit:
                name, limit = f"{metric} jumps", lowest + JUMP
            elif limit is not None and lowest + JUMP < limit:
                limit = lowest + JUMP
            if limit is not None and value > limit:
                before = "" if math.isnan(lowest) else f", it was {lowest:.0%}"
                yield name, metric, f"{value:.0%} {text} ({metric} above {limit:g}{before})"
            self._histories[metric].add(metrics.get(metric))

    def _rules(self) -> Iterator[tuple[AlertRule, str]]:
        config = self._config
        if config.drift is not None:
            text = "engine and trainer differ by {value:.2g} nats per token ({rule})"
            yield AlertRule(metric=DRIFT, above=config.drift), text
        for rule in config.rules:
            yield rule, "{rule}: it is {value:.4g}"

    def _call(self, alert: Alert) -> None:
        """Call the command and the URL, and do not wait for them."""
        config, content = self._config, dump_json(asdict(alert)).encode()
        if config.command is not None:
            threading.Thread(
                target=_run_command, args=(config.command, content), daemon=True
            ).start()
        if config.webhook_url is not None:
            threading.Thread(target=_post, args=(config.webhook_url, content), daemon=True).start()


def find_idle_rules(config: AlertsConfig) -> Iterator[str]:
    """Yield a note for each rule whose metric no run logs."""
    names = [name for section in load_table(_MEANINGS).values() for name in section]
    known = [one for name in names for one in expand_name(name)]
    for rule in config.rules:
        if not any(re.fullmatch(re.sub(r"<\w+>", ".+", name), rule.metric) for name in known):
            near = did_you_mean(rule.metric, known)
            yield f"trainer.alerts.rules: {rule.metric!r} is not a metric of agentrl{near}"


def expand_name(name: str) -> list[str]:
    """Expand `{a,b}` in a name of `meanings.yaml`.

    Example:
        >>> expand_name("num_turns/{mean,max}")
        ['num_turns/mean', 'num_turns/max']
    """
    parts = [part.split(",") for part in re.split(r"[{}]", name)]
    return ["".join(chosen) for chosen in itertools.product(*parts)]


class _History:
    """What a metric was: means over the last steps, and its changes from step to step."""

    def __init__(self, window: int) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self.first = self.lowest = math.nan
        """The first mean and the lowest mean of a whole window."""
        self.best = math.nan
        """The highest mean, also of the first steps, which are fewer than a window."""
        self._best_steps = 1
        self._low = math.nan
        """The lowest mean of a whole window before the best one."""
        self._num_changes, self._changes, self._largest_change = 0, 0.0, 0.0

    @property
    def num_steps(self) -> int:
        """Steps of the last mean."""
        return len(self._values)

    def add(self, value: float | None) -> float | None:
        """Return the mean of the last steps; None if the step has no value."""
        if value is None or not math.isfinite(value):
            return None
        if self._values:
            change = abs(value - self._values[-1])
            self._num_changes, self._changes = self._num_changes + 1, self._changes + change
            self._largest_change = max(change, self._largest_change)
        self._values.append(value)
        mean = statistics.fmean(self._values)
        if not mean <= self.best:
            self.best, self._best_steps, self._low = mean, len(self._values), self.lowest
        if len(self._values) == self._values.maxlen:
            self.first = mean if math.isnan(self.first) else self.first
            self.lowest = mean if math.isnan(self.lowest) else min(mean, self.lowest)
        return mean

    def has_fallen(self, mean: float, share: float) -> bool:
        """Return whether the last mean is below the best by a share of it, and not by noise.

        If the values rose from below zero, the share is that of the rise. The noise of one step is
        the mean change from step to step, without the largest one, which may be the fall itself.
        """
        if self._num_changes < MIN_CHANGES:
            return False
        rise = 0.0 if math.isnan(self._low) else self.best - self._low
        noise = (self._changes - self._largest_change) / (self._num_changes - 1)
        error = noise * math.sqrt(1 / self._best_steps + 1 / len(self._values))
        return self.best - mean > max(share * max(abs(self.best), rise), NUM_ERRORS * error)


def _run_command(command: str, content: bytes) -> None:
    try:
        done = subprocess.run(
            command, shell=True, input=content, capture_output=True, timeout=CALL_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("the command of trainer.alerts failed: %s", error)
        return
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()[-300:]
        logger.warning("the command of trainer.alerts exited with %d: %s", done.returncode, said)


def _post(url: str, content: bytes) -> None:
    request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
    try:
        urllib.request.urlopen(request, timeout=CALL_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        # The URL may hold a secret: it is not printed.
        logger.warning("the URL of trainer.alerts could not be called: %s", error)
