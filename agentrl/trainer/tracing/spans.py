"""Spans, made from what requests and the step's timer recorded. Nothing is measured here.

request                  from its start to the end of its score
  turn                   a completion, and what answers it
    engine_call          the completion, with its time in the engine's queue
    tool_call            a call, with its time in queues
    interaction          the reply of the simulated user or environment
  sub_agent              a request that worked for a `delegate` call; it has turns too
  score                  the scorer
step                     one step of the training loop on one rank
  train_step
    gen, reward, ..., update_actor, sync_weights      the phases of `timing_s/`
  validate
    gen, reward

All times are Unix times.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentrl.config.schema.reward import RewardConfig
from agentrl.messages import CallOutcome
from agentrl.rewards import combine_rewards
from agentrl.rewards.combination import TRAJECTORY_ALONE
from agentrl.rollout.failures import FAILED
from agentrl.rollout.records import Turn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState

Attribute = str | int | float | bool
_NOT_NAMED = {"step": "train_step"}
"""Names of spans of phases, if they are not those of `timing_s/`."""


class Interval(NamedTuple):
    """A phase of a step, once."""

    name: str
    started: float
    """Unix time."""
    ended: float


@dataclass(slots=True)
class Span:
    """Work from one time to another, and the parts of it. Parts are inside of the whole."""

    name: str
    started: float
    """Unix time."""
    ended: float
    attributes: dict[str, Attribute] = field(default_factory=dict[str, Attribute])
    error: str = ""
    """What failed; empty if nothing did."""
    children: "list[Span]" = field(default_factory=list["Span"])

    def add(self, children: "Iterable[Span]") -> None:
        """Add parts in the order of time; the whole is extended to contain them."""
        self.children = sorted([*self.children, *children], key=lambda one: one.started)
        self.started = min([self.started, *(one.started for one in self.children)])
        self.ended = max([self.ended, *(one.ended for one in self.children)])


class Trace(NamedTuple):
    """All spans of one request, or of one step on one rank."""

    trace_id: str
    """32 hexadecimal digits."""
    rank: int
    root: Span


def request_span(
    request: AsyncRolloutRequest, step: int, reward: RewardConfig = TRAJECTORY_ALONE
) -> Span | None:
    """Make the spans of a finished request; None if no start was recorded.

    Args:
        request: The request. Spans of turns without a start are left out.
        step: The step of the training loop.
        reward: How rewards are combined.
    """
    root = _sequence_span("request", request)
    if root is None:
        return None
    root.attributes["agentrl.step"] = step
    root.attributes["agentrl.reward"] = combine_rewards(request, reward).total
    owners = {request.request_id: root}
    for branch in request.branches:
        if branch.branch_cause == "delegate" and (span := _sequence_span("sub_agent", branch)):
            owners[branch.request_id] = span
    turns: defaultdict[str, list[Span]] = defaultdict(list)
    for one in request.sequences:
        # A sequence that was set aside is named after the request that continues it.
        name = one.request_id if one.request_id in owners else one.request_id.rpartition("#")[0]
        turns[name if name in owners else request.request_id] += _turn_spans(one)
    for name, span in owners.items():
        span.add(turns[name])
    root.add(span for name, span in owners.items() if name != request.request_id)
    root.add(_score_span(request))
    return root


def _sequence_span(name: str, request: AsyncRolloutRequest) -> Span | None:
    started = request.metrics.get("seconds_started")
    if started is None:
        return None
    attributes: dict[str, Attribute] = {
        "agentrl.request_id": request.request_id,
        "agentrl.group": request.uid,
        "agentrl.data_source": request.data_source,
        "agentrl.stop_reason": str(request.stop_reason),
        "agentrl.num_turns": request.num_turns,
        "agentrl.attempt": request.attempt,
    }
    error = request.error.message if request.error and request.state is RequestState.FAILED else ""
    ended = started + request.metrics.get("seconds", 0.0)
    return Span(name, started, ended, attributes, error)


def _turn_spans(sequence: AsyncRolloutRequest) -> Iterator[Span]:
    """Group a completion with the turns that answer it."""
    turns = sequence.turns
    for index, turn in enumerate(turns):
        if turn.role != "assistant" or turn.seconds_started is None:
            continue
        following = turns[index + 1 : index + 2]
        whole = Span("turn", turn.seconds_started, turn.seconds_started)
        whole.attributes["agentrl.turn"] = turn.index
        whole.add(_parts_of_turn(turn, following, sequence.num_prompt_tokens + turn.start))
        yield whole


def _parts_of_turn(turn: Turn, following: Sequence[Turn], num_input: int) -> Iterator[Span]:
    assert turn.seconds_started is not None
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.input_tokens": num_input,
        "gen_ai.usage.output_tokens": turn.num_tokens,
        "agentrl.cached_tokens": turn.cached_tokens,
        "agentrl.finish_reason": str(turn.finish_reason),
    }
    if turn.weight_versions:
        attributes["agentrl.policy_version"] = turn.weight_versions[-1].version
    ended = turn.seconds_started + turn.seconds
    yield Span("engine_call", turn.seconds_started, ended, attributes)
    for call in turn.calls:
        if call.seconds_started is not None:
            yield Span(
                "tool_call",
                call.seconds_started,
                call.seconds_started + call.queue_seconds + call.seconds,
                {
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.name": call.name,
                    "gen_ai.tool.call.id": call.call_id,
                    "agentrl.outcome": str(call.outcome),
                    "agentrl.queue_seconds": call.queue_seconds,
                    "agentrl.num_attempts": call.num_attempts,
                    "agentrl.is_cached": call.is_cached,
                },
                call.message if CallOutcome(call.outcome) in FAILED else "",
            )
    for reply in following:
        if reply.role == "user" and reply.seconds_started is not None:
            yield Span("interaction", reply.seconds_started, reply.seconds_started + reply.seconds)


def _score_span(request: AsyncRolloutRequest) -> Iterator[Span]:
    started = request.metrics.get("seconds_reward_started")
    if started is not None:
        yield Span("score", started, started + request.metrics.get("seconds_reward", 0.0))


def step_span(step: int, intervals: Iterable[Interval]) -> Span | None:
    """Make the spans of a step from its phases, which nest; None without phases."""
    in_order = sorted(intervals, key=lambda one: (one.started, -one.ended))
    if not in_order:
        return None
    root = Span("step", in_order[0].started, max(one.ended for one in in_order))
    root.attributes["agentrl.step"] = step
    open_spans = [root]
    for one in in_order:
        while one.started >= open_spans[-1].ended and len(open_spans) > 1:
            open_spans.pop()
        span = Span(_NOT_NAMED.get(one.name, one.name), one.started, one.ended)
        open_spans[-1].children.append(span)
        open_spans.append(span)
    return root
