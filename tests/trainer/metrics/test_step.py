import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from agentrl.engines.protocol import VersionSpan
from agentrl.errors import Fault
from agentrl.messages import CallOutcome, Message
from agentrl.protocol import DataProto
from agentrl.rollout.compaction import count_no_space
from agentrl.rollout.records import CallRecord, TokenDifference
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.trainer.metrics import rollout as rollout_module
from agentrl.trainer.metrics import step as step_module
from agentrl.trainer.metrics.aggregators import (
    MaxMetric,
    MeanMetric,
    Metric,
    Metrics,
    MinMetric,
    StdMetric,
    compute_values,
    merge_metrics,
)
from agentrl.trainer.metrics.step import Timer, compute_throughput, perf_metrics, time_metrics
from tests.fakes.finished_requests import (
    append_answer,
    finish_request,
    finished_requests,
    make_tool_request,
    start_request,
)


def rollout_metrics(requests: list[AsyncRolloutRequest]) -> Metrics:
    return compute_values(rollout_module.rollout_metrics(requests))


def batch_metrics(data: DataProto) -> Metrics:
    return compute_values(step_module.batch_metrics(data))


def test_lengths_and_turns_of_a_tool_story():
    metrics = rollout_metrics([make_tool_request()])
    assert metrics["prompt_length/mean"] == 6
    assert metrics["response_length/mean"] == metrics["response_length/max"] == 12
    assert metrics["num_turns/mean"] == 4, "call, result, answer, and the prompt as verl counts it"
    assert metrics["rollout/assistant_turns/mean"] == 2
    assert metrics["rollout/user_turns/max"] == 0
    assert metrics["rollout/tokens_per_turn/mean"] == 4.5
    assert metrics["rollout/mask_ones_ratio"] == pytest.approx(9 / 12)


def test_mask_ratio_is_of_tokens_not_a_mean_of_requests():
    short = start_request()
    append_answer(short, "x")
    finish_request(short, StopReason.ANSWERED)
    assert rollout_metrics([short, make_tool_request()])["rollout/mask_ones_ratio"] == 10 / 13


def test_clip_ratio_counts_what_a_length_ended():
    requests = [
        make_tool_request(),
        make_tool_request(StopReason.RESPONSE_BUDGET),
        make_tool_request(StopReason.MODEL_LENGTH),
        make_tool_request(StopReason.MAX_ASSISTANT_TURNS),
    ]
    assert rollout_metrics(requests)["response_length/clip_ratio"] == 0.5


def test_calls_are_counted_per_request_and_by_outcome():
    request = start_request()
    calls = [
        CallRecord(name="calculator", seconds=1.0),
        CallRecord(name="calculator", seconds=3.0, outcome="timeout"),
        CallRecord(name="rm -rf", seconds=0.0, outcome="malformed"),
    ]
    append_answer(request, "a", calls=calls)
    finish_request(request, StopReason.ANSWERED)
    metrics = rollout_metrics([request, make_tool_request()])
    assert metrics["rollout/tool_calls/mean"] == 2
    assert metrics["rollout/tool_calls/ok"] == 1
    assert metrics["rollout/tool_calls/timeout"] == metrics["rollout/tool_calls/malformed"] == 0.5
    assert metrics["rollout/tool/calculator/num_calls"] == 3
    assert metrics["rollout/tool/calculator/seconds/mean"] == pytest.approx(1.5)
    assert metrics["rollout/tool/calculator/seconds/max"] == 3
    assert "rollout/tool/unknown/num_calls" not in metrics, "what is malformed never ran"


def test_a_tools_queue_retries_and_cache_are_separate_from_its_work():
    request = start_request()
    calls = [
        CallRecord(name="calculator", seconds=2.0, queue_seconds=1.0, num_attempts=3),
        CallRecord(name="calculator", queue_seconds=0.5, num_attempts=0, is_cached=True),
        CallRecord(name="calculator", num_attempts=0, outcome="unavailable"),
        CallRecord(name="calculator", seconds=4.0, outcome="crashed"),
    ]
    append_answer(request, "a", calls=calls)
    request.tool_schemas = make_tool_request().tool_schemas
    finish_request(request, StopReason.ANSWERED)
    metrics = rollout_metrics([request])
    of_tool = {k.removeprefix("rollout/tool/calculator/"): v for k, v in metrics.items()}
    assert of_tool["num_calls"] == 4
    assert of_tool["seconds/mean"] == 3, "what was not executed took no time"
    assert (of_tool["queue_seconds/mean"], of_tool["queue_seconds/max"]) == (0.375, 1)
    assert of_tool["retries"] == 2
    assert (of_tool["cache_hit_frac"], of_tool["unavailable_frac"]) == (0.25, 0.25)
    assert of_tool["failed_frac"] == 0.5


