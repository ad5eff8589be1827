import json
import random
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.config.schema.run import AlertRule, AlertsConfig
from agentrl.trainer.metrics import alerts as module
from agentrl.trainer.metrics.alerts import Alerts, find_idle_rules

REWARD, COMBINED, ENTROPY = "rollout/reward/mean", "rollout/combined_reward/mean", module.ENTROPY


def warnings_of(lines: list[dict[str, float]], **config: Any) -> list[str]:
    alerts = Alerts(AlertsConfig.model_validate({"window": 2} | config), Path("run"))
    steps = enumerate(lines, start=1)
    return [text for step, metrics in steps for text in alerts.check(step, metrics)]


def series(metric: str, *values: float) -> list[dict[str, float]]:
    return [{metric: value} for value in values]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (series(REWARD, 0.5, 0.6, 0.6, 0.1, 0.1), ["step 5: the mean reward of the last 2"]),
        (series(REWARD, 0.1, 0.5, 0.7, 0.5, 0.4, 0.3), []),
        (series(REWARD, -1.0, -0.9, -0.8, -0.8, -1.9, -1.9), ["step 5: the mean reward"]),
        (series(REWARD, 0.0), []),
        (
            series(ENTROPY, 2.0, 2.0, 0.3, 0.1, 0.1),
            ["step 5: the entropy of the policy is 0.1 nats"],
        ),
        (series(module.FAILED, 0.1, 0.3, 0.4, 0.1, 0.5), ["step 2: 30% of", "step 5: 50% of"]),
        (series(module.TRUNCATED, 0.9, 0.8, 0.9), ["step 1: 90% of"]),  # high from the start
        (series(module.TRUNCATED, 0.4, 0.6), ["step 2: 60% of the responses were cut"]),
        (series(module.TRUNCATED, 0.55, 0.55, 0.99, 0.6), ["step 1: 55% of", "step 3: 99% of"]),
        (series(module.TRUNCATED, 0.0, 0.0, 0.45, 0.6), ["step 3: 45% of"]),
        (series(module.FAILED, 0.25, 0.25, 0.95), ["step 1: 25% of", "step 3: 95% of"]),
        (series(module.FAILED, 0.25, 0.25, 0.02, 0.02, 0.4), ["step 1: 25%", "step 5: 40%"]),
        (series(module.DRIFT, 0.001, 0.1), ["step 2: engine and trainer differ by 0.1 nats"]),
        (series(module.ZERO_SIGNAL, 0.9, 1.0, 1.0), []),  # the console says so
    ],
)
def test_each_reason_is_told_once_until_it_is_over(
    lines: list[dict[str, float]], expected: list[str]
):
    said = warnings_of(lines)
    assert len(said) == len(expected), said
    assert all(
        line.startswith(f"warning: {text}") for line, text in zip(said, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([0.57] + [0.0] * 9, 4),  # from the second step on
        ([0.57] * 10 + [0.0] * 9, 13),
        ([0.9] * 10 + [0.1] * 9, 13),
        ([0.55, 0.62, 0.5, 0.6, 0.58, 0.53, 0.61] + [0.0] * 9, 10),
    ],
)
def test_collapse_is_reported_in_its_third_step_and_once(values: list[float], step: int):
    [line] = warnings_of(series(REWARD, *values), window=5)
    assert line.startswith(f"warning: step {step}: the mean reward")


@pytest.mark.parametrize("share", [0.9, 1.0, 1.5])
def test_collapse_to_a_new_low_is_reported_with_any_threshold(share: float):
    [line] = warnings_of(series(REWARD, *[0.5] * 10, *[-0.6] * 10), window=5, reward_fall=share)
    assert line.endswith("its best was 0.5")


def test_share_of_a_fall_is_that_of_the_rise_before_the_best():
    values = [*[-1.0] * 5, *[0.2] * 5, *[-0.2] * 5]
    assert warnings_of(series(REWARD, *values), window=5) == []
    [line] = warnings_of(series(REWARD, *values, *[-0.8] * 5), window=5)
    assert "its best was 0.2" in line


def test_best_reward_may_be_that_of_the_first_step():
    [line] = warnings_of(series(REWARD, 0.57, 0.0, 0.0, 0.0), window=5)
    assert line.endswith("the mean reward of the last 4 steps is 0.142; its best was 0.57")


def test_noise_around_zero_and_a_rise_through_zero_are_no_collapse():
    for seed in range(5):
        noise = random.Random(seed).gauss
        assert warnings_of(series(REWARD, *(noise(0.02, 0.02) for _ in range(60))), window=5) == []
        rise = (noise(step / 100 - 0.5, 0.05) for step in range(120))
        assert warnings_of(series(REWARD, *rise), window=5) == []


def test_reward_is_the_combined_one_if_a_step_has_it(tmp_path: Path):
    lines = [{REWARD: 0.0, COMBINED: value} for value in (0.9, 0.9, 0.9, 0.1, 0.1)]
    [line] = warnings_of(lines, command=f"cat > {tmp_path}/told.json")
    joined("_run_command")
    assert "step 5: the mean reward" in line
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["metric"], told["value"]) == (COMBINED, 0.1)


