"""Warnings in words about the metrics of a run, and the command or URL that gets them."""

import json
import logging
import math
import statistics
import subprocess
import threading
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from agentrl.config.schema.run import AlertRule, AlertsConfig
from agentrl.trainer.metrics.sinks import ZERO_SIGNAL, has_no_signal, read_metrics

REWARD, ENTROPY = "rollout/reward/mean", "actor/entropy"
FAILED, TRUNCATED = "rollout/failed_frac", "response_length/clip_ratio"
DRIFT = "rollout_corr/k3_kl"
NO_SIGNAL = "no signal"
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
        self._rewards = _Windows(config.window)
        self._entropies = _Windows(config.window)
        self._active: set[str] = set()
        self._seen: set[str] = set()

    def replay(self, file: Path) -> None:
        """Learn the metrics of the steps before a resume, without warnings.

        Raises:
            DataError: If a line cannot be read.
        """
        for line in read_metrics(file):
            self._active = {name for name, _, _ in self._find(line.metrics)}
            self._seen |= line.metrics.keys()

    def check(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Check the metrics of a step, call for the new warnings, and return their lines."""
        found, lines = list(self._find(metrics)), list[str]()
        # Shares that are high from the start do not rise.
        for name, metric, _ in found:
            if metric in (FAILED, TRUNCATED) and metric not in self._seen:
                self._active.add(name)
        self._seen |= metrics.keys()
        for name, metric, message in found:
            if name not in self._active:
                alert = Alert(self._run, step, metric, float(metrics[metric]), message)
                if name != NO_SIGNAL:  # the console has its own line for these steps
                    lines.append(f"warning: step {step}: {message}")
                self._call(alert)
        self._active = {name for name, _, _ in found}
        return lines

    def _find(self, metrics: Mapping[str, float]) -> Iterator[tuple[str, str, str]]:
        """Yield name, metric and message of each reason to warn."""
        config = self._config
        reward = self._rewards.add(metrics.get(REWARD))
        if reward is not None and config.reward_fall is not None:
            best = self._rewards.best
            if reward < best - config.reward_fall * abs(best):
                message = f"the mean reward of the last {config.window} steps is {reward:.3g}"
                yield "reward", REWARD, f"{message}; its best was {best:.3g}"
        entropy = self._entropies.add(metrics.get(ENTROPY))
        if entropy is not None and config.entropy_fall is not None:
            first = self._entropies.first
            if entropy < (1 - config.entropy_fall) * first:
                message = f"the entropy of the policy is {entropy:.2g} nats per token"
                yield "entropy", ENTROPY, f"{message}; in the first steps it was {first:.2g}"
        if has_no_signal(metrics) and config.no_signal:
            text = "no group has a learning signal: all samples of each group have the same reward"
            yield NO_SIGNAL, ZERO_SIGNAL, text
        for rule, text in self._rules():
            value = metrics.get(rule.metric)
            if value is not None and rule.is_met(value):
                yield rule.describe(), rule.metric, text.format(value=value, rule=rule.describe())

    def _rules(self) -> Iterator[tuple[AlertRule, str]]:
        config = self._config
        for metric, limit, text in (
            (FAILED, config.failed_frac, "{value:.0%} of the requests failed"),
            (TRUNCATED, config.truncated_frac, "{value:.0%} of the responses were cut"),
            (DRIFT, config.drift, "engine and trainer differ by {value:.2g} nats per token"),
        ):
            if limit is not None:
                yield AlertRule(metric=metric, above=limit), text + " ({rule})"
        for rule in config.rules:
            yield rule, "{rule}: it is {value:.4g}"

    def _call(self, alert: Alert) -> None:
        """Call the command and the URL, and do not wait for them."""
        config, content = self._config, json.dumps(asdict(alert)).encode()
        if config.command is not None:
            threading.Thread(
                target=_run_command, args=(config.command, content), daemon=True
            ).start()
        if config.webhook_url is not None:
            threading.Thread(target=_post, args=(config.webhook_url, content), daemon=True).start()


class _Windows:
    """Means over the last steps: the first one, and the best one."""

    def __init__(self, size: int) -> None:
        self._values: deque[float] = deque(maxlen=size)
        self.first = self.best = math.nan

    def add(self, value: float | None) -> float | None:
        """Return the mean of the last steps; None before there are enough of them."""
        if value is None or not math.isfinite(value):
            return None
        self._values.append(value)
        if len(self._values) < (self._values.maxlen or 1):
            return None
        mean = statistics.fmean(self._values)
        self.first = mean if math.isnan(self.first) else self.first
        self.best = mean if math.isnan(self.best) else max(mean, self.best)
        return mean


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
