"""One batch, its update by the critic in several configurations, and by a naive padded computation.

As a module it is one rank of several: it writes its results of every case of `RANK_CASES`.
"""

import math
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from agentrl.cli import leave_rank
from agentrl.config.schema.training import CriticConfig, FsdpConfig
from agentrl.protocol import DataProto
from agentrl.workers.critic import Critic
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.load import enable_checkpointing
from agentrl.workers.offload import OffloadedMemory
from agentrl.workers.shards import local_slice, local_tensor
from agentrl.workers.value_model import ValueModel, drop_head
from tests.fakes.engines import tiny_model
from tests.fakes.training import whole
from tests.fakes.update_equality import Update, full_batch, share_of

CLIP = 0.2


def head_weights() -> tuple[torch.Tensor, torch.Tensor]:
    """A head that gives values of size 1."""
    draw = torch.Generator().manual_seed(5)
    return torch.randn(1, 32, generator=draw) * 0.2, torch.tensor([0.1])


@torch.no_grad()
def set_head(model: ValueModel) -> None:
    for value, weight in zip(head_weights(), model.score.parameters(), strict=True):
        part = local_slice(weight, model.world)
        part.local.copy_(value[part.offset[0] : part.offset[0] + part.local.shape[0]])


def make_critic(
    world: World,
    *,
    model: ValueModel | None = None,
    seed: int = 0,
    head: bool = True,
    fsdp: FsdpConfig | None = None,
    checkpointing: bool = False,
    activations_in_host: bool = False,
    **config: Any,
) -> Critic:
    """A critic with a constant rate and no decay; `head`: with the head of `head_weights`."""
    if model is None:
        lm = drop_head(tiny_model(seed=seed, initializer_range=0.1))
        if checkpointing:
            enable_checkpointing(lm)
        model = ValueModel(lm, world, torch.float32, fsdp or FsdpConfig())
        model.offloads_activations = activations_in_host
        if head:
            set_head(model)
    settings: dict[str, Any] = {
        "ppo_max_token_len_per_gpu": 120, "grad_clip": 1e6, "cliprange_value": CLIP,
        "optim": {"lr": 1e-3, "weight_decay": 0.0},
    }  # fmt: skip
    section = CriticConfig.model_validate(settings | config)
    return Critic(model, section, total_steps=10, response_budget=16)


def make_offloading(world: World) -> Critic:
    """A critic whose weights have no memory between uses, as with `param_offload` on a device."""
    critic = make_critic(world)
    weights = [local_tensor(weight.detach()) for _, weight in critic.model.named_weights()]
    critic.model.offload = OffloadedMemory(lambda: weights)
    with critic.updater.on_device():
        pass
    assert not any(weight.untyped_storage().nbytes() for weight in weights)
    return critic


def make_ulysses(world: World, *, size: int = 2, **config: Any) -> Critic:
    """Two ranks compute each micro-batch together."""
    return make_critic(world.with_sequence_groups(size), **config)


Case = Callable[[World], Critic]
CASES: dict[str, Case] = {
    "one_micro_batch": partial(make_critic, ppo_max_token_len_per_gpu=4096),
    "many_micro_batches": partial(make_critic, ppo_max_token_len_per_gpu=40),
    "prefixes_not_shared": partial(make_critic, share_prefixes=False),
    "checkpointed_activations": partial(make_critic, checkpointing=True),
    "checkpointed_activations_in_host": partial(
        make_critic, checkpointing=True, activations_in_host=True
    ),
    "offloaded_between_uses": make_offloading,
}
"""Cases of one rank."""
RANK_CASES: dict[str, Case] = {
    "sharded": make_critic,
    "copies_that_are_not_sharded": partial(make_critic, fsdp=FsdpConfig(fsdp_size=1)),
    "offloaded": partial(make_critic, fsdp=FsdpConfig(offload_policy=True)),
    "offloaded_between_uses": make_offloading,
    "checkpointed_activations": partial(make_critic, checkpointing=True),
    "ulysses": make_ulysses,
    "ulysses_with_prefixes_not_shared": partial(make_ulysses, share_prefixes=False),
}
"""Cases that run on 2 ranks."""


@cache
def value_batch() -> DataProto:
    """The rows of the actor's tests, with old values near the critic's, and returns."""
    batch = full_batch().select()
    shape, draw = batch.batch["response_mask"].shape, torch.Generator().manual_seed(1)
    with torch.no_grad():
        values = naive_values(batch)[0]
    batch.batch["values"] = values + 0.3 * torch.randn(shape, generator=draw)
    batch.batch["returns"] = torch.randn(shape, generator=draw)
    return batch


def naive_values(batch: DataProto) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Values `[B, T]` of the whole padded batch, and the weights with their gradients."""
    lm, (weight, bias) = tiny_model(initializer_range=0.1), head_weights()
    weight.requires_grad_(), bias.requires_grad_()
    ids, attention = batch.batch["input_ids"], batch.batch["attention_mask"]
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    hidden = lm.base_model(
        input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False
    ).last_hidden_state
    length = batch.batch["response_mask"].shape[1]
    values = hidden[:, -length - 1 : -1] @ weight[0] + bias
    named = {f"model.{name}": one for name, one in lm.base_model.named_parameters()}
    return values, named | {"score.weight": weight, "score.bias": bias}


def naive_update() -> Update:
    """The clipped value loss, token by token, and its gradient."""
    batch = value_batch()
    values, weights = naive_values(batch)
    total, count = torch.zeros(()), 0
    for row, column in batch.batch["response_mask"].nonzero().tolist():
        value, old = values[row, column], float(batch.batch["values"][row, column])
        target = batch.batch["returns"][row, column]
        clipped = value.clamp(old - CLIP, old + CLIP)
        total = total + torch.maximum((value - target) ** 2, (clipped - target) ** 2) / 2
        count += 1
    (total / count).backward()
    return Update((total / count).item(), {name: one.grad for name, one in weights.items()})  # pyright: ignore[reportArgumentType]


def packed_update(world: World, case: Case) -> Update:
    """The critic's update of this rank's rows, without its optimizer step."""
    critic = case(world)
    found: dict[str, torch.Tensor] = {}

    def trap(*, grad_scale: float = 1.0) -> None:
        critic.model.release_gathered()
        for name, weight in critic.model.named_weights():
            assert weight.grad is not None
            found[name] = whole(weight.grad).clone()
        critic.updater.optimizer.drop_gradients()

    critic.updater.optimizer.step = trap  # pyright: ignore[reportAttributeAccessIssue]
    metrics = critic.update_critic(share_of(value_batch(), world)).metrics
    square = sum(gradient.double().square().sum() for gradient in found.values())
    assert math.isclose(metrics["critic/grad_norm"], math.sqrt(square), rel_tol=1e-5)
    assert 0 < metrics["critic/vf_clipfrac"] < 1
    return Update(metrics["critic/vf_loss"], found)


def run(folder: Path) -> None:
    """Write this rank's results of every case."""
    world = start_world("cpu", timeout_s=60)
    found = {name: packed_update(world, case)._asdict() for name, case in RANK_CASES.items()}
    torch.save(found, folder / f"rank_{world.rank}.pt")
    stop_world()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
    leave_rank(SystemExit(0))
