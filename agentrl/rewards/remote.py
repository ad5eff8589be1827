"""A scorer in the process that has its `resources`."""

import pickle

from agentrl.config.schema.reward import RewardConfig
from agentrl.plugins.call import ExecutionMode
from agentrl.rewards.calling import ScoreCaller
from agentrl.rewards.loading import load_scorers, parts_of
from agentrl.rewards.pool import pack_error


class HostedScorer:
    """One scorer of a run.

    Args:
        config: The reward section.
        index: Index in `reward.functions`; None: `reward.custom_reward_function`.
    """

    def __init__(self, config: RewardConfig, index: int | None) -> None:
        functions = [] if index is None else [config.functions[index]]
        config = config.model_copy(update={"functions": functions, "rate_limit": None})
        loaded = load_scorers(config)
        [self._scorer] = parts_of(loaded)
        mode = ExecutionMode.PROCESS if config.manager == "prime" else ExecutionMode.THREAD
        self._caller = ScoreCaller(loaded, config, mode, arguments=None)

    async def score(self, arguments: bytes) -> bytes:
        """Call the scorer; return its value and its error or None, pickled."""
        try:
            value = await self._caller.call(self._scorer, pickle.loads(arguments))
            return pickle.dumps((value, None))
        except Exception as error:  # noqa: BLE001 - the boundary around code of users
            return pack_error(error)

    async def close(self) -> None:
        """Release what the scorer holds, at the end of the run."""
        await self._caller.close()
