"""The first stages of a step, repeated as often as needed: prompts -> the samples that are trained.

    load_prompts        the data's order                     -> a generation batch of prompts
    roll_out            prompts                              -> finished requests, scored
    record_shaping      requests                             -> bonuses and penalties, recorded
    read_baselines      greedy rollouts                      -> a baseline for each prompt
    find_signal         groups                               -> groups with different members
    choose_groups       groups with a signal, or all         -> groups that are trained

Decisions are made over all ranks and are the same on every rank.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from agentrl.config.schema.reward import RewardConfig
from agentrl.config.schema.run import RunConfig
from agentrl.config.schema.training import FilterGroupsConfig
from agentrl.data.rows import Prompt
from agentrl.errors import ConfigError
from agentrl.protocol import DataProto
from agentrl.rewards.combination import (
    SHAPING,
    Source,
    active_sources,
    combine_rewards,
    record_shaping,
)
from agentrl.rewards.scoring import check_number
from agentrl.rollout.manager import RolloutManager, SamplingPlan
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.credit import estimator_requires
from agentrl.trainer.metrics.aggregators import MaxMetric, MeanMetric, MetricDict, mean_max_min
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.workers.batches import shard_samples
from agentrl.workers.distributed import World

NO_SIGNAL = "its group has no signal"
SURPLUS = "enough groups before it have a signal"
IS_BASELINE = "the greedy rollout of its prompt: a baseline, not a sample"
NO_BASELINE = "the greedy rollout of its prompt failed"

REWARD_BASELINES = "reward_baselines"
"""`[B]`: the score of each prompt's greedy rollout."""
COMBINED = frozenset({"score", "reward", "seq_reward", "seq_final_reward"})
"""Names of the combined reward, which the estimator compares, among `filter_groups` metrics."""

LoadPrompts = Callable[[], Sequence[Prompt]]
RollOut = Callable[..., list[AsyncRolloutRequest]]
"""Called with prompts and the plans by which each of them is sampled."""


@dataclass(slots=True)
class StepSamples:
    """This rank's requests of one step, and what all ranks know about its groups."""

    sampled: list[AsyncRolloutRequest] = field(default_factory=list[AsyncRolloutRequest])
    """Every training sample; the field `dropped` has the reason if it is not trained."""
    greedy: list[AsyncRolloutRequest] = field(default_factory=list[AsyncRolloutRequest])
    """The prompts' greedy rollouts, if the estimator requires them."""
    batch: list[AsyncRolloutRequest] = field(default_factory=list[AsyncRolloutRequest])
    """The samples that become rows."""
    baselines: dict[int, float] | None = None
    """Reward of the greedy rollout by prompt index; None if the estimator requires none."""
    metrics: MetricDict = field(default_factory=MetricDict)

    @property
    def everything(self) -> list[AsyncRolloutRequest]:
        """All requests that were rolled out."""
        return [*self.sampled, *self.greedy]

    def add_baselines(self, batch: DataProto) -> None:
        """Add `reward_baselines`, `[B]` float32, if the estimator requires it.

        A row without a baseline gets 0; it is masked.
        """
        if self.baselines is not None and batch.batch is not None:
            indices = batch.batch["batch_data_id"].tolist()
            found = [self.baselines.get(index, 0.0) for index in indices]
            batch.batch[REWARD_BASELINES] = torch.tensor(found, dtype=torch.float32)


