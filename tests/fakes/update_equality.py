"""One batch, its update by the actor in several configurations, and by a naive padded computation.

As a module it is one rank of several: it writes its results of every case of `RANK_CASES`.
"""

import math
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import PreTrainedModel

from agentrl.algorithms import get_policy_loss_fn, register_policy_loss
from agentrl.algorithms.kl import kl_penalty
from agentrl.cli import leave_rank
from agentrl.config.schema.training import FsdpConfig, PolicyLossConfig
from agentrl.protocol import DataProto
from agentrl.workers.actor import Actor
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.load import enable_checkpointing
from agentrl.workers.model import PolicyModel
from agentrl.workers.offload import OffloadedMemory
from agentrl.workers.shards import local_tensor
from tests.fakes import training
from tests.fakes.engines import VOCAB_SIZE, tiny_model
from tests.fakes.training import (
    GradientTrap,
    Layout,
    Row,
    make_actor,
    make_batch,
    make_lora_policy,
)

TEMPERATURE = 0.8
TERMS = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "k3", "entropy_coeff": 0.01}
PLAIN: dict[str, Any] = {}
EVERY_ROW = "vanilla_of_every_row"
LORA = "lora_"
"""Prefix of the names of cases whose policy has adapters."""


@register_policy_loss(EVERY_ROW)
def compute_loss_of_every_row(*args: Any, scale: Any = None) -> Any:
    """The usual loss; it does not declare that it needs no rows without an advantage."""
    return get_policy_loss_fn("vanilla")(*args, scale=scale)


class Update(NamedTuple):
    """The result of one update without its optimizer step."""

    loss: float
    """Policy loss, and the KL term if there is one."""
    gradients: dict[str, torch.Tensor]
    """Of each weight, whole."""


def build(
    world: World,
    terms: Mapping[str, Any],
    *,
    budget: int = 120,
    fsdp: FsdpConfig | None = None,
    model: Mapping[str, Any] = PLAIN,
    checkpointing: bool = False,
    activations_in_host: bool = False,
    has_lora: bool = False,
    **config: Any,
) -> Actor:
    """The actor of a case: the changes of its settings, and of its model's configuration.

    With the plain loss it does not compute the rows without an advantage.
    """
    lm = tiny_model(initializer_range=0.1, **model)
    if checkpointing:
        enable_checkpointing(lm)
    fsdp = fsdp or FsdpConfig()
    if has_lora:
        policy = make_lora_policy(world, lm, fsdp)
    else:
        policy = PolicyModel(lm, world, torch.float32, fsdp)
    policy.offloads_activations = activations_in_host
    return make_actor(policy, Layout(budget=budget), **terms, **config)


def build_offloading(world: World, terms: Mapping[str, Any], **settings: Any) -> Actor:
    """An actor whose weights have no memory between uses, as with `param_offload` on a device."""
    actor = build(world, terms, **settings)
    weights = [local_tensor(weight.detach()) for _, weight in actor.policy.named_weights()]
    actor.policy.offload = OffloadedMemory(lambda: weights)
    with actor.on_device():
        pass
    assert not any(weight.untyped_storage().nbytes() for weight in weights)
    return actor


Case = Callable[[World, Mapping[str, Any]], Actor]
"""Makes the actor whose update is compared, from the world and the terms of its loss."""


def build_computing_every_row(world: World, terms: Mapping[str, Any]) -> Actor:
    """An actor whose loss does not say that a row without an advantage has no gradient."""
    settings = PolicyLossConfig(loss_mode=EVERY_ROW)
    return build(world, terms, policy_loss=settings)


