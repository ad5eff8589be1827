"""The policy in training: its log-probabilities and its update."""

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.registry import TrainedTokens, needs_summary, with_summary
from agentrl.config.schema.training import ActorConfig
from agentrl.protocol import DataProto
from agentrl.workers.batches import (
    UpdateRows,
    read_padded_rows,
    read_update_rows,
    split_micro_batches,
    split_mini_batches,
)
from agentrl.workers.distributed import World
from agentrl.workers.log_probs import TokenScores
from agentrl.workers.memory import explain_out_of_memory, explain_out_of_memory_in_step
from agentrl.workers.model import PolicyModel, ScoringParams
from agentrl.workers.optim import PolicyOptimizer
from agentrl.workers.packing import PackedBatch
from agentrl.workers.policy_loss import MicroLoss, NotFinite, compute_micro_loss
from agentrl.workers.rng import capture_random_state, restore_random_state
from agentrl.workers.scoring import score_rows


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
        mine = {name: math.fsum(map(float, parts)) for name, parts in self._parts.items()}
        totals: defaultdict[str, float] = defaultdict(float)
        for one in world.gather(mine):
            for name, value in one.items():
                totals[name] += value
        return dict(totals)


def mean_by_name(steps: list[dict[str, float]]) -> dict[str, float]:
    """Average each metric over the steps that have it."""
    by_name: defaultdict[str, list[float]] = defaultdict(list)
    for step in steps:
        for name, value in step.items():
            by_name[name].append(value)
    return {name: math.fsum(values) / len(values) for name, values in by_name.items()}


