"""The library's requests as calls of the engine: how one starts, goes on, ends and is handed over.

These refine classes of transformers' continuous batching, which calls their methods from its own
scheduling loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import (
    GenerationOutput,
    RequestState,
    RequestStatus,
)

from agentrl.engines.protocol import FinishReason
from agentrl.engines.transformers.calls import Call

UNLIMITED_TOKENS = None
"""The library's own limit is not used: `Call` counts."""


class CallSink(Protocol):
    """Where calls go when they end."""

    def finished(self, calls: Sequence[tuple[Call, FinishReason]]) -> None:
        """Take calls that ended as they should."""
        ...

    def failed(self, call: Call, reason: str) -> None:
        """Take a call that the library gave up."""
        ...


@dataclass
class TrackedState(RequestState):
    """A request of the library that is one call of the engine."""

    call: Call = field(kw_only=True)
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, call: Call) -> "TrackedState":
        """The state from which a call starts, or starts again with what it has sampled."""
        return cls(
            request_id=call.key,
            initial_tokens=call.input_ids + call.token_ids,
            max_new_tokens=UNLIMITED_TOKENS,
            call=call,
        )

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        """Take a sampled token; the library asks whether it was the last."""
        self.generated_tokens.append(token_id)
        self.tokens_to_process = [token_id]
        self.finish_reason = self.call.append(
            token_id, float("nan") if logprob is None else logprob
        )
        if self.finish_reason is None:
            return False
        self.status = RequestStatus.FINISHED
        return True

    def create_equivalent_initial_request(self) -> RequestState:
        """Start again: the library took the request's pages, or its weights changed."""
        return TrackedState.of(self.call)

    def to_generation_output(self) -> GenerationOutput:
        """What the library hands to the router."""
        return TrackedOutput(
            request_id=self.request_id, status=self.status, error=self.error, state=self
        )


@dataclass
class TrackedOutput(GenerationOutput):
    """A result of the library that still knows its state."""

    state: TrackedState = field(kw_only=True)


class CallRouter(OutputRouter):
    """Hands finished requests to the engine instead of the library's queue."""

    def __init__(self, sink: CallSink) -> None:
        super().__init__()
        self._sink = sink

    def deliver(self, output: Any) -> None:
        """Take one result, a `TrackedOutput`."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        """Take the results of one step, each a `TrackedOutput`."""
        finished: list[tuple[Call, FinishReason]] = []
        for output in outputs:
            reason = output.state.finish_reason
            if reason is None:
                self._sink.failed(output.state.call, output.error or "the request was dropped")
            else:
                finished.append((output.state.call, reason))
        self._sink.finished(finished)
