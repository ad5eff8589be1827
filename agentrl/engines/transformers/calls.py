"""One running `generate` of the embedded engine: what it asks for and what it has so far."""

import asyncio
import math
import random
from dataclasses import dataclass, field

from agentrl.engines.protocol import Completion, FinishReason, SamplingParams, VersionSpan
from agentrl.engines.stopping import StopCheck
from agentrl.engines.transformers.sampling import Draw
from agentrl.errors import EngineError


@dataclass(eq=False, slots=True)
class Call:
    """One `generate`. After it was handed over, only the engine's thread writes to it."""

    key: str
    """Unique among all calls of the engine; a request makes one call for each of its turns."""
    request_id: str
    input_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    """Most tokens to sample: the caller's budget, or what the engine's length leaves."""
    stop: StopCheck
    random: random.Random
    future: asyncio.Future[Completion]
    version: int
    """The version of the weights when the call began."""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    version_changes: list[tuple[int, int]] = field(default_factory=list)
    """(version, number of tokens sampled before it came)."""
    cached_tokens: int | None = None
    """Input tokens found in the prefix cache; None: not looked up yet."""

    @property
    def is_finite(self) -> bool:
        """Whether the model's last logits were numbers."""
        return not self.log_probs or math.isfinite(self.log_probs[-1])

    def draw(self) -> Draw:
        """How the next token is sampled."""
        return Draw(self.sampling, self.random.random())

    def append(self, token_id: int, log_prob: float) -> FinishReason | None:
        """Take a sampled token; says whether, and why, it is the last."""
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
        """Take note that what follows is sampled by other weights."""
        self.version_changes.append((version, len(self.token_ids)))

    def result(self, reason: FinishReason) -> Completion | EngineError:
        """What the caller gets."""
        if not self.is_finite:
            return EngineError(
                "the model's logits are not finite: its weights have diverged",
                request_id=self.request_id,
                position=len(self.input_ids) + len(self.token_ids) - 1,
            )
        return Completion(
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=reason,
            weight_versions=self._version_spans(),
            cached_tokens=self.cached_tokens or 0,
        )

    def _version_spans(self) -> tuple[VersionSpan, ...]:
        marks = [(self.version, 0), *self.version_changes]
        ends = [start for _, start in self.version_changes] + [len(self.token_ids)]
        spans = (VersionSpan(v, start, end) for (v, start), end in zip(marks, ends, strict=True))
        return tuple(span for span in spans if span.start < span.end)
