"""One rollout: its conversation, its ledger, its state, and all that is known of each token.

A request is made from a `Prompt`, driven by `agentrl.rollout.runner`, scored by `agentrl.rewards`
and turned into a row of tensors by `agentrl.collate`. Everything that can be derived is a property.
"""

import copy
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Self, cast

from pydantic import (
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from agentrl.data.rows import Prompt
from agentrl.engines.protocol import FinishReason, VersionSpan
from agentrl.errors import LedgerError, TransitionError
from agentrl.rollout.ledger import Ledger, make_turn, save_private, split_saved
from agentrl.rollout.records import Failure, RequestFields, Turn
from agentrl.rollout.states import (
    ENDS,
    FINAL_STATES,
    End,
    RequestState,
    StopReason,
    check_edge,
    check_end,
)


class AsyncRolloutRequest(RequestFields):
    """One sample of one prompt, from PENDING to its end.

    Its fields are those of `RequestFields`, free to read and to write. Tokens enter through
    `append_sampled` and `append_observed` alone; the state changes through `take_edge` and `finish`
    alone.

    Example:
        >>> request = AsyncRolloutRequest(messages=[Message(role="user", content="Hi")])
        >>> request.begin([1, 2, 3])
        >>> turn = request.append_sampled([7, 8], [-0.1, -0.2], finish_reason=FinishReason.STOP)
        >>> request.input_ids, request.loss_mask
        ([1, 2, 3, 7, 8], [1, 1])
    """

    # The private half. Pydantic does not see it: it would look for each of these in many places,
    # and a turn asks some twenty times.
    if TYPE_CHECKING:
        _state: RequestState = PrivateAttr()
        _stop_reason: StopReason | None = PrivateAttr()
        _error: Failure | None = PrivateAttr()
        _ledger: Ledger = PrivateAttr()
        _turns: list[Turn] = PrivateAttr()

    def model_post_init(self, context: Any, /) -> None:
        """Begin the private half."""
        vars(self).update(
            _state=RequestState.PENDING, _stop_reason=None, _error=None, _ledger=Ledger(), _turns=[]
        )

    @classmethod
    def from_prompt(cls, prompt: Prompt, **fields: Any) -> "AsyncRolloutRequest":
        """Make a request from a row; `fields` are identity, budgets, sampling, schemas, seed."""
        return cls(
            messages=[message.model_copy(deep=True) for message in prompt.messages],
            tools_kwargs=prompt.tools_kwargs,
            interaction_kwargs=prompt.interaction_kwargs,
            tool_selection=prompt.tool_selection,
            data_source=prompt.data_source,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            columns=prompt.columns,
            **fields,
        )

    # The state.

    @property
    def state(self) -> RequestState:
        """Where the request stands; changed by `take_edge` and `finish` alone."""
        return self._state

    @property
    def stop_reason(self) -> StopReason | None:
        """Why it ended; None while it lives."""
        return self._stop_reason

    @property
    def error(self) -> Failure | None:
        """What broke; None unless it failed."""
        return self._error

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self._stop_reason is not None

    @property
    def end(self) -> End | None:
        """What its stop reason means for the rest of the data's way; None while it lives."""
        return None if self._stop_reason is None else ENDS[self._stop_reason]

    @property
    def is_trained(self) -> bool:
        """Whether its sampled tokens enter the loss."""
        return self.end is not None and self.end.trained and self.dropped is None

    @property
    def in_baseline(self) -> bool:
        """Whether its group's statistics count it."""
        return self.end is not None and self.end.in_baseline and self.dropped is None

    def take_edge(self, target: RequestState) -> None:
        """Follow an edge between living states (one state machine); ends are taken by `finish`.

        Raises:
            TransitionError: where the table has no such edge.
        """
        if target in FINAL_STATES:
            raise TransitionError(f"{target} is an end: it needs a stop reason", expected="finish")
        self._follow(target)

    def finish(self, reason: StopReason, error: Failure | None = None) -> None:
        """End the request, once.

        Raises:
            TransitionError: where it has ended before, or cannot end so from its state; for a
                failure without an error, or an error without a failure.
        """
        if self._stop_reason is not None:
            raise TransitionError(f"the request has ended already: {self._stop_reason}")
        self._end(reason, error)

    def fail_scoring(self, error: Failure, reason: StopReason = StopReason.FAILED) -> None:
        """Turn a completed request whose scorer broke, or was cancelled, into a failed one (a
        failed request is data).

        The conversation stands; only its account changes: it leaves baseline and loss.

        Raises:
            TransitionError: where it is not completed, or the reason is none of a failure.
        """
        if self._state is not RequestState.COMPLETED:
            raise TransitionError(f"only a completed request can fail scoring, not {self._state}")
        self._end(reason, error)

    def _end(self, reason: StopReason, error: Failure | None) -> None:
        self._follow(check_end(reason, is_explained=error is not None))
        self._stop_reason = reason
        self._error = error

    def _follow(self, target: RequestState) -> None:
        check_edge(self._state, target)
        self._state = target

    # The ledger.

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
        """1 for each response token that is trained (a copy)."""
        return list(self._ledger.loss_mask)

    @property
    def rollout_log_probs(self) -> list[float]:
        """Log-probability at sampling, 0.0 for observed tokens (a copy)."""
        return list(self._ledger.rollout_log_probs)

    @property
    def input_ids(self) -> list[int]:
        """Prompt and response: what the engine is sent, exactly (train what was sampled)."""
        ledger = self._ledger
        return ledger.prompt_ids + ledger.response_ids

    @property
    def attention_mask(self) -> list[int]:
        """1 for each of `input_ids`: a request holds no padding."""
        return [1] * len(self._ledger)

    @property
    def position_ids(self) -> list[int]:
        """0, 1, 2, ... for each of `input_ids`."""
        return list(range(len(self._ledger)))

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self._ledger.prompt_ids)

    @property
    def num_response_tokens(self) -> int:
        """Length of the response."""
        return len(self._ledger.response_ids)

    @property
    def num_tokens_left(self) -> int:
        """Tokens that still fit into the response budget and the model's length."""
        ledger, budgets = self._ledger, self.budgets
        of_response = budgets.max_response_tokens - len(ledger.response_ids)
        return min(of_response, budgets.max_model_len - len(ledger))

    @property
    def nearest_limit(self) -> StopReason:
        """Which of the two limits on its tokens is the nearer one."""
        of_response = self.budgets.max_response_tokens - self.num_response_tokens
        is_response = of_response <= self.num_tokens_left
        return StopReason.RESPONSE_BUDGET if is_response else StopReason.MODEL_LENGTH

    def begin(self, prompt_ids: Sequence[int]) -> None:
        """Set the prompt's tokens, once, before anything is appended.

        Raises:
            LedgerError: for an empty prompt, where there is one already, or behind the end.
        """
        if self._ledger.prompt_ids or self.is_finished:
            raise LedgerError("the request has begun already, or ended")
        if not len(prompt_ids):
            raise LedgerError("a prompt without tokens", expected="at least one token")
        self._ledger = Ledger(prompt_ids)

    def append_sampled(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        *,
        finish_reason: FinishReason | None = None,
        weight_versions: tuple[VersionSpan, ...] = (),
        cached_tokens: int = 0,
        seconds: float = 0.0,
    ) -> Turn:
        """Append a completion of the policy, verbatim, with mask 1; opens its turn's record.

        Raises:
            LedgerError: where tokens, log-probabilities and versions do not agree, where they do
                not fit into the budgets, before the prompt, or behind the end; nothing is appended.
        """
        turn = self._next_turn(
            len(ids),
            role="assistant",
            finish_reason=finish_reason,
            weight_versions=weight_versions,
            cached_tokens=cached_tokens,
            seconds=seconds,
        )
        self._ledger.append_sampled(ids, log_probs)
        return self._open(turn)

    def append_observed(
        self, ids: Sequence[int], *, role: Literal["tool", "user"], seconds: float = 0.0
    ) -> Turn:
        """Append what the policy is shown, with mask 0; opens its turn's record.

        Raises:
            LedgerError: as `append_sampled`; nothing is appended.
        """
        turn = self._next_turn(len(ids), role=role, seconds=seconds)
        if turn.role == "assistant":
            raise LedgerError("what an assistant says was sampled", expected="append_sampled")
        self._ledger.append_observed(ids)
        return self._open(turn)

    def exclude_turn(self, index: int, reason: str) -> None:
        """Leave a sampled turn out of the loss, by a declared policy; its ids stay.

        Raises:
            LedgerError: where there is no such turn, or it was not sampled.
        """
        if not 0 <= index < len(self._turns) or self._turns[index].role != "assistant":
            raise LedgerError(f"turn {index} is no sampled turn of {len(self._turns)} turns")
        turn = self._turns[index]
        turn.excluded = reason
        self._ledger.exclude(turn.start, turn.end)

    def _next_turn(self, num_tokens: int, **fields: Any) -> Turn:
        """Make the record of a turn that may be appended; `fields` are the turn's own."""
        if self.is_finished or not self._ledger.prompt_ids:
            raise LedgerError("no token enters a request before its prompt or behind its end")
        if num_tokens > (left := self.num_tokens_left):
            raise LedgerError(f"{num_tokens} tokens where {left} fit", limit=self.nearest_limit)
        start = self.num_response_tokens
        return make_turn(index=len(self._turns), start=start, end=start + num_tokens, **fields)

    def _open(self, turn: Turn) -> Turn:
        self._turns.append(turn)
        return turn

    def add_media(self, media: Mapping[str, Sequence[Any]]) -> None:
        """Add the images and videos of a message that was appended, by kind."""
        for kind, values in media.items():
            self.multi_modal_data.setdefault(kind, []).extend(values)

    # The turns.

    @property
    def turns(self) -> tuple[Turn, ...]:
        """A record for each turn, in order; their spans cover the response without a gap."""
        return tuple(self._turns)

    @property
    def num_assistant_turns(self) -> int:
        """Completions so far."""
        return sum(turn.role == "assistant" for turn in self._turns)

    @property
    def num_user_turns(self) -> int:
        """Replies of the interaction so far."""
        return sum(turn.role == "user" for turn in self._turns)

    @property
    def num_turns(self) -> int:
        """Turns as verl counts them: the prompt is one, all results of one completion are one."""
        return 1 + sum(1 for _ in groupby(turn.role for turn in self._turns))

    @property
    def num_tool_calls(self) -> int:
        """Tool calls so far, malformed ones included."""
        return sum(len(turn.calls) for turn in self._turns)

    @property
    def reward_scores(self) -> dict[str, Any]:
        """Rewards of tools by name, and of the turns under `user_turn_rewards`."""
        scored = [turn.reward for turn in self._turns if turn.reward is not None]
        return {**self.tool_rewards, "user_turn_rewards": scored}

    def __eq__(self, other: object) -> bool:
        """Compare all that is known of both; pydantic would compare the public half alone."""
        if not isinstance(other, AsyncRolloutRequest):
            return NotImplemented
        return self._private_half == other._private_half and super().__eq__(other)

    @property
    def _private_half(self) -> tuple[Any, ...]:
        return self._state, self._stop_reason, self._error, self._turns, self._ledger

    # Saving: the private half travels with the public one.

    @model_serializer(mode="wrap")
    def _save(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return handler(self) | save_private(*self._private_half)

    @model_validator(mode="wrap")
    @classmethod
    def _load(
        cls, data: Any, handler: ModelWrapValidatorHandler["AsyncRolloutRequest"]
    ) -> "AsyncRolloutRequest":
        if not isinstance(data, dict) or "version" not in data:
            return handler(data)
        public, private = split_saved(cast("dict[str, Any]", data))
        request = handler(public)
        request._ledger, request._turns = private.ledger, private.turns
        request._stop_reason, request._error = private.stop_reason, private.error
        request._state = private.state
        return request

    def __copy__(self) -> Self:
        """Copy with a ledger and turns of its own: no copy appends to another's tokens."""
        twin = super().__copy__()
        twin._ledger, twin._turns = copy.deepcopy((self._ledger, self._turns))
        return twin