def test_names_that_a_model_invents_make_no_columns():
    request = start_request()
    append_answer(request, "a", calls=[CallRecord(name=f"made_up_{n}") for n in range(9)])
    finish_request(request, StopReason.ANSWERED)
    metrics = rollout_metrics([request])
    assert metrics["rollout/tool/unknown/num_calls"] == 9
    assert not any("made_up" in name for name in metrics)


def test_stop_reasons_and_faults_are_shares():
    failed = make_tool_request(StopReason.FAILED)
    late = make_tool_request(StopReason.WALL_CLOCK)
    metrics = rollout_metrics([failed, late, make_tool_request(), make_tool_request()])
    assert metrics["rollout/stop_reason/answered"] == 0.5
    assert metrics["rollout/failures/tool"] == metrics["rollout/failures/limit"] == 0.25
    assert metrics["rollout/failures/model"] == 0
    assert metrics["rollout/failed_frac"] == 0.5


def test_rewards_of_failed_requests_are_left_out():
    scored = make_tool_request(reward=1.0)
    broken = make_tool_request(StopReason.FAILED, reward=0.0)
    assert rollout_metrics([scored, broken])["rollout/reward/mean"] == 1.0


def test_cut_observations_and_excluded_turns():
    request = make_tool_request()
    request.turns[0].calls[0].num_cut_tokens = 7
    request.exclude_turn(0, "malformed")
    metrics = rollout_metrics([request, make_tool_request()])
    assert metrics["rollout/cut_observations/mean"] == 0.5
    assert metrics["rollout/cut_observation_tokens/mean"] == 3.5
    assert metrics["rollout/excluded_turns/mean"] == 0.5


def test_what_the_token_check_was_not_drawn_for_counts_as_nothing():
    checked = make_tool_request()
    checked.is_checked = True
    checked.differences.append(TokenDifference(turn=0, kind="missing", expected="a", actual=""))
    metrics = rollout_metrics([checked, make_tool_request()])
    assert metrics["rollout/tokenization_differences_frac"] == 1
    assert "rollout/tokenization_differences_frac" not in rollout_metrics([make_tool_request()])


def test_the_counts_of_the_gateway_are_sums_and_its_sequences_a_mean():
    one, other = make_tool_request(), make_tool_request()
    one.metrics |= {"gateway/sequences": 2.0, "gateway/discarded": 1.0, "gateway/ignored_x": 1.0}
    other.metrics |= {"gateway/sequences": 1.0}
    found = rollout_metrics([one, other, make_tool_request()])
    counts = {name: value for name, value in found.items() if name.startswith("gateway/")}
    assert counts == {"gateway/sequences/mean": 1.5, "gateway/discarded": 1.0}


def test_histories_that_could_not_be_compacted_are_counted():
    one, other = make_tool_request(), make_tool_request()
    for request in (one, other, other):
        count_no_space(request, "summary")
    found = rollout_metrics([one, other, make_tool_request()])
    assert found["rollout/compaction/no_space_for_summary"] == 3
    assert found["rollout/sequences/mean"] == 1


def test_agent_loops_report_what_they_sampled_and_did_not_train():
    own = {"calls": 3.0, "unused_calls": 1.0, "dropped_tokens": 4.0, "masked_tokens": 2.0}
    driven = make_tool_request()
    driven.metrics |= {f"agent_loop/{name}": value for name, value in own.items()}
    found = rollout_metrics([driven, make_tool_request()])
    assert {name: found[f"agent_loop/{name}/mean"] for name in own} == own
    assert not any(
        name.startswith("agent_loop/") for name in rollout_metrics([make_tool_request()])
    )


def test_versions_differences_and_cache():
    request = start_request()
    append_answer(request, "abcd", version=3)
    append_answer(request, "ef", version=5)
    request.turns[1].cached_tokens = 8
    request.turns[1].weight_versions = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 2))
    request.differences.append(TokenDifference(turn=0, kind="whitespace", expected="a", actual="b"))
    request.is_checked = True
    finish_request(request, StopReason.ANSWERED)
    metrics = rollout_metrics([request])
    assert metrics["rollout/policy_version/min"] == 3
    assert metrics["rollout/policy_version/max"] == 5
    assert metrics["rollout/policy_version/spread_max"] == 2
    assert metrics["rollout/tokenization_differences/mean"] == 1
    assert metrics["rollout/cached_tokens_frac"] == 8 / (6 + 10)


def test_nothing_gives_nothing():
    assert rollout_metrics([]) == {}
    assert batch_metrics(DataProto.from_dict({"response_mask": torch.zeros(0, 4)})) == {}
    assert merge_metrics([]) == merge_metrics([{}, {}]) == {}


