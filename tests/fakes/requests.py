"""Finished requests without an engine: built from a few words, or generated."""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from hypothesis import strategies as st

from agentrl.config.schema.reward import RewardConfig, RewardWeightsConfig
from agentrl.engines.protocol import VersionSpan
from agentrl.errors import Fault
from agentrl.messages import Message
from agentrl.rollout.records import CallRecord, Failure
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import ENDS, RequestState, StopReason


@dataclass(frozen=True)
class TurnPlan:
    role: Literal["assistant", "tool", "user"]
    num_tokens: int
    reward: float | None = None
    call_rewards: tuple[float, ...] = ()
    call_spans: tuple[tuple[int, int] | None, ...] = ()
    """Tokens of the calls, counted from the turn's first."""
    excluded: bool = False
    version: int = 0
    text: str = ""


def said(num_tokens: int, **fields) -> TurnPlan:
    return TurnPlan("assistant", num_tokens, **fields)


def observed(num_tokens: int, **fields) -> TurnPlan:
    return TurnPlan("tool", num_tokens, **fields)


def build_request(
    *turns: TurnPlan,
    num_prompt_tokens: int = 3,
    stop_reason: StopReason = StopReason.ANSWERED,
    **fields,
) -> AsyncRolloutRequest:
    fields.setdefault("messages", [Message(role="user", content="What is 2 + 3?")])
    request = AsyncRolloutRequest(**fields)
    if num_prompt_tokens:
        request.begin(range(100, 100 + num_prompt_tokens))
        request.take_edge(RequestState.RUNNING)
    for plan in turns:
        _add_turn(request, plan)
    failed = ENDS[stop_reason].state is RequestState.FAILED
    request.finish(stop_reason, make_failure() if failed else None)
    return request


def weighted(
    turns: float, *, trajectory: float = 1.0, tool: float = 0.0, **keys: Any
) -> RewardConfig:
    """Count what turns earned, from an interaction or by calls, with this weight."""
    weights = RewardWeightsConfig(
        trajectory=trajectory, interaction=turns, tool_call=turns, tool=tool
    )
    return RewardConfig(weights=weights, **keys)


def make_failure() -> Failure:
    return Failure(fault=Fault.TOOL, kind="RuntimeError", message="broken", turn=0)


def _add_turn(request: AsyncRolloutRequest, plan: TurnPlan) -> None:
    start = request.num_response_tokens
    ids = range(200 + start, 200 + start + plan.num_tokens)
    if plan.role == "assistant":
        log_probs = [-(i + 1) / 64 for i in range(plan.num_tokens)]
        spans = (VersionSpan(plan.version, 0, plan.num_tokens),)
        turn = request.append_sampled(ids, log_probs, weight_versions=spans)
        for reward, span in zip_longest(plan.call_rewards, plan.call_spans):
            whole = span and (start + span[0], start + span[1])
            turn.calls.append(CallRecord(name="calculator", reward=reward, span=whole))
        if plan.excluded:
            request.exclude_turn(turn.index, "malformed call")
    else:
        turn = request.append_observed(ids, role=plan.role)
    turn.reward = plan.reward
    request.messages.append(Message(role=plan.role, content=plan.text or f"turn {turn.index}"))


rewards = st.floats(-10, 10, allow_nan=False, width=32)


def turn_plans() -> st.SearchStrategy[TurnPlan]:
    maybe = st.none() | rewards
    sampled = st.builds(
        TurnPlan,
        role=st.just("assistant"),
        num_tokens=st.integers(0, 6),
        reward=maybe,
        call_rewards=st.lists(rewards, max_size=2).map(tuple),
        call_spans=st.lists(st.none() | st.sampled_from([(0, 1), (0, 2), (1, 3)]), max_size=2).map(
            tuple
        ),
        excluded=st.booleans(),
        version=st.integers(0, 3),
    )
    shown = st.builds(
        TurnPlan, role=st.sampled_from(["tool", "user"]), num_tokens=st.integers(0, 6), reward=maybe
    )
    return sampled | shown


@st.composite
def finished_requests(draw) -> AsyncRolloutRequest:
    """Requests that ended in every way, also before their prompt, with rewards and groups."""
    stop_reason = draw(st.sampled_from(list(StopReason)))
    failed = ENDS[stop_reason].state is RequestState.FAILED
    begun = not failed or draw(st.booleans())
    return build_request(
        *(draw(st.lists(turn_plans(), max_size=5)) if begun else ()),
        num_prompt_tokens=draw(st.integers(1, 5)) if begun else 0,
        stop_reason=stop_reason,
        uid=draw(st.sampled_from("abc")),
        reward=None if failed else draw(st.none() | rewards),
        tool_rewards={} if failed else draw(st.dictionaries(st.sampled_from("xy"), rewards)),
    )
