"""Compute the metrics of a validation set from its finished requests.

Success of one request is a number, and the success of a set is its mean:

    threshold          1 if the combined reward is at least `reward.success_threshold`, else 0
    scorer's verdict   what the scorer returns under `success`, else under `acc`, if not a text
    combined reward    the reward that training would use, `reward.weights` and bonuses included;
                       without the reward model's part, unless `reward.weights.trajectory` is 0

The first rule that applies is used. A request that failed has success 0. A scorer that returns a
bare number, or only the same number as `acc`, gives no verdict. The score of a reward model has no
scale, so it is no measure of success if there is a scorer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import fmean

from agentrl.config.schema.reward import RewardConfig
from agentrl.messages import CallOutcome
from agentrl.rewards import Source, combine_rewards
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.metrics.rollout import (
    MAX_SCORER_KEYS,
    read_number,
    scorer_dict,
    scorer_numbers,
)


class SuccessRule(StrEnum):
    """The rule that decided the success of a request; the value is used in messages."""

    THRESHOLD = "the combined reward is at least reward.success_threshold"
    SUCCESS = "the scorer's `success`"
    ACC = "the scorer's `acc`"
    COMBINED = "the combined reward (the scorer returns no `success`, and no `acc` of its own)"
    UNREADABLE = (
        "the combined reward (what the scorer returns as `success` or `acc` is no number and no "
        "boolean)"
    )
    FAILED = "0, because the request failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one validation request; ranks send these to each other."""

    success: float
    rule: SuccessRule
    reward: float
    combined_reward: float
    num_turns: int
    used_tool: bool
    failed: bool
    num_response_tokens: int
    rm_score: float | None = None
    """Score of the reward model, without its weight."""
    scorer: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers of the scorer's dict."""


def read_outcome(request: AsyncRolloutRequest, config: RewardConfig) -> Outcome:
    """Extract from a request what validation counts."""
    rule, success = measure_success(request, config)
    return Outcome(
        success=success,
        rule=rule,
        reward=request.reward or 0.0,
        combined_reward=combine_rewards(request, config).total,
        num_turns=request.num_turns,
        used_tool=any(
            call.outcome == CallOutcome.OK for turn in request.turns for call in turn.calls
        ),
        failed=request.error is not None,
        num_response_tokens=request.num_response_tokens,
        rm_score=request.rm_score,
        scorer=scorer_numbers(request, config),
    )


def measure_success(
    request: AsyncRolloutRequest, config: RewardConfig
) -> tuple[SuccessRule, float]:
    """Measure whether a finished request solved its problem, and by which rule."""
    if request.error is not None:
        return SuccessRule.FAILED, 0.0
    reward = combine_rewards(request, config)
    combined = reward.total
    if config.success_threshold is not None:
        return SuccessRule.THRESHOLD, float(combined >= config.success_threshold)
    found = scorer_dict(request)
    for key, rule in (("success", SuccessRule.SUCCESS), ("acc", SuccessRule.ACC)):
        verdict = read_number(found.get(key))
        if verdict is not None:
            return rule, verdict
    given = any(found.get(key) is not None for key in ("success", "acc"))
    if config.weights.trajectory:
        combined -= reward.of(Source.REWARD_MODEL)
    return (SuccessRule.UNREADABLE if given else SuccessRule.COMBINED), combined


def describe_success(name: str, outcomes: Sequence[Outcome]) -> str:
    """Describe by which rules the success of a set was measured."""
    rules = Counter(one.rule for one in outcomes if one.rule is not SuccessRule.FAILED)
    if len(rules) == 1:
        return f"success on {name} is {next(iter(rules))}"
    parts = ", ".join(f"{rule} ({count} requests)" for rule, count in rules.most_common())
    return f"success on {name} is {parts or SuccessRule.FAILED}"


def validation_metrics(name: str, outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Average the outcomes of the validation set `name`, under `val/<name>/`."""
    if not outcomes:
        return {}
    means = {
        "success": [o.success for o in outcomes],
        "reward/mean": [o.reward for o in outcomes],
        "combined_reward/mean": [o.combined_reward for o in outcomes],
        "num_turns/mean": [o.num_turns for o in outcomes],
        "used_tool": [o.used_tool for o in outcomes],
        "failed": [o.failed for o in outcomes],
        "response_length/mean": [o.num_response_tokens for o in outcomes],
    }
    if scores := [o.rm_score for o in outcomes if o.rm_score is not None]:
        means["reward_model/mean"] = scores
    keys = sorted({key for outcome in outcomes for key in outcome.scorer})[:MAX_SCORER_KEYS]
    for key in keys:
        means[f"scorer/{key}/mean"] = [o.scorer[key] for o in outcomes if key in o.scorer]
    metrics = {f"val/{name}/{figure}": fmean(values) for figure, values in means.items()}
    return metrics | {f"val/{name}/num": float(len(outcomes))}