CASES: dict[str, Case] = {
    "one_micro_batch": partial(build, budget=4096),
    "every_row": build_computing_every_row,
    "many_micro_batches": partial(build, budget=40),
    "prefixes_not_shared": partial(build, share_prefixes=False),
    "checkpointed_activations": partial(build, checkpointing=True),
    "activations_in_host": partial(build, activations_in_host=True),
    "checkpointed_activations_in_host": partial(
        build, checkpointing=True, activations_in_host=True
    ),
    "offloaded_between_uses": build_offloading,
    "prefixes_of_split_groups": partial(build, budget=60),
    f"{LORA}one_micro_batch": partial(build, has_lora=True, budget=4096),
    f"{LORA}many_micro_batches": partial(build, has_lora=True, budget=40),
    f"{LORA}prefixes_not_shared": partial(build, has_lora=True, share_prefixes=False),
    f"{LORA}checkpointed_activations_in_host": partial(
        build, has_lora=True, checkpointing=True, activations_in_host=True
    ),
    f"{LORA}offloaded_between_uses": partial(build_offloading, has_lora=True),
}
"""Cases of one rank."""


def build_ulysses(world: World, terms: Mapping[str, Any], *, size: int = 2, **config: Any) -> Actor:
    """Two ranks, or all, compute each micro-batch together."""
    return build(world.with_sequence_groups(size or world.size), terms, **config)


RANK_CASES: dict[str, Case] = {
    "sharded": build,
    "every_row": build_computing_every_row,
    "copies_of_two_shards": partial(build, fsdp=FsdpConfig(fsdp_size=2)),
    "copies_that_are_not_sharded": partial(build, fsdp=FsdpConfig(fsdp_size=1)),
    "offloaded": partial(build, fsdp=FsdpConfig(offload_policy=True)),
    "offloaded_between_uses": build_offloading,
    "checkpointed_activations_in_host": partial(
        build, checkpointing=True, activations_in_host=True
    ),
    "ulysses": build_ulysses,
    "ulysses_with_prefixes_not_shared": partial(build_ulysses, share_prefixes=False),
    "ulysses_in_many_micro_batches": partial(build_ulysses, budget=40),
    "ulysses_over_all_ranks": partial(build_ulysses, size=0),
    "ulysses_with_checkpointed_activations": partial(build_ulysses, checkpointing=True),
    f"{LORA}sharded": partial(build, has_lora=True),
    f"{LORA}copies_of_two_shards": partial(build, has_lora=True, fsdp=FsdpConfig(fsdp_size=2)),
    f"{LORA}offloaded": partial(build, has_lora=True, fsdp=FsdpConfig(offload_policy=True)),
    f"{LORA}offloaded_between_uses": partial(build_offloading, has_lora=True),
    f"{LORA}checkpointed_activations_in_host": partial(
        build, has_lora=True, checkpointing=True, activations_in_host=True
    ),
    f"{LORA}ulysses": partial(build_ulysses, has_lora=True),
    f"{LORA}ulysses_with_checkpointed_activations": partial(
        build_ulysses, has_lora=True, checkpointing=True
    ),
}
"""Cases that run on 2 and on 4 ranks."""


@cache
def rows() -> list[Row]:
    """Four groups of four with one prompt each; two groups have no advantage.

    Half of the tokens of a response are observations. One row has no trained token.
    """
    draw = np.random.default_rng(0)
    found: list[Row] = []
    for group in range(4):
        prompt = draw.integers(0, VOCAB_SIZE, 12).tolist()
        first = draw.integers(0, VOCAB_SIZE, 4).tolist()
        for sample in range(4):
            length = int(draw.integers(4, 20))
            # Two samples of each group share the first tokens of the response, too.
            rest = draw.integers(0, VOCAB_SIZE, length).tolist()
            response = (first if sample < 2 else draw.integers(0, VOCAB_SIZE, 4).tolist()) + rest
            mask = [1, 1, *draw.integers(0, 2, len(response) - 2).tolist()]
            advantage = 0.0 if group % 2 else float(draw.normal())
            mask = [0] * len(mask) if (group, sample) == (2, 3) else mask
            found.append(Row(prompt, response, mask, f"g{group}", advantage))
    return found