def test_reason_is_not_over_in_steps_without_its_metric(tmp_path: Path):
    lines = [{"val/x/success": 0.1} if step % 2 else {REWARD: 0.5} for step in range(8)]
    rules = [{"metric": "val/x/success", "below": 0.5}]
    assert len(warnings_of(lines, rules=rules)) == 1
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": n} | line) + "\n" for n, line in enumerate(lines)))
    alerts = Alerts(AlertsConfig.model_validate({"rules": rules}), tmp_path)
    alerts.replay(file, resumed_step=6)  # a step without the metric
    assert alerts.check(7, {"val/x/success": 0.1}) == []


def test_null_switches_a_warning_off():
    off = dict.fromkeys(["reward_fall", "entropy_fall", "failed_frac", "truncated_frac", "drift"])
    lines = [
        {REWARD: 1.0, ENTROPY: 1.0},
        {REWARD: 1.0, ENTROPY: 1.0},
        {REWARD: 0, ENTROPY: 0, module.FAILED: 1, module.TRUNCATED: 1, module.DRIFT: 9},
        {REWARD: 0, ENTROPY: 0, module.ZERO_SIGNAL: 1},
    ]
    assert warnings_of(lines, no_signal=False, **off) == []


def test_rules_watch_any_metric():
    rules = [{"metric": "actor/grad_norm", "above": 5}, {"metric": "perf/throughput", "below": 10}]
    lines = [{"actor/grad_norm": 7.25, "perf/throughput": 20}, {"perf/throughput": 5}]
    assert warnings_of(lines, rules=rules) == [
        "warning: step 1: actor/grad_norm above 5: it is 7.25",
        "warning: step 2: perf/throughput below 10: it is 5",
    ]


def test_a_rule_without_a_threshold_is_an_error():
    with pytest.raises(ValidationError, match="needs `above` or `below`"):
        AlertRule(metric="a")


def test_rules_for_metrics_that_no_run_logs_get_a_note():
    known = ["actor/grad_norm", "val/gsm8k/success", "reward/seconds/p95", "scorer/format/max"]
    rules = [{"metric": name, "above": 1} for name in (*known, "actor/grad_nrm", "reward")]
    assert list(find_idle_rules(AlertsConfig.model_validate({"rules": rules}))) == [
        "trainer.alerts.rules: 'actor/grad_nrm' is not a metric of agentrl; "
        "did you mean 'actor/grad_norm'?",
        "trainer.alerts.rules: 'reward' is not a metric of agentrl",
    ]


def test_a_resumed_run_knows_the_steps_before(tmp_path: Path):
    file = tmp_path / "metrics.jsonl"
    lines = series(REWARD, *[0.8] * 10, 0.1, 0.1, 0.8)
    file.write_text("".join(json.dumps({"step": n} | line) + "\n" for n, line in enumerate(lines)))
    alerts = Alerts(AlertsConfig(window=2), tmp_path)
    alerts.replay(file, resumed_step=11)
    assert alerts.check(12, {REWARD: 0.1}) == []  # told before the resume
    steps = enumerate((0.8, 0.8, 0.1, 0.1), start=13)
    rewards = [alerts.check(step, {REWARD: reward}) for step, reward in steps]
    assert list(map(len, rewards)) == [0, 0, 0, 1]


def joined(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name.endswith(f"({name})"):
            thread.join(10)


def test_command_and_url_get_the_warning_as_json(tmp_path: Path):
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    file = tmp_path / "told.json"
    url = f"http://127.0.0.1:{server.server_port}/hook"
    warnings_of(series(module.FAILED, 0.0, 0.5), command=f"cat > {file}", webhook_url=url)
    joined("_run_command")
    joined("_post")
    server.shutdown()
    server.server_close()
    expected = {
        "run": "run", "step": 2, "metric": module.FAILED, "value": 0.5,
        "message": f"50% of the requests failed ({module.FAILED} above 0.2)",
    }  # fmt: skip
    assert json.loads(file.read_text()) == expected
    assert received == [expected]


def test_steps_without_a_signal_call_the_command(tmp_path: Path):
    command = f"cat >> {tmp_path}/told.json"
    warnings_of(series(module.ZERO_SIGNAL, 1.0, 1.0), command=command)
    joined("_run_command")
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["step"], told["message"][:8]) == (1, "no group")
    warnings_of(series(module.ZERO_SIGNAL, 1.0), command=f"touch {tmp_path}/off", no_signal=False)
    joined("_run_command")
    assert not (tmp_path / "off").exists()


def test_calls_that_fail_are_logged_and_stop_nothing(caplog: pytest.LogCaptureFixture):
    warnings_of(
        series(module.FAILED, 0.0, 0.5),
        command="echo no >&2; exit 3",
        webhook_url="http://127.0.0.1:9/secret",
    )
    joined("_run_command")
    joined("_post")
    assert "exited with 3: no" in caplog.text
    assert "could not be called" in caplog.text
    assert "secret" not in caplog.text
