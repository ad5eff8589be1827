"""The policy in training: its log-probabilities and its update."""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.registry import (
    TrainedTokens,
    needs_summary,
    policy_loss_facts,
    with_summary,
)
from agentrl.config.schema.training import ActorConfig
from agentrl.errors import DataError
from agentrl.protocol import DataProto
from agentrl.workers.batches import (
    UpdateRows,
    read_groups,
    read_padded_rows,
    read_update_rows,
    split_micro_batches,
    split_mini_batches,
)
from agentrl.workers.distributed import World
from agentrl.workers.log_probs import TokenScores
from agentrl.workers.memory import explain_out_of_memory, explain_out_of_memory_in_step
from agentrl.workers.model import PolicyModel, ScoringParams
from agentrl.workers.offload import OffloadedMemory
from agentrl.workers.optim import PolicyOptimizer
from agentrl.workers.packing import PackedBatch, count_tokens
from agentrl.workers.policy_loss import MicroLoss, NotFinite, compute_micro_loss, name_broken_rows
from agentrl.workers.rng import capture_random_state, restore_random_state
from agentrl.workers.row_exchange import RowExchange, plan_exchange
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
    log_probs: "ComputedLogProbs | None" = None
    """Those of the update's forward pass, if the batch had no `old_log_probs`."""


