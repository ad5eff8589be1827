"""One rollout: its conversation, its tokens, its state, and a record of each turn.

A request is one trajectory: one sample of its group. Most have one sequence of tokens, their own.
If the history was replaced by a summary, or a sub-agent worked for it, the trajectory has several
sequences: the request holds the last one, and the others are its `branches` (see
docs/segments.md).

A request is made from a `Prompt`, driven by `agentrl.rollout.runner`, scored by `agentrl.rewards`
and turned into a row of tensors by `agentrl.collate`. What can be derived is a property.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from agentrl.data.rows import Prompt
from agentrl.engines.protocol import FinishReason, VersionSpan
from agentrl.errors import LedgerError, TransitionError
from agentrl.media.positions import Run, compute_position_ids, place_runs
from agentrl.media.records import MediaSpan
from agentrl.messages import Message
from agentrl.rollout.ledger import Ledger, make_turn, save_state, split_saved
from agentrl.rollout.records import BranchCause, Failure, MediaRun, RequestFields, Turn
from agentrl.rollout.states import (
    ENDS,
    FINAL_STATES,
    End,
    RequestState,
    StopReason,
    check_edge,
    check_end,
)

_SHARED_WITH_BRANCHES = ("tool_schemas", "data_source", "sampling", "budgets", "seed")
"""Fields that a sequence has in common with the branch into which it is moved."""


class AsyncRolloutRequest(RequestFields):
    """One sample of one prompt, from PENDING to its end.

    The fields of `RequestFields` are free to read and write. Tokens enter only through
    `append_sampled` and `append_observed`. The state changes only through `take_edge`, `finish` and
    `fail_scoring`.

    Example:
        >>> request = AsyncRolloutRequest(messages=[Message(role="user", content="Hi")])
        >>> request.begin([1, 2, 3])
        >>> turn = request.append_sampled([7, 8], [-0.1, -0.2], finish_reason=FinishReason.STOP)
        >>> request.input_ids, request.loss_mask
        ([1, 2, 3, 7, 8], [1, 1])
    """

    branches: "list[AsyncRolloutRequest]" = Field(default_factory=list["AsyncRolloutRequest"])
    """Earlier and parallel sequences of the trajectory, finished, in the order in which they ended.
    `set_aside` and `add_branch` append them. Branches have none of their own."""

    # Pydantic does not see the private attributes: its attribute lookup is slow, and the runner
    # reads them about twenty times per turn.
    if TYPE_CHECKING:
        _state: RequestState = PrivateAttr()
        _stop_reason: StopReason | None = PrivateAttr()
        _error: Failure | None = PrivateAttr()
        _ledger: Ledger = PrivateAttr()
        _turns: list[Turn] = PrivateAttr()
        _media_spans: list[MediaSpan] = PrivateAttr()
        _saved_media: Sequence[MediaRun] = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Initialize the private attributes."""
        vars(self).update(
            _state=RequestState.PENDING,
            _stop_reason=None,
            _error=None,
            _ledger=Ledger(),
            _turns=[],
            _media_spans=[],
            _saved_media=(),
        )

    @classmethod
    def from_prompt(cls, prompt: Prompt, **fields: Any) -> "AsyncRolloutRequest":
        """Make a request from a row. `fields` are its other fields: ids, budgets, sampling."""
        return cls(
            messages=[message.model_copy(deep=True) for message in prompt.messages],
            tools_kwargs=prompt.tools_kwargs,
            interaction_kwargs=prompt.interaction_kwargs,
            tool_selection=prompt.tool_selection,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            columns=prompt.columns,
            multi_modal_data={kind: list(of) for kind, of in prompt.multi_modal_data.items()},
            **fields,
        )

    # State

    @property
    def state(self) -> RequestState:
        """Current state."""
        return self._state

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the request ended; None before its end."""
        return self._stop_reason

    @property
    def error(self) -> Failure | None:
        """What failed; None if nothing did."""
        return self._error

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self._stop_reason is not None

    @property
    def end(self) -> End | None:
        """What the stop reason means for baseline and loss; None before the end."""
        return None if self._stop_reason is None else ENDS[self._stop_reason]

    @property
    def is_trained(self) -> bool:
        """Whether the sampled tokens enter the loss."""
        return self.end is not None and self.end.trained and self.dropped is None

    @property
    def in_baseline(self) -> bool:
        """Whether the statistics of the group count this request."""
        return self.end is not None and self.end.in_baseline and self.dropped is None

    def take_edge(self, target: RequestState) -> None:
        """Change to another live state (one state machine). `finish` changes to a final one.

        Raises:
            TransitionError: If the table has no such edge, or the target is a final state.
        """
        if target in FINAL_STATES:
            raise TransitionError(f"{target} is a final state: use finish", expected="finish")
        self._follow(target)

    def finish(self, reason: StopReason, error: Failure | None = None) -> None:
        """End the request, once.

        Raises:
            TransitionError: If it has ended, if its state has no edge to this end, if a failure has
                no error, or if a completion has one.
        """
        if self._stop_reason is not None:
            raise TransitionError(f"the request has ended already: {self._stop_reason}")
        self._end(reason, error)

    def fail_scoring(self, error: Failure, reason: StopReason = StopReason.FAILED) -> None:
        """Fail a completed request, because its scoring failed or was cancelled.

        The conversation stays. The request leaves baseline and loss.

        Raises:
            TransitionError: If it is not completed, or the reason is not that of a failure.
        """
        if self._state is not RequestState.COMPLETED:
            raise TransitionError(f"only a completed request can fail scoring, not {self._state}")
        self._end(reason, error)

    def _end(self, reason: StopReason, error: Failure | None) -> None:
        self._follow(check_end(reason, has_error=error is not None))
        self._stop_reason = reason
        self._error = error

    def _follow(self, target: RequestState) -> None:
        check_edge(self._state, target)
        self._state = target

    # Tokens

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens before the first sampled one (a copy)."""
        return list(self._ledger.prompt_ids)

    @property
    def response_ids(self) -> list[int]:
        """Tokens after the prompt, sampled and observed (a copy)."""
        return list(self._ledger.response_ids)

    @property
    def loss_mask(self) -> list[int]:
        """1 for each response token that is trained, 0 for the others (a copy)."""
        return list(self._ledger.loss_mask)

    @property
    def rollout_log_probs(self) -> list[float]:
        """Log-probability at sampling; 0.0 for observed tokens (a copy)."""
        return list(self._ledger.rollout_log_probs)

    @property
    def input_ids(self) -> list[int]:
        """Prompt and response: exactly the tokens that the engine gets (train what was sampled)."""
        ledger = self._ledger
        return ledger.prompt_ids + ledger.response_ids

    def tokens_before(self, turn: Turn, num: int = 64) -> list[int]:
        """Return up to so many tokens before a turn."""
        ledger, start = self._ledger, turn.start
        prompt = ledger.prompt_ids[-num:] if start < num else []
        return [*prompt, *ledger.response_ids[max(0, start - num) : start]][-num:]

    @property
    def attention_mask(self) -> list[int]:
        """1 for each of `input_ids`: a request has no padding."""
        return [1] * len(self._ledger)

    @property
    def position_ids(self) -> list[int]:
        """0, 1, 2, ... for each of `input_ids`."""
        return list(range(len(self._ledger)))

    @property
    def mrope_position_ids(self) -> NDArray[np.int64]:
        """`[3, L]`: temporal, vertical and horizontal position of each of `input_ids`."""
        return compute_position_ids(self._media_spans, 0, len(self._ledger))

    @property
    def media_spans(self) -> tuple[MediaSpan, ...]:
        """The runs of placeholder tokens of images and videos in `input_ids`, in order."""
        return tuple(self._media_spans)

    @property
    def media_runs(self) -> Sequence[MediaRun]:
        """The same runs as they are saved; a request that was read from a file has only these."""
        return [self._as_saved(span) for span in self._media_spans] or self._saved_media

    def _as_saved(self, span: MediaSpan) -> MediaRun:
        loaded = span.item.loaded
        shown = self.multi_modal_data.get(str(loaded.kind), ())
        index = next((n for n, one in enumerate(shown) if one is loaded.data), None)
        return MediaRun(
            start=span.start, end=span.end, kind=loaded.kind.value, index=index,
            offset=span.offset, source=loaded.source,
        )  # fmt: skip

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._ledger.prompt_ids)

    @property
    def num_response_tokens(self) -> int:
        """Length of the response."""
        return len(self._ledger.response_ids)

    def begin(self, prompt_ids: Sequence[int], runs: Sequence[Run] = ()) -> None:
        """Set the tokens of the prompt, once, before anything is appended.

        Args:
            prompt_ids: The tokens; each image and video has all its placeholder tokens.
            runs: The runs of placeholder tokens in them, in order.

        Raises:
            LedgerError: If the prompt is empty, or the request has begun or ended.
        """
        if self._ledger.prompt_ids or self.is_finished:
            raise LedgerError("the request has begun already, or ended")
        if not len(prompt_ids):
            raise LedgerError("a prompt without tokens", expected="at least one token")
        self._ledger = Ledger(prompt_ids)
        self._media_spans = place_runs([], runs)

    def append_sampled(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        *,
        finish_reason: FinishReason | None = None,
        weight_versions: tuple[VersionSpan, ...] = (),
        cached_tokens: int = 0,
        seconds: float = 0.0,
        seconds_started: float | None = None,
    ) -> Turn:
        """Append a completion of the policy, verbatim, with mask 1, as a new turn.

        Raises:
            LedgerError: If tokens, log-probabilities and versions do not agree, if the tokens do
                not fit into the budgets, before the prompt, and after the end. Nothing is appended.
        """
        turn = self._make_turn(
            len(ids),
            role="assistant",
            finish_reason=finish_reason,
            weight_versions=weight_versions,
            cached_tokens=cached_tokens,
            seconds=seconds,
            seconds_started=seconds_started,
        )
        self._ledger.append_sampled(ids, log_probs)
        self._turns.append(turn)
        return turn

    def append_observed(
        self,
        ids: Sequence[int],
        *,
        role: Literal["tool", "user"],
        seconds: float = 0.0,
        seconds_started: float | None = None,
        runs: Sequence[Run] = (),
    ) -> Turn:
        """Append what the policy is shown, with mask 0, as a new turn.

        Args:
            ids: The tokens; each image and video has all its placeholder tokens.
            role: Who the tokens are from.
            seconds: How long the policy waited for them.
            seconds_started: Unix time at which it began to wait.
            runs: The runs of placeholder tokens in `ids`, in order.

        Raises:
            LedgerError: As for `append_sampled`. Nothing is appended.
        """
        turn = self._make_turn(
            len(ids), role=role, seconds=seconds, seconds_started=seconds_started
        )
        if turn.role == "assistant":
            raise LedgerError("tokens of the assistant are sampled", expected="append_sampled")
        shift = len(self._ledger)
        self._ledger.append_observed(ids)
        self._media_spans += place_runs(self._media_spans, runs, shift=shift)
        self._turns.append(turn)
        return turn

    def exclude_turn(self, index: int, reason: str) -> None:
        """Exclude a sampled turn from the loss. Its tokens and log-probabilities stay.

        Raises:
            LedgerError: If there is no such turn, or it was not sampled.
        """
        if not 0 <= index < len(self._turns) or self._turns[index].role != "assistant":
            raise LedgerError(f"turn {index} is not a sampled turn ({len(self._turns)} turns)")
        turn = self._turns[index]
        turn.excluded = reason
        self._ledger.exclude(turn.start, turn.end)

    def _make_turn(self, num_tokens: int, **fields: Any) -> Turn:
        if self.is_finished or not self._ledger.prompt_ids:
            raise LedgerError("tokens cannot be appended before the prompt or after the end")
        if num_tokens > (left := self.num_tokens_left):
            raise LedgerError(f"{num_tokens} tokens, but {left} are left", limit=self.nearest_limit)
        start = self.num_response_tokens
        return make_turn(index=len(self._turns), start=start, end=start + num_tokens, **fields)

    def add_media(self, media: Mapping[str, Sequence[Any]]) -> None:
        """Add the images and videos of an appended message, by kind."""
        for kind, values in media.items():
            self.multi_modal_data.setdefault(kind, []).extend(values)

    def share_media(self) -> None:
        """Let `multi_modal_data` hold the objects of the items that the messages show.

        A request that comes from another process has copies of pictures that this process has.
        """
        if self._media_spans:
            parts = [part for message in self.messages for part in message.parts]
            items = [part.item for part in parts if part.item is not None]
            self.multi_modal_data = {}
            self.add_media({str(item.kind): () for item in items})
            for item in items:
                self.multi_modal_data[str(item.kind)].append(item.loaded.data)

    # Sequences of the trajectory

    @property
    def sequences(self) -> "tuple[AsyncRolloutRequest, ...]":
        """All sequences of the trajectory; the request itself is the last one."""
        return (*self.branches, self)

    @property
    def trajectory_turns(self) -> Sequence[Turn]:
        """Turns of all sequences, except those of delegates, which have budgets of their own.

        `start` and `end` of a turn count in its own sequence.
        """
        if not self.branches:
            return self._turns
        helpers = [one.request_id for one in self.branches if one.branch_cause == "delegate"]
        earlier = tuple(f"{name}#" for name in helpers)  # set aside by them (see `set_aside`)
        own = (one for one in self.sequences if one.request_id not in helpers)
        return [
            turn for one in own if not one.request_id.startswith(earlier) for turn in one._turns
        ]

    def set_aside(
        self, cause: BranchCause, messages: Sequence[Message] = ()
    ) -> "AsyncRolloutRequest":
        """Move tokens, turns, messages and media into a finished branch, and return the branch.

        Afterwards the request has no tokens and can `begin` again, in the same state.

        Args:
            cause: Why the sequence does not continue.
            messages: The conversation with which the request begins again.

        Raises:
            LedgerError: If the request has no tokens, or has ended. Nothing is changed.
        """
        if self.is_finished or not self._ledger.prompt_ids:
            raise LedgerError("a sequence without tokens, or one that has ended, stays")
        branch = AsyncRolloutRequest(
            request_id=f"{self.request_id}#{len(self.branches)}",
            parent_id=self.parent_id,
            messages=self.messages,
            multi_modal_data=self.multi_modal_data,
            **{name: getattr(self, name) for name in _SHARED_WITH_BRANCHES},
        )
        branch._ledger, branch._turns = self._ledger, self._turns
        branch._media_spans = self._media_spans
        branch.take_edge(RequestState.RUNNING)
        branch.finish(StopReason.CONTINUED)
        for one in self.branches:
            if one.parent_id == self.request_id:
                one.parent_id = branch.request_id
        self._ledger, self._turns, self.multi_modal_data = Ledger(), [], {}
        self._media_spans = []
        self.messages, self.parent_id = [*messages], branch.request_id
        self._attach(branch, cause)
        return branch

    def add_branch(self, other: "AsyncRolloutRequest", cause: BranchCause) -> None:
        """Attach a finished request as a branch, and its own branches before it.

        If it has no `parent_id`, its parent is this request. It becomes a sample of this request's
        group. If it is not trained, its branches are not trained either.

        Raises:
            LedgerError: If it has not ended, or is attached already. Nothing is changed.
        """
        attached = {id(one) for one in self.sequences}
        if not other.is_finished or other.branch_cause or id(other) in attached:
            raise LedgerError(
                f"the request {other.request_id} cannot become a branch of {self.request_id}",
                expected="another request, which has ended and is not a branch",
            )
        others, other.branches = other.branches, []
        first = next((one for one in [*others, other] if one.parent_id is None), other)
        first.parent_id = first.parent_id or self.request_id
        for one in others:
            if not other.is_trained:
                one.dropped = one.dropped or f"{other.request_id} is not trained"
            self._attach(one, one.branch_cause or cause)
        self._attach(other, cause)

    def _attach(self, branch: "AsyncRolloutRequest", cause: BranchCause) -> None:
        branch.branch_cause = cause
        branch.uid, branch.batch_data_id = self.uid, self.batch_data_id
        branch.rollout_offset, branch.attempt = self.rollout_offset, self.attempt
        self.branches.append(branch)

    # Budgets

    @property
    def num_tokens_left(self) -> int:
        """Tokens that still fit into the response budget and the model's length."""
        ledger, budgets = self._ledger, self.budgets
        of_response = budgets.max_response_tokens - len(ledger.response_ids)
        return min(of_response, budgets.max_model_len - len(ledger))

    @property
    def max_next_tokens(self) -> int:
        """Tokens that the next turn may sample."""
        left = self.num_tokens_left
        return min(left, self.budgets.max_turn_tokens or left)

    @property
    def nearest_limit(self) -> StopReason:
        """The token limit that is reached first."""
        of_response = self.budgets.max_response_tokens - self.num_response_tokens
        is_response = of_response <= self.num_tokens_left
        return StopReason.RESPONSE_BUDGET if is_response else StopReason.MODEL_LENGTH

    def limit_for_calls(self, num_calls: int) -> StopReason | None:
        """Return the limit that more calls, or the turn after them, would exceed, if any."""
        limit = self.budgets.max_tool_calls
        if limit is not None and self.num_tool_calls + num_calls > limit:
            return StopReason.MAX_TOOL_CALLS
        return self._limit_for_turn()

    def limit_for_reply(self) -> StopReason | None:
        """Return the limit that a user reply, or the turn after it, would exceed, if any."""
        limit = self.budgets.max_user_turns
        if limit is not None and self.num_user_turns >= limit:
            return StopReason.MAX_USER_TURNS
        return self._limit_for_turn()

    def _limit_for_turn(self) -> StopReason | None:
        limit = self.budgets.max_assistant_turns
        is_reached = limit is not None and self.num_assistant_turns >= limit
        return StopReason.MAX_ASSISTANT_TURNS if is_reached else None

    # Turns

    @property
    def turns(self) -> tuple[Turn, ...]:
        """A record for each turn, in order. Their spans cover the response without a gap."""
        return tuple(self._turns)

    @property
    def num_assistant_turns(self) -> int:
        """Completions of the trajectory so far, without summaries and delegates."""
        turns = self.trajectory_turns
        return sum(turn.role == "assistant" and not turn.is_compaction for turn in turns)

    @property
    def num_user_turns(self) -> int:
        """Replies of the interaction to the trajectory so far."""
        turns = self.trajectory_turns
        return sum(turn.role == "user" and not turn.is_compaction for turn in turns)

    @property
    def num_turns(self) -> int:
        """Turns as verl counts them: the prompt is one, all results of one completion are one."""
        turns = [turn for turn in self.trajectory_turns if not turn.is_compaction]
        return 1 + sum(1 for _ in groupby(turn.role for turn in turns))

    @property
    def num_tool_calls(self) -> int:
        """Tool calls of the trajectory so far, malformed ones included, without delegates' own."""
        turns = self.trajectory_turns
        return sum(len(turn.calls) for turn in turns if not turn.is_compaction)

    @property
    def reward_scores(self) -> dict[str, Any]:
        """Rewards of tools by name, and those of the turns under `user_turn_rewards`."""
        turns = self.trajectory_turns
        scored = [turn.reward for turn in turns if turn.reward is not None]
        return {**self.tool_rewards, "user_turn_rewards": scored}

    # Comparing, copying and saving include the private attributes.

    def __eq__(self, other: object) -> bool:
        """Compare all fields and the private attributes."""
        if not isinstance(other, AsyncRolloutRequest):
            return NotImplemented
        return self._private_values() == other._private_values() and super().__eq__(other)

    def __copy__(self) -> Self:
        """Copy with a ledger and turns of its own, so that copies do not share tokens."""
        twin = super().__copy__()
        twin._ledger, twin._turns = copy.deepcopy((self._ledger, self._turns))
        twin._media_spans = [*self._media_spans]
        twin.branches = [copy.copy(branch) for branch in self.branches]
        return twin

    def _private_values(self) -> tuple[RequestState, StopReason | None, Any, list[Turn], Ledger]:
        return self._state, self._stop_reason, self._error, self._turns, self._ledger

    @model_serializer(mode="wrap")
    def _save(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return handler(self) | save_state(*self._private_values(), self.media_runs)

    @model_validator(mode="wrap")
    @classmethod
    def _load(
        cls, data: Any, handler: ModelWrapValidatorHandler["AsyncRolloutRequest"]
    ) -> "AsyncRolloutRequest":
        if not isinstance(data, dict) or "version" not in data:
            return handler(data)
        fields, saved = split_saved(cast("dict[str, Any]", data))
        request = handler(fields)
        request._ledger, request._turns = saved.ledger, saved.turns
        request._stop_reason, request._error = saved.stop_reason, saved.error
        request._state = saved.state
        request._saved_media = saved.media_runs
        return request
