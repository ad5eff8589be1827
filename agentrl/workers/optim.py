"""Optimizers over shards, and their schedule.

The optimizers work on plain tensors that alias each rank's shard. AdamW on a shard gives the same
result as on the whole, without the cost of distributed tensors (for a small model this cost is
larger than the step itself). Muon needs whole matrices, so on several ranks it gets the sharded
tensors and gathers them.

Weight decay applies to matrices, including embeddings, and not to norms and biases. With `muon`,
Muon trains the matrices in the decoder's layers, with their own rate, and AdamW all others.
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
    """A weight, and the tensor that its optimizer updates."""

    name: str
    """Its Hugging Face name."""
    weight: nn.Parameter
    """The module's parameter; sharded on several ranks."""
    local: nn.Parameter
    """The optimizer's parameter: the same memory."""

    def take_gradient(self) -> None:
        """Give the optimizer the gradient of the backward pass."""
        grad = self.weight.grad
        if grad is not None and not isinstance(self.local, DTensor):
            grad = _local(grad)
        self.local.grad = grad

    def drop_gradient(self) -> None:
        """Delete the gradient."""
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
        matrices: list[TrainedWeight] = []  # Muon's; AdamW has the others
        others: list[TrainedWeight] = []
        for name, weight in named_weights:
            if config.name == "muon" and weight.ndim == 2 and ".layers." in f".{name}":
                local = _alias(weight) if world.is_alone else weight
                matrices.append(TrainedWeight(name, weight, local))
            else:
                others.append(TrainedWeight(name, weight, _alias(weight)))
        self.weights = matrices + others
        self._parts: list[_Part] = []
        if matrices:
            group = {"params": [w.local for w in matrices], "base_lr": config.muon_lr}
            muon = torch.optim.Muon([group], lr=config.muon_lr, weight_decay=config.weight_decay)
            self._parts.append(_Part(matrices, muon, ("momentum_buffer",)))
        if others:
            state_keys = ("exp_avg", "exp_avg_sq", "step")
            self._parts.append(_Part(others, _adamw(others, config), state_keys))

    @property
    def lr(self) -> float:
        """The learning rate of the next step (with `muon`, AdamW's)."""
        return self.config.lr * self.schedule(self.num_steps)

    def grad_norm(self) -> float:
        """Return the norm of the gradient over all weights and ranks. A collective."""
        norms = [torch.linalg.vector_norm(grad) for grad in self._local_gradients()]
        square = torch.stack(norms).double().square().sum().item() if norms else 0.0
        return math.sqrt(self.world.sum([square])[0])

    def step(self, *, grad_scale: float = 1.0) -> None:
        """Take one step with the gradient times `grad_scale`, and delete the gradient."""
        factor = self.schedule(self.num_steps)
        for weight in self.weights:
            weight.take_gradient()
        if grad_scale != 1.0:
            for grad in self._local_gradients():
                grad.mul_(grad_scale)
        # Counted first: a step that fails halfway has changed weights.
        self.num_steps += 1
        for part in self._parts:
            for group in part.optimizer.param_groups:
                group["lr"] = group["base_lr"] * factor
            part.optimizer.step()
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """Delete the gradients of a step that is skipped."""
        for weight in self.weights:
            weight.drop_gradient()

    def state_tensors(self) -> dict[str, Tensor]:
        """Gather moments and counters as whole tensors, named `moment/weight`. A collective."""
        return {
            f"{key}/{weight.name}": _gather(part.optimizer.state[weight.local][key], weight)
            for part in self._parts
            for weight in part.weights
            for key in part.state_keys
            if key in part.optimizer.state[weight.local]
        }

    def load_state_tensors(self, tensors: dict[str, Tensor], num_steps: int) -> None:
        """Load the results of `state_tensors` and `num_steps`.

        Raises:
            CheckpointError: for the state of another optimizer; then nothing is changed.
        """
        targets = {
            f"{key}/{weight.name}": (part.optimizer.state[weight.local], key, weight)
            for part in self._parts
            for weight in part.weights
            for key in part.state_keys
        }
        unknown = sorted(tensors.keys() - targets.keys())
        if unknown:
            raise CheckpointError(
                f"the checkpoint is of another optimizer: it has {unknown[0]}",
                expected=f"the state of {self.config.name}",
            )
        for name, value in tensors.items():
            state, key, weight = targets[name]
            state[key] = _scatter(value, weight)
        self.num_steps = num_steps

    def _local_gradients(self) -> list[Tensor]:
        return [_local(w.weight.grad) for w in self.weights if w.weight.grad is not None]


@dataclass(frozen=True, slots=True)
class _Part:
    """One of torch's optimizers and its weights."""

    weights: list[TrainedWeight]
    optimizer: torch.optim.Optimizer
    state_keys: tuple[str, ...]


def make_schedule(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return a function from the number of completed steps to a factor of the learning rate.

    Linear warm-up, then constant, or linear or cosine decay to `min_lr_ratio` at the last step.
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


def _gather(value: Tensor, weight: TrainedWeight) -> Tensor:
    """Gather a state tensor; counters are the same on every rank."""
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
    """Return this rank's shard of a whole state tensor."""
    sharded = weight.weight
    if value.ndim == 0 or not isinstance(sharded, DTensor):
        return value
    whole = value.to(sharded.device)
    placed = distribute_tensor(whole, sharded.device_mesh, sharded.placements)
    return placed if isinstance(weight.local, DTensor) else placed.to_local().clone()
