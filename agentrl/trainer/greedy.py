"""One greedy rollout for each prompt, whose reward is the baseline of the prompt's samples (ReMax).

Source: Li et al. 2023 (arXiv 2310.10505), algorithm 2.
"""

from collections.abc import Mapping, Sequence

import torch

from agentrl.config.schema import RewardConfig
from agentrl.protocol import DataProto
from agentrl.rewards.combination import combine_rewards
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.columns_asked import REWARD_BASELINES
from agentrl.workers.distributed import World

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