def test_a_request_that_never_began_gives_finite_figures():
    request = AsyncRolloutRequest(messages=[Message(role="user", content="x")])
    finish_request(request, StopReason.FAILED, Fault.ENGINE)
    metrics = rollout_metrics([request])
    assert all(map(math.isfinite, metrics.values()))
    assert metrics["rollout/failures/engine"] == 1


@settings(max_examples=40)
@given(st.lists(finished_requests(), min_size=1, max_size=4))
def test_figures_are_finite_and_shares_add_up(requests):
    metrics = rollout_metrics(requests)
    assert all(map(math.isfinite, metrics.values()))
    reasons = [v for k, v in metrics.items() if k.startswith("rollout/stop_reason/")]
    assert sum(reasons) == pytest.approx(1)
    outcomes = sum(metrics[f"rollout/tool_calls/{outcome}"] for outcome in CallOutcome)
    assert outcomes == pytest.approx(metrics["rollout/tool_calls/mean"])


# Tensors.


def batch(**tensors: list) -> DataProto:
    mask = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0]])
    columns = {
        "uid": ["a", "a", "b", "b"],
    }
    named = {key: torch.tensor(rows) for key, rows in tensors.items()}
    named["in_baseline"] = torch.tensor([True, True, True, False])
    return DataProto.from_dict({"response_mask": mask} | named, columns)