@dataclass(frozen=True, slots=True)
class ComputedLogProbs:
    """The log-probabilities of the rows that an update computed."""

    log_probs: Tensor
    """`[B, T]`, of the policy before the update; 0 at masked positions and in other rows."""
    is_computed: Tensor
    """`[B]` bool."""

    @classmethod
    def none(cls, like: Tensor) -> "ComputedLogProbs":
        """Make the record of `[B, T]` tokens before any row is computed."""
        return cls(torch.zeros_like(like), torch.zeros(len(like), dtype=torch.bool))

    def put(self, micros: Sequence[MicroLoss]) -> None:
        """Add the rows of some micro-batches."""
        for micro in micros:
            index = torch.tensor(micro.row_index, dtype=torch.int64)
            self.log_probs[index] = micro.log_probs.to(self.log_probs)
            self.is_computed[index] = True

    def send_back(self, exchange: RowExchange) -> "ComputedLogProbs":
        """Return the owners' rows. A collective."""
        return ComputedLogProbs(
            exchange.send_back(self.log_probs), exchange.send_back(self.is_computed)
        )


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
    """The rows of this mini-batch that are computed."""
    params: ScoringParams
    scale: LossScale
    has_advantages: bool
    """Whether an advantage of any rank is not 0."""

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
        fsdp, is_cpu = config.fsdp_config, policy.world.device.type == "cpu"
        moves_moments = fsdp.optimizer_offload and not fsdp.offload_policy and not is_cpu
        self.optimizer = PolicyOptimizer(
            policy.trained_weights(), config.optim, policy.world, total_steps
        )
        self.offload = OffloadedMemory(self.optimizer.state_tensors) if moves_moments else None
        self.response_budget = response_budget
        self.seed = seed
        self.num_updates = 0

    def compute_log_probs(
        self, batch: DataProto, *, temperature: float, with_sum_pi_squared: bool = False
    ) -> TokenScores:
        """Score a batch with the current weights: `old_log_probs` and entropy.

        A collective.

        Args:
            batch: This rank's rows as collated, as wide as those of all ranks.
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
            groups=read_groups(batch),
        )

    def update_policy(self, batch: DataProto, *, temperature: float) -> UpdateResult:
        """Train on a batch: epochs of mini-batches, one optimizer step each. A collective.

        A step with a loss or gradient that is not finite is skipped: weights, moments and schedule
        do not change, and the result reports it. A mini-batch in which every advantage is 0 and no
        other term (KL, entropy) gives a gradient takes no step either: momentum and weight decay
        would move the weights.

        A row in which every advantage is 0 is not computed if no term but the advantages gives a
        gradient (see `register_policy_loss`). Denominators of the loss count it; means of metrics
        are over the computed rows.

        Args:
            batch: This rank's rows, as wide as those of all ranks, with `advantages` and, under
                `use_kl_loss`, `ref_log_prob`. Without `old_log_probs`, they are those of the
                update's own forward pass; then the batch must be one optimizer step.
            temperature: The rollout's.

        Raises:
            DataError: without `old_log_probs`, if there are several optimizer steps or if the loss
                reads them before the forward pass.
        """
        with self.on_device():
            return self._update_policy(batch, temperature)

    def _update_policy(self, batch: DataProto, temperature: float) -> UpdateResult:
        rows = read_update_rows(batch, with_reference=self.config.use_kl_loss)
        self.policy.train()
        outcomes: list[dict[str, float] | SkippedStep] = []
        computed: ComputedLogProbs | None = None
        before = self.optimizer.num_steps
        for epoch in range(self.config.ppo_epochs):
            exchange = self._plan_exchange(rows, epoch)
            moved = rows.move(exchange)
            found = None
            if rows.old_log_probs is None:
                self._check_is_one_step(exchange)
                found = ComputedLogProbs.none(moved.advantages)
            for index in exchange.mini_batches:
                mini = self._mini_batch(moved, index, self._params(temperature))
                outcomes.append(self._step(mini, len(outcomes), found))
            computed = None if found is None else found.send_back(exchange)
        self.num_updates += 1
        skipped = [outcome for outcome in outcomes if isinstance(outcome, SkippedStep)]
        measured = [outcome for outcome in outcomes if isinstance(outcome, dict) and outcome]
        taken = self.optimizer.num_steps - before
        counts = {
            "actor/skipped_steps": len(skipped),
            "actor/zero_gradient_steps": len(measured) - taken,
            "actor/optimizer_steps": taken,
        }
        return UpdateResult(mean_by_name(measured) | counts, tuple(skipped), computed)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have weights and moments in their own memory while the block runs."""
        moments = nullcontext() if self.offload is None else self.offload.in_use()
        with self.policy.on_device(), moments:
            yield

    def counters(self) -> ActorCounters:
        """Return the counters that a checkpoint holds."""
        return ActorCounters(self.num_updates, self.optimizer.num_steps)

    def _params(self, temperature: float) -> ScoringParams:
        return ScoringParams(
            temperature=temperature,
            logits_block_bytes=self.config.logits_block_bytes,
            share_prefixes=self.config.share_prefixes,
        )

    def _plan_exchange(self, rows: UpdateRows, epoch: int) -> RowExchange:
        """Plan which rank computes which rows of each mini-batch of an epoch. A collective."""
        seed = [self.seed, self.num_updates, epoch] if self.config.shuffle else []
        owned = split_mini_batches(rows, self.config.ppo_mini_batch_size, self.world, seed)
        lengths, computed = count_tokens(rows.padded), self._find_computed(rows)
        lengths = [length if row else 0 for length, row in zip(lengths, computed, strict=True)]
        return plan_exchange(self.world, lengths, rows.uids, owned)

    def _find_computed(self, rows: UpdateRows) -> list[bool]:
        """Return for each row whether a term of the loss may give it a gradient."""
        config = self.config
        facts = policy_loss_facts(config.policy_loss.loss_mode)
        if facts.only_advantages and not config.use_kl_loss and not config.entropy_coeff:
            return rows.find_signal()
        return [True] * len(rows.uids)

    def _check_is_one_step(self, exchange: RowExchange) -> None:
        if self.config.ppo_epochs * len(exchange.mini_batches) > 1 or needs_summary(self.config):
            raise DataError(
                "the batch has no 'old_log_probs'",
                expected="log-probabilities before the update, unless the batch is one optimizer "
                "step of a loss that needs no summary of them",
            )

    def _step(
        self, mini: "_MiniBatch", number: int, found: ComputedLogProbs | None
    ) -> dict[str, float] | SkippedStep:
        """Train on one mini-batch; return no metrics if no token of it is trained."""
        if not mini.scale.batch_num_tokens:
            return {}
        micros, sums = self._accumulate(mini)
        if found is not None:
            found.put(micros)
        metrics = {"actor/pg_loss": 0.0, "loss": 0.0} | sums.totals(self.world)
        loss, grad_norm = metrics.pop("loss"), self.optimizer.grad_norm()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            self.optimizer.drop_gradients()
            broken = mini.name(name_broken_rows(micros))
            causes = self._gather_rows(broken) or self._find_causes(mini)
            step = SkippedStep(self.num_updates, number, loss, grad_norm, tuple(causes))
            logger.warning("update %d: %s", self.num_updates, step.describe())
            return step
        lr = self.optimizer.lr
        if mini.has_advantages or grad_norm:
            with explain_out_of_memory_in_step():
                self.optimizer.step(grad_scale=min(1.0, self.config.grad_clip / (grad_norm + 1e-6)))
        else:
            self.optimizer.drop_gradients()
        return metrics | {"actor/grad_norm": grad_norm, "actor/lr": lr}

    def _accumulate(self, mini: "_MiniBatch") -> tuple[list[MicroLoss], MetricSums]:
        """Run the backward pass of every micro-batch; the gradients add up."""
        micros, sums = list[MicroLoss](), MetricSums()
        for packed in self._micro_batches(mini):
            micro = self._backward(packed, mini)
            sums.add({**micro.parts, "loss": micro.loss / mini.scale.dp_size})
            micros.append(micro)
        return micros, sums

    def _micro_batches(self, mini: "_MiniBatch") -> list[PackedBatch]:
        budget = self.config.ppo_max_token_len_per_gpu
        sharing = self.policy.max_sharing_length(mini.params)
        return split_micro_batches(
            mini.rows.padded, mini.index, budget, self.world, max_sharing_length=sharing
        )

    def _backward(self, packed: PackedBatch, mini: "_MiniBatch") -> MicroLoss:
        with explain_out_of_memory("the update", packed):
            scores = self.policy(packed, mini.params)
            micro = compute_micro_loss(scores, packed, mini.rows, mini.scale, self.config)
            micro.loss.backward()
        return replace(micro, loss=micro.loss.detach())

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
        return self._gather_rows(causes) or self._gather_rows(everyone)

    def _gather_rows(self, broken: list[BrokenRow]) -> list[BrokenRow]:
        return self.world.gather_flat(broken if self.world.reports_rows else [])

    def _mini_batch(
        self, rows: UpdateRows, index: list[int], params: ScoringParams
    ) -> "_MiniBatch":
        """Return the rows of a mini-batch that are computed, and its denominators. A collective.

        The denominators are over all ranks and count all rows.
        """
        mask, weights = rows.response_mask.bool(), rows.row_weights
        mine = LossScale.of(mask[index], row_weights=None if weights is None else weights[index])
        is_computed, has_signal = self._find_computed(rows), rows.find_signal()
        computed = [row for row in index if is_computed[row]]
        num_signals = sum(has_signal[row] for row in index)
        share = float(self.world.reports_rows)
        num_measured = int(mask[computed].sum())
        tokens, sequences, measured, signals = self.world.sum(
            [
                share * count
                for count in (
                    mine.batch_num_tokens,
                    mine.global_batch_size,
                    num_measured,
                    num_signals,
                )
            ]
        )
        scale = LossScale(
            batch_num_tokens=int(tokens),
            global_batch_size=int(sequences),
            num_measured_tokens=int(measured),
            dp_size=self.world.size,
            loss_scale_factor=float(self.response_budget),
            row_weights=weights,
        )
        if needs_summary(self.config) and rows.old_log_probs is not None:
            inside = mask[index]
            own = TrainedTokens(rows.old_log_probs[index][inside], rows.advantages[index][inside])
            parts = self.world.gather_flat([own] if self.world.reports_rows else [])
            scale = with_summary(scale, parts, self.config)
        return _MiniBatch(rows, computed, params, scale, has_advantages=signals > 0)
