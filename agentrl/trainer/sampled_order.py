"""The order of the data by a sampler of the user, with verl's interface (`data.sampler`)."""

import base64
import copy
import io
import logging
import pickle
import random
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from omegaconf import OmegaConf

from agentrl.config.schema.run import DataConfig
from agentrl.data.dataset import PromptDataset
from agentrl.data.order import DataOrder
from agentrl.data.rows import Prompt
from agentrl.errors import DataError, PluginError
from agentrl.plugins import load_object
from agentrl.protocol import DataProto
from agentrl.workers.distributed import World
from agentrl.workers.rng import capture_random_state, restore_random_state, seed_everything

_KEY = "data.sampler"
logger = logging.getLogger(__name__)


class SampledOrder(DataOrder):
    """Batches in the order of a sampler; the main rank has it.

    A sampler without `update` is iterated once for each epoch. One with `update` is iterated again
    for each batch, without the rows that the epoch has had, so that an update counts at once. While
    it is iterated, the global random streams have a seed of `data.seed` and the epoch.

    Args:
        rows: The training rows.
        config: The section `data`.
        world: The ranks.

    Raises:
        PluginError: if the class cannot be loaded or built.
    """

    def __init__(self, rows: PromptDataset, config: DataConfig, world: World) -> None:
        super().__init__(
            len(rows), seed=config.seed, shuffle=config.shuffle, fingerprint=rows.fingerprint
        )
        self._rows, self._config, self._world = rows, config, world
        self._taken: list[int] = []
        self._sampler = self._build()
        self._report_unsaved()

    def num_batches(self, size: int) -> int:
        """Count the full batches of one epoch, by the sampler's length if it has one."""
        has_length = hasattr(self._sampler, "__len__")
        return (len(self._sampler) if has_length else self.num_rows) // size

    def next_batch(self, size: int) -> list[int]:
        """Return the indices of the next rows. A collective.

        Raises:
            DataError: if an epoch of the sampler does not fill a batch, or an index is no row.
        """
        self.check_batch(size)
        found: list[int] = []
        with self._world.raise_on_all_ranks():
            if self._world.is_main:
                found = self._draw(size)
                if len(found) < size:
                    self.epoch, self._taken = self.epoch + 1, []
                    found = self._draw(size)
                if len(found) < size:
                    raise DataError(
                        f"an epoch of the sampler has {len(found)} rows", key=_KEY,
                        expected=f"at least {size}, those of a batch",
                    )  # fmt: skip
                self._taken = [*self._taken, *found]
        found, self.epoch, self._taken = self._world.broadcast((found, self.epoch, self._taken))
        self.position = len(self._taken)
        return found

    def update(self, batch: DataProto) -> None:
        """Give the sampler a step's batch of all ranks, if it has `update`. A collective."""
        if not self._adapts:
            return
        parts = self._world.gather_on_main([batch.to("cpu")])
        with self._world.raise_on_all_ranks():
            if self._world.is_main:
                self._sampler.update(batch=DataProto.concat(parts))

    def state_dict(self) -> dict[str, Any]:
        """Return position, taken rows and the sampler's state."""
        sampler = None
        if self._adapts:
            sampler = _pack(self._own_state())
        return super().state_dict() | {"taken": list(self._taken), "sampler": sampler}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position of `state`; see `DataOrder.load_state_dict`."""
        super().load_state_dict(state)
        self._taken, self._sampler = list(state["taken"]), self._build()
        if state["sampler"] is None:  # it repeats its epochs
            for epoch in range(self.epoch):
                self._order_of(epoch)
            return
        own = self._own_state()
        if self._keeps_state:  # its new state may refer to the sampler's own objects
            own = {name: copy.copy(value) for name, value in own.items()}
            self._sampler.load_state_dict(_unpack(state["sampler"], own))
        else:
            vars(self._sampler).update(_unpack(state["sampler"], own))

    def _draw(self, size: int) -> list[int]:
        """Take up to so many rows that the epoch has not had."""
        if not self._adapts:
            return self._order_of(self.epoch)[len(self._taken) : len(self._taken) + size]
        taken = set(self._taken)
        with _seeded(self.seed, self.epoch):
            left = (row for row in self._iterate() if row not in taken)
            return list(islice(left, size))

    def _order_of(self, epoch: int) -> list[int]:
        if self._drawn is None or self._drawn[0] != epoch:
            with _seeded(self.seed, epoch):
                self._drawn = epoch, list(self._iterate())
        return self._drawn[1]

    def _iterate(self) -> Iterator[int]:
        for index in self._sampler:
            if not 0 <= int(index) < self.num_rows:
                expected = f"an index of the {self.num_rows} rows"
                raise DataError(f"the sampler gives {index!r}", key=_KEY, expected=expected)
            yield int(index)

    def _own_state(self) -> Mapping[str, Any]:
        return self._sampler.state_dict() if self._keeps_state else vars(self._sampler)

    def _report_unsaved(self) -> None:
        """Warn about attributes of a sampler with `update` that a checkpoint cannot have."""
        if not self._adapts or not self._world.is_main:
            return
        own = self._own_state()
        unsaved = sorted(own.keys() - _pack(own).keys() - {"data_source", "data_config"})
        if unsaved:
            logger.warning(
                "data.sampler: a checkpoint does not have its %s: a resumed run has them "
                "as the constructor makes them; define state_dict and load_state_dict to save them",
                ", ".join(unsaved),
            )

    @property
    def _adapts(self) -> bool:
        return hasattr(self._sampler, "update")

    @property
    def _keeps_state(self) -> bool:
        return all(hasattr(self._sampler, name) for name in ("state_dict", "load_state_dict"))

    def _build(self) -> Any:
        chosen, self._drawn = cast("Any", self._config.sampler), None
        path = f"{chosen.path}:{chosen.name}"
        config = OmegaConf.create(self._config.model_dump(mode="json"))
        kind = load_object(path)
        try:
            with _seeded(self.seed, -1):
                made = kind(data_source=_Rows(self._rows), data_config=config)
        except TypeError as error:
            wanted = "a class that is built with data_source and data_config"
            raise PluginError(f"{path}: {error}", key=_KEY, expected=wanted) from error
        if not isinstance(made, Iterable):
            raise PluginError(f"{path} has no __iter__", key=_KEY, expected="one that gives rows")
        return made


class _Rows(Sequence[dict[str, Any]]):
    """The rows as samplers read them: dicts of columns."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: Any) -> Any:
        prompt = self._prompts[index]
        return prompt.columns | {
            "prompt": [message.to_template() for message in prompt.messages],
            "data_source": prompt.data_source,
            "reward_model": {"style": "rule", "ground_truth": prompt.ground_truth},
            "extra_info": prompt.extra_info,
            "index": prompt.extra_info.get("index", prompt.index),
        }


