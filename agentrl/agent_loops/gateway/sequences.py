"""The token sequences of one agent's trajectory, and how they become a request with branches."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from agentrl.rollout.context import RolloutContext
from agentrl.rollout.records import BranchCause, TokenDifference, Turn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import RequestState, StopReason

Discarded = Literal["exclude", "train"]
"""What happens to a completion that the agent sampled again from the same history and did not use.
`exclude` leaves it out of the loss: the reward is that of another completion. `train` trains it."""


@dataclass(eq=False, slots=True)
class Point:
    """A completion of the policy: the end of a sampled turn of a sequence."""

    sequence: "TokenSequence"
    turn: Turn
    order: int
    """Number of completions of the trajectory before this one."""
    num_messages: int
    """Messages of the sequence up to the completion."""
    is_delivered: bool = False
    """Whether the client got the whole answer."""
    is_continued: bool = False
    """Whether a later history contains the completion."""

    @property
    def is_free(self) -> bool:
        """Whether a call can append to the sequence here."""
        return not self.sequence.is_busy and self.sequence.points[-1] is self

    @property
    def input_ids(self) -> list[int]:
        """All tokens up to the completion, and those of the completion."""
        record = self.sequence.record
        return record.prompt_ids + record.response_ids[: self.turn.end]

    @property
    def completion_ids(self) -> list[int]:
        """The sampled tokens."""
        return self.sequence.record.response_ids[self.turn.start : self.turn.end]


@dataclass(eq=False, slots=True)
class TokenSequence:
    """One sequence of the trajectory, and how it came to be."""

    record: AsyncRolloutRequest
    engine_id: str
    cause: BranchCause | None = None
    parent: "TokenSequence | None" = None
    copied: Point | None = None
    """The completion up to which the prompt copies another sequence; None: it copies none."""
    points: list[Point] = field(default_factory=list[Point])
    is_busy: bool = False
    """Whether a call is sampling its next completion."""


def exclude_unused(
    sequences: Sequence[TokenSequence], has_later: Callable[[Point], bool], discarded: Discarded
) -> Counter[str]:
    """Exclude completions that had no effect on the agent from the loss.

    Args:
        sequences: Those of the trajectory.
        has_later: Whether the agent sampled again from the history before a completion.
        discarded: What happens to completions that the agent got and did not use.

    Returns:
        The number of completions without effect, by reason.
    """
    counts = Counter[str]()
    points = [point for one in sequences if one.cause != "side_call" for point in one.points]
    last = max(points, key=lambda point: (point.is_delivered, point.order), default=None)
    for point in points:
        if point.is_continued:
            continue
        reason = None
        if not point.is_delivered:
            counts["undelivered"] += 1
            reason = "not delivered to the agent"
        elif point is not last and has_later(point):
            counts["discarded"] += 1
            reason = "discarded by the agent" if discarded == "exclude" else None
        if reason and point.turn.excluded is None:
            point.sequence.record.exclude_turn(point.turn.index, reason)
    return counts


def check_tokens(sequence: TokenSequence, context: RolloutContext) -> None:
    """Compare a sequence with the rendering of its conversation, as `check_tokens` of the run.

    A prompt in which the client wrote words of the assistant is not compared: they are encoded
    as text, and a template would write what they hold.
    """
    if context.settings.tokenization_sanity_check_mode == "disable":
        return
    record, compared = sequence.record, _with_copied_turns(sequence)
    num_sampled = sum(turn.role == "assistant" for turn in compared.turns)
    if sum(message.role == "assistant" for message in record.messages) > num_sampled:
        return
    try:
        context.check_tokens(compared, list)
    except Exception as error:  # noqa: BLE001 - a broken check must not fail the request
        what = f"{type(error).__name__}: {error}"
        broken = TokenDifference(turn=-1, kind="check_failed", expected="", actual=what)
        compared.differences.append(broken)
    record.differences, record.is_checked = compared.differences, compared.is_checked


def write_sequences(sequences: Sequence[TokenSequence], request: AsyncRolloutRequest) -> None:
    """Write sequences with a completion to a running request without tokens.

    The one with the last delivered completion that is not a side call becomes the request's own,
    the others its branches.
    """

    def rank(one: TokenSequence) -> tuple[bool, bool, int]:
        return one.cause != "side_call", one.points[-1].is_delivered, one.points[-1].order

    root = max(sequences, key=rank)

    def parent_id(sequence: TokenSequence) -> str | None:
        parent = sequence.parent
        while parent is not None and not parent.points:
            parent = parent.parent
        if parent is root:
            return request.request_id
        return parent.record.request_id if parent else None

    for sequence in sorted(sequences, key=lambda one: one.points[-1].order):
        if sequence is not root:
            branch, own_parent = sequence.record, parent_id(sequence)
            branch.finish(StopReason.CONTINUED)
            # The first sequence has no cause of its own; the one of the last sequence says why
            # the trajectory does not end in it.
            request.add_branch(branch, sequence.cause or root.cause or "branch")
            branch.parent_id = own_parent
    request.parent_id = parent_id(root)
    _copy_sequence(root.record, request)
    request.differences, request.is_checked = root.record.differences, root.record.is_checked


def _copy_sequence(source: AsyncRolloutRequest, target: AsyncRolloutRequest) -> None:
    """Append the tokens and turns of a sequence to a running request without tokens."""
    target.messages, target.tool_schemas = source.messages, source.tool_schemas
    target.begin(source.prompt_ids)
    _copy_turns(source, target, source.turns)


def _copy_turns(
    source: AsyncRolloutRequest, target: AsyncRolloutRequest, turns: Sequence[Turn]
) -> None:
    """Append turns of a sequence, with their tokens, to another."""
    ids, log_probs = source.response_ids, source.rollout_log_probs
    for turn in turns:
        own = slice(turn.start, turn.end)
        if turn.role == "assistant":
            copied = target.append_sampled(
                ids[own],
                log_probs[own],
                finish_reason=turn.finish_reason,
                weight_versions=turn.weight_versions,
                cached_tokens=turn.cached_tokens,
                seconds=turn.seconds,
                seconds_started=turn.seconds_started,
            )
        else:
            copied = target.append_observed(
                ids[own],
                role=turn.role,
                seconds=turn.seconds,
                seconds_started=turn.seconds_started,
            )
        copied.calls, copied.cut, copied.num_cut_tokens = turn.calls, turn.cut, turn.num_cut_tokens
        if turn.excluded is not None:
            target.exclude_turn(copied.index, turn.excluded)


def _with_copied_turns(sequence: TokenSequence) -> AsyncRolloutRequest:
    """Return the record of a sequence, with the turns whose tokens are in its prompt."""
    record, copied = sequence.record, sequence.copied
    if copied is None:
        return record
    before = _with_copied_turns(copied.sequence)
    num_later = len(copied.sequence.record.turns) - copied.turn.index - 1
    kept = before.turns[: len(before.turns) - num_later]
    whole = AsyncRolloutRequest(
        request_id=record.request_id,
        messages=record.messages,
        tool_schemas=record.tool_schemas,
        data_source=record.data_source,
        sampling=record.sampling,
        budgets=record.budgets,
    )
    whole.take_edge(RequestState.RUNNING)
    whole.begin(before.prompt_ids)
    _copy_turns(before, whole, kept)
    if observed := record.prompt_ids[len(copied.input_ids) :]:
        whole.append_observed(observed, role="user")
    _copy_turns(record, whole, record.turns)
    return whole
