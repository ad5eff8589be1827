"""The reward that an agent reports: instead of the scorer, in addition, or only recorded."""

import pytest

from agentrl.config.schema.reward import RewardConfig
from agentrl.rewards import get_reward_manager
from agentrl.rewards.managers import ScoreAfterRollout
from tests.fakes.scorers import answers, score


def give_two(data_source, solution_str, ground_truth, extra_info=None):
    return 2.0


def give_twos(data_sources, solution_strs, ground_truths, extra_infos):
    return [2.0] * len(solution_strs)


class OwnManager:
    """A manager of a user, which knows nothing of agents' rewards."""

    async def score(self, requests):
        for request in requests:
            request.reward = 2.0


MANAGERS = {
    "naive": lambda config: get_reward_manager("naive")(give_two, config),
    "batch": lambda config: get_reward_manager("batch")(give_twos, config),
    "later": lambda config: ScoreAfterRollout(MANAGERS["naive"](config), config),
    "own": lambda config: ScoreAfterRollout(OwnManager(), config),
}


@pytest.mark.parametrize("name", MANAGERS)
@pytest.mark.parametrize(("mode", "expected"), [("replace", 0.25), ("add", 2.25), ("ignore", 2.0)])
def test_a_reported_reward_counts_as_declared(name, mode, expected):
    reporting, other = answers("ab", "cd")
    reporting.agent_reward = 0.25
    score(MANAGERS[name](RewardConfig(agent_reward=mode)), [reporting, other])
    assert (reporting.reward, other.reward) == (expected, 2.0)