class StepSampler:
    """Takes prompts and rolls them out until a step has enough groups.

    Args:
        config: The run's configuration.
        manager: Has the plans for samples and greedy rollouts.
        world: The ranks.
        run_logger: Prints a line if groups are missing.
        num_batches: Full batches of one epoch of the data.
    """

    def __init__(
        self,
        config: RunConfig,
        manager: RolloutManager,
        world: World,
        run_logger: RunLogger,
        *,
        num_batches: int,
    ) -> None:
        self._config = config
        self._manager = manager
        self._world = world
        self._run_logger = run_logger
        self._filter = config.algorithm.filter_groups
        self._size = config.data.train_batch_size
        # Without a limit, data without any signal would be sampled forever.
        self._max_batches = self._filter.max_num_gen_batches or num_batches
        self._has_baselines = estimator_requires(config.algorithm, REWARD_BASELINES)

    def take(self, step: int, load_prompts: LoadPrompts, roll_out: RollOut) -> StepSamples:
        """Roll out the samples of one step. A collective.

        Without `filter_groups` this is one batch of prompts, and all of it is trained. With it,
        batches are taken until `train_batch_size` groups have a signal or the limit of batches is
        reached. Then the groups found so far are trained, even if there are none.

        Args:
            step: The step's number, for messages.
            load_prompts: Takes the next prompts in the data's order.
            roll_out: Samples this rank's share and scores it.

        Raises:
            ConfigError: if the scorer does not return the metric that filters groups.
        """
        samples = StepSamples()
        if self._filter.enable:
            self._take_until_full(samples, step, load_prompts, roll_out)
        else:
            samples.batch = self._take_batch(samples, 0, load_prompts, roll_out)
        samples.metrics |= source_metrics(samples.sampled, self._config.reward)
        if samples.greedy and (baselines := samples.baselines) is not None:
            indices = [request.batch_data_id for request in samples.greedy]
            failed = MeanMetric.of([index not in baselines for index in indices])
            known = [baselines[index] for index in indices if index in baselines]
            samples.metrics["rollout/greedy_failed_frac"] = failed
            samples.metrics |= mean_max_min("rollout/greedy_reward", known)
        return samples

    def make_requests(
        self, step: int, prompts: Sequence[Prompt], plans: Sequence[SamplingPlan]
    ) -> list[AsyncRolloutRequest]:
        """Make this rank's share of the requests, plan after plan."""
        size, world = self._config.actor.ppo_mini_batch_size, self._world
        requests: list[AsyncRolloutRequest] = []
        for plan in plans:
            mine = shard_samples(len(prompts), plan.n, size, world.size)[world.rank]
            requests += self._manager.make_requests(prompts, plan, step=step, samples=mine)
        return requests

    def _take_until_full(
        self, samples: StepSamples, step: int, load_prompts: LoadPrompts, roll_out: RollOut
    ) -> None:
        """Take batches until enough groups have a signal, and choose among them."""
        reward, indices, num_batches = self._config.reward, list[int](), 0
        while len(indices) < self._size and num_batches < self._max_batches:
            requests = self._take_batch(samples, num_batches, load_prompts, roll_out)
            indices += find_signal(requests, self._filter, reward, self._world)
            num_batches += 1
        num_prompts, num_found = num_batches * self._config.prompts_per_rollout, len(indices)
        # All ranks know the same counts; each rank has its own rewards.
        counts = {
            "num_gen_batches": num_batches,
            "num_without_signal": num_prompts - num_found,
            "num_surplus": max(0, num_found - self._size),
            "num_missing": max(0, self._size - num_found),
        }
        for name, count in counts.items():
            samples.metrics[f"filter_groups/{name}"] = MaxMetric(float(count))
        scored = [request for request in samples.sampled if request.in_baseline]
        if rewards := [combine_rewards(request, reward).total for request in scored]:
            samples.metrics["filter_groups/reward/mean"] = MeanMetric.of(rewards)
        samples.batch = choose_groups(samples.sampled, indices, self._size)
        if num_found < self._size:
            self._run_logger.info(
                f"step {step}: {num_found} of {self._size} groups have a signal, after "
                f"{num_batches} batches of prompts (algorithm.filter_groups): "
                f"{'these are trained' if indices else 'nothing is trained'}"
            )

    def _take_batch(
        self, samples: StepSamples, number: int, load_prompts: LoadPrompts, roll_out: RollOut
    ) -> list[AsyncRolloutRequest]:
        """Roll out one batch of prompts; return its training samples."""
        plans = [self._manager.train_plan()]
        plans += [self._manager.greedy_plan()] if self._has_baselines else []
        offset = number * self._config.prompts_per_rollout
        requests = roll_out(load_prompts(), *(plan._replace(index_offset=offset) for plan in plans))
        for request in requests:
            record_shaping(request, self._config.reward)
        # Training samples are drawn at a temperature above 0.
        sampled = [request for request in requests if request.sampling.temperature != 0]
        if self._has_baselines:
            greedy = [request for request in requests if request.sampling.temperature == 0]
            found = read_baselines(greedy, self._config.reward, self._world)
            for request in sampled:
                if request.batch_data_id not in found:
                    request.dropped = request.dropped or NO_BASELINE
            samples.baselines = (samples.baselines or {}) | found
            samples.greedy += greedy
        samples.sampled += sampled
        return sampled


def choose_groups(
    sampled: Sequence[AsyncRolloutRequest], indices: Sequence[int], size: int
) -> list[AsyncRolloutRequest]:
    """Choose the samples that become rows: the first groups with a signal, in the data's order.

    The other samples are marked as dropped. If no group has a signal, the first groups become rows,
    all of them masked.

    Args:
        sampled: This rank's samples of all batches.
        indices: Prompt indices of the groups with a signal, on all ranks, in order.
        size: Groups of a step.
    """
    chosen, signal = set(indices[:size]), set(indices)
    for request in sampled:
        if request.batch_data_id not in chosen:
            reason = SURPLUS if request.batch_data_id in signal else NO_SIGNAL
            request.dropped = request.dropped or reason
    kept = chosen or range(size)
    return [request for request in sampled if request.batch_data_id in kept]


