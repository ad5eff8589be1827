"""The invariants of a rollout, on generated conversations through the whole runner."""

import copy
from collections import Counter

from hypothesis import HealthCheck, event, given, settings
from pydantic import PrivateAttr

from agentrl.errors import Fault
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import ENDS, TRANSITIONS, RequestState, StopReason
from tests.fakes.conversations import Plan, Played, plans, play
from tests.fakes.plugins import (
    assert_invariants,
    check_life,
    control_ids,
    decode,
    encode,
    tiny_template,
)

quick = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def assert_ledger_agrees(request: AsyncRolloutRequest) -> None:
    length = request.num_response_tokens
    lists = (request.response_ids, request.loss_mask, request.rollout_log_probs)
    assert [len(each) for each in lists] == [length] * 3
    for log_prob, mask in zip(request.rollout_log_probs, request.loss_mask, strict=True):
        assert mask or log_prob in (0.0, -0.5, -2.0)


@quick
@given(plans())
def test_ledger_consistency_lists_have_equal_lengths_at_every_step(plan: Plan):
    played = play(plan, watch=assert_ledger_agrees)
    event(str(played.request.stop_reason))
    assert_ledger_agrees(played.request)
    for turn in played.request.turns:
        if turn.role != "assistant":
            assert not any(played.request.rollout_log_probs[turn.start : turn.end])
            assert not any(played.request.loss_mask[turn.start : turn.end])


@quick
@given(plans())
def test_sampled_tokens_are_in_the_ledger_verbatim(plan: Plan):
    played = play(plan)
    request = played.request
    assert_invariants(request, played.engine)
    completions = iter(played.engine.records)
    for turn in request.turns:
        if turn.role == "assistant":
            record = next(completions)
            answer = plan.answers[min(record.turn, len(plan.answers) - 1)]
            sampled = request.response_ids[turn.start : turn.end]
            assert sampled == list(answer.content)[: len(sampled)]
            whole = min(len(answer.content), record.sampling.max_new_tokens)
            stops = tiny_template().stop_token_ids
            stop = next((i + 1 for i, id in enumerate(answer.content) if id in stops), whole)
            assert len(sampled) == min(whole, stop)


@quick
@given(plans())
def test_outside_text_never_becomes_a_control_token(plan: Plan):
    request = play(plan).request
    prompt = ["<|im_start|>", "<|im_end|>"]
    if request.prompt_ids:
        opened = len(request.prompt_ids) and control_ids(request.prompt_ids)
        num_messages = (len(opened) - 1) // 2 if opened else 0
        assert opened == prompt * num_messages + prompt[:1]
        assert num_messages == 2 + sum(m.role == "tool" for m in request.messages[1:2])
    for turn in request.turns:
        if turn.role != "assistant":
            before = request.turns[turn.index - 1]
            num_messages = len(before.calls) if turn.role == "tool" else 1
            last = request.response_ids[turn.start - 1] if turn.start else None
            sampled_end = before.num_tokens > 0 and last == encode("<|im_end|>")[0]
            ids = request.response_ids[turn.start : turn.end]
            written = [] if sampled_end else ["<|im_end|>"]
            assert control_ids(ids) == written + prompt * num_messages + prompt[:1]


class NotedRequest(AsyncRolloutRequest):
    """Remembers every edge that it took."""

    _edges: list[tuple[RequestState, RequestState]] = PrivateAttr(default_factory=list)

    def _follow(self, target: RequestState) -> None:
        self._edges.append((self.state, target))
        super()._follow(target)


@quick
@given(plans())
def test_state_machine_only_legal_edges_are_taken(plan: Plan):
    request = play(plan, kind=NotedRequest).request
    edges = request._edges  # type: ignore[attr-defined]
    assert edges[0][0] is RequestState.PENDING
    assert all(target in TRANSITIONS[source] for source, target in edges)
    assert [source for source, _ in edges[1:]] == [target for _, target in edges[:-1]]
    assert request.stop_reason is not None
    assert edges[-1][1] is request.state is ENDS[request.stop_reason].state


@quick
@given(plans())
def test_failures_are_data_every_request_ends_once_with_a_reason_and_a_fault(plan: Plan):
    request = play(plan).request
    assert request.is_finished
    if request.state is RequestState.FAILED:
        assert request.error is not None
        assert request.error.kind
        is_limit = request.stop_reason is not StopReason.FAILED
        assert (request.error.fault is Fault.LIMIT) >= is_limit
    if plan.cancel_after is None:
        assert request.stop_reason is not StopReason.ABORTED
    saved = request.model_dump(mode="json")
    assert AsyncRolloutRequest.model_validate(copy.deepcopy(saved)).model_dump(mode="json") == saved


@quick
@given(plans())
def test_life_cycle_every_created_plugin_is_released(plan: Plan):
    played = play(plan)
    for tool in played.tools:
        check_life(tool.lives, "create", "release")
        assert all(len(set(life)) >= 2 for life in tool.lives.values())
    check_life(played.user.lives, "start", "finalize")
    if played.request.turns:
        assert all(tool.lives for tool in played.tools)
        assert played.user.lives
    if played.request.state is RequestState.COMPLETED:
        lives = [life for tool in played.tools for life in tool.lives.values()]
        assert all(life.count("calc_reward") == 1 for life in lives)


def cuts(played: Played) -> Counter[str]:
    """What the request itself says was cut."""
    request = played.request
    found = Counter(turn.cut for turn in request.turns if turn.cut)
    found["call"] = sum(bool(call.num_cut_tokens) for turn in request.turns for call in turn.calls)
    return found


@quick
@given(plans(broken=False, cancelled=False))
def test_budgets_no_budget_is_exceeded_and_each_cut_is_recorded(plan: Plan):
    played = play(plan)
    request, budgets = played.request, plan.budgets
    assert_invariants(request, played.engine)
    event(f"{request.stop_reason}, {dict(cuts(played))}")
    for turn, record in zip(
        (turn for turn in request.turns if turn.role == "assistant"),
        played.engine.records,
        strict=True,
    ):
        left = min(
            budgets.max_response_tokens - turn.start,
            budgets.max_model_len - request.num_prompt_tokens - turn.start,
        )
        assert record.sampling.max_new_tokens == min(left, budgets.max_turn_tokens or left)
        is_full = turn.num_tokens == left and turn.cut is not None
        assert (turn.cut in ("response", "model")) == is_full
    for message in request.messages[1:]:
        if message.role in ("tool", "user"):
            assert len(encode_plain(message.text)) <= budgets.max_observation_tokens
    said = [line.content for line in plan.lines]
    for turn, text in zip((t for t in request.turns if t.role == "user"), said, strict=False):
        assert (turn.cut == "observation") == (len(encode_plain(text)) > 24)


def encode_plain(text: str) -> list[int]:
    return tiny_template().encode_text(text.encode("utf-8", "replace").decode())


@quick
@given(plans(broken=False, cancelled=False))
def test_messages_say_what_the_tokens_say(plan: Plan):
    """The conversation as messages holds every observation as text, in order."""
    request = play(plan).request
    shown = "".join(
        decode(request.response_ids[turn.start : turn.end])
        for turn in request.turns
        if turn.role != "assistant"
    )
    place = 0
    for message in request.messages[1 + bool(plan.opening) :]:
        if message.role != "assistant":
            place = shown.index(message.text, place) + len(message.text)
