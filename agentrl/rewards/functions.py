"""Several reward functions: each keeps its number, and their weighted sum is the reward."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import RewardError, words_of
from agentrl.plugins.call import call_method
from agentrl.rewards.scoring import Score, ScoreFn, read_score


@dataclass(frozen=True, slots=True)
class NamedScorer:
    """One of several scorers."""

    name: str
    scorer: ScoreFn
    weight: float


class WeightedScorers:
    """Several scorers, whose weighted numbers are summed.

    Args:
        parts: The scorers, each with its name and weight.
    """

    def __init__(self, parts: Sequence[NamedScorer]) -> None:
        self.parts = tuple(parts)

    async def __call__(self, **told: Any) -> dict[str, Any]:
        """Score as one scorer would: for managers that know of one alone."""
        calls = (call_method(part.scorer, **told) for part in self.parts)
        score = self.combine(await asyncio.gather(*calls, return_exceptions=True))
        return {**score.extra, "score": score.value}

    def combine(self, outcomes: Sequence[Any]) -> Score:
        """Make one score of what each scorer returned, or raised.

        Beside the sum the score keeps each function's number under its name, and of what else they
        said the first word on every key: `acc` and `success` are those of the first function that
        tells them. A bare number says nothing else.

        Raises:
            RewardError: naming the function that raised, or returned no finite number.
        """
        scores = [_read(part, outcome) for part, outcome in zip(self.parts, outcomes, strict=True)]
        said = [score.extra for score in reversed(scores)]
        extra = {key: value for one in said for key, value in one.items()}
        values = {part.name: s.value for part, s in zip(self.parts, scores, strict=True)}
        total = math.fsum(part.weight * values[part.name] for part in self.parts)
        return Score(total, extra | values)


def _read(part: NamedScorer, outcome: Any) -> Score:
    try:
        if isinstance(outcome, BaseException):
            raise outcome
        score = read_score(outcome)
    except Exception as error:
        raise RewardError(f"the reward function {part.name!r}: {words_of(error)}") from error
    return score if isinstance(outcome, dict) else Score(score.value, {})
