"""The update of a model: epochs of mini-batches, an optimizer step each. Actor and critic share it.

UpdateRows   -> RowExchange     which rank computes which rows (`row_exchange.py`)
             -> mini-batches    the rows and denominators of one optimizer step
             -> PackedBatch     micro-batches (`batches.py`); their gradients add up
             -> MicroLoss       the objective of the model: policy loss or value loss
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from agentrl.algorithms.aggregation import LossScale, count_sequences
from agentrl.config.schema.training import UpdateConfig
from agentrl.errors import DataError
from agentrl.progress import Advance
from agentrl.workers.batches import UpdateRows, split_micro_batches, split_mini_batches
from agentrl.workers.distributed import World
from agentrl.workers.memory import explain_out_of_memory, explain_out_of_memory_in_step
from agentrl.workers.model import PackedModel
from agentrl.workers.offload import OffloadedMemory
from agentrl.workers.optim import PolicyOptimizer
from agentrl.workers.packing import PackedBatch, count_tokens, move_to_device
from agentrl.workers.rng import capture_random_state, restore_random_state
from agentrl.workers.row_exchange import RowExchange, plan_exchange

logger = logging.getLogger(__name__)
Rows = TypeVar("Rows", bound=UpdateRows)

NotFinite = dict[str, tuple[int, ...]]
"""By quantity: the response tokens at which it is not finite."""


@dataclass(frozen=True, slots=True)
class MicroLoss:
    """One micro-batch's part of its mini-batch."""

    loss: Tensor
    """Scalar with gradient, multiplied by the number of ranks because FSDP2 averages over them."""
    parts: dict[str, Tensor | float]
    """Parts of the mini-batch's metrics; they add up over micro-batches and ranks."""
    row_index: tuple[int, ...]
    """The rows of the batch."""
    outputs: Tensor
    """`[b, T]`, detached: log-probabilities or values; 0 at masked positions."""
    broken: dict[str, Tensor]
    """`[b, T]` bool by quantity: trained tokens at which it is not finite."""

    @classmethod
    def of_dummy(cls, packed: PackedBatch, *outputs: Tensor) -> "MicroLoss":
        """Return the loss 0 of a micro-batch without rows.

        It is zero times the outputs: the backward pass must run through every shard.
        """
        nothing = outputs[0].detach().new_zeros(0, packed.response_length)
        loss = torch.stack([one.sum() for one in outputs]).sum() * 0.0
        return cls(loss, {}, (), nothing, {})


