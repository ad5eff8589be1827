"""What every inference engine is: token ids in, token ids and log-probabilities out.

The protocol is all that the rest of agentrl knows of an engine. `tests/engines/conformance.py` is
the suite that each implementation passes.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch


class FinishReason(StrEnum):
    """Why one engine call ended."""

    STOP = "stop"
    """A stop token or stop string was sampled; it is the last of the completion's tokens."""
    LENGTH = "length"
    """`max_new_tokens` or the engine's context length was reached."""
    ABORT = "abort"
    """The call was aborted; what had been sampled so far is returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one engine call samples. Different calls may differ side by side."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Stop strings; the tokens that complete one are kept in the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends behind any of these; the token itself is kept in the output."""
    seed: int | None = None
    """The same seed, input and weights give the same tokens, whichever calls run beside it (up to
    rounding: a token decided within it may fall otherwise); the embedded and the scripted engine
    keep this. None: the engine's own random stream."""


class VersionSpan(NamedTuple):
    """Which weights sampled the completion's tokens `[start, end)`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What one engine call returned, verbatim."""

    token_ids: list[int]
    log_probs: list[float]
    """`log_softmax(logits / T)` of each token over the whole vocabulary, T the call's temperature;
    for a greedy call (T = 0) at T = 1. One entry for each of `token_ids`."""
    finish_reason: FinishReason
    weight_versions: tuple[VersionSpan, ...]
    """Spans that cover `token_ids` from 0 to its end; empty where no token was sampled."""
    cached_tokens: int = 0
    """Tokens of the input that were served from a prefix cache."""

    @property
    def weight_version(self) -> int | None:
        """The version that sampled the last token."""
        return self.weight_versions[-1].version if self.weight_versions else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """What `generate` is asked, as a record."""

    input_ids: Sequence[int]
    sampling: SamplingParams
    request_id: str


class CompletionSource(Protocol):
    """All that a request sees of its engine."""

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Continue `input_ids`. Returns at a stop, at a limit, or when aborted."""
        ...


class MemoryTag(StrEnum):
    """What of an engine's memory can be given back."""

    WEIGHTS = "weights"
    """The engine's own copy of the weights; their values are lost."""
    KV_CACHE = "kv_cache"
    """The cache of keys and values; what it holds is lost."""


ALL_MEMORY = tuple(MemoryTag)


@dataclass(slots=True)
class SyncFigures:
    """What an update of weights moved."""

    num_bytes: int = 0
    """Bytes written or sent; 0 where the engine computes on the tensors themselves."""
    num_buckets: int = 0
    """Parts in which they were sent."""

    def add(self, num_bytes: int) -> None:
        """Count a bucket."""
        self.num_buckets += 1
        self.num_bytes += num_bytes


@runtime_checkable
class Engine(CompletionSource, Protocol):
    """An inference engine. All methods run on one event loop.

    A failure of the engine is an `EngineError`. Cancelling `generate` aborts the call inside the
    engine, so that nothing goes on sampling for a request that has ended.
    """

    max_model_len: int
    """Most tokens, input and output together, of one sequence."""
    is_shared: bool
    """Whether the engines of all ranks are one (servers): then one rank alone updates it."""

    async def generate_together(
        self, calls: Sequence[EngineCall]
    ) -> "list[Completion | BaseException]":
        """Run calls that begin at once, in their order; return when all have ended.

        While nothing else runs, the work of an engine that computes in this process is a function
        of these calls, of the weights and of the cached prefixes, step by step: so are the results,
        to the last bit. Cancelling takes every call out.

        Returns:
            For each call its completion, or what it alone failed with.

        Raises:
            EngineError: The engine as a whole failed or was closed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a running call, whose `generate` returns with `ABORT`; unknown ids are ignored."""
        ...

    async def update_weights(
        self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> SyncFigures:
        """Take new weights (full tensors by parameter name); caches of the old ones are dropped.

        An engine that fails here takes no calls until an update has gone through whole.
        """
        ...

    async def flush_cache(self) -> None:
        """Drop every cached prefix."""
        ...

    async def sleep(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Give memory (and cores) back until `wake`; a no-op where there is nothing to give.

        Calls wait meanwhile. What is asleep already stays so. Weights that slept must be updated
        before calls go on.
        """
        ...

    async def wake(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Take memory again; when all is awake, calls go on."""
        ...

    async def close(self) -> None:
        """Stop for good; running calls end with `EngineError`. May be called twice."""
        ...


@runtime_checkable
class FollowsUpdates(Protocol):
    """An engine that is shared by all ranks, each of which has a view of its own of it."""

    async def follow_update(self, *, version: int) -> None:
        """Hear what came of an update that another rank has just made.

        Args:
            version: Of the weights that are there now.

        Raises:
            EngineError: where they are nowhere.
        """
        ...


async def generate_each(
    source: CompletionSource, calls: Sequence[EngineCall]
) -> "list[Completion | BaseException]":
    """Run calls side by side, each by a `generate` of its own (see `Engine.generate_together`)."""
    generating = (
        source.generate(call.input_ids, call.sampling, request_id=call.request_id) for call in calls
    )
    return await asyncio.gather(*generating, return_exceptions=True)
