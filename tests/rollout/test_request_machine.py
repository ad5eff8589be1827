"""Random walks of a request beside a plain model of it: no invariant broken, whatever is called.

The machine calls the public doors of a request, rightly and wrongly, and holds it against the model
after every step. A step is one call of one door. A call that the invariants forbid must raise its
typed error and change nothing at all.
"""

import copy
import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pydantic import ValidationError

from agentrl.config.schema.reward import Placement, RewardConfig
from agentrl.engines.protocol import VersionSpan
from agentrl.errors import LedgerError, TransitionError
from agentrl.messages import Message
from agentrl.rollout.manager import next_attempt
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import ENDS, TRANSITIONS, RequestState, StopReason
from tests.fakes.request_mistakes import (
    BROKEN,
    COPIES,
    DAMAGES,
    SAVES,
    WRONG_OBSERVATIONS,
    WRONG_SAMPLES,
)
from tests.fakes.request_model import (
    EDGES,
    FAILURES,
    UNKNOWN,
    RequestModel,
    assert_rewards_land,
    assert_same,
    snapshot,
)
from tests.fakes.requests import weighted

placements = st.sampled_from(get_args(Placement))
SIZES = st.integers(0, 5)
REASONS = st.sampled_from(list(StopReason))


class RequestMachine(RuleBasedStateMachine):
    """Everything that can be asked of a request, in any order."""

    num_steps: ClassVar[Counter[str]] = Counter()
    """Steps of all walks: `kind: made` and `kind: refused`."""

    request: AsyncRolloutRequest
    model: RequestModel
    fresh: AsyncRolloutRequest
    witness: tuple[AsyncRolloutRequest, bytes] | None = None
    """A copy of the request as it was at some step, which no later step may change."""
    next_id = 1

    @initialize(response=st.integers(8, 60), room=st.integers(8, 70), size=SIZES)
    def make(self, response: int, room: int, size: int) -> None:
        budgets = Budgets(max_response_tokens=response, max_model_len=room)
        messages = [Message(role="user", content="Hi")]
        self.request = AsyncRolloutRequest(messages=messages, budgets=budgets)
        self.fresh = self.request.model_copy(deep=True)
        self.model = RequestModel(response, room)
        self.begin(size)

    def step(
        self, kind: str, call: Callable[[], object], *, may: bool, error: type[Exception]
    ) -> bool:
        """Make one call; where it is forbidden, see that it raises and changes nothing."""
        kind += " after the end" if self.model.reason else ""
        self.num_steps[f"{kind}: {'made' if may else 'refused'}"] += 1
        if may:
            call()
            return True
        before = snapshot(self.request)
        with pytest.raises(error):
            call()
        assert snapshot(self.request) == before
        return False

    def draw_ids(self, size: int) -> list[int]:
        """Ids that no other token of the walk has, so that none can stand for another."""
        first, self.next_id = self.next_id, self.next_id + size
        return list(range(first, first + size))

    # The prompt.

    @rule(size=SIZES)
    def begin(self, size: int) -> None:
        ids = self.draw_ids(size)
        may = self.model.can_begin(size)
        if self.step("begin", lambda: self.request.begin(ids), may=may, error=LedgerError):
            self.model.prompt = ids

    @precondition(lambda self: not self.model.prompt)
    @rule(wrong=st.sampled_from([[-1], [1.5], ["1"], [None], []]))
    def begin_wrongly(self, wrong: Sequence[Any]) -> None:
        call = partial(self.request.begin, wrong)
        self.step(f"begin with {wrong}", call, may=False, error=LedgerError)

    # The ledger's two doors.

    @rule(size=SIZES, cut=SIZES, version=st.integers(-1, 3))
    def sample(self, size: int, cut: int, version: int) -> None:
        ids = self.draw_ids(size)
        log_probs = [-(1 + place) / 64 for place in range(size)]
        cut = min(cut, size)
        spans = (VersionSpan(version, 0, cut), VersionSpan(version + 1, cut, size))
        versions = [version] * cut + [version + 1] * (size - cut)
        if version == UNKNOWN:
            spans, versions = (), [UNKNOWN] * size
        call = partial(self.request.append_sampled, ids, log_probs, weight_versions=spans)
        if self.step("sample", call, may=self.model.can_take(size), error=LedgerError):
            self.model.append("assistant", ids, log_probs, versions)

    @rule(size=SIZES, role=st.sampled_from(["tool", "user"]))
    def observe(self, size: int, role: Any) -> None:
        ids = self.draw_ids(size)
        call = partial(self.request.append_observed, ids, role=role)
        if self.step("observe", call, may=self.model.can_take(size), error=LedgerError):
            self.model.append(role, ids, [0.0] * size, [UNKNOWN] * size)

    @rule(more=st.integers(1, 3), is_sampled=st.booleans())
    def exceed_the_budget(self, more: int, is_sampled: bool) -> None:
        ids = self.draw_ids(max(self.model.left, 0) + more)
        sample = partial(self.request.append_sampled, ids, [-0.5] * len(ids))
        observe = partial(self.request.append_observed, ids, role="tool")
        call = sample if is_sampled else observe
        self.step("exceed the budget", call, may=False, error=LedgerError)

    @precondition(lambda self: self.model.can_take(2))
    @rule(kind=st.sampled_from(sorted(WRONG_SAMPLES)), size=st.integers(1, 3))
    def sample_wrongly(self, kind: str, size: int) -> None:
        size = min(size, self.model.left)
        wrong = WRONG_SAMPLES[kind](self.draw_ids(size))
        call = partial(self.request.append_sampled, **wrong)
        self.step(f"sample with {kind}", call, may=False, error=LedgerError)

    @precondition(lambda self: self.model.can_take(2))
    @rule(kind=st.sampled_from(sorted(WRONG_OBSERVATIONS)))
    def observe_wrongly(self, kind: str) -> None:
        wrong = WRONG_OBSERVATIONS[kind](self.draw_ids(2))
        call = partial(self.request.append_observed, **wrong)
        self.step(f"observe with {kind}", call, may=False, error=LedgerError)

    @precondition(lambda self: any(turn.role == "assistant" for turn in self.model.turns))
    @rule(place=st.integers(0, 9))
    def exclude_a_sampled_turn(self, place: int) -> None:
        sampled = [i for i, turn in enumerate(self.model.turns) if turn.role == "assistant"]
        self.exclude(sampled[place % len(sampled)], f"policy {place}")

    @rule(index=st.integers(-2, 9), reason=st.sampled_from(["malformed", "declared"]))
    def exclude(self, index: int, reason: str) -> None:
        call = partial(self.request.exclude_turn, index, reason)
        if self.step("exclude", call, may=self.model.is_sampled(index), error=LedgerError):
            self.model.turns[index].excluded = reason

    # The states.

    @rule(state=st.sampled_from(list(RequestState)))
    def take_edge(self, state: RequestState) -> None:
        call = partial(self.request.take_edge, state)
        kind, may = f"edge {self.model.state} to {state}", self.model.can_go(state)
        if self.step(kind, call, may=may, error=TransitionError):
            self.model.state = str(state)

    @precondition(lambda self: self.model.ways)
    @rule(place=st.integers(0, 2))
    def go_on(self, place: int) -> None:
        ways = self.model.ways
        self.take_edge(RequestState(ways[place % len(ways)]))

    # Walks that end at once try little else: no end before the second turn.
    @precondition(lambda self: self.model.reason or len(self.model.turns) > 1)
    @rule(reason=REASONS, has_error=st.booleans())
    def finish(self, reason: StopReason, has_error: bool) -> None:
        error = BROKEN if has_error else None
        may = self.model.can_end(reason, has_error=has_error)
        call = partial(self.request.finish, reason, error)
        if self.step(f"finish {reason}", call, may=may, error=TransitionError):
            self.model.end(str(reason))

    @precondition(lambda self: self.model.reason or len(self.model.turns) > 1)
    @rule(reason=REASONS)
    def end(self, reason: StopReason) -> None:
        self.finish(reason, str(reason) in FAILURES)

    @precondition(lambda self: self.model.state == "completed")
    @rule(reason=st.sampled_from(sorted(FAILURES)))
    def break_the_scorer(self, reason: str) -> None:
        self.fail_scoring(StopReason(reason), has_error=True)

    @rule(reason=st.sampled_from([reason for reason in StopReason if reason not in FAILURES]))
    def finish_with_an_error_that_is_none(self, reason: StopReason) -> None:
        call = partial(self.request.finish, reason, BROKEN)
        self.step("finish well with an error", call, may=False, error=TransitionError)

    @rule(reason=REASONS, has_error=st.booleans())
    def fail_scoring(self, reason: StopReason, has_error: bool) -> None:
        error: Any = BROKEN if has_error else None
        may = self.model.can_fail_scoring(reason, has_error=has_error)
        call = partial(self.request.fail_scoring, error, reason)
        if self.step("fail scoring", call, may=may, error=TransitionError):
            self.model.end(str(reason))

    # Rewards.

    @rule(reward=st.sampled_from([None, 0.0, 1.0, -2.5]), index=st.integers(-2, 6))
    def reward(self, reward: float | None, index: int) -> None:
        def call() -> None:
            if index == -2:
                self.request.tool_rewards["tool"] = reward or 0.0
            elif 0 <= index < len(self.model.turns):
                self.request.turns[index].reward = self.model.turns[index].reward = reward
            else:
                self.request.reward = self.model.reward = reward

        self.step("reward", call, may=True, error=LedgerError)

    @rule(placement=placements, turn=st.sampled_from([0.0, 0.5]))
    def place(self, placement: Placement, turn: float) -> None:
        config = weighted(turn, tool=2 * turn, placement=placement)
        call = partial(assert_rewards_land, self.request, self.model, config)
        self.step("place rewards", call, may=True, error=LedgerError)

    @precondition(lambda self: self.model.reason)
    @rule(reward=st.sampled_from([1.0, -2.5]), placement=placements)
    def score(self, reward: float, placement: Placement) -> None:
        def call() -> None:
            self.request.reward = self.model.reward = reward
            assert_rewards_land(self.request, self.model, RewardConfig(placement=placement))

        self.step("score", call, may=True, error=LedgerError)

    @rule(reason=st.sampled_from([None, "a sample of its group failed"]))
    def drop(self, reason: str | None) -> None:
        def call() -> None:
            self.request.dropped = reason

        self.step("drop", call, may=True, error=LedgerError)

    # Copies, attempts, saved forms.

    @rule(kind=st.sampled_from(sorted(COPIES)))
    def go_on_with_a_copy(self, kind: str) -> None:
        def call() -> None:
            before, twin = self.request, COPIES[kind](self.request)
            self.witness, self.request = (before, snapshot(before)), twin
            if "shallow" in kind or kind == "model copy":  # public fields are shared on purpose
                self.request.tool_rewards = dict(self.request.tool_rewards)

        self.step(kind, call, may=True, error=LedgerError)

    @rule(kind=st.sampled_from(sorted(SAVES)))
    def go_on_with_a_saved_one(self, kind: str) -> None:
        def call() -> None:
            loaded = SAVES[kind](self.request)
            assert loaded.model_dump(mode="json") == self.request.model_dump(mode="json")
            self.request = loaded

        self.step(f"save as {kind}", call, may=True, error=LedgerError)

    @rule(kind=st.sampled_from(sorted(DAMAGES)))
    def load_a_damaged_one(self, kind: str) -> None:
        saved = json.loads(self.request.model_dump_json())
        whole = copy.deepcopy(saved)
        DAMAGES[kind](saved)
        call = partial(AsyncRolloutRequest.model_validate, saved)
        may = saved == whole
        self.step(f"load with {kind}", call, may=may, error=ValidationError)

    @precondition(lambda self: self.model.reason)
    @rule()
    def retry(self) -> None:
        def call() -> None:
            self.fresh = next_attempt(self.fresh)
            attempt = self.fresh.model_copy(deep=True)
            assert attempt.request_id != self.request.request_id
            assert attempt.uid == self.request.uid
            self.request = attempt

        self.step("retry", call, may=True, error=LedgerError)
        self.model = RequestModel(self.model.max_response, self.model.max_model)

    @rule(name=st.sampled_from(["prompt_ids", "response_ids", "loss_mask", "rollout_log_probs"]))
    def write_into_what_was_handed_out(self, name: str) -> None:
        def call() -> None:
            handed_out = getattr(self.request, name)
            handed_out[:] = [7, *handed_out, 7]
            self.request.input_ids.append(7)

        before = snapshot(self.request)
        self.step("write into a copy", call, may=True, error=LedgerError)
        assert snapshot(self.request) == before

    # The invariants, after every step.

    @invariant()
    def invariants_hold(self) -> None:
        assert_same(self.request, self.model)
        if self.witness is not None:
            kept, as_it_was = self.witness
            assert snapshot(kept) == as_it_was


