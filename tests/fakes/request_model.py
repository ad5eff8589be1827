"""A plain model of a request: lists, and the tables written out once more.

Nothing in it looks at the ledger, the tables or the checks of the library, so that an invariant
that breaks there does not break here too.
"""

import pickle
from dataclasses import dataclass, field, replace
from itertools import groupby

from agentrl.config.schema.reward import RewardConfig
from agentrl.rewards.placement import place_rewards
from agentrl.rollout.records import Turn
from agentrl.rollout.request import AsyncRolloutRequest

EDGES = {
    "pending": {"running", "failed"},
    "running": {"tool_calling", "interacting", "completed", "failed"},
    "tool_calling": {"running", "completed", "failed"},
    "interacting": {"running", "completed", "failed"},
    "completed": {"failed"},
    "failed": set[str](),
}
FAILURES = {"wall_clock", "aborted", "failed"}
"""Reasons that are not the policy's doing: out of the baseline and of the loss."""
UNKNOWN = -1
"""Version of a token of which nobody said which weights sampled it."""


@dataclass
class ModelTurn:
    role: str
    start: int
    versions: list[int]
    """One for each token."""
    excluded: str | None = None
    reward: float | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.versions)


@dataclass
class RequestModel:
    """What a request should be after the steps that it took."""

    max_response: int
    max_model: int
    prompt: list[int] = field(default_factory=list[int])
    ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    turns: list[ModelTurn] = field(default_factory=list[ModelTurn])
    state: str = "pending"
    reason: str | None = None
    reward: float | None = None

    def copy(self) -> "RequestModel":
        lists = {"prompt": [*self.prompt], "ids": [*self.ids], "log_probs": [*self.log_probs]}
        return replace(self, **lists, turns=[replace(turn) for turn in self.turns])

    # What is legal.

    @property
    def left(self) -> int:
        of_model = self.max_model - len(self.prompt) - len(self.ids)
        return min(self.max_response - len(self.ids), of_model)

    def can_begin(self, num_tokens: int) -> bool:
        return num_tokens > 0 and not self.prompt and self.reason is None

    def can_take(self, num_tokens: int) -> bool:
        return bool(self.prompt) and self.reason is None and num_tokens <= self.left

    def can_go(self, target: str) -> bool:
        return target in EDGES[self.state] and target not in ("completed", "failed")

    @property
    def ways(self) -> list[str]:
        return [target for target in sorted(EDGES[self.state]) if self.can_go(target)]

    def can_end(self, reason: str, *, has_error: bool) -> bool:
        target = "failed" if reason in FAILURES else "completed"
        is_open = self.reason is None and target in EDGES[self.state]
        return is_open and has_error == (reason in FAILURES)

    def can_fail_scoring(self, reason: str, *, has_error: bool) -> bool:
        return self.state == "completed" and reason in FAILURES and has_error

    def is_sampled(self, index: int) -> bool:
        return 0 <= index < len(self.turns) and self.turns[index].role == "assistant"

    # What a legal step does.

    def append(
        self, role: str, ids: list[int], log_probs: list[float], versions: list[int]
    ) -> None:
        self.turns.append(ModelTurn(role, len(self.ids), versions))
        self.ids += ids
        self.log_probs += log_probs

    def end(self, reason: str) -> None:
        self.reason = reason
        self.state = "failed" if reason in FAILURES else "completed"

    # What follows.

    @property
    def mask(self) -> list[int]:
        trained = [turn.role == "assistant" and turn.excluded is None for turn in self.turns]
        spans = zip(trained, self.turns, strict=True)
        return [int(is_trained) for is_trained, turn in spans for _ in turn.versions]

    @property
    def counts(self) -> bool:
        return self.reason is not None and self.reason not in FAILURES


def assert_same(request: AsyncRolloutRequest, model: RequestModel) -> None:
    """Hold a request against its model: every invariant that speaks of a request."""
    _assert_same_ledger(request, model)
    _assert_same_turns(request.turns, model)
    _assert_same_life(request, model)


def _assert_same_ledger(request: AsyncRolloutRequest, model: RequestModel) -> None:
    ids, mask, log_probs = request.response_ids, request.loss_mask, request.rollout_log_probs
    assert len(ids) == len(mask) == len(log_probs) == request.num_response_tokens  # ledger
    assert (ids, mask, log_probs) == (model.ids, model.mask, model.log_probs)
    whole = [*model.prompt, *model.ids]
    assert request.prompt_ids == model.prompt
    assert request.input_ids == whole  # sampled tokens: all that the engine is sent
    assert request.attention_mask == [1] * len(whole)
    assert request.position_ids == list(range(len(whole)))
    assert request.num_prompt_tokens == len(model.prompt)
    assert request.num_tokens_left == model.left  # budgets
    of_response = model.max_response - len(ids)
    assert (request.nearest_limit == "response_budget") == (of_response == model.left)


def _assert_same_turns(turns: tuple[Turn, ...], model: RequestModel) -> None:
    assert len(turns) == len(model.turns)
    for index, (turn, expected) in enumerate(zip(turns, model.turns, strict=True)):
        span = (index, expected.role, expected.start, expected.end, expected.excluded)
        assert (turn.index, turn.role, turn.start, turn.end, turn.excluded) == span
        assert turn.reward == expected.reward
        versions = [UNKNOWN] * turn.num_tokens
        for version, start, end in turn.weight_versions:
            versions[start:end] = [version] * (end - start)
        assert versions == expected.versions


def _assert_same_life(request: AsyncRolloutRequest, model: RequestModel) -> None:
    assert (request.state, request.stop_reason) == (model.state, model.reason)
    assert request.is_finished == (model.reason is not None)
    assert (request.error is not None) == (model.state == "failed")  # failures
    is_counted = model.counts and request.dropped is None
    assert request.is_trained == request.in_baseline == is_counted
    roles = [turn.role for turn in model.turns]
    assert request.num_assistant_turns == roles.count("assistant")
    assert request.num_user_turns == roles.count("user")
    assert request.num_turns == 1 + len(list(groupby(roles)))
    assert request.reward == model.reward


def assert_rewards_land(
    request: AsyncRolloutRequest,
    model: RequestModel,
    config: RewardConfig,
) -> None:
    """Rewards are on trained tokens and sum to what the weights combine."""
    placed, weights = place_rewards(request, config), config.weights
    assert weights.interaction == weights.tool_call  # the model does not know which a turn had
    is_counted = model.counts and request.dropped is None
    trained = [i for i, is_trained in enumerate(model.mask) if is_trained and is_counted]
    of_turns = [turn.reward or 0.0 for turn in model.turns]
    combined = weights.trajectory * (model.reward or 0.0) + weights.interaction * sum(of_turns)
    combined += weights.tool * sum(request.tool_rewards.values())
    assert abs(placed.combined - combined) < 1e-9
    assert (placed.index in trained) if trained else (placed.index is None)
    positions = [reward.position for reward in placed.rewards]
    assert positions == sorted(set(positions) & set(trained))
    total = sum(reward.value for reward in placed.rewards)
    assert not trained or abs(total - combined) <= 1e-5 * (1 + abs(combined))


def snapshot(request: AsyncRolloutRequest) -> bytes:
    """Everything that a request is; equal for as long as nothing changes in it."""
    return pickle.dumps(request)
