"""The bundled scorers, by name and by the `data_source` of a row.

A source is looked up among the exact names first, then among the patterns in their order. The names
are those of verl's `default_compute_score`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from agentrl.errors import RewardError, did_you_mean
from agentrl.plugins import load_object
from agentrl.plugins.call import ExecutionMode

BY_SOURCE = "data_source"
"""The name that means: the scorer of each row's `data_source`."""


@dataclass(frozen=True, slots=True)
class Bundled:
    """A scorer that agentrl includes. It is imported when it is first used."""

    path: str
    mode: ExecutionMode = ExecutionMode.THREAD
    needs_sandbox: bool = False
    """Whether it takes an argument `sandbox`, in which it runs code that a model wrote."""

    def load(self) -> Callable[..., Any]:
        """Import the scorer.

        Raises:
            PluginError: If it does not exist.
        """
        return load_object(self.path)


BUNDLED: Mapping[str, Bundled] = {
    "gsm8k": Bundled("agentrl.rewards.gsm8k:compute_score"),
    # Some answers make computer algebra compute forever: run it in a process.
    "math": Bundled("agentrl.rewards.math_answer:compute_score", ExecutionMode.PROCESS),
    "math_dapo": Bundled("agentrl.rewards.math_dapo:compute_score", ExecutionMode.PROCESS),
    "multiple_choice": Bundled("agentrl.rewards.multiple_choice:compute_score"),
    "qa": Bundled("agentrl.rewards.qa:compute_score"),
    "code": Bundled("agentrl.rewards.code:compute_score", needs_sandbox=True),
    "judge": Bundled("agentrl.rewards.judge:Judge"),
}
"""Bundled scorers by their names in `reward.functions`."""

SOURCES: Mapping[str, str] = {
    "openai/gsm8k": "gsm8k",
    "agentrl/arithmetic": "gsm8k",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "hiyouga/geometry3k": "math",
    "hendrycks_math": "math",
    "math_dapo": "math_dapo",
    "math": "math_dapo",
    "codecontests": "code",
    "apps": "code",
    "codeforces": "code",
    "taco": "code",
    "openai_humaneval": "code",
    "humaneval": "code",
    "mbpp": "code",
    "cais/mmlu": "multiple_choice",
    "TIGER-Lab/MMLU-Pro": "multiple_choice",
    "allenai/ai2_arc": "multiple_choice",
    "tau/commonsense_qa": "multiple_choice",
    "hotpotqa": "qa",
    "nq": "qa",
    "triviaqa": "qa",
}
"""Scorer names by data source."""

PATTERNS: tuple[tuple[str, str], ...] = (
    ("math_dapo*", "math_dapo"),
    ("aime*", "math_dapo"),
    ("amc*", "math"),
    ("numina_*", "math"),
    ("searchR1_*", "qa"),
    ("Idavidrein/gpqa*", "multiple_choice"),
)
"""Scorer names by patterns of data sources, with `*` as in a shell."""


def find_bundled(data_source: str) -> str:
    """Return the name of the bundled scorer of a data source.

    Raises:
        RewardError: If it has none; the error suggests the nearest known source.
    """
    if (name := _named_for(data_source)) is not None:
        return name
    known = [*SOURCES, *(pattern for pattern, _ in PATTERNS)]
    guess = did_you_mean(data_source, known)
    raise RewardError(
        f"no bundled scorer for the data source {data_source!r}{guess}",
        expected=f"one of {', '.join(known)}; or reward.custom_reward_function, or "
        "reward.functions that name the scorers; or, if other parts of the reward count alone (a "
        "reward model, tools), reward.weights.trajectory: 0",
    )


def has_bundled(data_source: str) -> bool:
    """Whether a data source has a bundled scorer."""
    return _named_for(data_source) is not None


def _named_for(data_source: str) -> str | None:
    fitting = (name for pattern, name in PATTERNS if fnmatchcase(data_source, pattern))
    return SOURCES.get(data_source) or next(fitting, None)


@cache
def find_scorer(data_source: str) -> Callable[..., Any]:
    """Return the bundled scorer of a data source.

    Raises:
        RewardError: If the source has none.
    """
    return BUNDLED[find_bundled(data_source)].load()


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **reward_kwargs: Any,
) -> Any:
    """Score with the bundled scorer of the data source. An `async` one returns an awaitable.

    Raises:
        RewardError: If the source has no scorer.
    """
    scorer = find_scorer(data_source)
    return scorer(data_source, solution_str, ground_truth, extra_info, **reward_kwargs)


def score_where_known(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    **reward_kwargs: Any,
) -> Any:
    """Score as `default_compute_score` does; return 0 if the data source has no scorer.

    For runs in which the scorer's number has no weight (`reward.weights.trajectory: 0`).
    """
    if not has_bundled(data_source):
        return {"score": 0.0}
    return default_compute_score(
        data_source, solution_str, ground_truth, extra_info, **reward_kwargs
    )