@contextmanager
def _seeded(seed: int, epoch: int) -> Generator[None]:
    """Seed the global random streams in a `with` block, and restore them after it."""
    before = capture_random_state()
    seed_everything(hash((seed, epoch)) % 2**31)
    try:
        yield
    finally:
        restore_random_state(before)


def _pack(values: Mapping[str, Any]) -> dict[str, str]:
    """Write the values that a safe load can read: numbers, texts, containers, arrays, generators.

    Others are left out: a resumed sampler has them as its constructor makes them.
    """
    packed: dict[str, str] = {}
    for name, value in values.items():
        match value:
            case random.Random():
                plain: Any = value.getstate()
            case torch.Generator():
                plain = value.get_state()
            case np.random.Generator():
                plain = value.bit_generator.state
            case np.ndarray():
                plain = torch.from_numpy(value)
            case _:
                plain = dict(cast("Any", value)) if isinstance(value, dict) else value
        file = io.BytesIO()
        with suppress(pickle.PickleError, TypeError, AttributeError, RuntimeError):
            torch.save(plain, file)
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
            packed[name] = base64.b64encode(file.getvalue()).decode("ascii")
    return packed


def _unpack(packed: Mapping[str, str], current: Mapping[str, Any]) -> dict[str, Any]:
    """Read what `_pack` wrote; a value gets the type that it has now."""
    found: dict[str, Any] = {}
    for name, text in packed.items():
        plain = torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)
        found[name] = now = current.get(name, plain)
        match now:
            case random.Random():
                now.setstate(plain)
            case torch.Generator():
                now.set_state(plain)
            case np.random.Generator():
                now.bit_generator.state = plain
            case dict():
                cast("dict[Any, Any]", now).clear()
                cast("dict[Any, Any]", now).update(plain)
            case _:
                found[name] = plain.numpy() if isinstance(now, np.ndarray) else plain
    return found
