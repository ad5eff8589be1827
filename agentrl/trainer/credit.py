"""What each token of a batch is worth, and which tokens are trained.

    rollout correction    old_log_probs, rollout_log_probs   -> rollout_is_weights, what is rejected
    KL in the reward      token_level_scores, ref_log_prob   -> token_level_rewards
    advantages            token_level_rewards, ...           -> advantages, returns
    rejection             response_mask                      -> response_mask, rejected

Advantages are those of all that was sampled: a sample that is rejected was scored like the others,
and stays in its group's baseline. What is rejected is then not trained. (`advantages: kept` puts
the last station second, so that what is left is compared.) On several ranks each one computes the
whole batch, in the order of one rank, and keeps its own rows.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from agentrl.algorithms import columns_read, compute_advantage, get_adv_estimator_fn
from agentrl.algorithms.advantages.groups import Groups, GroupScores
from agentrl.algorithms.correction import compute_rollout_correction_and_rejection_mask
from agentrl.algorithms.kl_control import (
    MeasuredKL,
    compute_reward_kl,
    get_kl_controller,
    measure_kl,
    penalize_rewards,
)
from agentrl.config.schema.run import AlgorithmConfig
from agentrl.errors import DataError
from agentrl.protocol import DataProto
from agentrl.workers.distributed import World

CREDIT = "credit"
"""Under which name a checkpoint keeps the state."""
CORRECTED = ("old_log_probs", "rollout_log_probs", "turn_ids")
COMPUTED = (
    "token_level_rewards", "advantages", "returns", "rollout_is_weights", "response_mask",
    "rejected",
)  # fmt: skip
_REFERENCE_SUFFIX = "_verl"


class Credit:
    """Gives credit, batch by batch, and keeps the weight of the KL in the reward.

    Args:
        config: The estimator, the KL in the reward and the correction.
        world: The ranks.
    """

    def __init__(self, config: AlgorithmConfig, world: World) -> None:
        self.config = config
        self.correction = config.rollout_correction.effective
        self.kl_ctrl = get_kl_controller(config.kl_ctrl)
        self._world = world
        self._measured: MeasuredKL | None = None

    def compute(self, batch: DataProto) -> dict[str, float]:
        """Add `COMPUTED` to this rank's rows, by what all rows are worth. A collective.

        Args:
            batch: This rank's rows, scored, with log-probabilities; it may have none.

        Returns:
            Figures of the whole batch, the same on every rank.

        Raises:
            ConfigError: see `compute_advantage`.
        """
        if self._world.is_alone:
            return self._compute_whole(batch)
        whole = gather_batch(batch, *self._columns(batch), self._world)
        metrics = self._compute_whole(whole.data)
        mine, computed = tensors_of(batch), tensors_of(whole.data)
        for name in COMPUTED:
            if name in computed:
                mine[name] = computed[name][whole.own]
        return metrics

    def commit(self) -> None:
        """Let the weight of the KL move: the batch that was measured last has been trained on.

        A step that ends before its update has moved nothing, nor has one whose update was skipped.
        """
        if self._measured is not None:
            self.kl_ctrl.update(self._measured.current_kl, self._measured.num_sequences)
            self._measured = None

    def state_dict(self) -> dict[str, float]:
        """What a run goes on from."""
        return {"kl_coef": self.kl_ctrl.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on from it; a fixed weight is what the configuration says."""
        if self.config.kl_ctrl.type == "adaptive":
            self.kl_ctrl.value = state.get("kl_coef", self.kl_ctrl.value)

    def _compute_whole(self, data: DataProto) -> dict[str, float]:
        compares_kept = self.correction.advantages == "kept"
        kept, metrics = self._correct(data)
        if kept is not None and compares_kept:
            reject(data, kept)
        metrics |= self._penalize(data)
        compute_advantage(data, self.config)
        if kept is not None and not compares_kept:
            reject(data, kept)
        return metrics

    def _correct(self, data: DataProto) -> tuple[Tensor | None, dict[str, float]]:
        """Add weights; returns what is kept, None where nothing can be rejected."""
        tensors = tensors_of(data)
        if self.correction.bypass_mode or not {*CORRECTED[:2]} <= set(tensors.keys()):
            return None, {}
        old, rollout, turn_ids = (tensors.get(name, None) for name in CORRECTED)
        found = compute_rollout_correction_and_rejection_mask(
            old, rollout, tensors["response_mask"], self.correction, turn_ids
        )
        if found.weights is not None:
            tensors["rollout_is_weights"] = found.weights
        return None if self.correction.rollout_rs is None else found.kept, found.metrics

    def _penalize(self, data: DataProto) -> dict[str, float]:
        """Add rewards from which the KL to the reference is taken, on rejected tokens too."""
        if not self.config.use_kl_in_reward:
            return {}
        tensors, coef = tensors_of(data), self.kl_ctrl.value
        mask = tensors["response_mask"].bool()
        mask = mask | tensors["rejected"] if "rejected" in tensors else mask
        kl = compute_reward_kl(
            tensors["old_log_probs"], tensors["ref_log_prob"], mask, self.config.kl_penalty
        )
        tensors["token_level_rewards"] = penalize_rewards(
            tensors["token_level_scores"], kl, coef, find_silent_rows(data, self.config)
        )
        self._measured = measure_kl(kl, mask)
        return {
            "actor/reward_kl_penalty": self._measured.current_kl,
            "actor/reward_kl_penalty_coeff": coef,
        }

    def _columns(self, batch: DataProto) -> tuple[list[str], list[str]]:
        """What all of this reads."""
        tensors, objects = columns_read(batch, self.config)
        read = {*tensors, "token_level_scores", "response_mask"}
        if not self.correction.bypass_mode:
            read |= {*(CORRECTED if self.correction.reads_turns else CORRECTED[:2])}
        if self.config.use_kl_in_reward:
            read |= {"old_log_probs", "ref_log_prob", "in_baseline"}
        return [name for name in map(str, tensors_of(batch).keys()) if name in read], objects