def source_metrics(sampled: Sequence[AsyncRolloutRequest], config: RewardConfig) -> MetricDict:
    """Measure each reward source besides the scorer, if the run uses any.

    Rewards are multiplied by their weights; bonuses and penalties are those in `reward_extra_info`.
    `rollout/combined_reward` is over the same samples as `rollout/reward`, including those that
    `filter_groups` drops later.
    """
    scored = [request for request in sampled if request.reward is not None]
    sources = active_sources(config)
    metrics: MetricDict = {}
    if sources or config.weights.trajectory != 1:
        compared = (request for request in scored if request.in_baseline)
        totals = [combine_rewards(request, config).total for request in compared]
        metrics |= mean_max_min("rollout/combined_reward", totals)
    for source in sources:
        if source in SHAPING:
            rewards = [float(request.reward_extra_info[source.value]) for request in scored]
        else:
            rewards = [combine_rewards(request, config).of(source) for request in scored]
        metrics |= mean_max_min(f"rollout/{source}", rewards)
        if source is Source.OVERLONG and rewards:
            metrics["rollout/overlong_frac"] = MeanMetric.of([reward < 0 for reward in rewards])
    return metrics


class GroupMember(NamedTuple):
    """The compared value of one member of a group; ranks send these to each other."""

    prompt_index: int
    """Index of the prompt in the step."""
    value: float


def find_signal(
    requests: Sequence[AsyncRolloutRequest],
    config: FilterGroupsConfig,
    reward: RewardConfig,
    world: World,
) -> list[int]:
    """Find the groups with different values, over all ranks. A collective.

    Members that are not in their group's baseline (the infrastructure failed) are ignored. A group
    with fewer than two other members has no signal.

    Args:
        requests: This rank's scored requests.
        config: Names the metric that must differ.
        reward: How rewards of several sources are combined.
        world: The ranks.

    Returns:
        The indices of these groups' prompts, in order.

    Raises:
        ConfigError: if the scorer's dict has no such key, or no number under it.
    """
    mine: list[GroupMember] = []
    with world.raise_on_all_ranks():
        for request in requests:
            # Estimators do not count a member without a trained token either.
            if request.in_baseline and any(any(one.loss_mask) for one in request.sequences):
                value = read_metric(request, config.metric, reward)
                mine.append(GroupMember(request.batch_data_id, value))
    return find_differing_groups(world.gather_flat(mine))


def find_differing_groups(members: Iterable[GroupMember]) -> list[int]:
    """Find the groups in which the maximum is not the minimum, in order."""
    groups: dict[int, list[float]] = defaultdict(list)
    for index, value in members:
        groups[index].append(value)
    return sorted(index for index, values in groups.items() if max(values) != min(values))


def read_metric(request: AsyncRolloutRequest, metric: str, reward: RewardConfig) -> float:
    """Read the value that is compared, rounded to float32 as rewards in batches are.

    Raises:
        ConfigError: if the scorer's dict has no such key, or no number under it.
    """
    if metric in COMBINED:
        return float(np.float32(combine_rewards(request, reward).total))
    found = request.reward_extra_info
    if metric not in found:
        raise ConfigError(
            f"the scorer returned no {metric!r} for {request.request_id}",
            key="algorithm.filter_groups.metric",
            expected=f"one of {', '.join(sorted(COMBINED))} or of the keys of the scorer's dict: "
            f"{', '.join(map(str, found)) or 'it has none'}",
        )
    return float(np.float32(check_number(found[metric], f"the scorer's {metric!r}")))


def read_baselines(
    greedy: Sequence[AsyncRolloutRequest], reward: RewardConfig, world: World | None
) -> dict[int, float]:
    """Read the combined reward of each prompt's greedy rollout, over all ranks. A collective.

    The rollouts are marked as dropped, so that they are not used as samples.

    Args:
        greedy: The greedy rollouts of this rank.
        reward: How rewards are combined.
        world: The ranks; None: this process has the rollouts of all ranks.

    Returns:
        Rewards by prompt index, without failed rollouts.
    """
    scored = [request for request in greedy if request.in_baseline]
    mine = [(one.batch_data_id, combine_rewards(one, reward).total) for one in scored]
    for request in greedy:
        request.dropped = request.dropped or IS_BASELINE
    return dict(mine if world is None else world.gather_flat(mine))
