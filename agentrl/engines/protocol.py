"""The protocol of inference engines: token ids in, token ids and log-probabilities out.

The rest of agentrl uses engines only through this protocol. Each implementation passes the suite in
`tests/engines/conformance.py`.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from agentrl.media.records import MediaSpan

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
    """How one engine call samples. Calls that run together may differ."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = -1
    """-1: the whole vocabulary."""
    stop: tuple[str, ...] = ()
    """Stop strings; the tokens that complete one are kept in the output."""
    stop_token_ids: tuple[int, ...] = ()
    """Sampling ends after any of these; the token itself is kept in the output."""
    seed: int | None = None
    """The same seed, input and weights give the same tokens, independent of other running calls, up
    to rounding. The embedded and the scripted engine keep this. None: the engine's own random
    stream."""


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
    """Spans that cover `token_ids` from 0 to its end; empty if no token was sampled."""
    cached_tokens: int = 0
    """Tokens of the input that were served from a prefix cache."""

    @property
    def weight_version(self) -> int | None:
        """The version that sampled the last token."""
        return self.weight_versions[-1].version if self.weight_versions else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCall:
    """The arguments of `generate` as a record."""

    input_ids: Sequence[int]
    sampling: SamplingParams
    request_id: str
    media: Sequence[MediaSpan] = ()
    """The runs of placeholder tokens in `input_ids`, in order."""


class CompletionSource(Protocol):
    """The part of an engine that a request uses."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        media: Sequence[MediaSpan] = (),
    ) -> Completion:
        """Continue `input_ids`. Returns at a stop, at a limit, or when aborted.

        Args:
            input_ids: The whole sequence; each image and video has all its placeholder tokens.
            sampling: How to sample.
            request_id: Names the call in errors and in `abort`.
            media: The runs of placeholder tokens in `input_ids`, in order.
        """
        ...


class MemoryTag(StrEnum):
    """A part of an engine's memory that can be released."""

    WEIGHTS = "weights"
    """The engine's own copy of the weights; their values are lost."""
    KV_CACHE = "kv_cache"
    """The cache of keys and values; its contents are lost."""


ALL_MEMORY = tuple(MemoryTag)


@dataclass(slots=True)
class SyncFigures:
    """The size of a weight update."""

    num_bytes: int = 0
    """Bytes written or sent; 0 if the engine uses the tensors themselves."""
    num_buckets: int = 0
    """Buckets in which they were sent."""

    def add(self, num_bytes: int) -> None:
        """Count a bucket."""
        self.num_buckets += 1
        self.num_bytes += num_bytes


@runtime_checkable
class Engine(CompletionSource, Protocol):
    """An inference engine. All methods run on one event loop.

    A failure of the engine is an `EngineError`. Cancelling `generate` aborts the call inside the
    engine, so it does not sample for a request that has ended.
    """

    max_model_len: int
    """Most tokens, input and output together, of one sequence."""
    is_shared: bool
    """Whether all ranks use the same engine (servers): then only one rank updates it."""

    async def generate_together(
        self, calls: Sequence[EngineCall]
    ) -> "list[Completion | BaseException]":
        """Run calls that start together, in their order; return when all have ended.

        While no other call runs, the results of an engine that computes in this process are a
        function of these calls, the weights and the cached prefixes, to the last bit. Cancelling
        removes every call.

        Returns:
            For each call its completion, or its own error.

        Raises:
            EngineError: The engine as a whole has failed or was closed.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """End a running call: its `generate` returns with `ABORT`. Unknown ids are ignored."""
        ...

    async def update_weights(
        self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> SyncFigures:
        """Replace the weights (full tensors by parameter name), and drop all cached prefixes.

        If this fails, the engine takes no calls until an update succeeds.
        """
        ...

    async def flush_cache(self) -> None:
        """Drop every cached prefix."""
        ...

    async def sleep(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Release memory and cores until `wake`; does nothing if the engine cannot release any.

        Calls wait until `wake`. Memory that sleeps already stays asleep. Weights that have slept
        must be updated before calls continue.
        """
        ...

    async def wake(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Allocate memory again; calls continue when none sleeps."""
        ...

    async def close(self) -> None:
        """End the engine; running calls end with `EngineError`. Can be repeated."""
        ...


@runtime_checkable
class FollowsUpdates(Protocol):
    """An engine that all ranks share, with one client in each rank."""

    async def follow_update(self, *, version: int) -> None:
        """Learn the result of an update that another rank has made.

        Args:
            version: Of the new weights.

        Raises:
            EngineError: No server has the new weights.
        """
        ...


@runtime_checkable
class LoadsTower(Protocol):
    """An engine that reads the weights of a vision tower from the model's files itself."""

    loads_tower: bool
    """Whether updates may leave out the weights of a tower that is not trained."""


@runtime_checkable
class SharesDevices(Protocol):
    """An engine that all ranks share, on devices of its own or on those of the ranks."""

    shares_devices: bool
    """Whether it must sleep while the ranks update the policy."""


async def generate_each(
    source: CompletionSource, calls: Sequence[EngineCall]
) -> "list[Completion | BaseException]":
    """Run calls concurrently, each with its own `generate` (see `Engine.generate_together`)."""
    generating = (
        source.generate(call.input_ids, call.sampling, request_id=call.request_id, media=call.media)
        for call in calls
    )
    return await asyncio.gather(*generating, return_exceptions=True)
