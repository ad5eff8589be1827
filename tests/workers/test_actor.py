import copy
import logging
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from agentrl.algorithms.kl import kl_penalty
from agentrl.config.schema.training import OptimConfig
from agentrl.errors import ConfigError, DataError
from agentrl.protocol import DataProto
from agentrl.workers.actor import Actor
from agentrl.workers.distributed import World
from agentrl.workers.log_probs import TokenScores
from agentrl.workers.model import ScoringParams
from agentrl.workers.packing import PackedBatch
from agentrl.workers.scoring import Reference
from agentrl.workers.shards import full_tensor
from agentrl.workers.update import MetricSums
from tests.fakes.engines import tiny_model
from tests.fakes.training import (
    GradientTrap,
    Layout,
    Row,
    make_actor,
    make_batch,
    make_policy,
    moments_of,
    plain_loss,
    plain_scores,
    random_rows,
    rows_and_layouts,
    weights,
)

same_policy = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def packed_gradients(actor, batch, temperature=1.0) -> dict[str, torch.Tensor]:
    trap = GradientTrap(actor)
    actor.update_policy(batch, temperature=temperature)
    (found,) = trap.seen
    return found


def assert_close(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, grad in mine.items():
        assert torch.allclose(grad, theirs[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_equal_those_of_the_naive_computation(world: World, tied: bool):
    plain = tiny_model(initializer_range=0.1, tie_word_embeddings=tied)
    actor = make_actor(
        make_policy(world, tie_word_embeddings=tied), Layout(budget=30), entropy_coeff=0.01
    )
    rows = random_rows(10)
    found = packed_gradients(actor, make_batch(rows), temperature=0.8)
    plain_loss(plain, rows, temperature=0.8, entropy_coeff=0.01).backward()
    assert_close(found, {name: p.grad for name, p in plain.named_parameters()})


@given(drawn=rows_and_layouts())
@same_policy
def test_layout_is_invisible_layout_changes_no_loss_and_no_gradient(world: World, drawn):
    rows, layout = drawn
    rows = [*rows, Row([1], [2], [1])]
    order = [*layout.order, len(rows) - 1]
    layout = Layout(layout.pad_left, layout.pad_right, order, layout.budget, layout.block_bytes)
    results = []
    for one in (Layout(), layout):
        actor = make_actor(make_policy(world), one)
        trap = GradientTrap(actor)
        metrics = actor.update_policy(make_batch(rows, one), temperature=1.0).metrics
        results.append((trap.seen[0], metrics["actor/pg_loss"]))
    (plain, loss), (other, other_loss) = results
    assert math.isclose(loss, other_loss, rel_tol=1e-4, abs_tol=1e-6)
    assert_close(plain, other)


@given(drawn=rows_and_layouts())
@same_policy
def test_observations_are_invisible_values_on_masked_tokens_have_no_effect(world: World, drawn):
    rows = [*drawn[0], Row([1], [2], [1])]
    batch, other = make_batch(rows), make_batch(rows)
    masked = other.batch["response_mask"] == 0
    for key in ("advantages", "old_log_probs"):
        other.batch[key] = torch.where(masked, float("nan"), other.batch[key])
    plain = packed_gradients(make_actor(make_policy(world)), batch)
    # Observations behind the last trained token, too.
    longer = make_batch([Row(r.prompt, [*r.response, 4, 4], [*r.mask, 0, 0],
                             advantage=r.advantage) for r in rows])  # fmt: skip
    for changed in (other, longer):
        found = packed_gradients(make_actor(make_policy(world)), changed)
        assert all(torch.equal(grad, plain[name]) for name, grad in found.items())


def test_kl_term_pulls_to_the_reference_as_computed_by_hand(world: World):
    rows = random_rows(6)
    batch = make_batch(rows)
    reference = Reference(make_policy(world, seed=1), budget=64)
    batch.batch["ref_log_prob"] = reference.compute_ref_log_prob(batch, temperature=1.0)
    actor = make_actor(make_policy(world), use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k3")
    found = packed_gradients(actor, batch)
    plain = tiny_model(initializer_range=0.1)
    other = tiny_model(seed=1, initializer_range=0.1)
    kl = [
        torch.tensor(row.mask)
        * kl_penalty(
            plain_scores(plain, row, 1.0)[0], plain_scores(other, row, 1.0)[0].detach(), "k3"
        )
        for row in rows
    ]
    tokens = sum(sum(row.mask) for row in rows)
    (plain_loss(plain, rows) + 0.5 * torch.cat(kl).sum() / tokens).backward()
    assert_close(found, {name: p.grad for name, p in plain.named_parameters()})


def test_reference_never_changes(world: World):
    reference = Reference(make_policy(world), budget=64)
    assert not any(p.requires_grad for p in reference.policy.parameters())


def test_update_raises_what_was_good_and_lowers_what_was_bad(world: World):
    actor = make_actor(make_policy(world), optim=OptimConfig(lr=1e-2))
    batch = make_batch(
        [Row([1, 2], [3, 4], [1, 1], "a", 1.0), Row([1, 2], [5, 6], [1, 1], "a", -1.0)]
    )
    before = actor.compute_log_probs(batch, temperature=1.0).log_probs
    batch.batch["old_log_probs"] = before
    result = actor.update_policy(batch, temperature=1.0)
    after = actor.compute_log_probs(batch, temperature=1.0).log_probs
    assert (after[0] > before[0]).all()
    assert (after[1] < before[1]).all()
    assert result.metrics["actor/pg_clipfrac"] == 0.0
    assert result.metrics["actor/optimizer_steps"] == 1
    assert {"actor/pg_loss", "actor/ppo_kl", "actor/entropy", "actor/grad_norm", "actor/lr",
            "actor/skipped_steps"} <= result.metrics.keys()  # fmt: skip


def test_mini_batches_of_prompts_make_the_optimizer_steps(world: World):
    actor = make_actor(make_policy(world), ppo_mini_batch_size=2, ppo_epochs=3, shuffle=True)
    rows = [Row([1], [2, 3], [1, 1], f"g{n // 3}", float(n)) for n in range(12)]
    result = actor.update_policy(make_batch(rows), temperature=1.0)
    assert result.metrics["actor/optimizer_steps"] == 6
    assert actor.counters().num_optimizer_steps == 6


def test_mini_batch_without_a_trained_token_takes_no_step(world: World):
    actor = make_actor(make_policy(world), ppo_mini_batch_size=1)
    rows = [Row([1], [2], [0], "a"), Row([1], [2], [1], "b")]
    result = actor.update_policy(make_batch(rows), temperature=1.0)
    assert result.metrics["actor/optimizer_steps"] == 1
    assert not result.skipped
    nothing = actor.update_policy(make_batch(rows[:1]), temperature=1.0)
    assert set(nothing.metrics.values()) == {0}
    assert set(nothing.metrics) == {
        "actor/skipped_steps", "actor/zero_gradient_steps", "actor/optimizer_steps",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_update_without_an_advantage_moves_no_weight_no_moment_and_no_rate(world: World, name: str):
    optim = OptimConfig(name=name, lr=1e-2, weight_decay=0.1, lr_warmup_steps=4)
    actor = make_actor(make_policy(world), optim=optim, ppo_epochs=2)
    batch = make_batch(random_rows(4))
    actor.update_policy(batch, temperature=1.0)
    before, moments = weights(actor.policy), copy.deepcopy(moments_of(actor))
    lr = actor.optimizer.lr
    batch.batch["advantages"].zero_()
    metrics = actor.update_policy(batch, temperature=1.0).metrics
    assert (metrics["actor/optimizer_steps"], metrics["actor/zero_gradient_steps"]) == (0, 2)
    assert metrics["actor/grad_norm"] == 0
    assert actor.optimizer.lr == lr
    for key, weight in weights(actor.policy).items():
        assert torch.equal(weight, before[key])
    for key, moment in moments_of(actor).items():
        assert torch.equal(moment, moments[key])


def count_computed_tokens(actor: Actor, monkeypatch: pytest.MonkeyPatch, batch: DataProto) -> int:
    counts, forward = [], actor.policy.forward

    def counting(packed: PackedBatch, params: ScoringParams) -> TokenScores:
        counts.append(len(packed.targets))
        return forward(packed, params)

    monkeypatch.setattr(actor.policy, "forward", counting)
    actor.update_policy(batch, temperature=1.0)
    return sum(counts)


def test_rows_without_an_advantage_are_not_computed_unless_a_term_needs_them(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    rows = [Row([1, 2], [3, 4, 5], [1, 1, 0], f"g{n // 2}", float(n >= 2)) for n in range(6)]
    batch = make_batch(rows)
    found = [
        count_computed_tokens(make_actor(make_policy(world), **terms), monkeypatch, batch)
        for terms in ({}, {"entropy_coeff": 0.01})
    ]
    assert found == [8, 12]


def test_metrics_are_means_over_the_computed_rows(world: World):
    signal = [Row([1, 2], [3, 4], [1, 1], "a", 1.0), Row([1, 2], [5, 6], [1, 0], "a", -1.0)]
    silent = [Row([1, 2], [7, 8], [1, 1], "b", 0.0)]
    alone, together = (
        make_actor(make_policy(world)).update_policy(make_batch(rows), temperature=1.0).metrics
        for rows in (signal, signal + silent)
    )
    for name in ("actor/entropy", "actor/ppo_kl"):
        assert together[name] == pytest.approx(alone[name], rel=1e-6)
    assert together["actor/pg_loss"] == pytest.approx(alone["actor/pg_loss"] * 3 / 5, rel=1e-5)


@pytest.mark.parametrize("entropy_coeff", [0.0, 0.01])
def test_old_log_probs_of_the_update_give_the_gradients_of_a_pass_before_it(
    world: World, entropy_coeff: float
):
    rows = random_rows(12)
    batch, without = make_batch(rows), make_batch(rows)
    before = make_actor(make_policy(world)).compute_log_probs(batch, temperature=0.8).log_probs
    batch.batch["old_log_probs"] = before
    del without.batch["old_log_probs"]
    actors = [
        make_actor(make_policy(world), Layout(budget=30), entropy_coeff=entropy_coeff)
        for _ in range(2)
    ]
    assert_close(*(packed_gradients(actor, one, 0.8)
                   for actor, one in zip(actors, (batch, without), strict=True)))  # fmt: skip
    found = actors[1].update_policy(without, temperature=0.8).outputs
    assert found is not None
    assert found.is_computed.any()
    expected = torch.where(found.is_computed[:, None], before, 0.0)
    assert torch.allclose(found.values, expected, atol=1e-6)


@pytest.mark.parametrize("changes", [{"ppo_epochs": 2}, {"ppo_mini_batch_size": 1}])
def test_several_optimizer_steps_need_old_log_probs(world: World, changes: dict[str, int]):
    batch = make_batch(random_rows(4))
    del batch.batch["old_log_probs"]
    with pytest.raises(DataError, match="old_log_probs"):
        make_actor(make_policy(world), **changes).update_policy(batch, temperature=1.0)


def test_entropy_term_trains_without_an_advantage(world: World):
    actor = make_actor(make_policy(world), entropy_coeff=0.01)
    batch = make_batch(random_rows(4))
    batch.batch["advantages"].zero_()
    assert actor.update_policy(batch, temperature=1.0).metrics["actor/optimizer_steps"] == 1


@pytest.mark.parametrize("broken", ["advantages", "old_log_probs", "weight"])
def test_step_that_is_not_finite_changes_nothing_and_names_the_requests(
    world: World, broken: str, caplog: pytest.LogCaptureFixture
):
    policy = make_policy(world)
    actor = make_actor(policy, optim=OptimConfig(lr=1e-3, lr_scheduler="linear", lr_warmup_steps=2))
    rows = [Row([1, 2], [3, 4], [1, 1], "a"), Row([1, 2], [95, 6], [1, 0], "b")]
    good = make_batch(rows)
    actor.update_policy(good, temperature=1.0)
    bad = copy.deepcopy(good)
    if broken == "weight":
        embedding = policy.lm.get_input_embeddings().weight
        full_tensor(embedding).data[95] = math.nan
        bad = make_batch(rows[:1])
    else:
        bad.batch[broken][1, 0] = math.nan
    before, moments = weights(policy), copy.deepcopy(moments_of(actor))
    lr = actor.optimizer.lr
    with caplog.at_level(logging.WARNING):
        result = actor.update_policy(bad, temperature=1.0)
    assert result.metrics["actor/skipped_steps"] == 1
    (skipped,) = result.skipped
    assert skipped.request_ids == (("r0",) if broken == "weight" else ("r1",))
    assert "skipped" in caplog.text
    assert actor.optimizer.lr == lr
    for name, weight in weights(policy).items():
        assert torch.equal(weight.nan_to_num(), before[name].nan_to_num())
    for name, moment in moments_of(actor).items():
        assert torch.equal(moment, moments[name])


def test_update_goes_on_after_a_skipped_step(world: World):
    actor = make_actor(make_policy(world))
    good = make_batch(random_rows(4))
    bad = copy.deepcopy(good)
    bad.batch["advantages"][0] = math.inf
    actor.update_policy(bad, temperature=1.0)
    fresh = make_actor(make_policy(world))
    for one in (actor, fresh):
        one.update_policy(good, temperature=1.0)
    for name, weight in weights(actor.policy).items():
        assert torch.equal(weight, weights(fresh.policy)[name])


def test_gradient_is_clipped_to_the_configured_norm(world: World):
    actor = make_actor(make_policy(world), grad_clip=1e-3)
    seen = []
    actor.optimizer.step = lambda *, grad_scale: seen.append(grad_scale)
    metrics = actor.update_policy(make_batch(random_rows(6)), temperature=1.0).metrics
    assert math.isclose(seen[0] * metrics["actor/grad_norm"], 1e-3, rel_tol=1e-3)


def test_scoring_leaves_the_optimizers_own_weights_in_the_module(world: World):
    policy = make_policy(world)
    actor = make_actor(policy)
    places = {name: full_tensor(w).data_ptr() for name, w in policy.named_weights()}
    batch = make_batch(random_rows(4))
    actor.compute_log_probs(batch, temperature=1.0)
    actor.update_policy(batch, temperature=1.0)
    actor.compute_log_probs(batch, temperature=1.0)
    assert {name: full_tensor(w).data_ptr() for name, w in policy.lm.named_parameters()} == places


def test_infinities_of_both_signs_are_a_sum_that_is_not_finite(world: World):
    sums = MetricSums()
    for value in (math.inf, -math.inf):
        sums.add({"loss": torch.tensor(value)})
    assert math.isnan(sums.totals(world)["loss"])


@pytest.mark.parametrize("name", ["gspo", "clip_cov_verl"])
def test_loss_that_depends_on_rows_refuses_split_trajectories(world: World, name: str):
    actor = make_actor(make_policy(world), Layout(budget=30), policy_loss={"loss_mode": name})
    batch = make_batch(random_rows(4))
    mask = batch.batch["response_mask"]
    batch.batch["trajectory_ids"] = torch.zeros(len(mask), dtype=torch.int64)
    with pytest.raises(ConfigError, match="depends on rows as a whole"):
        actor.update_policy(batch, temperature=1.0)
