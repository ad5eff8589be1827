"""The first stations of a step, as often as it takes: prompts -> the samples that are trained.

    load_prompts        the data's order                     -> a generation batch of prompts
    roll_out            prompts                              -> finished requests, scored
    record_shaping      requests                             -> bonuses and penalties, written down
    read_baselines      greedy rollouts                      -> a baseline for each prompt
    find_signal         groups                               -> those whose members differ
    choose              groups with a signal, or all         -> those that are trained

The decisions are those of all ranks together, and the same on every one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from agentrl.config.schema import RewardConfig, RunConfig
from agentrl.data.prompt import Prompt
from agentrl.protocol import DataProto
from agentrl.rewards.combination import (
    SHAPING,
    Source,
    active_sources,
    combine_rewards,
    record_shaping,
)
from agentrl.rollout.manager import RolloutManager, SamplingPlan
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.columns_asked import REWARD_BASELINES, estimator_names
from agentrl.trainer.figures import Figures, Largest, Mean, spread
from agentrl.trainer.greedy import (
    add_reward_baselines,
    is_greedy,
    leave_out_without_baseline,
    read_baselines,
)
from agentrl.trainer.group_filter import find_signal
from agentrl.trainer.journal import Journal
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
        requests = roll_out(load_prompts(), *self._plans(first_place=number * self._num_prompts))
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

    def _plans(self, *, first_place: int) -> list[SamplingPlan]:
        plans = [self._manager.train_plan()]
        plans += [self._manager.greedy_plan()] if self._has_baselines else []
        return [plan._replace(first_place=first_place) for plan in plans]

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
