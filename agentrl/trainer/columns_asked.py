"""What the chosen estimator asks of the loop, beyond what every batch has."""

import inspect

from agentrl.algorithms import get_adv_estimator_fn
from agentrl.config.schema import AlgorithmConfig

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
