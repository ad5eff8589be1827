"""Model FLOP utilization against numbers computed by hand, and idle shares."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from agentrl import Trainer
from agentrl.config import parse_config
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState, StopReason
from agentrl.trainer.metrics.aggregators import RateMetric, WaitMetric, compute_values
from agentrl.trainer.metrics.efficiency import ModelCost, idle_metrics, peak_tflops
from tests.fakes.runs import read_lines, tiny_run

COST = ModelCost(num_weights=1000, trained_weights=1000, num_layers=2, query_width=8)


def test_the_operations_of_a_pass_are_those_of_the_formula():
    # 6 * 1000 * (3 + 5) + 12 * 2 * 8 * (9 + 25)
    assert COST.train_flops([3, 5]) == 48_000 + 6_528
    # 2 * 1000 * (3 + 5) + 4 * 2 * 8 * (9 + 25)
    assert COST.forward_flops([3, 5]) == 16_000 + 2_176


def test_weights_that_are_not_trained_have_no_gradient_of_their_own():
    cost = ModelCost(num_weights=1000, trained_weights=100, num_layers=2, query_width=8)
    # Forward 2 * 1000, gradient of the inputs 2 * 1000, gradient of the weights 2 * 100.
    assert cost.train_flops([1]) - 12 * 2 * 8 == 4_200


class FakeLM(nn.Module):
    """Ten tokens, four numbers each; one layer of two experts, of which one computes a token."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 4, bias=False)
        self.experts = nn.ModuleList([nn.Linear(4, 3, bias=False) for _ in range(2)])
        self.head = nn.Linear(4, 10, bias=False)
        self.config: Any = type("Config", (), {"vision_config": None})()
        if is_tied:
            self.head.weight = self.embed.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class FakeConfig:
    num_attention_heads, hidden_size, num_hidden_layers = 2, 4, 3
    num_experts_per_tok, num_experts = 1, 2

    def get_text_config(self) -> "FakeConfig":
        return self


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_embedding_counts_only_if_it_is_the_head_and_half_of_the_experts(
    is_tied: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentrl.trainer.metrics.efficiency.tower_weights", lambda _: [])
    policy: Any = type("Policy", (), {})()
    policy.lm, policy.text_config = FakeLM(is_tied=is_tied), FakeConfig()
    policy.lm.layer.weight.requires_grad_(False)
    cost = ModelCost.of(policy)
    # layer 4 * 4, one of two experts 4 * 3, head 4 * 10.
    assert cost.num_weights == 16 + 12 + 40
    assert cost.trained_weights == 12 + 40
    assert (cost.num_layers, cost.query_width) == (3, 4)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
        ("Some Device", None),
    ],
)
def test_the_peak_of_a_device_is_found_by_its_name(device: str, peak: float | None):
    assert peak_tflops(device) == peak


@pytest.mark.usefixtures("alone")
def test_a_run_with_a_peak_logs_the_utilization_of_its_update(tiny_home: Path, tmp_path: Path):
    content = tiny_run(
        tiny_home,
        tmp_path / "run",
        trainer__peak_tflops=0.5,
        trainer__total_training_steps=1,
        trainer__val_before_train=False,
        actor__entropy_coeff=0.01,  # so that rows without an advantage are computed too
        actor__ppo_epochs=2,
    )
    trainer = Trainer(parse_config(content))
    trainer.fit()
    (line,) = (one for one in read_lines(tmp_path / "run/metrics.jsonl") if one["step"] == 1)
    cost = ModelCost.of(trainer.components.actor.policy)
    num_weights = sum(w.numel() for w in trainer.components.actor.policy.lm.parameters())
    embedding = trainer.components.actor.policy.lm.get_input_embeddings().weight.numel()
    assert cost.num_weights in (num_weights, num_weights - embedding)
    # Each row is shorter than 288 tokens, so the second term is bounded by the first.
    num_tokens = line["perf/tokens_per_s/update_actor"] * line["timing_s/update_actor"]
    assert num_tokens == pytest.approx(2 * line["perf/total_num_tokens"], rel=0.05)
    low = 6 * cost.num_weights * num_tokens
    high = low + 12 * cost.num_layers * cost.query_width * num_tokens * 288
    flops = line["perf/mfu/actor"] * line["timing_s/update_actor"] * 0.5e12
    assert low < flops < high
    assert 0 < line["perf/mfu/actor_infer"] < 1
    assert 0 < line["perf/padding_frac"] < 1
    assert line["perf/tokens_per_s/gen"] * line["timing_s/gen"] == pytest.approx(
        line["rollout/tokens_per_turn/mean"] * line["rollout/assistant_turns/mean"] * 8
    )
    assert "perf/idle/ranks_frac" not in line, "there is one rank"


@pytest.mark.usefixtures("alone")
def test_a_cpu_without_a_given_peak_has_no_utilization(tiny_home: Path, tmp_path: Path):
    content = tiny_run(tiny_home, tmp_path / "run", trainer__total_training_steps=1)
    Trainer(parse_config(content)).fit()
    for line in read_lines(tmp_path / "run/metrics.jsonl"):
        assert not [name for name in line if name.startswith("perf/mfu")]


def request(started: float, seconds: float, in_engine: float) -> AsyncRolloutRequest:
    one = AsyncRolloutRequest(messages=[])
    one.metrics |= {"seconds_started": started, "seconds": seconds}
    one.begin([1])
    one.take_edge(RequestState.RUNNING)
    one.append_sampled([2], [-0.5], seconds=in_engine)
    one.finish(StopReason.ANSWERED)
    return one


def test_idle_shares_are_those_of_the_slots_that_ran_at_once():
    # Four slots for ten seconds. From the sixth second on, one request of four runs.
    requests = [request(0.0, 6.0, 5.0) for _ in range(3)] + [request(0.0, 10.0, 5.0)]
    values = compute_values(idle_metrics(requests, 10.0))
    assert values["perf/idle/engine_slots_frac"] == pytest.approx(1 - 20 / 40)
    assert values["perf/idle/tail_frac"] == pytest.approx(0.4)


def test_a_slot_that_is_used_again_is_one_slot():
    requests = [request(0.0, 5.0, 5.0), request(5.0, 5.0, 5.0)]
    values = compute_values(idle_metrics(requests, 10.0))
    assert values == {"perf/idle/engine_slots_frac": 0.0, "perf/idle/tail_frac": 0.0}
    assert idle_metrics([], 10.0) == {}


def test_ranks_wait_for_the_slowest_one():
    parts = [WaitMetric(seconds, 1, seconds) for seconds in (2.0, 4.0, 3.0)]
    assert parts[0].merge(parts[1]).merge(parts[2]).value == pytest.approx(1 - 3 / 4)


def test_a_rate_is_that_of_all_ranks_in_the_time_of_the_slowest():
    assert RateMetric(100.0, 2.0).merge(RateMetric(200.0, 4.0)).value == 75.0