logger = logging.getLogger(__name__)


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

    update: int
    """Index of the call of `update_policy`, from 0."""
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
            f"the step of mini-batch {self.mini_batch} was skipped: loss {self.loss:g}, gradient "
            f"norm {self.grad_norm:g}; not finite in {len(self.rows)} rows: {', '.join(what)}"
        )


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of an update."""

    metrics: dict[str, float]
    """Flat names; means over the optimizer steps, except counts."""
    skipped: tuple[SkippedStep, ...]


@dataclass(frozen=True, slots=True)
class ActorCounters:
    """The counters of an actor that a checkpoint holds."""

    num_updates: int
    num_optimizer_steps: int


@dataclass(frozen=True, slots=True)
class _MiniBatch:
    """The inputs of one optimizer step."""

    rows: UpdateRows
    """The whole batch."""
    index: Sequence[int]
    """The rows of this mini-batch."""
    params: ScoringParams
    scale: LossScale

    def name(self, broken: Mapping[int, NotFinite]) -> list[BrokenRow]:
        return [BrokenRow(self.rows.request_ids[row], what) for row, what in broken.items()]


class Actor:
    """Owns the policy's weights and their optimizer.

    Args:
        policy: The sharded module.
        config: The update.
        total_steps: Optimizer steps of the whole run, for the schedule.
        response_budget: `data.max_response_length`, the divisor of `seq-mean-token-sum-norm`.
        seed: Seed of the order of mini-batches with `shuffle`.
    """

    def __init__(
        self,
        policy: PolicyModel,
        config: ActorConfig,
        *,
        total_steps: int,
        response_budget: int,
        seed: int = 0,
    ) -> None:
        self.policy = policy
        self.config = config
        self.world = policy.world
        self.optimizer = PolicyOptimizer(
            policy.named_weights(), config.optim, policy.world, total_steps
        )
        self.response_budget = response_budget
        self.seed = seed
        self.num_updates = 0

    def compute_log_probs(
        self, batch: DataProto, *, temperature: float, with_sum_pi_squared: bool = False
    ) -> TokenScores:
        """Score a batch with the current weights: `old_log_probs` and entropy.

        A collective.

        Args:
            batch: Rows as collated.
            temperature: The rollout's.
            with_sum_pi_squared: Also sum the squared probabilities of the vocabulary.

        Returns:
            `[B, T]` each, float32, 0 at masked positions.
        """
        params = replace(self._params(temperature), with_sum_pi_squared=with_sum_pi_squared)
        return score_rows(
            self.policy,
            read_padded_rows(batch),
            params,
            budget=self.config.ppo_max_token_len_per_gpu,
        )

    def update_policy(self, batch: DataProto, *, temperature: float) -> UpdateResult:
        """Train on a batch: epochs of mini-batches, one optimizer step each. A collective.

        A step with a loss or gradient that is not finite is skipped: weights, moments and schedule
        do not change, and the result reports it. A mini-batch in which every advantage is 0 and no
        other term (KL, entropy) gives a gradient takes no step either: momentum and weight decay
        would move the weights. Its metrics are kept.

        Args:
            batch: This rank's rows, with `advantages`, `old_log_probs` and, under `use_kl_loss`,
                `ref_log_prob`.
            temperature: The rollout's.
        """
        rows = read_update_rows(batch, with_reference=self.config.use_kl_loss)
        self.policy.train()
        measured: list[dict[str, float]] = []
        skipped: list[SkippedStep] = []
        before = self.optimizer.num_steps
        for number, index in enumerate(self._mini_batches(rows)):
            outcome = self._step(rows, index, self._params(temperature), number)
            if isinstance(outcome, SkippedStep):
                skipped.append(outcome)
            elif outcome:
                measured.append(outcome)
        self.num_updates += 1
        taken = self.optimizer.num_steps - before
        counts = {
            "actor/skipped_steps": len(skipped),
            "actor/zero_gradient_steps": len(measured) - taken,
            "actor/optimizer_steps": taken,
        }
        return UpdateResult(mean_by_name(measured) | counts, tuple(skipped))

    def counters(self) -> ActorCounters:
        """Return the counters that a checkpoint holds."""
        return ActorCounters(self.num_updates, self.optimizer.num_steps)

    def _params(self, temperature: float) -> ScoringParams:
        return ScoringParams(
            temperature=temperature, logits_block_bytes=self.config.logits_block_bytes
        )

    def _mini_batches(self, rows: UpdateRows) -> list[list[int]]:
        """Return this rank's rows of each mini-batch of all epochs."""
        found: list[list[int]] = []
        for epoch in range(self.config.ppo_epochs):
            seed = [self.seed, self.num_updates, epoch] if self.config.shuffle else []
            size = self.config.ppo_mini_batch_size
            found += split_mini_batches(rows, size, self.world, seed)
        return found

    def _step(
        self, rows: UpdateRows, index: Sequence[int], params: ScoringParams, number: int
    ) -> dict[str, float] | SkippedStep:
        """Train on one mini-batch; return no metrics if no token of it is trained."""
        scale = self._loss_scale(rows, list(index))
        if not scale.batch_num_tokens:
            return {}
        mini = _MiniBatch(rows, index, params, scale)
        trained = rows.advantages[list(index)][rows.response_mask[list(index)].bool()]
        has_advantages = bool(self.world.max([float(trained.ne(0).any())])[0])
        sums, broken = self._accumulate(mini)
        metrics = sums.totals(self.world)
        loss, grad_norm = metrics.pop("loss"), self.optimizer.grad_norm()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.optimizer.drop_gradients()
            causes = self.world.gather_flat(broken) or self._find_causes(mini)
            step = SkippedStep(self.num_updates, number, loss, grad_norm, tuple(causes))
            logger.warning("update %d: %s", self.num_updates, step.describe())
            return step
        lr = self.optimizer.lr
        if has_advantages or grad_norm:
            with explain_out_of_memory_in_step():
                self.optimizer.step(grad_scale=min(1.0, self.config.grad_clip / (grad_norm + 1e-6)))
        else:
            self.optimizer.drop_gradients()
        return metrics | {"actor/grad_norm": grad_norm, "actor/lr": lr}

    def _accumulate(self, mini: "_MiniBatch") -> tuple[MetricSums, list[BrokenRow]]:
        """Run the backward pass of every micro-batch; the gradients add up."""
        sums, broken = MetricSums(), list[BrokenRow]()
        for packed in self._micro_batches(mini):
            micro = self._backward(packed, mini)
            sums.add({**micro.parts, "loss": micro.loss.detach() / mini.scale.dp_size})
            broken += mini.name(micro.broken_rows)
        return sums, broken

    def _micro_batches(self, mini: "_MiniBatch") -> list[PackedBatch]:
        budget = self.config.ppo_max_token_len_per_gpu
        return split_micro_batches(mini.rows.padded, mini.index, budget, self.world)

    def _backward(self, packed: PackedBatch, mini: "_MiniBatch") -> MicroLoss:
        with explain_out_of_memory("the update", packed):
            scores = self.policy(packed, mini.params)
            micro = compute_micro_loss(scores, packed, mini.rows, mini.scale, self.config)
            micro.loss.backward()
        return micro

    def _find_causes(self, mini: "_MiniBatch") -> list[BrokenRow]:
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
        return self.world.gather_flat(causes) or self.world.gather_flat(everyone)

    def _loss_scale(self, rows: UpdateRows, index: list[int]) -> LossScale:
        """Return the denominators of a mini-batch over all ranks, and the summary for its loss."""
        mask, weights = rows.response_mask[index].bool(), rows.row_weights
        mine = LossScale.of(mask, row_weights=None if weights is None else weights[index])
        tokens, sequences = self.world.sum([mine.batch_num_tokens, mine.global_batch_size])
        scale = LossScale(
            batch_num_tokens=int(tokens),
            global_batch_size=int(sequences),
            dp_size=self.world.size,
            loss_scale_factor=float(self.response_budget),
            row_weights=weights,
        )
        if not needs_summary(self.config):
            return scale
        own = TrainedTokens(rows.old_log_probs[index][mask], rows.advantages[index][mask])
        return with_summary(scale, self.world.gather(own), self.config)
