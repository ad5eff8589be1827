"""The first stations of a step, as often as it takes: prompts -> the samples that are trained.

    load_prompts        the data's order                     -> a generation batch of prompts
    roll_out            prompts                              -> finished requests, scored
    record_shaping      requests                             -> bonuses and penalties, written down
    read_baselines      greedy rollouts                      -> a baseline for each prompt
    find_signal         groups                               -> those whose members differ
    choose              groups with a signal, or all         -> those that are trained

The decisions are those of all ranks together, and the same on every one.
"""

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from agentrl.algorithms import get_adv_estimator_fn
from agentrl.config.schema.run import AlgorithmConfig, FilterGroupsConfig, RewardConfig, RunConfig
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
from agentrl.trainer.metrics.aggregators import Figures, Largest, Mean, spread
from agentrl.trainer.metrics.run_logger import Journal
from agentrl.workers.batches import deal_samples
from agentrl.workers.distributed import World

NO_SIGNAL = "its group has no signal"
SURPLUS = "enough groups before it have a signal"

LoadPrompts = Callable[[], Sequence[Prompt]]
RollOut = Callable[..., list[AsyncRolloutRequest]]
"""Called with prompts, and every plan by which each of them is sampled."""


@dataclass(slots=True)
class StepSamples:
    """This rank's requests of one step, and what all ranks know of its groups."""

    sampled: list[AsyncRolloutRequest] = field(default_factory=list[AsyncRolloutRequest])
    """Every training sample; what is not trained says why under `dropped`."""
    greedy: list[AsyncRolloutRequest] = field(default_factory=list[AsyncRolloutRequest])
    """The prompts' greedy rollouts, where the estimator asks for them."""
    batch: list[AsyncRolloutRequest] = field(default_factory=list[AsyncRolloutRequest])
    """Those of `sampled` that become rows."""
    baselines: dict[int, float] | None = None
    """The reward of the greedy rollout by the prompt's place; None: nobody asked for any."""
    figures: Figures = field(default_factory=Figures)

    @property
    def everything(self) -> list[AsyncRolloutRequest]:
        """All that was rolled out."""
        return [*self.sampled, *self.greedy]

    def add_baselines(self, batch: DataProto) -> None:
        """Add `reward_baselines` to the rows, where the estimator asks for them."""
        if self.baselines is not None:
            add_reward_baselines(batch, self.baselines)


