"""The policy in training: its log-probabilities and its update."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.losses.registry import (
    TrainedTokens,
    needs_summary,
    policy_loss_facts,
    with_summary,
)
from agentrl.config.schema.training import ActorConfig
from agentrl.errors import ConfigError, DataError
from agentrl.protocol import DataProto
from agentrl.workers.batches import PolicyRows, read_groups, read_padded_rows
from agentrl.workers.log_probs import TokenScores
from agentrl.workers.model import PolicyModel, ScoringParams
from agentrl.workers.optim import PolicyOptimizer
from agentrl.workers.packing import PackedBatch
from agentrl.workers.policy_loss import compute_micro_loss
from agentrl.workers.scoring import score_rows
from agentrl.workers.update import MicroLoss, UpdateCounters, Updater, UpdateResult


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
        self.updater = Updater(
            policy,
            config,
            role="actor",
            total_steps=total_steps,
            response_budget=response_budget,
            seed=seed,
        )

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
        """Train on a batch (see `Updater.update`). A collective.

        The signal of a row is an advantage that is not 0. A row without one is not computed if no
        term but the advantages gives a gradient (see `register_policy_loss`).

        Args:
            batch: This rank's rows, as wide as those of all ranks, with `advantages` and, under
                `use_kl_loss`, `ref_log_prob`. Without `old_log_probs`, they are those of the
                update's own forward pass, and the result has them as `outputs`; then the batch must
                be one optimizer step.
            temperature: The rollout's.

        Raises:
            DataError: without `old_log_probs`, if there are several optimizer steps or if the loss
                reads them before the forward pass.
            ConfigError: if several rows of a trajectory are trained, and the loss takes a ratio of
                the row.
        """
        rows = PolicyRows.read(batch, with_reference=self.config.use_kl_loss)
        if rows.old_log_probs is None and needs_summary(self.config):
            raise DataError(
                "the batch has no 'old_log_probs'",
                expected=f"log-probabilities before the update, of which the loss "
                f"{self.config.policy_loss.loss_mode} needs a summary",
            )
        self._refuse_split_trajectories(rows)
        params = self._params(temperature)
        return self.updater.update(
            rows,
            lambda rows: PolicyObjective(rows, self.policy, self.config, params),
            keeps_outputs=rows.old_log_probs is None,
        )

    def _refuse_split_trajectories(self, rows: PolicyRows) -> None:
        """Refuse rows that the loss would weigh by their number. Every rank raises."""
        name = self.config.policy_loss.loss_mode
        if not policy_loss_facts(name).by_row:
            return
        if self.updater.world.max([float(rows.has_split_trajectory())])[0]:
            raise ConfigError(
                f"the loss {name!r} depends on rows as a whole, and a trajectory has several "
                "sequences (compaction, sub-agents, rewritten history)",
                key="actor.policy_loss.loss_mode",
                expected="a loss of single tokens, or algorithm.segment_credit: final",
            )

    @property
    def optimizer(self) -> PolicyOptimizer:
        """The optimizer of the policy's weights."""
        return self.updater.optimizer

    def on_device(self) -> AbstractContextManager[None]:
        """Have weights and moments in their own memory while the block runs."""
        return self.updater.on_device()

    def counters(self) -> UpdateCounters:
        """Return the counters that a checkpoint holds."""
        return self.updater.counters()

    def _params(self, temperature: float) -> ScoringParams:
        return ScoringParams(
            temperature=temperature,
            logits_block_bytes=self.config.logits_block_bytes,
            share_prefixes=self.config.share_prefixes,
        )


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The policy loss of some rows, with its KL and entropy terms (an `Objective`)."""

    rows: PolicyRows
    policy: PolicyModel
    config: ActorConfig
    params: ScoringParams
    metric: str = "actor/pg_loss"

    def find_signal(self) -> list[bool]:
        """Return for each row whether a trained token has an advantage."""
        return self.rows.find_signal()

    def find_computed(self) -> list[bool]:
        """Return for each row whether a term of the loss may give it a gradient."""
        config = self.config
        facts = policy_loss_facts(config.policy_loss.loss_mode)
        if facts.only_advantages and not config.use_kl_loss and not config.entropy_coeff:
            return self.rows.find_signal()
        return [True] * len(self.rows.uids)

    def add_summary(self, scale: LossScale, index: Sequence[int]) -> LossScale:
        """Add what the loss needs of the mini-batch's old log-probabilities. A collective."""
        rows, world = self.rows, self.policy.world
        if rows.old_log_probs is None or not needs_summary(self.config):
            return scale
        inside = rows.response_mask.bool()[index]
        own = TrainedTokens(rows.old_log_probs[index][inside], rows.advantages[index][inside])
        parts = world.gather_flat([own] if world.reports_rows else [])
        return with_summary(scale, parts, self.config)

    def compute_loss(self, packed: PackedBatch, scale: LossScale) -> MicroLoss:
        """Score a micro-batch, and compute its share of the mini-batch's loss."""
        scores = self.policy(packed, self.params)
        return compute_micro_loss(scores, packed, self.rows, scale, self.config)
