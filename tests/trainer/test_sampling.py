"""From prompts to the samples of a step: dynamic sampling, overlong answers, greedy baselines."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import register_adv_est
from agentrl.collate import collate
from agentrl.config.schema.reward import RewardConfig, RewardWeightsConfig
from agentrl.errors import ConfigError
from agentrl.rollout.states import StopReason
from agentrl.trainer.sampling import (
    IS_BASELINE,
    NO_BASELINE,
    NO_SIGNAL,
    SURPLUS,
    GroupMember,
    find_differing_groups,
    find_signal,
    source_metrics,
)
from agentrl.workers.distributed import World, start_world, stop_world
from tests.fakes.requests import build_request, said
from tests.fakes.sampling import GREEDY, FakeLoop, FakeManager, SampleResult

FAILED = SampleResult(stop_reason=StopReason.FAILED)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    yield start_world("cpu", timeout_s=60)
    stop_world()


@register_adv_est("asks_for_baselines")
def asks_for_baselines(token_level_rewards: Any, response_mask: Any, reward_baselines: Any) -> Any:
    return token_level_rewards, token_level_rewards


def filtering(**keys: Any) -> dict[str, Any]:
    return {"algorithm": {"filter_groups": {"enable": True} | keys}}


def differs_in(*rows: int) -> Any:
    """The samples of these rows earn 0, 1, ...; those of others 1 each."""
    return lambda row, offset: SampleResult(float(offset) if row in rows else 1.0)


def rows_of(requests: Any) -> list[str]:
    return list(dict.fromkeys(request.uid for request in requests))


def metrics_of(samples: Any) -> dict[str, float]:
    return {
        name.removeprefix("filter_groups/"): figure.value
        for name, figure in samples.metrics.items()
    }


# Without any of it.


def test_a_step_is_one_batch_of_prompts_and_all_of_it_is_trained(world: World):
    samples = FakeLoop(world, differs_in()).take()
    assert samples.batch == samples.sampled == samples.everything
    assert rows_of(samples.batch) == ["train-0-0", "train-1-1"]
    assert all(request.dropped is None for request in samples.batch)
    assert samples.metrics == {}
    assert samples.baselines is None


# Dynamic sampling.


def test_groups_without_signal_give_way_to_the_next_of_the_data(world: World):
    loop = FakeLoop(world, differs_in(1, 4), **filtering())
    samples = loop.take()
    assert rows_of(samples.batch) == ["train-1-1", "train-4-4"]
    assert loop.order.position == 6
    assert len(samples.sampled) == 12
    dropped = [request for request in samples.sampled if request not in samples.batch]
    assert {request.dropped for request in dropped} == {NO_SIGNAL}
    assert not any(request.is_trained or request.in_baseline for request in dropped)
    assert metrics_of(samples) == {
        "num_gen_batches": 3, "num_without_signal": 4, "num_surplus": 0, "num_missing": 0,
        "reward/mean": (8 * 1.0 + 2 * 0.5 * 2) / 12,
    }  # fmt: skip
    assert loop.run_logger.lines == []


def test_a_generation_batch_may_be_larger_than_a_step(world: World):
    data = {"train_files": ["a.parquet"], "train_batch_size": 2, "gen_batch_size": 5,
            "max_response_length": 10}  # fmt: skip
    loop = FakeLoop(world, differs_in(1, 5, 8), data=data, **filtering())
    samples = loop.take()
    assert rows_of(samples.batch) == ["train-1-1", "train-5-5"]
    assert loop.order.position == len(samples.sampled) / 2 == 10
    counts = metrics_of(samples)
    assert (counts["num_gen_batches"], counts["num_without_signal"]) == (2, 7)
    assert counts["num_surplus"] == 1


def test_of_more_groups_than_a_step_takes_the_first_in_the_data_s_order_are_trained(world: World):
    loop = FakeLoop(world, differs_in(1, 2, 3), **filtering())
    samples = loop.take()
    assert rows_of(samples.batch) == ["train-1-1", "train-2-2"]
    surplus = [request for request in samples.sampled if request.dropped == SURPLUS]
    assert rows_of(surplus) == ["train-3-3"]
    assert metrics_of(samples)["num_surplus"] == 1
    assert metrics_of(samples)["num_without_signal"] == 1


def test_at_the_bound_what_there_is_is_trained_and_said(world: World):
    loop = FakeLoop(world, differs_in(3), **filtering(max_num_gen_batches=2))
    samples = loop.take(step=7)
    assert rows_of(samples.batch) == ["train-3-3"]
    assert loop.order.position == 4
    assert metrics_of(samples)["num_missing"] == 1
    [line] = loop.run_logger.lines
    assert line == (
        "step 7: 1 of 2 groups have a signal, after 2 batches of prompts "
        "(algorithm.filter_groups): these are trained"
    )


def test_a_step_without_any_signal_has_rows_and_trains_on_none(world: World):
    loop = FakeLoop(world, differs_in(), **filtering(max_num_gen_batches=2))
    samples = loop.take()
    assert rows_of(samples.batch) == ["train-0-0", "train-1-1"]
    assert not collate(samples.batch, pad_token_id=0).batch["response_mask"].any()
    assert "nothing is trained" in loop.run_logger.lines[0]


def test_without_a_bound_one_epoch_is_sampled_and_no_more(world: World):
    loop = FakeLoop(world, differs_in(), num_rows=7, **filtering())
    assert metrics_of(loop.take())["num_gen_batches"] == 3
    assert (loop.order.epoch, loop.order.position) == (0, 6)


def test_a_prompt_that_comes_twice_in_one_step_is_another_group(world: World):
    loop = FakeLoop(world, differs_in(), num_rows=2, **filtering(max_num_gen_batches=3))
    samples = loop.take()
    assert len(set(rows_of(samples.sampled))) == 6
    assert len({request.request_id for request in samples.sampled}) == 12


def test_infrastructure_failures_do_not_count_in_a_groups_signal(world: World):
    def outcome(row: int, offset: int) -> SampleResult:
        ends = {
            0: [SampleResult(1.0), SampleResult(0.0), FAILED],
            1: [SampleResult(1.0), FAILED, FAILED],
            2: [FAILED] * 3,
            3: [SampleResult(1.0), SampleResult(1.0), FAILED],
        }  # fmt: skip
        return ends.get(row, [SampleResult(0.0), SampleResult(1.0), SampleResult(0.0)])[offset]

    loop = FakeLoop(world, outcome, rollout={"n": 3}, **filtering())
    samples = loop.take()
    assert rows_of(samples.batch) == ["train-0-0", "train-4-4"]
    assert metrics_of(samples)["num_without_signal"] == 3


def test_members_without_a_trained_token_do_not_count_in_a_groups_signal(world: World):
    loop = FakeLoop(world, differs_in(), **filtering())
    masked, other = loop.roll_out(loop.load_prompts()[:1], FakeManager(2).train_plan())
    masked.reward, other.reward = 1.0, 0.0
    config = loop.config.algorithm.filter_groups, loop.config.reward, world
    assert find_signal([masked, other], *config) == [0]
    masked.exclude_turn(0, "malformed")
    assert not any(masked.loss_mask)
    assert find_signal([masked, other], *config) == []


@pytest.mark.parametrize("metric", ["score", "reward", "seq_reward", "seq_final_reward"])
def test_names_of_the_reward_mean_the_combined_one(world: World, metric: str):
    def outcome(row: int, offset: int) -> SampleResult:
        return SampleResult(float(offset) if row > 1 else 1.0, extra={"acc": float(offset)})

    samples = FakeLoop(world, outcome, **filtering(metric=metric)).take()
    assert rows_of(samples.batch) == ["train-2-2", "train-3-3"]


def test_a_key_of_the_scorer_s_dict_is_compared_and_not_the_reward(world: World):
    def outcome(row: int, offset: int) -> SampleResult:
        return SampleResult(float(offset), extra={"acc": bool(offset) and row > 1})

    samples = FakeLoop(world, outcome, **filtering(metric="acc")).take()
    assert rows_of(samples.batch) == ["train-2-2", "train-3-3"]


@pytest.mark.parametrize(
    ("extra", "message"), [({"form": 1.0}, "form"), ({}, "it has none"), ({"acc": "good"}, "'acc'")]
)
def test_a_metric_that_the_scorer_does_not_give_is_named(
    world: World, extra: dict[str, Any], message: str
):
    loop = FakeLoop(world, lambda *_: SampleResult(extra=extra), **filtering(metric="acc"))
    with pytest.raises(ConfigError if "acc" not in extra else ValueError, match=r"'acc'") as caught:
        loop.take()
    assert message in str(caught.value)


def test_equal_rewards_rewards_are_compared_as_a_batch_holds_them(world: World):
    def outcome(row: int, offset: int) -> SampleResult:
        return SampleResult((0.3, 0.1 + 0.2)[offset] if row == 0 else float(offset))

    samples = FakeLoop(world, outcome, **filtering()).take()
    assert rows_of(samples.batch) == ["train-1-1", "train-2-2"]


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.5, 7.7])), max_size=24))
def test_equal_rewards_groups_that_differ_are_those_of_a_plain_comparison(
    drawn: list[tuple[int, float]],
):
    found = find_differing_groups(GroupMember(place, value) for place, value in drawn)
    expected = [
        place
        for place in range(5)
        if any(a != b for p, a in drawn for q, b in drawn if p == q == place)
    ]
    assert found == expected


@settings(max_examples=40)
@given(st.permutations(range(12)))
def test_layout_is_invisible_the_order_of_the_members_changes_no_decision(order: list[int]):
    members = [GroupMember(n // 3, float(n % 3 == n // 6)) for n in range(12)]
    assert find_differing_groups(members[n] for n in order) == find_differing_groups(members)


# Overlong answers.

BUFFER = {"reward": {"overlong_buffer": {"enable": True, "len": 4, "penalty_factor": 2.0}}}


def test_long_answers_lose_reward_and_it_is_written_down(world: World):
    lengths = {(0, 0): 6, (0, 1): 7, (1, 0): 10, (1, 1): 2}
    loop = FakeLoop(world, lambda row, at: SampleResult(1.0, num_tokens=lengths[row, at]), **BUFFER)
    samples = loop.take()
    assert [request.reward for request in samples.batch] == [1.0] * 4  # what the scorer said
    scores = loop.collate(samples.batch).batch["token_level_scores"].sum(-1)
    assert scores.tolist() == [1.0, 0.5, -1.0, 1.0]
    extra = [request.reward_extra_info["overlong_reward"] for request in samples.batch]
    assert extra == [0.0, -0.5, -2.0, 0.0]
    assert {name: figure.value for name, figure in samples.metrics.items()} == {
        "rollout/overlong_reward/mean": -0.625, "rollout/overlong_reward/min": -2.0,
        "rollout/overlong_reward/max": 0.0, "rollout/overlong_frac": 0.5,
        "rollout/combined_reward/mean": 0.375, "rollout/combined_reward/min": -1.0,
        "rollout/combined_reward/max": 1.0,
    }  # fmt: skip


def test_a_group_of_equal_scores_has_a_signal_where_its_lengths_differ(world: World):
    def outcome(row: int, offset: int) -> SampleResult:
        return SampleResult(1.0, num_tokens=10 if (row, offset) in ((1, 1), (3, 0)) else 3)

    samples = FakeLoop(world, outcome, **BUFFER, **filtering()).take()
    assert rows_of(samples.batch) == ["train-1-1", "train-3-3"]


def test_what_failed_has_no_reward_to_lose(world: World):
    samples = FakeLoop(world, lambda *_: FAILED, **BUFFER).take()
    assert {request.reward for request in samples.batch} == {None}
    assert samples.metrics == {}


# Bonuses and penalties.


def test_each_reward_source_besides_the_scorer_is_separate(world: World):
    lengths = {(0, 0): 6, (0, 1): 7, (1, 0): 10, (1, 1): 2}
    reward = {"reward": {"length_penalty": 0.5, "weights": {"tool": 2.0}}}
    loop = FakeLoop(world, lambda row, at: SampleResult(1.0, num_tokens=lengths[row, at]), **reward)
    samples = loop.take()
    penalties = [request.reward_extra_info["length_penalty"] for request in samples.batch]
    assert penalties == pytest.approx([-0.3, -0.35, -0.5, -0.1])
    assert {name: figure.value for name, figure in samples.metrics.items()} == pytest.approx({
        "rollout/length_penalty/mean": -0.3125, "rollout/length_penalty/min": -0.5,
        "rollout/length_penalty/max": -0.1, "rollout/tool_reward/mean": 0.0,
        "rollout/tool_reward/min": 0.0, "rollout/tool_reward/max": 0.0,
        "rollout/combined_reward/mean": 0.6875, "rollout/combined_reward/min": 0.5,
        "rollout/combined_reward/max": 0.9,
    })  # fmt: skip


# Greedy baselines.


def remax(outcome: Any, world: World, **sections: Any) -> Any:
    estimator = {"algorithm": {"adv_estimator": "asks_for_baselines"}}
    return FakeLoop(world, outcome, **(estimator | sections)).take()


def test_an_estimator_that_names_baselines_gets_those_of_greedy_rollouts(world: World):
    samples = remax(lambda row, at: SampleResult(10.0 * row if at == GREEDY else 1.0), world)
    assert samples.baselines == {0: 0.0, 1: 10.0}
    assert len(samples.batch) == 4
    batch = collate(samples.batch[::-1], pad_token_id=0)
    samples.add_baselines(batch)
    assert batch.batch["reward_baselines"].tolist() == [10.0, 10.0, 0.0, 0.0]
    assert [request.dropped for request in samples.greedy] == [IS_BASELINE] * 2
    assert not any(request.is_trained for request in samples.greedy)
    assert samples.metrics["rollout/greedy_reward/mean"].value == 5.0
    assert samples.metrics["rollout/greedy_failed_frac"].value == 0.0


def test_no_estimator_else_pays_for_greedy_rollouts(world: World):
    samples = FakeLoop(world, differs_in()).take()
    assert samples.greedy == []
    batch = collate(samples.batch, pad_token_id=0)
    samples.add_baselines(batch)
    assert "reward_baselines" not in batch.batch


def test_samples_of_a_prompt_without_its_baseline_are_not_trained(world: World):
    samples = remax(
        lambda row, at: FAILED if (row, at) == (1, GREEDY) else SampleResult(2.0), world
    )
    assert samples.baselines == {0: 2.0}
    assert [request.dropped for request in samples.batch] == [None, None, NO_BASELINE, NO_BASELINE]
    batch = collate(samples.batch, pad_token_id=0)
    samples.add_baselines(batch)
    assert batch.batch["reward_baselines"].tolist() == [2.0, 2.0, 0.0, 0.0]
    assert batch.batch["response_mask"].any(-1).tolist() == [True, True, False, False]
    assert samples.metrics["rollout/greedy_failed_frac"].value == 0.5


def test_the_baseline_is_the_combined_reward_and_loses_by_its_length_too(world: World):
    def outcome(row: int, offset: int) -> SampleResult:
        return SampleResult(1.0, num_tokens=10 if offset == GREEDY else 2)

    sections = BUFFER | {"reward": BUFFER["reward"] | {"weights": {"trajectory": 0.5}}}
    assert remax(outcome, world, **sections).baselines == {0: -0.5, 1: -0.5}


def test_a_group_without_its_baseline_gives_way_under_dynamic_sampling(world: World):
    def outcome(row: int, offset: int) -> SampleResult:
        return FAILED if (row, offset) == (0, GREEDY) else SampleResult(float(offset))

    algorithm = {"adv_estimator": "asks_for_baselines", "filter_groups": {"enable": True}}
    samples = remax(outcome, world, algorithm=algorithm)
    assert rows_of(samples.batch) == ["train-1-1", "train-2-2"]
    assert set(samples.baselines) == {1, 2, 3}


def test_the_combined_reward_is_logged_where_it_may_be_another_than_the_scorers():
    requests = [build_request(said(2), reward=1.0), build_request(said(2), reward=0.0)]
    requests.append(build_request(said(2), stop_reason=StopReason.FAILED))
    assert source_metrics(requests, RewardConfig()) == {}
    for config in (
        RewardConfig(weights=RewardWeightsConfig(trajectory=3)),
        RewardConfig(weights=RewardWeightsConfig(trajectory=3, tool=1)),
    ):
        assert source_metrics(requests, config)["rollout/combined_reward/mean"].value == 1.5