def test_scores_are_of_rows_in_the_baseline():
    scores = [[0.0, 0.0, 1.0], [0.0, 3.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    metrics = batch_metrics(batch(token_level_scores=scores))
    assert metrics["critic/score/mean"] == 2
    assert metrics["critic/score/min"] == 1
    assert metrics["critic/score/max"] == 3
    assert "critic/rewards/mean" not in metrics


def test_advantages_are_of_trained_tokens_only():
    advantages = [[1.0, 99.0, 1.0], [-1.0, -1.0, 99.0], [0.0, 99.0, 99.0], [99.0, 99.0, 99.0]]
    metrics = batch_metrics(batch(advantages=advantages, returns=advantages))
    assert metrics["critic/advantages/mean"] == 0
    assert metrics["critic/returns/max"] == 1


def test_a_group_without_an_advantage_has_no_signal():
    signal = [[1.0, 0.0, 1.0], [-1.0, -1.0, 0.0], [0.0, 5.0, 5.0], [5.0, 5.0, 5.0]]
    metrics = batch_metrics(batch(advantages=signal))
    assert metrics["algorithm/zero_signal_groups_frac"] == 0.5


def test_probs_diff_is_a_difference_of_probabilities():
    half, quarter = math.log(0.5), math.log(0.25)
    old = [[half, -99.0, half], [half, quarter, -99.0], [half, -99.0, -99.0], [-99.0] * 3]
    rollout = [[half, 0.0, quarter], [half, half, 0.0], [half, 0.0, 0.0], [0.0] * 3]
    metrics = batch_metrics(batch(old_log_probs=old, rollout_log_probs=rollout))
    assert metrics["training/rollout_probs_diff_max"] == pytest.approx(0.25)
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(0.1)
    assert metrics["training/rollout_probs_diff_std"] == pytest.approx(math.sqrt(0.015))
    assert metrics["training/rollout_log_probs_diff_max"] == pytest.approx(math.log(2))


def test_a_batch_that_trains_on_nothing_gives_no_nan():
    zeros = torch.zeros(2, 3)
    keys = ("response_mask", "advantages", "returns", "old_log_probs", "rollout_log_probs",
            "token_level_scores")  # fmt: skip
    tensors = dict.fromkeys(keys, zeros) | {"in_baseline": torch.zeros(2, dtype=torch.bool)}
    metrics = batch_metrics(DataProto.from_dict(tensors, {"uid": ["a", "b"]}))
    assert metrics == {"algorithm/zero_signal_groups_frac": 1.0}


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_observations_are_invisible_observed_tokens_change_no_figure(data):
    keys = ("advantages", "returns", "old_log_probs", "rollout_log_probs")
    width = data.draw(st.integers(1, 5))
    floats = st.floats(-3, 0, width=32)
    rows = {key: data.draw(st.lists(floats, min_size=width, max_size=width)) for key in keys}
    place = data.draw(st.integers(0, width))
    noise = data.draw(floats)

    def metrics(extra: bool) -> dict[str, float]:
        cut = [noise] if extra else []
        tensors = {k: torch.tensor([r[:place] + cut + r[place:]]) for k, r in rows.items()}
        mask = [1.0] * place + [0.0] * extra + [1.0] * (width - place)
        return batch_metrics(
            DataProto.from_dict(tensors | {"response_mask": torch.tensor([mask])}, {"uid": ["a"]})
        )

    assert metrics(extra=True) == metrics(extra=False)


# The clock.


def test_timer_adds_repeats_and_keeps_what_raised():
    timer = Timer(clock=iter([0.0, 1.0, 5.0, 7.0, 10.0, 14.0]).__next__)
    with timer("gen"):
        pass
    with timer("gen"):
        pass
    with pytest.raises(OSError, match="gone"), timer("save_checkpoint"):
        raise OSError("gone")
    assert timer.pop_metrics() == {"timing_s/gen": 3.0, "timing_s/save_checkpoint": 4.0}
    assert timer.pop_metrics() == {}, "each step starts afresh"


def test_timer_counts_real_seconds():
    timer = Timer()
    with timer("step"):
        sum(range(1000))
    assert 0 < timer.seconds("step") < 5


def test_throughput_is_tokens_per_second():
    metrics = compute_values(perf_metrics(1000, 4.0))
    assert compute_throughput(metrics, 1) == {"perf/throughput": 250}
    assert 0.01 < metrics["perf/max_cpu_memory_gb"] < 1000
    assert compute_throughput(compute_values(perf_metrics(0, 0.0)), 1) == {}


# Ranks.


@settings(max_examples=40)
@given(st.lists(finished_requests(), min_size=1, max_size=6), st.data())
def test_layout_is_invisible_figures_of_parts_are_those_of_the_whole(requests, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(requests)), max_size=3)))
    parts = [requests[a:b] for a, b in zip([0, *cuts], [*cuts, len(requests)], strict=True)]
    merged = compute_values(merge_metrics(map(rollout_module.rollout_metrics, parts)))
    assert merged == pytest.approx(rollout_metrics(requests), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_layout_is_invisible_figures_of_split_tensors_are_those_of_the_whole(data):
    num_rows, width = data.draw(st.integers(1, 6)), 3
    numbers = st.lists(st.floats(-3, 0, width=32), min_size=width, max_size=width)
    rows = st.lists(numbers, min_size=num_rows, max_size=num_rows)
    keys = ("advantages", "old_log_probs", "rollout_log_probs", "token_level_scores")
    tensors = {key: torch.tensor(data.draw(rows)) for key in keys}
    bits = st.lists(st.integers(0, 1), min_size=width, max_size=width)
    mask = data.draw(st.lists(bits, min_size=num_rows, max_size=num_rows))
    tensors |= {"response_mask": torch.tensor(mask)}
    tensors |= {"in_baseline": torch.tensor([bool(n % 3) for n in range(num_rows)])}
    whole = DataProto.from_dict(tensors, {"uid": [f"g{n // 2}" for n in range(num_rows)]})
    cut = data.draw(st.integers(0, num_rows))
    merged = compute_values(
        merge_metrics(map(step_module.batch_metrics, (whole[:cut], whole[cut:])))
    )
    assert merged == pytest.approx(batch_metrics(whole), rel=1e-9, abs=1e-12)


def test_a_mean_weighs_by_what_it_averages_over():
    one_failed = [make_tool_request(reward=1.0), make_tool_request(StopReason.FAILED)]
    metrics = merge_metrics(
        map(rollout_module.rollout_metrics, (one_failed, [make_tool_request(reward=4.0)]))
    )
    assert compute_values(metrics)["rollout/reward/mean"] == 2.5, "two are scored, of three"


def test_step_is_as_slow_as_its_slowest_rank():
    parts = [time_metrics({"timing_s/gen": s}) | perf_metrics(300, s) for s in (1.0, 3.0)]
    metrics = compute_values(merge_metrics(parts))
    assert metrics["timing_s/gen"] == metrics["perf/time_per_step"] == 3.0
    assert metrics["perf/total_num_tokens"] == 600
    assert compute_throughput(metrics, 2) == {"perf/throughput": 100}, "of each rank"


@pytest.mark.parametrize("figure", [MaxMetric, MinMetric])
def test_a_nan_of_one_rank_is_not_lost(figure):
    for values in ((1.0, math.nan), (math.nan, 1.0)):
        merged = merge_metrics([{"actor/grad_norm_max": figure(value)} for value in values])
        assert math.isnan(merged["actor/grad_norm_max"].value)


def test_a_figure_that_one_rank_has_is_its_own():
    parts: list[dict[str, Metric]] = [
        {"a": MeanMetric(2.0, 2)},
        {"a": MeanMetric(5.0, 1), "b": MeanMetric(2.0, 1)},
    ]
    assert compute_values(merge_metrics(parts)) == {"a": pytest.approx(7 / 3), "b": 2.0}


def test_deviations_about_unlike_means_are_put_together():
    values = torch.tensor([1.0, 1.0, 5.0, 9.0])
    merged = StdMetric.of(values[:2]).merge(StdMetric.of(values[2:]))
    assert merged.value == pytest.approx(values.std(correction=0).item())
