"""Muon with one product for several matrices of equal shape.

`torch.optim.Muon` orthogonalizes one matrix after the other. In a small model the calls take longer
than the products, so matrices of equal shape are stacked here. Formula, constants and state are
those of torch (`torch/optim/_muon.py`, after Keller Jordan, https://kellerjordan.github.io/posts/muon/).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

_MAX_ELEMENTS = 1 << 20
"""Of a stack. Larger products gain nothing from a stack, and each stack is a copy."""


class StackedMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` for plain tensors, with less time between its products.

    The learning rate is adjusted to the shape as by `adjust_lr_fn="original"`; the momentum is
    Nesterov's. Both are the defaults of torch, and there are no others. A tensor of three
    dimensions is a stack of matrices, one for each expert.
    """

    def __init__(self, params: Any, *, lr: float, weight_decay: float) -> None:
        # Not torch's constructor: it refuses stacks.
        plain = torch.optim.Muon([torch.zeros(1, 1)], lr=lr, weight_decay=weight_decay)
        super().__init__(params, plain.defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step; `closure` is not called."""
        for group in self.param_groups:
            trained = [matrix for matrix in group["params"] if matrix.grad is not None]
            for matrices in _group_by_shape(trained):
                self._update(matrices, group)

    def _update(self, matrices: list[Tensor], group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        grads = [cast("Tensor", matrix.grad) for matrix in matrices]
        for matrix in matrices:
            if "momentum_buffer" not in self.state[matrix]:
                self.state[matrix]["momentum_buffer"] = torch.zeros_like(matrix)
        buffers = [self.state[matrix]["momentum_buffer"] for matrix in matrices]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)  # pyright: ignore[reportPrivateImportUsage]
        ahead = torch._foreach_lerp(grads, buffers, momentum)  # pyright: ignore[reportPrivateImportUsage]
        rows, columns = matrices[0].shape[-2:]
        stack = torch.stack([one.bfloat16() for one in ahead])
        settings = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        flat = stack.view(-1, rows, columns)
        parts = flat.split(max(1, _MAX_ELEMENTS // max(1, rows * columns)))
        updates = torch.cat([_orthogonalize(part, *settings) for part in parts]).view_as(stack)
        adjusted = lr * math.sqrt(max(1, rows / columns))
        for matrix, update in zip(matrices, updates, strict=True):
            matrix.mul_(1 - lr * group["weight_decay"])
            matrix.add_(update, alpha=-adjusted)


def _group_by_shape(matrices: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield matrices of equal shape, dtype and device, at most `_MAX_ELEMENTS` together."""
    alike = defaultdict[Any, list[Tensor]](list)
    for matrix in matrices:
        alike[matrix.shape, matrix.dtype, matrix.device].append(matrix)
    for group in alike.values():
        size = max(1, _MAX_ELEMENTS // max(1, group[0].numel()))
        for start in range(0, len(group), size):
            yield group[start : start + size]


def _orthogonalize(
    stack: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> Tensor:
    """Bring the singular values of each matrix `[n, rows, columns]` near 1 (Newton-Schulz)."""
    a, b, c = coefficients
    tall = stack.shape[1] > stack.shape[2]
    wide = stack.mT if tall else stack
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(num_steps):
        gram = wide @ wide.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.baddbmm(wide, polynomial, wide, beta=a)
    return wide.mT if tall else wide
