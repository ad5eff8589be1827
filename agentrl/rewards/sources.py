"""Which bundled scorer applies to which `data_source`."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from agentrl.errors import RewardError
from agentrl.rewards import gsm8k

SOURCES: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "openai/gsm8k": gsm8k.compute_score,
        "agentrl/arithmetic": gsm8k.compute_score,
    }
)
"""The bundled scorers."""


def find_scorer(data_source: str) -> Callable[..., Any]:
    """Find the bundled scorer of a data source.

    Raises:
        RewardError: for a source that has none, with those that have one.
    """
    if data_source not in SOURCES:
        raise RewardError(
            f"no bundled scorer for the data source {data_source!r}",
            expected=f"one of {', '.join(SOURCES)}, or reward.custom_reward_function",
        )
    return SOURCES[data_source]


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **reward_kwargs: Any,
) -> Any:
    """Score by the bundled scorer of the data source.

    Raises:
        RewardError: for a source that has none.
    """
    scorer = find_scorer(data_source)
    return scorer(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)