def find_silent_rows(data: DataProto, config: AlgorithmConfig) -> Tensor | None:
    """Find the rows of groups that say nothing, `[B]` bool, before a KL makes them differ.

    Of an outcome these are groups whose scores are equal. Where turns are compared, equal scores
    may say much, and they are groups of which no token has an advantage without the KL.

    None where the estimator compares no groups, and where it is the reference's own, which takes
    the KL off every row.
    """
    name = config.adv_estimator
    parameters = inspect.signature(get_adv_estimator_fn(name)).parameters
    compares = "index" in parameters and "uid" in data.non_tensor_batch
    if not compares or name.endswith(_REFERENCE_SUFFIX):
        return None
    if "turn_ids" in parameters:
        return _find_groups_without_advantages(data, config)
    tensors = tensors_of(data)
    scores, mask = tensors["token_level_scores"], tensors["response_mask"]
    in_baseline = tensors.get("in_baseline", None)
    return GroupScores.of(scores, mask, data.non_tensor_batch["uid"], in_baseline).is_silent()


def _find_groups_without_advantages(data: DataProto, config: AlgorithmConfig) -> Tensor:
    unpenalized = data.select()
    tensors = tensors_of(unpenalized)
    tensors["token_level_rewards"] = tensors["token_level_scores"]
    compute_advantage(unpenalized, config)
    trains = tensors["advantages"].ne(0).any(dim=-1)
    groups = Groups.of(data.non_tensor_batch["uid"], trains)
    return (groups.count() == 0)[groups.rows]


def reject(data: DataProto, kept: Tensor) -> None:
    """Train on what is kept alone: `rejected` `[B, T]` says what was trained else."""
    tensors = tensors_of(data)
    mask = tensors["response_mask"]
    tensors["rejected"] = mask.bool() & ~kept
    tensors["response_mask"] = torch.where(kept, mask, 0)
    for name in {"advantages", "returns"} & set(tensors.keys()):
        tensors[name] = torch.where(kept, tensors[name], 0.0)


def tensors_of(data: DataProto) -> TensorDict:
    """The tensors of a batch.

    Raises:
        DataError: where it has none.
    """
    if data.batch is None:
        raise DataError("a batch without tensors cannot be credited")
    return data.batch


ORDER = "batch_data_id"
"""The column by which rows are put in the order of one rank."""


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """The rows of all ranks."""

    data: DataProto
    """In the order of the batch on one rank."""
    own: Tensor
    """`[b]` int64: where each of this rank's rows stands in it."""


def gather_batch(
    batch: DataProto, tensors: Sequence[str], objects: Sequence[str], world: World
) -> WholeBatch:
    """Bring columns of all ranks' rows together. A collective.

    Rows are ordered by their prompt's place in the batch, and within a group by the rank: that is
    how `deal_samples` deals them.

    Args:
        batch: This rank's rows, collated to widths that the ranks share.
        tensors: Names of tensors; every rank names the same.
        objects: Names of object columns; a row of a rank that has no such column has None there.
        world: The ranks.
    """
    columns = {} if batch.batch is None else dict(batch.batch.items())
    names = [*tensors, *([ORDER] if ORDER in columns and ORDER not in tensors else [])]
    gathered = {name: world.gather_rows(columns[name]) for name in names}
    beside = _gather_objects(batch, objects, world)
    data = DataProto.from_dict(gathered, beside)
    places = gathered.get(ORDER, torch.zeros(len(data), dtype=torch.int64))
    order = torch.argsort(places, stable=True)
    counts = world.gather(len(batch))
    first = sum(counts[: world.rank])
    own = torch.argsort(order)[first : first + len(batch)]
    return WholeBatch(data.select_idxs(order), own)


def _gather_objects(batch: DataProto, names: Sequence[str], world: World) -> dict[str, list[Any]]:
    empty = np.full(len(batch), None, dtype=object)
    mine = {name: batch.non_tensor_batch.get(name, empty).tolist() for name in names}
    parts = world.gather((len(batch), mine))
    found = dict.fromkeys(name for _, part in parts for name in part)
    return {
        name: [value for count, part in parts for value in part.get(name, [None] * count)]
        for name in found
    }
