"""Scorers in the process that has their resources."""

from typing import Any

import pytest

from agentrl.config.schema.reward import RewardConfig
from agentrl.errors import RewardError, WorkerLostError
from agentrl.plugins.call import ExecutionMode
from agentrl.rewards.calling import ScoreCaller
from agentrl.rewards.loading import LoadedScorer, load_scorers, parts_of
from agentrl.rewards.remote import HostedScorer

ARGUMENTS = {
    "data_source": "s", "solution_str": "12345", "ground_truth": "5", "extra_info": {}
}  # fmt: skip
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, factor=1):
    if not solution_str:
        raise ValueError("no answer")
    return {"score": factor * len(solution_str), "where": __name__}
"""


class Remote:
    """A `HostedScorer` in this process that can be lost."""

    name = "scorer"

    def __init__(self, hosted: HostedScorer) -> None:
        self.hosted, self.is_lost, self.num_calls = hosted, False, 0

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call the hosted scorer."""
        self.num_calls += 1
        if self.is_lost:
            raise WorkerLostError("scorer died")
        return await getattr(self.hosted, method)(*arguments)

    async def wait_until_ready(self) -> None:
        """It is ready at once."""


@pytest.mark.parametrize("index", [None, 1])
async def test_a_placed_scorer_is_called_there(tmp_path: Any, index: int | None):
    (tmp_path / "score.py").write_text(SCORER)
    own = {"path": f"{tmp_path}/score.py", "reward_kwargs": {"factor": 2}, "resources": {"a": 1}}
    config = RewardConfig.model_validate(
        {"custom_reward_function": own}
        if index is None
        else {"functions": [{"name": "gsm8k"}, {"name": "length", **own}]}
    )
    scorers = load_scorers(config)
    scorer = parts_of(scorers)[index or 0]
    assert isinstance(scorer, LoadedScorer)
    remote = scorer.remote = Remote(HostedScorer(config, index))
    caller = ScoreCaller(scorers, config, ExecutionMode.THREAD)
    assert (await caller.call(scorer, ARGUMENTS))["score"] == 10
    assert remote.num_calls == 1
    with pytest.raises(ValueError, match="no answer"):
        await caller.call(scorer, ARGUMENTS | {"solution_str": ""})
    remote.is_lost = True
    with pytest.raises(RewardError, match="scorer died"):
        await caller.call(scorer, ARGUMENTS)
    await remote.hosted.close()
    await caller.close()
