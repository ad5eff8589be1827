"""Observations and layout are invisible to every bundled policy loss in every mode."""

from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms import (
    LossScale,
    TrainedTokens,
    get_policy_loss_fn,
    policy_loss_facts,
    policy_loss_names,
    with_summary,
)
from agentrl.algorithms.aggregation import compute_row_weights
from agentrl.config.conflicts import BY_ROW
from agentrl.config.schema.training import ActorConfig, LossAggMode
from tests.fakes.naive_losses import BUDGET, Batch, config_of, invariant_losses, make_batch
from tests.fakes.tensors import masks

MODES = list(get_args(LossAggMode))
BY_SEQUENCE = {"gspo", "luspo", "geo_mean", "vespo", "bypass_mode"}
"""Losses that take a ratio of the whole row."""
all_losses = pytest.mark.parametrize("name", invariant_losses())


def named(name: str) -> ActorConfig:
    config = config_of(name)
    return config.model_copy(
        update={"policy_loss": config.policy_loss.model_copy(update={"loss_mode": name})}
    )


def tokens_of(batch: Batch, rows: list[int]) -> TrainedTokens:
    inside = batch.mask[rows].bool()
    return TrainedTokens(batch.old[rows][inside], batch.advantages[rows][inside])


def spread(data: st.DataObject, batch: Batch, leaf: torch.Tensor) -> tuple[Batch, torch.Tensor]:
    """Put masked tokens anywhere and masked rows behind, with what is not finite on them."""
    rows, width = batch.mask.shape
    drawn = [sorted(data.draw(st.permutations(range(width + 3)))[:width]) for _ in range(rows)]
    places = torch.tensor(drawn)

    def widen(values: torch.Tensor, filler: float) -> torch.Tensor:
        wide = torch.full((rows, width + 3), filler, dtype=values.dtype)
        below = torch.full((1, width + 3), filler, dtype=values.dtype)
        # What is masked already is spoiled as well.
        spoiled = torch.where(batch.mask.bool(), values, filler)
        return torch.cat([wide.scatter(1, places, spoiled), below])

    mask = torch.zeros(rows + 1, width + 3, dtype=batch.mask.dtype)
    mask[:rows] = mask[:rows].scatter(1, places, batch.mask)
    nan, inf = torch.nan, torch.inf
    found = Batch(
        old=widen(batch.old, -inf), new=widen(leaf.detach(), nan),
        advantages=widen(batch.advantages, nan), weights=widen(batch.weights, inf), mask=mask,
    )  # fmt: skip
    return found, widen(leaf, nan)


def layout(data: st.DataObject, num_rows: int) -> list[list[list[int]]]:
    """Rows dealt to ranks, and on each rank to micro-batches (some of them empty of rows)."""
    ranks: list[list[list[int]]] = [[[], []] for _ in range(data.draw(st.integers(1, 3)))]
    for row in data.draw(st.permutations(range(num_rows))):
        data.draw(st.sampled_from(data.draw(st.sampled_from(ranks)))).append(row)
    return ranks


def add_up(name, mode, batch, log_prob, ranks, row_weights=None):
    """The loss and the metrics of a mini-batch, as its ranks and micro-batches give them."""
    config = named(name)
    scale = LossScale.of(
        batch.mask, dp_size=len(ranks), loss_scale_factor=BUDGET, row_weights=row_weights
    )
    dealt = [tokens_of(batch, [row for part in rank for row in part]) for rank in ranks]
    scale = with_summary(scale, dealt, config)
    total, found = torch.zeros((), dtype=torch.float64), {}
    for rows in (rows for rank in ranks for rows in rank if rows):
        loss, parts = get_policy_loss_fn(name)(
            batch.old[rows], log_prob[rows], batch.advantages[rows], batch.mask[rows], mode,
            config, batch.weights[rows], scale=scale.at(rows),
        )  # fmt: skip
        total = total + loss / len(ranks)  # FSDP2 averages over ranks
        found = {key: found.get(key, 0.0) + part.double() for key, part in parts.items()}
    return total, found


def assert_same(leaf, one, other):
    # Shares of tokens and the weights of the bypass are float32.
    torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-6)
    gradients = [torch.autograd.grad(loss, leaf)[0] for loss, _ in (one, other)]
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-6, atol=1e-9)


@all_losses
@settings(deadline=None, max_examples=15)
@given(mask=masks(), seed=st.integers(0, 99), mode=st.sampled_from(MODES), data=st.data())
def test_masked_tokens_order_micro_batches_and_ranks_change_nothing(name, mask, seed, mode, data):
    batch = make_batch(mask, seed)
    leaf = batch.new.clone().requires_grad_()
    everything = list(range(len(mask)))
    alone = add_up(name, mode, batch, leaf, [[everything]])
    wide, log_prob = spread(data, batch, leaf)
    ranks = layout(data, len(mask) + 1)
    assert_same(leaf, alone, add_up(name, mode, wide, log_prob, ranks))