class StepSampler:
    """Takes prompts and rolls them out until a step has groups enough.

    Args:
        config: Of the run.
        manager: Knows how samples and greedy rollouts are sampled.
        world: The ranks.
        journal: Told where groups are missing.
        num_batches: Full batches of one epoch of the data.
    """

    def __init__(
        self,
        config: RunConfig,
        manager: RolloutManager,
        world: World,
        journal: Journal,
        *,
        num_batches: int,
    ) -> None:
        self._config = config
        self._manager = manager
        self._world = world
        self._journal = journal
        self._filter = config.algorithm.filter_groups
        self._size = config.data.train_batch_size
        self._num_prompts = config.prompts_per_rollout
        # Data that gives no signal at all would be sampled for ever.
        self._max_batches = self._filter.max_num_gen_batches or num_batches
        self._has_baselines = estimator_names(config.algorithm, REWARD_BASELINES)

    def take(self, step: int, load_prompts: LoadPrompts, roll_out: RollOut) -> StepSamples:
        """Roll out the samples of one step. A collective.

        Without `filter_groups` that is one batch of prompts, all of it trained. With it, batches
        are taken until `train_batch_size` groups have a signal, or the bound is reached: then what
        there is is trained, be it nothing.

        Args:
            step: For what is told.
            load_prompts: Takes the next prompts of the data's order.
            roll_out: Samples and scores them, this rank its share.

        Raises:
            ConfigError: where the scorer does not give the metric by which groups are filtered.
        """
        samples = StepSamples()
        if not self._filter.enable:
            samples.batch = self._roll_out_batch(samples, 0, load_prompts, roll_out)
        else:
            self._fill(samples, step, load_prompts, roll_out)
        samples.figures |= source_figures(samples.sampled, self._config.reward)
        samples.figures |= _greedy_figures(samples.greedy, samples.baselines)
        return samples

    def make_requests(
        self, step: int, prompts: Sequence[Prompt], plans: Sequence[SamplingPlan]
    ) -> list[AsyncRolloutRequest]:
        """Make this rank's share of what the plans sample of each prompt, plan after plan."""
        size, world = self._config.actor.ppo_mini_batch_size, self._world
        requests: list[AsyncRolloutRequest] = []
        for plan in plans:
            mine = deal_samples(len(prompts), plan.n, size, world.size)[world.rank]
            requests += self._manager.make_requests(prompts, plan, step=step, samples=mine)
        return requests

    def _fill(
        self, samples: StepSamples, step: int, load_prompts: LoadPrompts, roll_out: RollOut
    ) -> None:
        """Take batches until enough groups have a signal, and choose among them."""
        reward, places, num_batches = self._config.reward, list[int](), 0
        while len(places) < self._size and num_batches < self._max_batches:
            requests = self._roll_out_batch(samples, num_batches, load_prompts, roll_out)
            places += find_signal(requests, self._filter, reward, self._world)
            num_batches += 1
        samples.figures |= self._filter_figures(samples, len(places), num_batches)
        samples.batch = choose_groups(samples.sampled, places, self._size)
        if len(places) < self._size:
            self._journal.say(
                f"step {step}: {len(places)} of {self._size} groups have a signal, after "
                f"{num_batches} batches of prompts (algorithm.filter_groups): "
                f"{'these are trained' if places else 'nothing is trained'}"
            )

    def _roll_out_batch(
        self, samples: StepSamples, number: int, load_prompts: LoadPrompts, roll_out: RollOut
    ) -> list[AsyncRolloutRequest]:
        """Roll out one batch of prompts; returns its training samples."""
        requests = roll_out(load_prompts(), *self._plans(index_offset=number * self._num_prompts))
        for request in requests:
            record_shaping(request, self._config.reward)
        sampled = [request for request in requests if not is_greedy(request)]
        if self._has_baselines:
            greedy = [request for request in requests if is_greedy(request)]
            found = read_baselines(greedy, self._config.reward, self._world)
            leave_out_without_baseline(sampled, found)
            samples.baselines = (samples.baselines or {}) | found
            samples.greedy += greedy
        samples.sampled += sampled
        return sampled

    def _plans(self, *, index_offset: int) -> list[SamplingPlan]:
        plans = [self._manager.train_plan()]
        plans += [self._manager.greedy_plan()] if self._has_baselines else []
        return [plan._replace(index_offset=index_offset) for plan in plans]

    def _filter_figures(
        self, samples: StepSamples, num_with_signal: int, num_batches: int
    ) -> Figures:
        """What filtering cost. All ranks know the same counts; the rewards are each one's own."""
        counts = {
            "num_gen_batches": num_batches,
            "num_without_signal": num_batches * self._num_prompts - num_with_signal,
            "num_surplus": max(0, num_with_signal - self._size),
            "num_missing": max(0, self._size - num_with_signal),
        }
        reward = self._config.reward
        scored = [request for request in samples.sampled if request.in_baseline]
        rewards = [combine_rewards(request, reward).total for request in scored]
        figures: Figures = {
            f"filter_groups/{name}": Largest(float(count)) for name, count in counts.items()
        }
        return figures | ({"filter_groups/reward/mean": Mean.of(rewards)} if rewards else {})


def choose_groups(
    sampled: Sequence[AsyncRolloutRequest], places: Sequence[int], size: int
) -> list[AsyncRolloutRequest]:
    """Choose the samples that become rows: the first groups with a signal, in the data's order.

    The others are marked. Where no group has a signal, the first ones become rows that are not
    trained: a step whose every row is masked.

    Args:
        sampled: This rank's samples of all batches.
        places: The prompts whose groups have a signal, on all ranks, in order.
        size: Groups of a step.
    """
    chosen, signal = set(places[:size]), set(places)
    for request in sampled:
        if request.batch_data_id not in chosen:
            why = SURPLUS if request.batch_data_id in signal else NO_SIGNAL
            request.dropped = request.dropped or why
    kept = chosen or range(size)
    return [request for request in sampled if request.batch_data_id in kept]


def source_figures(sampled: Sequence[AsyncRolloutRequest], config: RewardConfig) -> Figures:
    """Describe, apart, what each source beside the scorer gave, as far as the run asks for it.

    Beside them `rollout/combined_reward`: of the same samples as `rollout/reward`, also of those
    that `filter_groups` drops later.

    What was earned is told with its weight, bonuses and penalties as they stand in
    `reward_extra_info`.
    """
    scored = [request for request in sampled if request.reward is not None]
    figures: Figures = {}
    if active_sources(config) or config.weights.trajectory != 1:
        compared = (request for request in scored if request.in_baseline)
        totals = [combine_rewards(request, config).total for request in compared]
        figures |= spread("rollout/combined_reward", totals)
    for source in active_sources(config):
        given = [_given_by(source, request, config) for request in scored]
        figures |= spread(f"rollout/{source}", given)
        if source is Source.OVERLONG and given:
            figures["rollout/overlong_frac"] = Mean.of([reward < 0 for reward in given])
    return figures


def _given_by(source: Source, request: AsyncRolloutRequest, config: RewardConfig) -> float:
    if source in SHAPING:
        return float(request.reward_extra_info[source.value])
    return combine_rewards(request, config).of(source)


def _greedy_figures(
    greedy: Sequence[AsyncRolloutRequest], baselines: dict[int, float] | None
) -> Figures:
    if baselines is None or not greedy:
        return {}
    places = [request.batch_data_id for request in greedy]
    known = [baselines[place] for place in places if place in baselines]
    failed = Mean.of([place not in baselines for place in places])
    return {"rollout/greedy_failed_frac": failed} | spread("rollout/greedy_reward", known)


