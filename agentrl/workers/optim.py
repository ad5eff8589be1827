"""Optimizers over shards, and their schedule.

The optimizers work on plain tensors that alias each rank's shard. AdamW is the same on a shard as
on the whole, and skips the cost of distributed tensors (on a small model that cost is larger than
the step itself). Muon needs whole matrices, so on several ranks it is given the sharded tensors
and gathers them.

Weight decay applies to matrices (embeddings among them) and not to norms and biases. Under `muon`,
matrices inside the decoder's layers are Muon's, with their own rate; all others are AdamW's.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from agentrl.config.schema.training import OptimConfig
from agentrl.errors import CheckpointError
from agentrl.workers.distributed import World


@dataclass(frozen=True, slots=True)
class TrainedWeight:
    """A weight, and the tensor that its optimizer changes."""

    name: str
    """Its Hugging Face name."""
    weight: nn.Parameter
    """As the module holds it; sharded on several ranks."""
    local: nn.Parameter
    """What the optimizer sees: the same memory."""

    def take_gradient(self) -> None:
        """Show the optimizer the gradient that the backward pass left."""
        grad = self.weight.grad
        self.local.grad = _as(self.local, grad)

    def drop_gradient(self) -> None:
        """Forget the gradient."""
        self.weight.grad = None
        self.local.grad = None


class PolicyOptimizer:
    """Gradient norm, clipping, step and schedule of one model's weights.

    Args:
        named_weights: Each trained weight once.
        config: Optimizer and schedule.
        world: The ranks that shard the weights.
        total_steps: Steps after which the schedule ends.
    """

    def __init__(
        self,
        named_weights: Iterable[tuple[str, nn.Parameter]],
        config: OptimConfig,
        world: World,
        total_steps: int,
    ) -> None:
        self.config = config
        self.world = world
        self.schedule = make_schedule(config, total_steps)
        self.num_steps = 0
        matrices, others = _divide(named_weights, config, world)
        self.weights = matrices + others
        self._parts: list[_Part] = []
        if matrices:
            self._parts.append(_Part(matrices, _muon(matrices, config), _MUON_STATE))
        if others:
            self._parts.append(_Part(others, _adamw(others, config), _ADAMW_STATE))

    @property
    def lr(self) -> float:
        """The rate of the next step (AdamW's, under `muon`)."""
        return self.config.lr * self.schedule(self.num_steps)

    def grad_norm(self) -> float:
        """Norm of the gradient over all weights and ranks. A collective."""
        norms = [torch.linalg.vector_norm(grad) for grad in self._local_gradients()]
        square = torch.stack(norms).double().square().sum().item() if norms else 0.0
        return math.sqrt(self.world.sum([square])[0])

    def step(self, *, grad_scale: float = 1.0) -> None:
        """Take one step along the gradient times `grad_scale`, and forget the gradient."""
        factor = self.schedule(self.num_steps)
        for weight in self.weights:
            weight.take_gradient()
        if grad_scale != 1.0:
            for grad in self._local_gradients():
                grad.mul_(grad_scale)
        # Counted before it is over: one that breaks off has moved weights.
        self.num_steps += 1
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
            part.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Forget the gradients of a step that is not taken."""
        for weight in self.weights:
            weight.drop_gradient()

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and counters as whole tensors, named `moment/weight`. A collective."""
        return {
            f"{key}/{weight.name}": _gather(part.optimizer.state[weight.local][key], weight)
            for part in self._parts
            for weight in part.weights
            for key in part.state_keys
            if key in part.optimizer.state[weight.local]
        }

    def load_state_tensors(self, tensors: dict[str, Tensor], num_steps: int) -> None:
        """Take up where `state_tensors` and `num_steps` were written.

        Raises:
            CheckpointError: for the state of another optimizer; nothing has changed then.
        """
        places = {
            f"{key}/{weight.name}": (part.optimizer.state[weight.local], key, weight)
            for part in self._parts
            for weight in part.weights
            for key in part.state_keys
        }
        unknown = sorted(tensors.keys() - places.keys())
        if unknown:
            raise CheckpointError(
                f"the checkpoint is of another optimizer: it has {unknown[0]}",
                expected=f"the state of {self.config.name}",
            )
        for name, value in tensors.items():
            state, key, weight = places[name]
            state[key] = _scatter(value, weight)
        self.num_steps = num_steps

    def _local_gradients(self) -> list[Tensor]:
        return [_local(w.weight.grad) for w in self.weights if w.weight.grad is not None]


@dataclass(frozen=True, slots=True)
class _Part:
    """One of torch's optimizers and the weights that it changes."""

    weights: list[TrainedWeight]
    optimizer: torch.optim.Optimizer
    state_keys: tuple[str, ...]


_MUON_STATE = ("momentum_buffer",)
_ADAMW_STATE = ("exp_avg", "exp_avg_sq", "step")


def make_schedule(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Make the factor of the learning rate by the number of steps already taken.

    Linear warm-up, then constant, or down to `min_lr_ratio` at the last step by a line or a cosine.
    """
    warmup = config.lr_warmup_steps or int(config.lr_warmup_steps_ratio * total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.lr_scheduler == "constant":
            return 1.0
        rest = max(1, total_steps - warmup)
        progress = min(1.0, (step - warmup) / rest)
        left = 1.0 - progress
        if config.lr_scheduler == "cosine":
            left = 0.5 * (1.0 + math.cos(math.pi * progress))
        return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left

    return factor


def _divide(
    named_weights: Iterable[tuple[str, nn.Parameter]], config: OptimConfig, world: World
) -> tuple[list[TrainedWeight], list[TrainedWeight]]:
    """Split into Muon's matrices and AdamW's rest."""
    matrices: list[TrainedWeight] = []
    others: list[TrainedWeight] = []
    for name, weight in named_weights:
        if config.name == "muon" and weight.ndim == 2 and ".layers." in f".{name}":
            local = _alias(weight) if world.is_alone else weight
            matrices.append(TrainedWeight(name, weight, local))
        else:
            others.append(TrainedWeight(name, weight, _alias(weight)))
    return matrices, others


def _muon(weights: list[TrainedWeight], config: OptimConfig) -> torch.optim.Muon:
    group = {"params": [w.local for w in weights], "base_lr": config.muon_lr}
    return torch.optim.Muon([group], lr=config.muon_lr, weight_decay=config.weight_decay)


def _adamw(weights: list[TrainedWeight], config: OptimConfig) -> torch.optim.AdamW:
    matrices = [w.local for w in weights if w.local.ndim >= 2]
    vectors = [w.local for w in weights if w.local.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay, "base_lr": config.lr},
        {"params": vectors, "weight_decay": 0.0, "base_lr": config.lr},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, fused=True)


def _alias(weight: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(_local(weight.detach()))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _as(local: Tensor, grad: Tensor | None) -> Tensor | None:
    return grad if grad is None or isinstance(local, DTensor) else _local(grad)


def _gather(value: Tensor, weight: TrainedWeight) -> Tensor:
    """Make a state tensor whole; counters are the same on every rank."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    sharded = weight.weight
    if value.ndim == 0 or not isinstance(sharded, DTensor) or sharded.device_mesh.size() == 1:
        return value
    return DTensor.from_local(
        value, sharded.device_mesh, sharded.placements,
        run_check=False, shape=sharded.shape, stride=sharded.stride(),
    ).full_tensor()  # fmt: skip


def _scatter(value: Tensor, weight: TrainedWeight) -> Tensor:
    """Keep this rank's part of a whole state tensor."""
    sharded = weight.weight
    if value.ndim == 0 or not isinstance(sharded, DTensor):
        return value
    whole = value.to(sharded.device)
    placed = distribute_tensor(whole, sharded.device_mesh, sharded.placements)
    return placed if isinstance(weight.local, DTensor) else placed.to_local().clone()
