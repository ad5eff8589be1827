"""The group-relative advantages beside verl's."""

from dataclasses import replace
from typing import Any

import torch
from verl.trainer.ppo import core_algos

from agentrl.algorithms import get_adv_estimator_fn
from agentrl.config.schema.training import AlgorithmConfig
from benchmarks.verl_parity.batches import Batch, make_batch
from benchmarks.verl_parity.comparison import Comparison, compare

ESTIMATORS = (
    "grpo", "grpo_vectorized", "grpo_passk", "reinforce_plus_plus_baseline",
    "rloo", "rloo_vectorized", "opo", "gpg",
)  # fmt: skip
HAVE_STD = ("grpo", "grpo_vectorized", "grpo_passk")
RIGHT_THERE = {("rloo_vectorized", "a group of one"), ("opo", "a masked row")}
"""Where one estimator of the reference keeps an invariant that the others break."""
KEYS, WEIGHTS = ("format", "accuracy"), (0.3, 1.0)

OBSERVED = "rewards on masked positions are not seen"
MASKED_ROW = "a row in which nothing is trained is not in its group"
ALONE = "a group of one trains on nothing"
EQUAL = "equal scores give exactly 0"


def check() -> list[Comparison]:
    """Make the lines of the table."""
    lines = [
        _line(name, make_batch(seed), f"seed {seed}") for name in ESTIMATORS for seed in (0, 1)
    ]
    lines += [_line(name, make_batch(2), "no std", divide=False) for name in HAVE_STD]
    for name in ESTIMATORS:
        lines += _faults(name, f"{name}_verl")
    return lines + _gdpo()


def _line(
    name: str, batch: Batch, where: str, *, theirs: str = "", divide: bool = True, reason: str = ""
) -> Comparison:
    ours = _run(get_adv_estimator_fn(name), batch, _ours(name, divide))
    reference = core_algos.get_adv_estimator_fn(theirs or name)
    expected = _run(reference, batch, {"config": {"norm_adv_by_std_in_grpo": divide}} | (
        {} if (theirs or name) not in HAVE_STD else {"norm_adv_by_std_in_grpo": divide}
    ))  # fmt: skip
    return compare(f"{name}, {where}", ours, expected, by_design=reason)


def _ours(name: str, divide: bool) -> dict[str, Any]:
    return {"norm_adv_by_std_in_grpo": divide} if name.removesuffix("_verl") in HAVE_STD else {}


def _run(function: Any, batch: Batch, settings: dict[str, Any]) -> torch.Tensor:
    return function(
        token_level_rewards=batch.rewards.clone(),
        response_mask=batch.mask,
        index=batch.index,
        **settings,
    )[0]


def _faults(name: str, by_name: str) -> list[Comparison]:
    """Batches on which the reference breaks an invariant: ours differs, and by name it does not."""
    lines: list[Comparison] = []
    faults = {
        "rewards on observations": (_with_rewards_everywhere(make_batch(3)), OBSERVED),
        "a masked row": (_with_a_masked_row(make_batch(4)), MASKED_ROW),
        "a group of one": (_with_a_group_of_one(make_batch(5)), ALONE),
    }
    for where, (batch, reason) in faults.items():
        if where == "a group of one" and name == "grpo_passk":
            continue  # the reference raises
        declared = "" if (name, where) in RIGHT_THERE else reason
        lines.append(_line(name, batch, where, reason=declared))
        lines.append(_line(by_name, batch, where, theirs=name))
    if name in ("grpo", "reinforce_plus_plus_baseline"):
        batch = _with_equal_scores(make_batch(6, group_size=17))
        lines.append(_line(name, batch, "equal scores", reason=EQUAL))
    return lines


def _with_rewards_everywhere(batch: Batch) -> Batch:
    generator = torch.Generator().manual_seed(99)
    return replace(batch, rewards=torch.randn(batch.rewards.shape, generator=generator))


def _with_a_masked_row(batch: Batch) -> Batch:
    mask = batch.mask.clone()
    mask[3] = 0
    return replace(batch, mask=mask)


def _with_a_group_of_one(batch: Batch) -> Batch:
    index = batch.index.copy()
    index[7] = "alone"
    return replace(batch, index=index)


def _with_equal_scores(batch: Batch) -> Batch:
    rewards, is_first = batch.rewards.clone(), torch.from_numpy(batch.index == batch.index[0])
    rewards[is_first] = 0
    rewards[is_first, 0] = 7.7
    return replace(batch, rewards=rewards)


def _gdpo() -> list[Comparison]:
    lines: list[Comparison] = []
    for divide in (True, False):
        found, expected = _gdpo_pair("gdpo", make_batch(7), divide=divide)
        lines.append(compare(f"gdpo, {'seed 7' if divide else 'no std'}", found, expected))
    for batch, where, reason in (
        (_with_a_masked_row(make_batch(8)), "a masked row", MASKED_ROW),
        (_with_a_group_of_one(make_batch(9)), "a group of one", ALONE),
    ):
        lines.append(compare(f"gdpo, {where}", *_gdpo_pair("gdpo", batch), by_design=reason))
        lines.append(compare(f"gdpo_verl, {where}", *_gdpo_pair("gdpo_verl", batch)))
    return lines


def _gdpo_pair(
    name: str, batch: Batch, *, divide: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    generator, num_rows = torch.Generator().manual_seed(98), len(batch.index)
    rewards = {key: torch.rand(num_rows, generator=generator).numpy() for key in KEYS}
    prompts = torch.zeros(num_rows, 3, dtype=torch.long)
    attention_mask = torch.cat([torch.ones_like(prompts), batch.attention_mask], dim=-1)
    config = AlgorithmConfig(gdpo_reward_keys=KEYS, gdpo_reward_weights=WEIGHTS)
    settings = {"non_tensor_batch": rewards, "norm_adv_by_std_in_grpo": divide}
    ours = _run(get_adv_estimator_fn(name), batch, settings | {"config": config})
    theirs = settings | {
        "config": {"gdpo_reward_keys": list(KEYS), "gdpo_reward_weights": list(WEIGHTS)},
        "batch": {"prompts": prompts, "attention_mask": attention_mask},
    }
    return ours, _run(core_algos.get_adv_estimator_fn("gdpo"), batch, theirs)
