"""The critic in training: its values and its update."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from agentrl.algorithms.aggregation import LossScale
from agentrl.algorithms.value_loss import compute_value_loss
from agentrl.config.schema.training import CriticConfig
from agentrl.protocol import DataProto
from agentrl.workers.batches import ValueRows, read_groups, read_padded_rows
from agentrl.workers.packing import PackedBatch
from agentrl.workers.scoring import compute_rows
from agentrl.workers.update import (
    MicroLoss,
    Updater,
    UpdateResult,
    find_broken,
    take_trained,
)
from agentrl.workers.value_model import ValueModel


class Critic:
    """Owns the value model's weights and their optimizer.

    Args:
        model: The sharded module.
        config: The update.
        total_steps: Optimizer steps of the whole run, for the schedule.
        response_budget: `data.max_response_length`, the divisor of `seq-mean-token-sum-norm`.
        seed: Seed of the order of mini-batches with `shuffle`.
    """

    def __init__(
        self,
        model: ValueModel,
        config: CriticConfig,
        *,
        total_steps: int,
        response_budget: int,
        seed: int = 0,
    ) -> None:
        self.model = model
        self.config = config
        self.updater = Updater(
            model,
            config,
            role="critic",
            total_steps=total_steps,
            response_budget=response_budget,
            seed=seed,
        )

    def compute_values(self, batch: DataProto) -> Tensor:
        """Compute the `values` of a batch with the current weights. A collective.

        Args:
            batch: This rank's rows as collated, as wide as those of all ranks.

        Returns:
            `[B, T]` float32, of the state before each trained token; 0 at masked positions.
        """
        (values,) = compute_rows(
            self.model,
            read_padded_rows(batch),
            lambda packed: (self.model(packed),),
            num_outputs=1,
            budget=self.config.ppo_max_token_len_per_gpu,
            groups=read_groups(batch),
            share_prefixes=self.config.share_prefixes,
            doing="values",
            section="critic",
        )
        return values

    def update_critic(self, batch: DataProto) -> UpdateResult:
        """Train on a batch (see `Updater.update`). A collective.

        Args:
            batch: This rank's rows, as wide as those of all ranks, with `values` (before the
                update) and `returns`.
        """
        rows = ValueRows.read(batch)
        return self.updater.update(rows, lambda rows: ValueObjective(rows, self.model, self.config))


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """The clipped value loss of some rows (an `Objective`)."""

    rows: ValueRows
    model: ValueModel
    config: CriticConfig
    metric: str = "critic/vf_loss"

    def find_signal(self) -> list[bool]:
        """Return for each row whether it has a trained token: each has a return."""
        return self.rows.response_mask.ne(0).any(dim=1).tolist()

    def find_computed(self) -> list[bool]:
        """Return for each row whether it has a trained token."""
        return self.find_signal()

    def add_summary(self, scale: LossScale, index: Sequence[int]) -> LossScale:
        """Return the same scale: the loss needs nothing else of the mini-batch."""
        return scale

    def compute_loss(self, packed: PackedBatch, scale: LossScale) -> MicroLoss:
        """Compute the values of a micro-batch, and its share of the mini-batch's loss."""
        computed, rows, config = self.model(packed), self.rows, self.config
        if not packed.row_index:
            return MicroLoss.of_dummy(packed, computed)
        vpreds = packed.unpack(computed)
        read = {"values": rows.values, "returns": rows.returns}
        mask, given = take_trained(packed, rows.response_mask, read, vpreds.device)
        scale = scale.at(list(packed.row_index))
        loss, clip_frac = compute_value_loss(
            vpreds, given["returns"], given["values"], mask,
            config.cliprange_value, config.loss_agg_mode, scale=scale,
        )  # fmt: skip
        parts: dict[str, Tensor | float] = {
            "critic/vf_loss": loss.detach() / scale.dp_size,
            "critic/vf_clipfrac": clip_frac,
            "critic/vpred_mean": scale.mean(vpreds, mask),
        }
        current = vpreds.detach()
        broken = find_broken({"vpreds": current, **given}, mask)
        return MicroLoss(loss, parts, packed.row_index, current, broken)
