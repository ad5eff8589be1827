"""The advantages that run along tokens beside verl's.

Where the reference leaves something on masked tokens, its result is compared twice: as it is, with
ours by the name `<estimator>_verl`, and on trained tokens alone, with ours.
"""

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from verl.trainer.ppo import core_algos

from agentrl.algorithms import get_adv_estimator_fn
from benchmarks.verl_parity.batches import Batch, make_batch
from benchmarks.verl_parity.comparison import Comparison, compare

GAMMA, LAM = 0.97, 0.9
BASELINES = ("optimal_token_baseline", "tir_optimal_token_baseline")

ON_TOOLS = "0 on masked tokens"
BY_POSITION = "trained tokens are compared by their number, not by their place"
ALONE = "a group of one trains on nothing"
EQUAL = "equal scores give exactly 0, in the longest row's tail too"
UNSEEN = "NaN on masked tokens is not seen"

Results = tuple[torch.Tensor, torch.Tensor]
"""Advantages and returns."""


def check() -> list[Comparison]:
    """Make the lines of the table."""
    lines: list[Comparison] = []
    for seed in (0, 1):
        batch = make_batch(seed)
        for name in ("gae", "reinforce_plus_plus", "remax", *BASELINES[1:]):
            lines += _lines(f"{name}, seed {seed}", name, batch, is_trained_only=True)
        for name in ("gae", "remax", *BASELINES):
            by_name = f"{name}_verl"
            lines += _lines(f"{by_name}, seed {seed}", by_name, batch, theirs=name)
    return lines + _baseline_settings() + _faults()


def _baseline_settings() -> list[Comparison]:
    batch, lines = make_batch(2), []
    for settings in ({"handle_zero_tail": False}, {"rollout_is_weights": _weights(batch)}):
        where = f"with {next(iter(settings))}"
        lines += _lines(
            f"{BASELINES[1]}, {where}", BASELINES[1], batch, is_trained_only=True, **settings
        )
        for name in BASELINES:
            by_name = f"{name}_verl"
            lines += _lines(f"{by_name}, {where}", by_name, batch, theirs=name, **settings)
    single = replace(batch, mask=batch.attention_mask)
    return lines + _lines(f"{BASELINES[0]}, one turn", BASELINES[0], single)


def _faults() -> list[Comparison]:
    batch = make_batch(3)
    lines = [
        *_lines("gae, tool tokens", "gae", batch, reasons=(ON_TOOLS, ON_TOOLS)),
        *_lines("remax, tool tokens", "remax", batch, reasons=(ON_TOOLS, ON_TOOLS)),
    ]
    spoiled = replace(batch, rewards=batch.rewards.where(batch.mask.bool(), torch.nan))
    lines += _lines(
        "reinforce_plus_plus, NaN", "reinforce_plus_plus", spoiled, reasons=(UNSEEN, UNSEEN)
    )
    alone, equal = _with_a_group_of_one(make_batch(4)), _with_equal_scores(make_batch(5))
    for name in BASELINES:
        where = BY_POSITION if name == BASELINES[0] else ALONE
        lines += _lines(f"{name}, a group of one", name, alone, reasons=(where, ON_TOOLS))
        where = BY_POSITION if name == BASELINES[0] else EQUAL
        lines += _lines(f"{name}, equal scores", name, equal, reasons=(where, ON_TOOLS))
        for what, faulty in (("a group of one", alone), ("equal scores", equal)):
            lines += _lines(f"{name}_verl, {what}", f"{name}_verl", faulty, theirs=name)
    return lines


def _lines(
    title: str,
    name: str,
    batch: Batch,
    *,
    theirs: str = "",
    is_trained_only: bool = False,
    reasons: tuple[str, str] = ("", ""),
    **settings: Any,
) -> list[Comparison]:
    ours = _run(get_adv_estimator_fn(name), batch, settings)
    expected = _run(core_algos.get_adv_estimator_fn(theirs or name), batch, settings)
    if is_trained_only:
        expected = tuple(torch.where(batch.mask.bool(), found, 0.0) for found in expected)
    return [
        compare(f"{title}: {what}", mine, reference, by_design=reason)
        for what, mine, reference, reason in zip(
            ("advantages", "returns"), ours, expected, reasons, strict=True
        )
    ]


def _run(function: Any, batch: Batch, settings: dict[str, Any]) -> Results:
    columns = _columns(batch) | settings
    known = inspect.signature(function).parameters
    return function(**{key: value for key, value in columns.items() if key in known})


def _columns(batch: Batch) -> dict[str, Any]:
    generator, shape = torch.Generator().manual_seed(97), batch.rewards.shape
    return {
        "token_level_rewards": batch.rewards.clone(),
        "response_mask": batch.mask,
        "index": batch.index,
        "values": torch.randn(shape, generator=generator),
        "old_log_probs": -3 * torch.rand(shape, generator=generator),
        "sum_pi_squared": torch.rand(shape, generator=generator),
        "reward_baselines": torch.rand(shape[0], generator=generator),
        "config": SimpleNamespace(gamma=GAMMA),
        "gamma": GAMMA,
        "lam": LAM,
    }


def _weights(batch: Batch) -> torch.Tensor:
    return 2 * torch.rand(batch.rewards.shape, generator=torch.Generator().manual_seed(96))


def _with_a_group_of_one(batch: Batch) -> Batch:
    index = batch.index.copy()
    index[7] = "alone"
    return replace(batch, index=index)


def _with_equal_scores(batch: Batch) -> Batch:
    """One group earns 7.7 throughout, on each row's last trained token."""
    rewards, is_first = batch.rewards.clone(), torch.from_numpy(batch.index == batch.index[0])
    last = batch.mask.cumsum(dim=-1).argmax(dim=-1)
    rewards[is_first] = 0
    rewards[is_first, last[is_first]] = 7.7
    return replace(batch, rewards=rewards)
