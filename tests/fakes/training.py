"""Small policies, batches of padded rows, and the naive computation that packing must equal."""

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import ActorConfig, FsdpConfig, OptimConfig
from agentrl.protocol import DataProto
from agentrl.workers.actor import Actor
from agentrl.workers.distributed import World
from agentrl.workers.lora import inject_adapters
from agentrl.workers.model import PolicyModel
from agentrl.workers.shards import local_slice
from tests.fakes.engines import VOCAB_SIZE, tiny_model


@dataclass(frozen=True)
class Row:
    """One sequence: its prompt, its response, and which of the response is trained."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    uid: str = "a"
    advantage: float = 1.0


@dataclass(frozen=True)
class Layout:
    """How rows are laid out in a batch: which must change nothing."""

    pad_left: int = 0
    pad_right: int = 0
    order: Sequence[int] | None = None
    budget: int = 64
    block_bytes: int = 256
    extra: dict[str, object] = field(default_factory=dict)


def make_policy(world: World, *, seed: int = 0, **overrides: object) -> PolicyModel:
    """A sharded policy of random weights, in float32."""
    lm = tiny_model(seed=seed, initializer_range=0.1, **overrides)
    return PolicyModel(lm, world, torch.float32, FsdpConfig())


LORA = ModelConfig(path="tiny", lora_rank=4, lora_alpha=8)


def make_lora_policy(
    world: World,
    lm: PreTrainedModel | None = None,
    fsdp: FsdpConfig | None = None,
    *,
    keys: ModelConfig = LORA,
    seed: int = 0,
) -> PolicyModel:
    """A policy with adapters, of which no matrix is 0."""
    lm = lm or tiny_model(initializer_range=0.1)
    adapters = inject_adapters(lm, keys)
    policy = PolicyModel(lm, world, torch.float32, fsdp or FsdpConfig(), adapters=adapters)
    fill_adapters(policy.trained_weights(), world, seed=seed)
    return policy


def adapter_value(name: str, shape: Sequence[int], *, seed: int = 0) -> torch.Tensor:
    """A value for an adapter's matrix that depends on its name and the seed."""
    draws = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
    return 0.2 * torch.randn(tuple(shape), generator=draws)


@torch.no_grad()
def fill_adapters(
    named_weights: Iterable[tuple[str, nn.Parameter]], world: World, *, seed: int = 0
) -> None:
    """Set adapters to values that are the same on any number of ranks."""
    for name, weight in named_weights:
        values = adapter_value(name, weight.shape, seed=seed)
        part = local_slice(weight, world)
        bounds = zip(part.offset, part.local.shape, strict=True)
        part.local.copy_(values[tuple(slice(start, start + size) for start, size in bounds)])


def make_actor(policy: PolicyModel, layout: Layout | None = None, **config: object) -> Actor:
    """An actor with a constant rate and no decay."""
    layout = layout or Layout()
    settings = {
        "ppo_max_token_len_per_gpu": layout.budget,
        "logits_block_bytes": layout.block_bytes,
        "optim": OptimConfig(lr=1e-3, weight_decay=0.0),
        "grad_clip": 1e6,
    }
    return Actor(policy, ActorConfig(**(settings | config)), total_steps=10, response_budget=16)


def random_rows(count: int, *, seed: int = 0, group: int = 2) -> list[Row]:
    """Rows of several turns; about every eighth trains on nothing."""
    draw = np.random.default_rng(seed)
    rows: list[Row] = []
    for number in range(count):
        length = int(draw.integers(1, 12))
        mask = draw.integers(0, 2, length).tolist() if number % 8 != 5 else [0] * length
        rows.append(
            Row(
                prompt=draw.integers(0, VOCAB_SIZE, int(draw.integers(1, 6))).tolist(),
                response=draw.integers(0, VOCAB_SIZE, length).tolist(),
                mask=mask,
                uid=f"g{number // group}",
                advantage=float(draw.normal()),
            )
        )
    return rows


