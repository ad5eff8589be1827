"""Compute the reward and advantage of each token of a batch, and which tokens are trained.

    log-probabilities     responses                          -> old_log_probs, ref_log_prob
                          (old_log_probs after the update if only the update reads them)
    rollout correction    old_log_probs, rollout_log_probs   -> rollout_is_weights, rejected tokens
    KL in the reward      token_level_scores, ref_log_prob   -> token_level_rewards
    whitening             token_level_rewards                -> token_level_rewards
    advantages            token_level_rewards, ...           -> advantages, returns
    rejection             response_mask                      -> response_mask, rejected

Advantages are computed from all samples: a rejected sample is scored like the others and stays in
its group's baseline; it is only not trained. (With `advantages: kept` the rejection comes right
after the correction, so that only kept samples are compared.) A trajectory of several rows is one
sample: its rows are joined before, and the results are split after (`join_trajectories`). With
several ranks each rank computes the whole batch, in the order of a single rank, and keeps its own
rows.
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
from agentrl.algorithms.kl import (
    MeasuredKL,
    compute_reward_kl,
    get_kl_controller,
    measure_kl,
    penalize_rewards,
)
from agentrl.algorithms.losses.registry import needs_summary
from agentrl.algorithms.masked import WHITENING_EPSILON, masked_var
from agentrl.algorithms.trajectories import TRAJECTORY_IDS, join_trajectories
from agentrl.algorithms.value_loss import compute_explained_variance
from agentrl.config.schema.run import RunConfig
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.errors import DataError
from agentrl.protocol import DataProto
from agentrl.trainer.metrics.step import Timer
from agentrl.workers.actor import Actor
from agentrl.workers.distributed import World
from agentrl.workers.scoring import Reference
from agentrl.workers.update import RowOutputs

CREDIT = "credit"
"""Key of the state in a checkpoint."""
SUM_PI_SQUARED = "sum_pi_squared"
"""`[B, T]`: sum of the vocabulary's squared probabilities."""
IS_COMPUTED = "is_computed"
"""`[B]` bool: the rows that have `old_log_probs`; without it all have."""
CORRECTED = ("old_log_probs", "rollout_log_probs", "turn_ids")
COMPUTED = (
    "token_level_rewards", "advantages", "returns", "rollout_is_weights", "response_mask",
    "rejected",
)  # fmt: skip
_REFERENCE_SUFFIX = "_verl"


def estimator_requires(config: AlgorithmConfig, column: str) -> bool:
    """Return whether the chosen estimator has a parameter with the column's name.

    An estimator that takes everything (`batch`, `**kwargs`) gets these columns only if it also
    names them as parameters.
    """
    return column in inspect.signature(get_adv_estimator_fn(config.adv_estimator)).parameters


