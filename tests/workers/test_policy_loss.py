"""Every policy loss through the packed update."""

import pytest
import torch

from agentrl.workers.distributed import World
from tests.fakes.naive_losses import config_of, invariant_losses
from tests.fakes.training import (
    GradientTrap,
    Layout,
    Row,
    make_actor,
    make_batch,
    make_policy,
    random_rows,
)


def update(world: World, name: str, rows: list[Row], layout: Layout, mode="token-mean", ids=None):
    """The gradients of one mini-batch, and its metrics."""
    config = config_of(name)
    chosen = config.policy_loss.model_copy(update={"loss_mode": name})
    settings = {name: getattr(config, name) for name in config.model_fields_set - {"policy_loss"}}
    actor = make_actor(
        make_policy(world), layout, policy_loss=chosen, loss_agg_mode=mode, **settings
    )
    trap = GradientTrap(actor)
    batch = make_batch(rows, layout)
    batch.batch["old_log_probs"] = (
        make_actor(make_policy(world, seed=1)).compute_log_probs(batch, temperature=1.0).log_probs
    )
    if ids is not None:
        batch.batch["trajectory_ids"] = torch.tensor(ids)
    metrics = actor.update_policy(batch, temperature=1.0).metrics
    return trap.seen[0], metrics


def assert_same(one, other):
    (gradients, metrics), (theirs, their_metrics) = one, other
    assert metrics == pytest.approx(their_metrics, rel=1e-4, abs=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", invariant_losses())
def test_layout_is_invisible_micro_batches_change_nothing_in_any_loss(world: World, name: str):
    rows = random_rows(12)
    whole = update(world, name, rows, Layout(budget=1000))
    order = [*range(5, 12), *range(5)]
    assert_same(whole, update(world, name, rows, Layout(2, 3, order, budget=15)))


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_layout_is_invisible_a_trajectory_in_two_rows_counts_as_one_sequence(
    world: World, mode: str
):
    rows = [row for row in random_rows(12) if len(row.response) > 3]
    parts, ids = list[Row](), list[int]()
    for number, row in enumerate(rows):
        first = Row(row.prompt, row.response[:3], row.mask[:3], row.uid, row.advantage)
        rest = Row(
            row.prompt + row.response[:3], row.response[3:], row.mask[3:], row.uid, row.advantage
        )
        parts, ids = [*parts, first, rest], [*ids, number, number]
    whole = update(world, "vanilla", rows, Layout(), mode)
    assert_same(whole, update(world, "vanilla", parts, Layout(budget=20), mode, ids))