@st.composite
def rows_and_layouts(draw: st.DrawFn) -> tuple[list[Row], Layout]:
    """Generated rows, and a layout to compare with the plain one."""
    tokens = st.integers(0, VOCAB_SIZE - 1)
    rows: list[Row] = []
    for _ in range(draw(st.integers(1, 5))):
        response = draw(st.lists(tokens, min_size=1, max_size=8))
        bits = st.lists(st.integers(0, 1), min_size=len(response), max_size=len(response))
        prompt = draw(st.lists(tokens, min_size=1, max_size=5))
        rows.append(Row(prompt, response, draw(bits), advantage=draw(st.floats(-2, 2, width=32))))
    layout = Layout(
        pad_left=draw(st.integers(0, 3)),
        pad_right=draw(st.integers(0, 3)),
        order=draw(st.permutations(range(len(rows)))),
        budget=draw(st.integers(1, 40)),
        block_bytes=draw(st.integers(1, 4000)),
    )
    return rows, layout


def make_batch(rows: Sequence[Row], layout: Layout | None = None) -> DataProto:
    """Lay rows out as `collate` does; what stands in the padding is garbage on purpose."""
    layout = layout or Layout()
    rows = [rows[place] for place in layout.order] if layout.order is not None else rows
    left = max(len(row.prompt) for row in rows) + layout.pad_left
    right = max(len(row.response) for row in rows) + layout.pad_right
    ids = torch.full((len(rows), left + right), 3)
    attention = torch.zeros_like(ids)
    mask = torch.zeros(len(rows), right, dtype=torch.long)
    advantages = torch.full((len(rows), right), 9.0)
    for place, row in enumerate(rows):
        start, end = left - len(row.prompt), left + len(row.response)
        ids[place, start:end] = torch.tensor(row.prompt + row.response)
        attention[place, start:end] = 1
        mask[place, : len(row.mask)] = torch.tensor(row.mask)
        advantages[place, : len(row.mask)] = row.advantage
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "response_mask": mask,
            "advantages": advantages,
            "old_log_probs": torch.full((len(rows), right), -4.0),
        },
        non_tensors={
            "uid": np.array([row.uid for row in rows], dtype=object),
            "request_id": np.array([f"r{place}" for place in range(len(rows))], dtype=object),
        },
    )


def plain_scores(lm: nn.Module, row: Row, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropy of every response token: the row alone, unpadded."""
    ids = torch.tensor([row.prompt + row.response])
    logits = lm(input_ids=ids, use_cache=False).logits[0, len(row.prompt) - 1 : -1] / temperature
    every = logits.float().log_softmax(-1)
    entropy = -(every.exp() * every).sum(-1)
    return every.gather(1, ids[0, len(row.prompt) :, None]).squeeze(1), entropy


def plain_loss(
    lm: nn.Module, rows: Sequence[Row], *, temperature: float = 1.0, entropy_coeff: float = 0.0
) -> torch.Tensor:
    """The clipped loss of `make_batch`'s old log-probabilities, token by token, token-mean."""
    total, count = torch.zeros(()), 0
    for row in rows:
        log_probs, entropy = plain_scores(lm, row, temperature)
        for place, trained in enumerate(row.mask):
            if trained:
                ratio = (log_probs[place] + 4.0).exp()
                free = -row.advantage * ratio
                loss = torch.maximum(free, -row.advantage * ratio.clamp(0.8, 1.2))
                if row.advantage < 0:
                    loss = torch.minimum(loss, torch.tensor(-row.advantage * 3.0))
                total = total + loss - entropy_coeff * entropy[place]
                count += 1
    return total / max(count, 1)


def gradients(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """The gradient of each trained weight, whole; zeros where there is none."""
    assert all(w.requires_grad or w.grad is None for _, w in policy.named_weights())
    found: dict[str, torch.Tensor] = {}
    for name, weight in policy.trained_weights():
        grad = weight.grad
        found[name] = torch.zeros(weight.shape) if grad is None else whole(grad).clone()
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor of all ranks, if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """A copy of each weight, whole."""
    return {name: whole(weight.detach()).clone() for name, weight in policy.named_weights()}


def moments_of(actor: Actor) -> dict[str, torch.Tensor]:
    """This rank's slices of moments and counters."""
    return {name: part.local for name, part in actor.optimizer.state_slices().items()}


class GradientTrap:
    """Keeps the gradient of the step that an optimizer would take, and takes none."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.seen: list[dict[str, torch.Tensor]] = []
        actor.optimizer.step = self._step  # pyright: ignore[reportAttributeAccessIssue]

    def _step(self, *, grad_scale: float = 1.0) -> None:
        self.seen.append(gradients(self._actor.policy))
        self._actor.optimizer.drop_gradients()
