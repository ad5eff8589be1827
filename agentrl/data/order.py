"""The order of the data: a function of seed and epoch, so that a resumed run repeats it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.errors import DataError

if TYPE_CHECKING:
    from agentrl.protocol import DataProto

_UINT64 = (1 << 64) - 1


def epoch_order(num_rows: int, *, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """Return the order of the rows in one epoch. The same arguments give the same order.

    Args:
        num_rows: Number of rows.
        seed: Any integer.
        epoch: From 0.
        shuffle: If false, the order of the rows does not change.
    """
    if not shuffle:
        return list(range(num_rows))
    generator = np.random.Generator(np.random.PCG64([seed & _UINT64, epoch]))
    return generator.permutation(num_rows).tolist()


class DataOrder:
    """The position in the data: batch after batch, epoch after epoch.

    An epoch ends when its rows do not fill another batch. The remaining rows are skipped in that
    epoch (with shuffling, other rows in each epoch). So every batch is full, and no batch has a row
    twice.

    Args:
        num_rows: Number of rows.
        seed: Seed of the shuffling.
        shuffle: Whether each epoch has a new order.
        fingerprint: `PromptDataset.fingerprint`. A saved state of other data is refused.

    Example:
        >>> order = DataOrder(5, seed=0, shuffle=False)
        >>> order.next_batch(2), order.next_batch(2), order.next_batch(2), order.epoch
        ([0, 1], [2, 3], [0, 1], 1)
    """

    def __init__(
        self, num_rows: int, *, seed: int, shuffle: bool = True, fingerprint: str = ""
    ) -> None:
        self.num_rows = num_rows
        self.seed = seed
        self.shuffle = shuffle
        self.fingerprint = fingerprint
        self.epoch = 0
        self.position = 0
        self._drawn: tuple[int, list[int]] | None = None

    def num_batches(self, size: int) -> int:
        """Count the full batches of one epoch."""
        return self.num_rows // size

    def check_batch(self, size: int) -> None:
        """Check that the data fills a batch.

        Raises:
            DataError: If it has fewer rows. The error has both numbers.
        """
        if size > self.num_rows:
            raise DataError(
                f"a batch of {size} prompts from {self.num_rows} rows",
                key="data.train_batch_size",
                expected=f"at most {self.num_rows} (data.gen_batch_size too), or more data",
            )

    def next_batch(self, size: int) -> list[int]:
        """Return the indices of the next `size` rows, and advance.

        Raises:
            DataError: If the data has fewer rows than a batch.
        """
        self.check_batch(size)
        if self.position + size > self.num_rows:
            self.epoch += 1
            self.position = 0
        start = self.position
        self.position += size
        return self._order()[start : self.position]

    def update(self, batch: "DataProto") -> None:
        """Take the batch of a step; this order does not depend on it."""

    def state_dict(self) -> dict[str, Any]:
        """Return position and identity of the order, for a checkpoint."""
        return self._identity() | {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of `state`.

        Raises:
            DataError: If the state has other data, another seed or another shuffling.
        """
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise DataError(
                    f"the data order of the checkpoint has {name} {state.get(name)!r}, this run "
                    f"{value!r}",
                    expected="the data and order that the run started with, or "
                    "trainer.resume_mode=disable to start again",
                )
        self.epoch, self.position = int(state["epoch"]), int(state["position"])

    def _identity(self) -> dict[str, int | bool | str]:
        return {
            "num_rows": self.num_rows,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "fingerprint": self.fingerprint,
        }

    def _order(self) -> list[int]:
        if self._drawn is None or self._drawn[0] != self.epoch:
            drawn = epoch_order(
                self.num_rows, seed=self.seed, epoch=self.epoch, shuffle=self.shuffle
            )
            self._drawn = self.epoch, drawn
        return self._drawn[1]
