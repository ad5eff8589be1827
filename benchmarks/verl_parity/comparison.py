"""One line of the table: how far two results are apart, and whether they should be."""

from dataclasses import dataclass

import torch

RELATIVE, ABSOLUTE = 1e-5, 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One result of ours beside the reference's."""

    name: str
    relative: float
    """Largest difference over the reference's value, where that is not 0."""
    absolute: float
    """Largest difference."""
    is_close: bool
    """Whether each difference is within `ABSOLUTE` + `RELATIVE` times the reference's value."""
    reason: str = ""
    """Why they differ by design; empty: they should not."""

    @property
    def is_as_declared(self) -> bool:
        """A difference without a reason, and a reason without a difference, are both faults."""
        return self.is_close != bool(self.reason)

    @property
    def verdict(self) -> str:
        """What the table says."""
        if self.is_as_declared:
            return f"differs by design: {self.reason}" if self.reason else "ok"
        return f"DECLARED AND EQUAL: {self.reason}" if self.is_close else "DIFFERS"


def compare(
    name: str, ours: torch.Tensor, theirs: torch.Tensor, *, by_design: str = ""
) -> Comparison:
    """Measure how far two tensors of one shape are apart.

    Args:
        name: What was computed.
        ours: Any shape.
        theirs: The same shape. NaN at the same places is equal.
        by_design: The reason, where they are to differ.
    """
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    gaps = torch.where(same, 0.0, (ours - theirs).abs().double()).nan_to_num(nan=torch.inf)
    sizes = theirs.abs().double().nan_to_num(nan=0.0)
    relative = torch.where(sizes > 0, gaps / sizes, 0.0)
    return Comparison(
        name=name,
        relative=float(relative.max()),
        absolute=float(gaps.max()),
        is_close=bool((gaps <= ABSOLUTE + RELATIVE * sizes).all()),
        reason=by_design,
    )
