"""`verl.utils.reward_score`: scorers by data source, under verl's signatures.

The functions are agentrl's own, so that their rules hold: thoughts are not read, numbers and
mathematics are compared by value. `docs/from_verl.md` says what follows from that.
"""

import inspect
from typing import Any

from agentrl.errors import RewardError
from agentrl.rewards.sources import BUNDLED, find_bundled
from agentrl.rewards.sources import default_compute_score as own_default_compute_score


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
    **kwargs: Any,
) -> Any:
    """Score by the data source: a number, or a dict with it under `score`.

    Raises:
        RewardError: for a source without a scorer, and for one whose scorer runs code: that needs
            the sandbox of a run, so leave it to `reward.manager`.
    """
    bundled = BUNDLED[find_bundled(data_source)]
    if bundled.needs_sandbox or inspect.iscoroutinefunction(bundled.load()):
        raise RewardError(
            f"the scorer of {data_source!r} runs code in the sandbox of a run",
            expected="no custom_reward_function for these rows: the run scores them by itself",
        )
    return own_default_compute_score(data_source, solution_str, ground_truth, extra_info)


_default_compute_score = default_compute_score
