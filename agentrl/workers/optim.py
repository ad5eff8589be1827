"""Optimizers over shards, and their schedule.

The optimizers work on plain tensors that alias each rank's shard. AdamW on a shard gives the same
result as on the whole, without the cost of distributed tensors (for a small model this cost is
larger than the step itself). Muon needs whole matrices, so on several ranks it gets the sharded
tensors and gathers them.

Weight decay applies to matrices, including embeddings, and not to norms and biases. With `muon`,
Muon trains the matrices in the decoder's layers, with their own rate, and AdamW all others.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from agentrl.config.schema.training import OptimConfig
from agentrl.errors import CheckpointError, ConfigError
from agentrl.workers.distributed import World
from agentrl.workers.muon import StackedMuon
from agentrl.workers.shards import LocalSlice, local_slice, local_tensor

_LAYER = re.compile(r"\.\d+\.")
"""In the name of a decoder layer's weight: `model.layers.0.`, `transformer.h.0.`."""


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
            grad = local_tensor(grad)
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
        stacks: list[TrainedWeight] = []  # Muon's, with those that it gathers; AdamW has the others
        matrices: list[TrainedWeight] = []
        others: list[TrainedWeight] = []
        for name, weight in named_weights:
            if config.name == "muon" and is_matrix(name, weight):
                # A shard of a stack has whole matrices, and one of a matrix has not.
                is_whole = world.is_alone or weight.ndim == 3
                local = _alias(weight) if is_whole else weight
                (stacks if is_whole else matrices).append(TrainedWeight(name, weight, local))
            else:
                others.append(TrainedWeight(name, weight, _alias(weight)))
        if config.name == "muon" and not stacks + matrices:
            raise ConfigError(
                "the model has no matrix in a numbered layer, which muon would train",
                key="actor.optim.name",
                expected="adamw",
            )
        self.weights = stacks + matrices + others
        self._parts: list[_Part] = []
        for kind, trained in ((StackedMuon, stacks), (torch.optim.Muon, matrices)):
            if trained:
                group = {"params": [w.local for w in trained], "base_lr": config.muon_lr}
                muon = kind([group], lr=config.muon_lr, weight_decay=config.weight_decay)
                self._parts.append(_Part(trained, muon, ("momentum_buffer",)))
        if others:
            state_keys = ("exp_avg", "exp_avg_sq", "step")
            self._parts.append(_Part(others, _adamw(others, config), state_keys))

    @property
    def lr(self) -> float:
        """The learning rate of the next step (with `muon`, AdamW's)."""
        return self.config.lr * self.schedule(self.num_steps)

    def grad_norm(self) -> float:
        """Return the norm of the gradient over all weights and ranks. A collective."""
        gradients, square = self._local_gradients(), 0.0
        if gradients:
            norms = torch._foreach_norm(gradients)  # pyright: ignore[reportPrivateImportUsage]
            square = torch.stack(norms).double().square().sum().item()
        return math.sqrt(self.world.sum([square])[0] / self._num_copies())

    def _num_copies(self) -> int:
        """Return how many ranks hold the same gradients (hybrid sharding)."""
        sharded = self.weights[0].weight
        if not isinstance(sharded, DTensor):
            return 1
        dims = enumerate(sharded.placements)
        return math.prod(sharded.device_mesh.size(dim) for dim, at in dims if at.is_replicate())

    def step(self, *, grad_scale: float = 1.0) -> None:
        """Take one step with the gradient times `grad_scale`, and delete the gradient."""
        factor = self.schedule(self.num_steps)
        for weight in self.weights:
            weight.take_gradient()
        gradients = self._local_gradients()
        if grad_scale != 1.0 and gradients:
            torch._foreach_mul_(gradients, grad_scale)  # pyright: ignore[reportPrivateImportUsage]
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

    def state_slices(self) -> dict[str, LocalSlice]:
        """Return this rank's slices of moments and counters, named `moment/weight`."""
        return {
            f"{key}/{weight.name}": local_slice(value, self.world, like=weight.weight)
            for part in self._parts
            for weight in part.weights
            for key, value in part.optimizer.state[weight.local].items()
            if key in part.state_keys
        }

    def state_tensors(self) -> list[Tensor]:
        """Return this rank's moments and counters."""
        states = (state for part in self._parts for state in part.optimizer.state.values())
        return [local_tensor(value) for state in states for value in state.values()]

    def allocate_state(self, names: Iterable[str], num_steps: int) -> dict[str, LocalSlice]:
        """Replace moments and counters by memory without values, for those of a checkpoint.

        Args:
            names: The names that `state_slices` had.
            num_steps: The steps of the optimizer that had them.

        Returns:
            The new slices, to be filled.

        Raises:
            CheckpointError: for names of another optimizer; then nothing is changed.
        """
        targets = {
            f"{key}/{weight.name}": (part.optimizer.state[weight.local], key, weight.local)
            for part in self._parts
            for weight in part.weights
            for key in part.state_keys
        }
        names = list(names)
        if unknown := sorted(set(names) - targets.keys()):
            raise CheckpointError(
                f"the checkpoint is of another optimizer: it has {unknown[0]}",
                expected=f"the state of {self.config.name}",
            )
        for name in names:
            state, key, local = targets[name]
            # The optimizer's kernels want the counter of steps next to the weight, as a float32.
            is_counter = key == "step"
            state[key] = (
                torch.empty((), dtype=torch.float32, device=local.device)
                if is_counter
                else torch.empty_like(local, requires_grad=False)
            )
        self.num_steps = num_steps
        return {name: part for name, part in self.state_slices().items() if name in set(names)}

    def _local_gradients(self) -> list[Tensor]:
        return [local_tensor(w.weight.grad) for w in self.weights if w.weight.grad is not None]


@dataclass(frozen=True, slots=True)
class _Part:
    """One of torch's optimizers and its weights."""

    weights: list[TrainedWeight]
    optimizer: torch.optim.Optimizer
    state_keys: tuple[str, ...]


def is_matrix(name: str, weight: Tensor) -> bool:
    """Return whether a weight is a matrix of a decoder layer, or a stack of them for experts.

    The biases of stacked experts have two dimensions, and depthwise convolutions three.
    """
    if not _LAYER.search(name) or name.endswith("bias"):
        return False
    return weight.ndim == 2 or (weight.ndim == 3 and min(weight.shape[1:]) > 1)


def make_schedule(config: OptimConfig, total_steps: int) -> Callable[[int], float]:
    """Return a function from the number of completed steps to a factor of the learning rate.

    Linear warm-up, then constant, or linear or cosine decay to `min_lr_ratio` after the last step.
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
    return nn.Parameter(local_tensor(weight.detach()))