def walk(num_walks: int, num_steps: int, *, derandomize: bool = False) -> Counter[str]:
    """Walk, and count the steps by kind."""
    RequestMachine.num_steps = Counter()
    run_state_machine_as_test(
        RequestMachine,
        settings=settings(
            max_examples=num_walks,
            stateful_step_count=num_steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    return RequestMachine.num_steps


def report(steps: Counter[str]) -> str:
    made = sum(count for kind, count in steps.items() if kind.endswith("made"))
    return f"{steps.total()} steps, {made} of them made, {steps.total() - made} refused"


def test_state_machine_the_tables_are_those_that_were_written_out_once_more() -> None:
    assert {str(s): set(map(str, targets)) for s, targets in TRANSITIONS.items()} == EDGES
    failed = {reason for reason, end in ENDS.items() if end.state is RequestState.FAILED}
    assert set(map(str, failed)) == FAILURES
    assert failed == {reason for reason, end in ENDS.items() if not end.in_baseline}
    assert failed == {reason for reason, end in ENDS.items() if not end.trained}


def test_invariants_hold_for_every_sequence_of_steps() -> None:
    steps = walk(100, 30)
    print(report(steps))
    assert steps.total() >= 2_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_invariants_hold_for_a_hundred_thousand_steps() -> None:
    steps = walk(2_400, 50, derandomize=True)
    print(report(steps), dict(sorted(steps.items())), sep="\n")
    assert steps.total() >= 100_000
    assert missing(steps) == set()


def missing(steps: Counter[str]) -> set[str]:
    """Kinds of steps that were never made, of those that an invariant speaks of."""
    ends = ("completed", "failed")
    legal = {(source, to) for source in EDGES for to in EDGES[source] if to not in ends}
    every = {(source, to) for source in EDGES for to in EDGES}
    wanted = {f"edge {source} to {to}: made" for source, to in legal}
    wanted |= {
        f"edge {source} to {to}{' after the end' if source in ends else ''}: refused"
        for source, to in every - legal
    }
    wanted |= {f"finish {reason}: made" for reason in StopReason}
    late = ("begin", "sample", "observe", *(f"finish {reason}" for reason in StopReason))
    wanted |= {f"{kind} after the end: refused" for kind in late}
    wanted |= {f"sample with {kind}: refused" for kind in WRONG_SAMPLES}
    wanted |= {f"observe with {kind}: refused" for kind in WRONG_OBSERVATIONS}
    wanted |= {f"load with {kind}: refused" for kind in DAMAGES}
    wanted |= {f"{kind}: made" for kind in COPIES} | {f"save as {kind}: made" for kind in SAVES}
    wanted |= {"fail scoring after the end: made", "retry after the end: made", "exclude: made"}
    return (wanted | {"exceed the budget: refused"}) - steps.keys()