def take_trained(
    packed: PackedBatch, mask: Tensor, columns: Mapping[str, Tensor | None], device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """Take a micro-batch's rows of some columns `[B, T]` to its device, with 0 where masked.

    Masked here once, so that observations are invisible in every loss.

    Returns:
        The mask, `[b, T]` bool, and the columns that are not None, `[b, T]` each.
    """
    index = torch.tensor(packed.row_index)
    trained = move_to_device(mask[index], device).ne(0)
    return trained, {
        name: torch.where(trained, move_to_device(column[index], device), 0.0)
        for name, column in columns.items()
        if column is not None
    }


def find_broken(checked: Mapping[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Find the trained tokens, `[b, T]` bool, at which a quantity is not finite."""
    return {name: ~tensor.isfinite() & mask for name, tensor in checked.items()}


class Objective(Protocol):
    """What a model learns from the rows of an update."""

    @property
    def rows(self) -> UpdateRows:
        """The rows that this rank computes, or those that it owns."""
        ...

    @property
    def metric(self) -> str:
        """Name of the loss among the metrics."""
        ...

    def find_signal(self) -> list[bool]:
        """Return for each row whether there is anything to learn.

        A mini-batch without such a row, and without a gradient, takes no optimizer step.
        """
        ...

    def find_computed(self) -> list[bool]:
        """Return for each row whether a term of the loss may give it a gradient."""
        ...

    def add_summary(self, scale: LossScale, index: Sequence[int]) -> LossScale:
        """Add what the loss needs of all rows of a mini-batch. A collective.

        Args:
            scale: The denominators of the mini-batch.
            index: This rank's rows of the mini-batch.
        """
        ...

    def compute_loss(self, packed: PackedBatch, scale: LossScale) -> MicroLoss:
        """Run the forward pass of a micro-batch, and compute its share of the mini-batch's loss."""
        ...


class MetricSums:
    """Sums of metrics by flat name. A part is a share of a mean, so parts add up."""

    def __init__(self) -> None:
        self._parts: defaultdict[str, list[Tensor | float]] = defaultdict(list)

    def add(self, parts: Mapping[str, Tensor | float]) -> None:
        """Add a micro-batch's parts. `totals` reads the tensors, so that no device waits here."""
        for name, part in parts.items():
            self._parts[name].append(part)

    def totals(self, world: World) -> dict[str, float]:
        """Sum all parts of all ranks. A collective."""
        mine = {name: _sum(_read(parts)) for name, parts in self._parts.items()}
        totals: defaultdict[str, float] = defaultdict(float)
        for one in world.gather(mine if world.reports_rows else {}):
            for name, value in one.items():
                totals[name] += value
        return dict(totals)


def _read(parts: Sequence[Tensor | float]) -> list[float]:
    """Read all parts from their device at once."""
    return torch.stack([torch.as_tensor(part).double() for part in parts]).tolist()


def _sum(values: Sequence[float]) -> float:
    """Add exactly; `fsum` refuses infinities of both signs, which have the sum NaN."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def mean_by_name(steps: list[dict[str, float]]) -> dict[str, float]:
    """Average each metric over the steps that have it."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            by_name[name].append(value)
    return {name: math.fsum(values) / len(values) for name, values in by_name.items()}


@dataclass(frozen=True, slots=True)
class BrokenRow:
    """A row that caused an optimizer step to be skipped."""

    request_id: str
    not_finite: NotFinite
    """If all values of the row are finite, but not the loss or gradient of its micro-batch: `loss`
    or `gradient`, without tokens."""


@dataclass(frozen=True, slots=True)
class SkippedStep:
    """An optimizer step that was skipped because its loss or gradient was not finite."""

    role: str
    """`actor` or `critic`."""
    update: int
    """Index of the update of this role, from 0."""
    mini_batch: int
    """Index of the mini-batch, counted over the epochs."""
    loss: float
    grad_norm: float
    rows: tuple[BrokenRow, ...]
    """The rows that caused it, of all ranks."""

    @property
    def request_ids(self) -> tuple[str, ...]:
        """The requests of these rows."""
        return tuple(row.request_id for row in self.rows)

    def describe(self) -> str:
        """Describe what was not finite, for a line of the run's output."""
        what = sorted({name for row in self.rows for name in row.not_finite})
        return (
            f"the {self.role}'s step of mini-batch {self.mini_batch} was skipped: "
            f"loss {self.loss:g}, gradient norm {self.grad_norm:g}; not finite in "
            f"{len(self.rows)} rows: {', '.join(what)}"
        )


@dataclass(frozen=True, slots=True)
class RowOutputs:
    """What the forward passes of an update computed: log-probabilities or values."""

    values: Tensor
    """`[B, T]`, of the model before its step; 0 at masked positions and in other rows."""
    is_computed: Tensor
    """`[B]` bool."""

    @classmethod
    def of(cls, micros: Sequence[MicroLoss], like: Tensor) -> "RowOutputs":
        """Collect the outputs of some micro-batches of `[B, T]` tokens."""
        found = torch.zeros(like.shape), torch.zeros(len(like), dtype=torch.bool)
        for micro in micros:
            index = torch.tensor(micro.row_index, dtype=torch.int64)
            found[0][index] = micro.outputs.to(found[0])
            found[1][index] = True
        return cls(*found)

    def send_back(self, exchange: RowExchange) -> "RowOutputs":
        """Return the owners' rows. A collective."""
        return RowOutputs(exchange.send_back(self.values), exchange.send_back(self.is_computed))


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of an update."""

    metrics: dict[str, float]
    """Flat names; means over the optimizer steps, except counts."""
    skipped: tuple[SkippedStep, ...] = ()
    outputs: RowOutputs | None = None
    """Those of the last epoch, if the caller asked for them."""
    row_lengths: Sequence[int] = ()
    """Tokens of each row of this rank that was computed, over the epochs. Ranks that compute the
    same rows have them once."""


@dataclass(frozen=True, slots=True)
class UpdateCounters:
    """The counters of a trained model that a checkpoint holds."""

    num_updates: int
    num_optimizer_steps: int


@dataclass(frozen=True, slots=True)
class _MiniBatch:
    """The inputs of one optimizer step."""

    objective: Objective
    """With the rows of the whole batch."""
    index: Sequence[int]
    """The rows of this mini-batch that are computed."""
    scale: LossScale
    has_signal: bool
    """Whether a row of any rank has something to learn."""

    def name(self, broken: Mapping[int, NotFinite]) -> list[BrokenRow]:
        names = self.objective.rows.request_ids
        return [BrokenRow(names[row], what) for row, what in broken.items()]


class Updater:
    """Owns the optimizer of a model's weights, and takes its steps.

    Args:
        model: The sharded module.
        config: Mini-batches, micro-batches, optimizer.
        role: `actor` or `critic`: the section of the run file, and the prefix of metrics.
        total_steps: Optimizer steps of the whole run, for the schedule.
        response_budget: `data.max_response_length`, the divisor of `seq-mean-token-sum-norm`.
        seed: Seed of the order of mini-batches with `shuffle`.
    """

    def __init__(
        self,
        model: PackedModel,
        config: UpdateConfig,
        *,
        role: str,
        total_steps: int,
        response_budget: int,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.config = config
        self.role = role
        self.world = model.world
        fsdp, is_cpu = config.fsdp_config, model.world.device.type == "cpu"
        moves_moments = fsdp.optimizer_offload and not fsdp.offload_policy and not is_cpu
        self.optimizer = PolicyOptimizer(
            model.trained_weights(), config.optim, model.world, total_steps
        )
        self.offload = OffloadedMemory(self.optimizer.state_tensors) if moves_moments else None
        self.response_budget = response_budget
        self.seed = seed
        self.num_updates = 0

    def update(
        self, rows: Rows, make: Callable[[Rows], Objective], *, keeps_outputs: bool = False
    ) -> UpdateResult:
        """Train on a batch: epochs of mini-batches, one optimizer step each. A collective.

        A step with a loss or gradient that is not finite is skipped: weights, moments and schedule
        do not change, and the result reports it. A mini-batch without a signal (see `Objective`)
        and without a gradient takes no step either: momentum and weight decay would move the
        weights.

        A row to which no term of the loss gives a gradient is not computed. Denominators of the
        loss count it; means of metrics are over the computed rows.

        Args:
            rows: This rank's rows, as wide as those of all ranks.
            make: Makes the objective of some rows.
            keeps_outputs: Whether the result has the outputs of the forward pass; then the batch
                must be one optimizer step.

        Raises:
            DataError: with `keeps_outputs`, if there are several optimizer steps.
        """
        self.model.train()
        outcomes: list[dict[str, float] | SkippedStep] = []
        outputs: RowOutputs | None = None
        lengths: list[int] = []
        before = self.optimizer.num_steps
        with self.on_device():
            for epoch in range(self.config.ppo_epochs):
                exchange = self._plan_exchange(make(rows), epoch, lengths)
                if keeps_outputs:
                    self._check_is_one_step(exchange)
                objective, micros = make(rows.move(exchange)), list[MicroLoss]()
                with self.world.status.count(sum(objective.find_computed())) as advance:
                    for index in exchange.mini_batches:
                        micros, outcome = self._step(objective, index, len(outcomes), advance)
                        outcomes.append(outcome)
                if keeps_outputs:
                    found = RowOutputs.of(micros, objective.rows.response_mask)
                    outputs = found.send_back(exchange)
        self.num_updates += 1
        taken = self.optimizer.num_steps - before
        return UpdateResult(
            self._summarize(outcomes, taken),
            tuple(outcome for outcome in outcomes if isinstance(outcome, SkippedStep)),
            outputs,
            lengths if self.world.reports_rows else (),
        )

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have weights and moments in their own memory while the block runs."""
        moments = nullcontext() if self.offload is None else self.offload.in_use()
        with self.model.on_device(), moments:
            yield

    def counters(self) -> UpdateCounters:
        """Return the counters that a checkpoint holds."""
        return UpdateCounters(self.num_updates, self.optimizer.num_steps)

    def _summarize(
        self, outcomes: Sequence[dict[str, float] | SkippedStep], num_taken: int
    ) -> dict[str, float]:
        """Return the metrics of an update of which so many steps were taken."""
        measured = [outcome for outcome in outcomes if isinstance(outcome, dict) and outcome]
        counts = {
            "skipped_steps": sum(isinstance(outcome, SkippedStep) for outcome in outcomes),
            "zero_gradient_steps": len(measured) - num_taken,
            "optimizer_steps": num_taken,
        }
        return mean_by_name(measured) | {f"{self.role}/{name}": counts[name] for name in counts}

    def _plan_exchange(
        self, objective: Objective, epoch: int, computed_lengths: list[int]
    ) -> RowExchange:
        """Plan which rank computes which rows of each mini-batch of an epoch. A collective.

        The lengths of this rank's rows that are computed are added to `computed_lengths`.
        """
        rows, size = objective.rows, self.config.ppo_mini_batch_size
        seed = [self.seed, self.num_updates, epoch] if self.config.shuffle else []
        owned = split_mini_batches(rows, size, self.world, seed)
        lengths, computed = count_tokens(rows.padded), objective.find_computed()
        lengths = [length if row else 0 for length, row in zip(lengths, computed, strict=True)]
        computed_lengths += filter(None, lengths)
        return plan_exchange(self.world, lengths, rows.uids, owned)

    def _check_is_one_step(self, exchange: RowExchange) -> None:
        if self.config.ppo_epochs * len(exchange.mini_batches) > 1:
            raise DataError(
                "the batch has no 'old_log_probs'",
                expected="log-probabilities before the update, unless the batch is one optimizer "
                "step",
            )

    def _step(
        self, objective: Objective, index: Sequence[int], number: int, advance: Advance
    ) -> tuple[list[MicroLoss], dict[str, float] | SkippedStep]:
        """Train on one mini-batch; return no metrics if no token of it is trained."""
        mini = self._mini_batch(objective, index)
        if not mini.scale.batch_num_tokens:
            return [], {}
        micros, sums = self._accumulate(mini, advance)
        metrics = {objective.metric: 0.0, "loss": 0.0} | sums.totals(self.world)
        loss, grad_norm = metrics.pop("loss"), self.optimizer.grad_norm()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.optimizer.drop_gradients()
            broken = mini.name(name_broken_rows(micros))
            causes = tuple(self._gather_rows(broken) or self._find_causes(mini))
            step = SkippedStep(self.role, self.num_updates, number, loss, grad_norm, causes)
            logger.warning("update %d: %s", self.num_updates, step.describe())
            return micros, step
        lr = self.optimizer.lr
        if mini.has_signal or grad_norm:
            with explain_out_of_memory_in_step(self.role):
                self.optimizer.step(grad_scale=min(1.0, self.config.grad_clip / (grad_norm + 1e-6)))
        else:
            self.optimizer.drop_gradients()
        return micros, metrics | {f"{self.role}/grad_norm": grad_norm, f"{self.role}/lr": lr}

    def _accumulate(self, mini: _MiniBatch, advance: Advance) -> tuple[list[MicroLoss], MetricSums]:
        """Run the backward pass of every micro-batch; the gradients add up."""
        micros, sums = list[MicroLoss](), MetricSums()
        for packed in self._micro_batches(mini):
            micro = self._backward(packed, mini)
            sums.add({**micro.parts, "loss": micro.loss / mini.scale.dp_size})
            micros.append(micro)
            advance(len(packed.row_index))
        return micros, sums

    def _micro_batches(self, mini: _MiniBatch) -> list[PackedBatch]:
        sharing = self.model.max_sharing_length(share_prefixes=self.config.share_prefixes)
        budget = self.config.ppo_max_token_len_per_gpu
        return split_micro_batches(
            mini.objective.rows.padded, mini.index, budget, self.world, max_sharing_length=sharing
        )

    def _backward(self, packed: PackedBatch, mini: _MiniBatch) -> MicroLoss:
        with explain_out_of_memory(f"the update of the {self.role}", packed, section=self.role):
            micro = mini.objective.compute_loss(packed, mini.scale)
            micro.loss.backward()
        return replace(micro, loss=micro.loss.detach())

    def _find_causes(self, mini: _MiniBatch) -> list[BrokenRow]:
        """Find the rows that cause a loss or gradient that is not finite from finite values.

        Each micro-batch is computed again, alone. If some are not finite again, all their rows are
        the causes; otherwise all rows of the mini-batch are. A collective.
        """
        random = capture_random_state()
        causes, everyone = list[BrokenRow](), list[BrokenRow]()
        for packed in self._micro_batches(mini):
            loss = self._backward(packed, mini).loss
            grad_norm = self.optimizer.grad_norm()
            self.optimizer.drop_gradients()
            own = not bool(loss.isfinite())
            breaks = own if self.world.max([float(own)])[0] else not math.isfinite(grad_norm)
            rows = mini.name({row: {"loss" if own else "gradient": ()} for row in packed.row_index})
            causes += rows if breaks else []
            everyone += rows
        restore_random_state(random)
        return self._gather_rows(causes) or self._gather_rows(everyone)

    def _gather_rows(self, broken: list[BrokenRow]) -> list[BrokenRow]:
        return self.world.gather_flat(broken if self.world.reports_rows else [])

    def _mini_batch(self, objective: Objective, index: Sequence[int]) -> _MiniBatch:
        """Return the rows of a mini-batch that are computed, and its denominators. A collective.

        The denominators are over all ranks and count all rows.
        """
        rows = objective.rows
        mask, weights = rows.response_mask.bool(), rows.row_weights
        own_weights = None if weights is None else weights[index]
        is_computed, has_signal = objective.find_computed(), objective.find_signal()
        computed = [row for row in index if is_computed[row]]
        share = float(self.world.reports_rows)
        counts = (
            int(mask[index].sum()),
            # Not rounded: another rank may compute the other rows of a trajectory.
            float(count_sequences(mask[index], own_weights).sum()),
            int(mask[computed].sum()),
            sum(has_signal[row] for row in index),
        )
        tokens, sequences, measured, signals = self.world.sum([share * count for count in counts])
        scale = LossScale(
            batch_num_tokens=int(tokens),
            global_batch_size=round(sequences),
            num_measured_tokens=int(measured),
            dp_size=self.world.size,
            loss_scale_factor=float(self.response_budget),
            row_weights=weights,
        )
        scale = objective.add_summary(scale, index)
        return _MiniBatch(objective, computed, scale, has_signal=signals > 0)


def name_broken_rows(micros: Sequence[MicroLoss]) -> dict[int, NotFinite]:
    """Name the rows with a value that the loss reads and that is not finite.

    Called once for all micro-batches, because it waits for the device.
    """
    found: dict[int, NotFinite] = {}
    for micro in micros:
        for name, positions in micro.broken.items():
            for row in positions.any(dim=1).nonzero().flatten().tolist():
                tokens = tuple(positions[row].nonzero().flatten().tolist())
                found.setdefault(micro.row_index[row], {})[name] = tokens
    return found