COMBINED = frozenset({"score", "reward", "seq_reward", "seq_final_reward"})
"""Metrics that are the combined reward: what the estimator compares."""


class Measured(NamedTuple):
    """One member of a group, as far as its signal goes; what ranks send each other."""

    place: int
    """Of its prompt, among those of the step."""
    value: float


def find_signal(
    requests: Sequence[AsyncRolloutRequest],
    config: FilterGroupsConfig,
    reward: RewardConfig,
    world: World,
) -> list[int]:
    """Find the groups whose members differ, over all ranks. A collective.

    Members that are not in their group's baseline (the infrastructure failed) count for nothing:
    a group is judged by the rest, and one of which fewer than two are left has no signal.

    Args:
        requests: This rank's, scored.
        config: What must differ.
        reward: How rewards of several sources become one.
        world: The ranks.

    Returns:
        The places of those groups' prompts, in order.

    Raises:
        ConfigError: where the scorer's dict has no such key, or no number under it.
    """
    mine: list[Measured] = []
    with world.agreeing():
        counted = (request for request in requests if request.in_baseline)
        mine += (Measured(r.batch_data_id, measure(r, config.metric, reward)) for r in counted)
    return places_that_differ(world.gather_flat(mine))


def places_that_differ(measured: Iterable[Measured]) -> list[int]:
    """Find the groups whose largest value is not their smallest, in order."""
    groups: dict[int, list[float]] = defaultdict(list)
    for place, value in measured:
        groups[place].append(value)
    return sorted(place for place, values in groups.items() if max(values) != min(values))


def measure(request: AsyncRolloutRequest, metric: str, reward: RewardConfig) -> float:
    """Read what of a request is compared, as float32 holds it: what batches hold rewards in.

    Raises:
        ConfigError: where the scorer's dict has no such key, or no number under it.
    """
    if metric in COMBINED:
        return float(np.float32(combine_rewards(request, reward).total))
    found = request.reward_extra_info
    if metric not in found:
        raise ConfigError(
            f"the scorer said nothing of {metric!r} for {request.request_id}",
            key="algorithm.filter_groups.metric",
            expected=f"one of {', '.join(sorted(COMBINED))} or of the keys of the scorer's dict: "
            f"{', '.join(map(str, found)) or 'it has none'}",
        )
    return float(np.float32(check_number(found[metric], f"the scorer's {metric!r}")))


IS_BASELINE = "the greedy rollout of its prompt: a baseline, not a sample"
NO_BASELINE = "the greedy rollout of its prompt failed"


def is_greedy(request: AsyncRolloutRequest) -> bool:
    """Whether a request is no training sample: those are drawn at a temperature above 0."""
    return request.sampling.temperature == 0


def read_baselines(
    greedy: Sequence[AsyncRolloutRequest], reward: RewardConfig, world: World
) -> dict[int, float]:
    """Read the combined reward of each prompt's greedy rollout, over all ranks. A collective.

    The rollouts are marked, so that nothing takes them for samples.

    Returns:
        By the prompt's place; without those whose rollout failed.
    """
    counted = [request for request in greedy if request.in_baseline]
    mine = [(one.batch_data_id, combine_rewards(one, reward).total) for one in counted]
    for request in greedy:
        request.dropped = request.dropped or IS_BASELINE
    return dict(world.gather_flat(mine))


def leave_out_without_baseline(
    samples: Sequence[AsyncRolloutRequest], baselines: Mapping[int, float]
) -> None:
    """Take the samples out of the step whose prompt has no baseline: any other would be wrong."""
    for request in samples:
        if request.batch_data_id not in baselines:
            request.dropped = request.dropped or NO_BASELINE


def add_reward_baselines(batch: DataProto, baselines: Mapping[int, float]) -> None:
    """Add `reward_baselines`, `[B]` float32, to a batch; 0 where a row has none: it is masked."""
    if batch.batch is not None:
        places = batch.batch["batch_data_id"].tolist()
        found = [baselines.get(place, 0.0) for place in places]
        batch.batch[REWARD_BASELINES] = torch.tensor(found, dtype=torch.float32)


REWARD_BASELINES = "reward_baselines"
"""`[B]`: the score of each prompt's greedy rollout."""
SUM_PI_SQUARED = "sum_pi_squared"
"""`[B, T]`: the squared probabilities of the vocabulary, summed."""


def estimator_names(config: AlgorithmConfig, column: str) -> bool:
    """Whether the chosen estimator has a parameter of this name, and so asks for the column.

    One that takes whatever there is (`batch`, `**kwargs`) asks for nothing: it gets these columns
    where it names them.
    """
    function = get_adv_estimator_fn(config.adv_estimator)
    return column in inspect.signature(function).parameters