@pytest.mark.parametrize(
    "name", [name for name in policy_loss_names() if policy_loss_facts(name).only_advantages]
)
@settings(deadline=None, max_examples=15)
@given(mask=masks(), seed=st.integers(0, 99), mode=st.sampled_from(MODES), data=st.data())
def test_rows_without_an_advantage_change_nothing_in_losses_that_say_so(
    name, mask, seed, mode, data
):
    batch = make_batch(mask, seed)
    silent = torch.tensor([data.draw(st.booleans()) for _ in mask])
    batch = batch._replace(advantages=torch.where(silent[:, None], 0.0, batch.advantages))
    leaf, config = batch.new.clone().requires_grad_(), named(name)
    everything = list(range(len(mask)))
    scale = with_summary(
        LossScale.of(mask, loss_scale_factor=BUDGET), [tokens_of(batch, everything)], config
    )
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    for rows in (everything, (~silent).nonzero().flatten().tolist()):
        loss = 0 * leaf.sum()
        if rows:
            loss = loss + get_policy_loss_fn(name)(
                batch.old[rows], leaf[rows], batch.advantages[rows], mask[rows], mode, config,
                batch.weights[rows], scale=scale,
            )[0]  # fmt: skip
        found.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-12)


def test_losses_with_a_term_of_their_own_need_every_row():
    needing = {name for name in policy_loss_names() if not policy_loss_facts(name).only_advantages}
    assert {"dro", "kl_cov", "kl_cov_verl", "clip_cov_verl", "geo_mean_verl"} <= needing


@all_losses
@settings(deadline=None, max_examples=10)
@given(mask=masks(), seed=st.integers(0, 99))
def test_layout_is_invisible_without_a_scale_the_rows_are_the_whole_mini_batch(name, mask, seed):
    batch, config = make_batch(mask, seed), named(name)
    args = (batch.old, batch.new, batch.advantages, mask, "seq-mean-token-mean", config)
    everything = list(range(len(mask)))
    scale = with_summary(LossScale.of(mask), [tokens_of(batch, everything)], config)
    without, given = (get_policy_loss_fn(name)(*args, scale=own) for own in (None, scale))
    torch.testing.assert_close(without, given)


def test_losses_that_depend_on_rows_say_so():
    by_row = {name for name in policy_loss_names() if policy_loss_facts(name).by_row}
    assert by_row == BY_SEQUENCE | {"geo_mean_verl", "clip_cov_verl", "kl_cov_verl"} == BY_ROW


@pytest.mark.parametrize(
    "name", [name for name in [*invariant_losses(), "sapo_verl"] if name not in BY_SEQUENCE]
)
@settings(deadline=None, max_examples=15)
@given(mask=masks(), seed=st.integers(0, 99), mode=st.sampled_from(MODES), data=st.data())
def test_layout_is_invisible_how_many_rows_a_trajectory_is_split_into_changes_nothing(
    name, mask, seed, mode, data
):
    batch = make_batch(mask, seed)
    leaf = batch.new.clone().requires_grad_()
    rows, width = mask.shape
    expected = add_up(name, mode, batch, leaf, [[list(range(rows))]])
    cuts = torch.tensor([data.draw(st.integers(0, width)) for _ in range(rows)])
    is_first = torch.arange(width) < cuts[:, None]
    pieces = torch.cat([mask * is_first, mask * ~is_first])
    twice = Batch(*(column.repeat(2, 1) for column in batch))._replace(mask=pieces)
    weights = compute_row_weights(pieces, torch.arange(rows).repeat(2))
    ranks = layout(data, 2 * rows)
    assert_same(leaf, expected, add_up(name, mode, twice, leaf.repeat(2, 1), ranks, weights))


@all_losses
@pytest.mark.parametrize("mode", MODES)
def test_a_batch_in_which_nothing_is_trained_has_loss_and_gradient_zero(name, mode):
    leaf = torch.full((2, 3), torch.nan, requires_grad=True)
    spoiled, mask = torch.full((2, 3), torch.inf), torch.zeros(2, 3)
    empty = TrainedTokens(torch.zeros(0), torch.zeros(0))
    scale = with_summary(LossScale.of(mask, loss_scale_factor=BUDGET), [empty], named(name))
    loss, metrics = get_policy_loss_fn(name)(
        spoiled, leaf, spoiled, mask, mode, named(name), spoiled, scale=scale
    )
    loss.backward()
    assert leaf.grad is not None
    assert (loss.item(), leaf.grad.abs().sum().item()) == (0.0, 0.0)
    assert all(value.item() == 0.0 for value in metrics.values())