@cache
def full_batch() -> DataProto:
    """The batch of all ranks. Old log-probabilities are near those of the policy."""
    batch = make_batch(rows())
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        log_probs, _ = score(tiny_model(initializer_range=0.1), batch)
    for name, spread in (("old_log_probs", 0.15), ("ref_log_prob", 0.3)):
        noise = torch.randn(log_probs.shape, generator=draw)
        batch.batch[name] = log_probs + spread * noise
    numbers = [int(uid[1]) for uid in batch.non_tensor_batch["uid"]]
    batch.batch["batch_data_id"] = torch.tensor(numbers)
    return batch


def share(world: World) -> DataProto:
    """This rank's rows of the batch."""
    return share_of(full_batch(), world)


def share_of(batch: DataProto, world: World) -> DataProto:
    """This rank's rows. The shares are unequal, and groups are on several ranks."""
    bounds = np.linspace(0, 1, world.size + 1) ** 1.5 * len(batch)
    start, end = bounds.round().astype(int)[world.rank : world.rank + 2]
    return batch.select_idxs(np.arange(start, end))


def score(lm: torch.nn.Module, batch: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies `[B, T]`, from the logits of the whole padded batch."""
    ids, attention = batch.batch["input_ids"], batch.batch["attention_mask"]
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    logits = lm(
        input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False
    ).logits
    length = batch.batch["response_mask"].shape[1]
    every = (logits[:, -length - 1 : -1] / TEMPERATURE).log_softmax(-1)
    log_probs = every.gather(2, ids[:, -length:, None]).squeeze(2)
    return log_probs, -(every.exp() * every).sum(-1)


def plain_lora() -> PreTrainedModel:
    """The policy of the cases with adapters, as peft makes it."""
    keys = training.LORA
    config = LoraConfig(
        r=keys.lora_rank, lora_alpha=keys.lora_alpha, target_modules=keys.target_modules
    )
    lm = inject_adapter_in_model(config, tiny_model(initializer_range=0.1))
    with torch.no_grad():
        for name, weight in lm.named_parameters():
            if weight.requires_grad:
                weight.copy_(training.adapter_value(name, weight.shape))
    return lm


def naive_update(terms: Mapping[str, Any], *, has_lora: bool = False) -> Update:
    """The clipped loss with mean over tokens, and its gradient, without packing."""
    lm = plain_lora() if has_lora else tiny_model(initializer_range=0.1)
    batch = full_batch()
    log_probs, entropy = score(lm, batch)
    mask, advantages = batch.batch["response_mask"].bool(), batch.batch["advantages"]
    ratio = (log_probs - batch.batch["old_log_probs"]).exp()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    losses = torch.where(advantages < 0, torch.minimum(losses, -advantages * 3.0), losses)
    loss = losses[mask].mean()
    if terms:
        kl = kl_penalty(log_probs, batch.batch["ref_log_prob"], terms["kl_loss_type"])
        loss = loss + terms["kl_loss_coef"] * kl[mask].mean()
    (loss - terms.get("entropy_coeff", 0.0) * entropy[mask].mean()).backward()
    found = {name: weight.grad for name, weight in lm.named_parameters() if weight.grad is not None}
    return Update(loss.item(), found)


def packed_update(world: World, case: Case, terms: Mapping[str, Any]) -> Update:
    """The actor's update of this rank's rows."""
    actor = case(world, terms)
    trap = GradientTrap(actor)
    metrics = actor.update_policy(share(world), temperature=TEMPERATURE).metrics
    square = sum(gradient.double().square().sum() for gradient in trap.seen[0].values())
    assert math.isclose(metrics["actor/grad_norm"], math.sqrt(square), rel_tol=1e-5)
    kl = metrics.get("actor/kl_loss", 0.0) * terms.get("kl_loss_coef", 0.0)
    return Update(metrics["actor/pg_loss"] + kl, trap.seen[0])


def run(folder: Path) -> None:
    """Write this rank's results of every case."""
    world = start_world("cpu", timeout_s=60)
    found = {
        (name, bool(terms)): packed_update(world, case, terms)._asdict()
        for name, case in RANK_CASES.items()
        for terms in (PLAIN, TERMS)
    }
    torch.save(found, folder / f"rank_{world.rank}.pt")
    stop_world()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
    leave_rank(SystemExit(0))
