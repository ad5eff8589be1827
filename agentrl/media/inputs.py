"""The images and videos of one row of a batch."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from agentrl.media.records import MediaItem, MediaSpan


class MultiModalInputs(Mapping[str, Tensor]):
    """The runs of placeholder tokens of a row, and the inputs of the vision tower by name.

    Training reads `spans`. The tensors are computed when they are read, so a batch holds no pixels.

    Args:
        spans: The runs of placeholder tokens, in order; their indices count from the first token of
            the row's prompt.

    Example:
        >>> sorted(batch.non_tensor_batch["multi_modal_inputs"][0])
        ['image_grid_thw', 'pixel_values']
    """

    def __init__(self, spans: Iterable[MediaSpan] = ()) -> None:
        self.spans = tuple(spans)

    @property
    def occurrences(self) -> tuple[MediaItem, ...]:
        """The images and videos in order; one that is shown twice is listed twice."""
        return tuple(span.item for span in self.spans if span.offset == 0)

    def __getitem__(self, name: str) -> Tensor:
        """Return an input of all images and videos that have it, concatenated in order."""
        given = [item.inputs() for item in self.occurrences]
        parts = [inputs[name] for inputs in given if name in inputs]
        if not parts:
            raise KeyError(name)
        return torch.from_numpy(np.concatenate(parts))

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the inputs."""
        return iter(dict.fromkeys(name for item in self.occurrences for name in item.inputs()))

    def __len__(self) -> int:
        """Return the number of inputs."""
        return len(list(iter(self)))

    def __repr__(self) -> str:
        """Name the images and videos, without computing their inputs."""
        shown = ", ".join(f"{item.kind} {item.digest[:8]}" for item in self.occurrences)
        return f"{type(self).__name__}({shown})"