def needs_old_log_probs(config: RunConfig) -> bool:
    """Return whether `old_log_probs` must be known before the update.

    They need not if a batch is one optimizer step, because they are those of its forward pass, and
    if the KL in the reward, the correction, the estimator and the loss do not read them.
    """
    algorithm, actor, prompts = config.algorithm, config.actor, config.data.train_batch_size
    correction = algorithm.rollout_correction.effective
    num_steps = actor.ppo_epochs * -(-prompts // (actor.ppo_mini_batch_size or prompts))
    parameters = inspect.signature(get_adv_estimator_fn(algorithm.adv_estimator)).parameters
    takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    read = {"old_log_probs", "entropies", SUM_PI_SQUARED, "batch", "non_tensor_batch"}
    return (
        num_steps > 1
        or takes_all
        or bool(read & parameters.keys())
        or algorithm.use_kl_in_reward
        or correction.bypass_mode
        or correction.rollout_is is not None
        or correction.rollout_rs is not None
        or needs_summary(actor)
    )


class Credit:
    """Computes credit, batch by batch, and keeps the coefficient of the KL in the reward.

    Args:
        config: The estimator, the KL in the reward and the correction.
        world: The ranks; None: this process has the rows of all ranks.
        is_before_update: Whether `old_log_probs` are computed before the update; if not, they are
            those of its own forward pass (see `needs_old_log_probs`).
    """

    def __init__(
        self, config: AlgorithmConfig, world: World | None, *, is_before_update: bool = True
    ) -> None:
        self.config = config
        self.correction = config.rollout_correction.effective
        self.kl_ctrl = get_kl_controller(config.kl_ctrl)
        self._is_before_update = is_before_update
        self._world = world
        self._measured: MeasuredKL | None = None

    def add_log_probs(
        self,
        batch: DataProto,
        actor: Actor,
        reference: Reference | None,
        timer: Timer,
        *,
        temperature: float,
    ) -> None:
        """Add `old_log_probs`, their entropies and `ref_log_prob`. A collective.

        The same pass adds `sum_pi_squared` if the estimator requires it. With `bypass_mode`,
        `old_log_probs` are the engine's log-probabilities, and the policy computes none. If the
        update computes them, they are added after it (`add_log_probs_of_update`).

        Args:
            batch: This rank's rows.
            actor: The policy before its update.
            reference: The frozen reference; None if no KL requires it.
            timer: Times both passes.
            temperature: The temperature of the rollout.
        """
        found: dict[str, Tensor] = {}
        if self.correction.bypass_mode:
            found["old_log_probs"] = tensors_of(batch)["rollout_log_probs"]
        elif self._is_before_update:
            with timer("old_log_prob"):
                scores = actor.compute_log_probs(
                    batch,
                    temperature=temperature,
                    with_sum_pi_squared=estimator_requires(self.config, SUM_PI_SQUARED),
                )
            found |= {"old_log_probs": scores.log_probs, "entropies": scores.entropy}
            if scores.sum_pi_squared is not None:
                found[SUM_PI_SQUARED] = scores.sum_pi_squared
        if reference is not None:
            with timer("ref"):
                ref_log_prob = reference.compute_ref_log_prob(batch, temperature=temperature)
            found["ref_log_prob"] = ref_log_prob
        batch.union(DataProto.from_dict(found))

    def compute(self, batch: DataProto) -> dict[str, float]:
        """Add the columns `COMPUTED` to this rank's rows, from the rows of all ranks. A collective.

        Args:
            batch: This rank's rows, scored, with log-probabilities; it may have no rows.

        Returns:
            Metrics of the whole batch, the same on every rank.

        Raises:
            ConfigError: see `compute_advantage`.
        """
        if self._world is None or self._world.is_alone:
            return self._compute_whole(batch)
        whole = gather_batch(batch, *self._columns(batch), self._world)
        metrics = self._compute_whole(whole.data)
        mine, computed = tensors_of(batch), tensors_of(whole.data)
        for name in COMPUTED:
            if name in computed:
                mine[name] = computed[name][whole.own]
        return metrics

    def add_log_probs_of_update(
        self, batch: DataProto, found: RowOutputs | None
    ) -> dict[str, float]:
        """Add the `old_log_probs` that the update computed, and compare them with the engine's.

        A collective.

        Args:
            batch: This rank's rows.
            found: The result of the update; None if the batch had `old_log_probs` before it.

        Returns:
            Metrics of the computed rows of all ranks, the same on every rank.
        """
        if found is None:
            return {}
        tensors = tensors_of(batch)
        tensors["old_log_probs"], tensors[IS_COMPUTED] = found.values, found.is_computed
        names = [*CORRECTED[:2], "response_mask", IS_COMPUTED]
        if not {*names} <= set(tensors.keys()):
            return {}
        if self._world is None or self._world.is_alone:
            whole = batch
        else:
            whole = gather_batch(batch, names, [], self._world).data
        old, rollout, mask, computed = (tensors_of(whole)[name] for name in names)
        mask = mask.bool() & computed[:, None]
        return compute_rollout_correction_and_rejection_mask(
            old, rollout, mask, self.correction
        ).metrics

    def commit(self) -> None:
        """Update the KL coefficient, after the last measured batch was trained.

        A step without an update must not change it.
        """
        if self._measured is not None:
            self.kl_ctrl.update(self._measured.current_kl, self._measured.num_sequences)
            self._measured = None

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"kl_coef": self.kl_ctrl.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state; a fixed coefficient is that of the configuration."""
        if self.config.kl_ctrl.type == "adaptive":
            self.kl_ctrl.value = state.get("kl_coef", self.kl_ctrl.value)

    def _compute_whole(self, data: DataProto) -> dict[str, float]:
        if (joined := join_trajectories(data)) is None:
            return self._compute_trajectories(data)
        metrics = self._compute_trajectories(joined.data)
        joined.copy_back(data, COMPUTED)
        return metrics

    def _compute_trajectories(self, data: DataProto) -> dict[str, float]:
        """Compute the columns of a batch in which each trajectory is one row."""
        compares_kept = self.correction.advantages == "kept"
        kept, metrics = self._correct(data)
        if kept is not None and compares_kept:
            reject(data, kept)
        if self.config.use_kl_in_reward:
            metrics |= self._penalize(data)
        if self.config.whiten_rewards:
            scale_rewards(data)
        compute_advantage(data, self.config)
        if kept is not None and not compares_kept:
            reject(data, kept)
        if estimator_requires(self.config, "values"):
            metrics |= measure_values(data)
        return metrics

    def _correct(self, data: DataProto) -> tuple[Tensor | None, dict[str, float]]:
        """Add weights; return the mask of kept tokens (None if nothing is rejected) and metrics."""
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
        """Subtract the KL to the reference from the rewards, on rejected tokens too."""
        tensors, coef = tensors_of(data), self.kl_ctrl.value
        mask = tensors["response_mask"].bool()
        mask = mask | tensors["rejected"] if "rejected" in tensors else mask
        kl = compute_reward_kl(
            tensors["old_log_probs"], tensors["ref_log_prob"], mask, self.config.kl_penalty
        )
        tensors["token_level_rewards"] = penalize_rewards(
            tensors["token_level_scores"], kl, coef, find_rows_without_signal(data, self.config)
        )
        self._measured = measure_kl(kl, mask)
        return {
            "actor/reward_kl_penalty": self._measured.current_kl,
            "actor/reward_kl_penalty_coeff": coef,
        }

    def _columns(self, batch: DataProto) -> tuple[list[str], list[str]]:
        """Name the tensors and object columns that `_compute_whole` reads."""
        tensors, objects = columns_read(batch, self.config)
        read = {*tensors, "token_level_scores", "response_mask", TRAJECTORY_IDS}
        if not self.correction.bypass_mode:
            read |= {*(CORRECTED if self.correction.reads_turns else CORRECTED[:2])}
        if self.config.use_kl_in_reward:
            read |= {"old_log_probs", "ref_log_prob", "in_baseline"}
        return [name for name in map(str, tensors_of(batch).keys()) if name in read], objects


def find_rows_without_signal(data: DataProto, config: AlgorithmConfig) -> Tensor | None:
    """Find the rows of groups without a signal, `[B]` bool, before a KL makes them differ.

    For an outcome these are groups of equal scores. For an estimator that compares turns, equal
    scores may still give a signal: then they are groups in which every advantage is 0 without the
    KL.

    Returns:
        None if the estimator compares no groups, or if it is a `_verl` variant, which subtracts the
        KL from every row.
    """
    name = config.adv_estimator
    parameters = inspect.signature(get_adv_estimator_fn(name)).parameters
    compares = "index" in parameters and "uid" in data.non_tensor_batch
    if not compares or name.endswith(_REFERENCE_SUFFIX):
        return None
    uid, tensors = data.non_tensor_batch["uid"], tensors_of(data)
    scores = tensors["token_level_scores"]
    if "turn_ids" in parameters:
        unpenalized = data.select()
        tensors = tensors_of(unpenalized)
        tensors["token_level_rewards"] = scores
        compute_advantage(unpenalized, config)
        groups = Groups.of(uid, tensors["advantages"].ne(0).any(dim=-1))
        return (groups.count() == 0)[groups.rows]
    in_baseline = tensors.get("in_baseline", None)
    return GroupScores.of(scores, tensors["response_mask"], uid, in_baseline).is_silent()


def scale_rewards(data: DataProto) -> None:
    """Divide the rewards of tokens by their standard deviation over the trained tokens.

    Their mean is not moved: a shift would give every token a reward. Equal rewards stay as they
    are.

    Source: `whiten_rewards` of TRL's PPO trainer.
    """
    tensors = tensors_of(data)
    rewards = tensors.get("token_level_rewards", tensors["token_level_scores"])
    variance = masked_var(rewards.double(), tensors["response_mask"])
    scale = (variance + WHITENING_EPSILON).rsqrt() if variance else 1.0
    tensors["token_level_rewards"] = (rewards * scale).to(rewards.dtype)


def measure_values(data: DataProto) -> dict[str, float]:
    """Measure how well the critic's values predict the returns of the batch."""
    tensors = tensors_of(data)
    columns = (tensors[name] for name in ("values", "returns", "response_mask"))
    return {"critic/vf_explained_var": compute_explained_variance(*columns)}


def reject(data: DataProto, kept: Tensor) -> None:
    """Train only kept tokens; mark the other trained tokens in `rejected` `[B, T]`."""
    tensors = tensors_of(data)
    mask = tensors["response_mask"]
    tensors["rejected"] = mask.bool() & ~kept
    tensors["response_mask"] = torch.where(kept, mask, 0)
    for name in {"advantages", "returns"} & set(tensors.keys()):
        tensors[name] = torch.where(kept, tensors[name], 0.0)


def tensors_of(data: DataProto) -> TensorDict:
    """Return the tensors of a batch.

    Raises:
        DataError: if it has none.
    """
    if data.batch is None:
        raise DataError("a batch without tensors has no advantages to compute")
    return data.batch


ORDER = "batch_data_id"
"""Column by which rows are put in the order of a single rank."""


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """The rows of all ranks."""

    data: DataProto
    """In the order of the batch on a single rank."""
    own: Tensor
    """`[b]` int64: indices of this rank's rows."""


def gather_batch(
    batch: DataProto, tensors: Sequence[str], objects: Sequence[str], world: World
) -> WholeBatch:
    """Gather columns of all ranks' rows. A collective.

    Rows are sorted by prompt index and then by rank, which is the order in which `shard_samples`
    assigns samples to ranks.

    Args:
        batch: This rank's rows, collated to widths that the ranks share.
        tensors: Names of tensors; every rank names the same.
        objects: Names of object columns. Rows of a rank without a column have None in it.
        world: The ranks.
    """
    columns = {} if batch.batch is None else dict(batch.batch.items())
    names = [*tensors, *([ORDER] if ORDER in columns and ORDER not in tensors else [])]
    gathered = {name: world.gather_rows(columns[name]) for name in names}
    data = DataProto.from_dict(gathered, _gather_objects(batch, objects, world))
    indices = gathered.get(ORDER, torch.zeros(len(data), dtype=torch.int64))
    order = torch.argsort(indices, stable=True)
    first = sum(world.gather(len(batch))[: world.rank])
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
