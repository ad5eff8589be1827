"""A running `generate` of the embedded engine, and the library's request that samples it.

The classes of the second half refine those of transformers' continuous batching, which calls their
methods in its scheduling loop.
"""

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from transformers.generation.continuous_batching.continuous_api import OutputRouter
from transformers.generation.continuous_batching.requests import (
    GenerationOutput,
    RequestState,
    RequestStatus,
)

from agentrl.engines.protocol import Completion, FinishReason, SamplingParams, VersionSpan
from agentrl.engines.stopping import StopCheck
from agentrl.engines.transformers.sampling import Draw
from agentrl.errors import EngineError
from agentrl.media.records import MediaSpan


@dataclass(eq=False, slots=True)
class Call:
    """One `generate`. Once it is submitted, only the engine's thread writes to it."""

    key: str
    """Unique among all calls of the engine; a request makes one call for each turn."""
    request_id: str
    input_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    """Most tokens to sample, by the caller's budget and the engine's length."""
    stop: StopCheck
    random: random.Random
    future: asyncio.Future[Completion]
    version: int
    """The version of the weights when the call started."""
    media: Sequence[MediaSpan] = ()
    """The runs of placeholder tokens in `input_ids`, in order."""
    prefix_ids: list[int] | None = None
    """What the library gets for `input_ids`, so that it shares no prefix between different
    pictures (see `PrefixIds`); None: the same."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    version_changes: list[tuple[int, int]] = field(default_factory=list)
    """(version, number of tokens sampled before it)."""
    cached_tokens: int | None = None
    """Input tokens found in the prefix cache; None: not known yet."""

    @property
    def is_finite(self) -> bool:
        """Whether the model's last logits were finite."""
        return not self.log_probs or math.isfinite(self.log_probs[-1])

    def draw(self) -> Draw:
        """Return how the next token is sampled."""
        return Draw(self.sampling, self.random.random())

    def append(self, token_id: int, log_prob: float) -> FinishReason | None:
        """Append a sampled token; return why it is the last, or None."""
        self.token_ids.append(token_id)
        self.log_probs.append(log_prob)
        if not self.is_finite:
            return FinishReason.ABORT
        if self.stop.is_met(self.token_ids):
            return FinishReason.STOP
        if len(self.token_ids) >= self.max_tokens:
            return FinishReason.LENGTH
        return None

    def note_version(self, version: int) -> None:
        """Record that later tokens are sampled with other weights."""
        self.version_changes.append((version, len(self.token_ids)))

    def result(self, reason: FinishReason) -> Completion | EngineError:
        """Return the caller's result."""
        if not self.is_finite:
            return EngineError(
                "the model's logits are not finite: its weights have diverged",
                request_id=self.request_id,
                position=len(self.input_ids) + len(self.token_ids) - 1,
            )
        marks = [(self.version, 0), *self.version_changes]
        ends = [start for _, start in self.version_changes] + [len(self.token_ids)]
        spans = (VersionSpan(v, start, end) for (v, start), end in zip(marks, ends, strict=True))
        return Completion(
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=reason,
            weight_versions=tuple(span for span in spans if span.start < span.end),
            cached_tokens=self.cached_tokens or 0,
        )


UNLIMITED_TOKENS = None
"""The library's own limit is not used: `Call` counts."""


class CallSink(Protocol):
    """Takes calls that have ended."""

    def finished(self, calls: Sequence[tuple[Call, FinishReason]]) -> None:
        """Take calls that ended normally."""
        ...

    def failed(self, call: Call, reason: str) -> None:
        """Take a call that the library dropped."""
        ...


@dataclass
class TrackedState(RequestState):
    """A request of the library that is one call of the engine."""

    call: Call = field(kw_only=True)
    finish_reason: FinishReason | None = None

    @classmethod
    def of(cls, call: Call) -> "TrackedState":
        """Make the state with which a call starts, or restarts after its tokens."""
        return cls(
            request_id=call.key,
            initial_tokens=(call.prefix_ids or call.input_ids) + call.token_ids,
            max_new_tokens=UNLIMITED_TOKENS,
            call=call,
        )

    def update_and_check_completion(self, token_id: int, logprob: float | None) -> bool:
        """Append a sampled token, and return whether it is the last."""
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
        """Restart: the library has taken the request's pages, or the weights have changed."""
        return TrackedState.of(self.call)

    def to_generation_output(self) -> GenerationOutput:
        """Return what the library passes to the router."""
        return TrackedOutput(
            request_id=self.request_id, status=self.status, error=self.error, state=self
        )


@dataclass
class TrackedOutput(GenerationOutput):
    """A result of the library with its state."""

    state: TrackedState = field(kw_only=True)


class CallRouter(OutputRouter):
    """Passes finished requests to the engine instead of the library's queue."""

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
