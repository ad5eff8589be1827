"""`SGLangEngine`: SGLang inside this process."""

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Self

from agentrl.engines.protocol import (
    ALL_MEMORY,
    Completion,
    MemoryTag,
    SamplingParams,
    SyncFigures,
)
from agentrl.engines.sglang.arguments import (
    CPU_ENVIRONMENT,
    ENVIRONMENT,
    SGLangNeeds,
    has_accelerator,
    server_arguments,
)
from agentrl.engines.sglang.backend import Backend, JsonFields, SleepingBackend, flush
from agentrl.engines.sglang.calls import AbortableCall, BaseSGLangEngine
from agentrl.engines.sglang.inprocess.host import SGLangHost
from agentrl.engines.sglang.media import no_tower
from agentrl.engines.sglang.weights.buckets import ModelWeights
from agentrl.engines.sglang.weights.sync import DEFAULT_BUCKET_BYTES, Target, update_weights
from agentrl.engines.sglang.weights.tensor import TensorTransport
from agentrl.engines.stopping import Decode, decoder_of
from agentrl.errors import EngineError
from agentrl.media.records import MediaSpan
from agentrl.plugins.call import PerLoop

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

ABORT_PATIENCE_S = 5.0
"""Seconds for an aborted call to return what it has sampled."""


class SGLangEngine(BaseSGLangEngine):
    """Generates with `sglang.Engine`. Its processes are children of this process.

    SGLang's own event loop runs on a thread. Calls are batched with each other and share prefixes
    through its radix cache. Without an accelerator, the platform plug-in `agentrl_cpu` is used.

    Args:
        host: The running SGLang.
        decode: Token ids to text, for stop strings.
        max_model_len: Most tokens of a sequence.
        tp_size: SGLang's tensor-parallel ranks.
        bucket_bytes: Most bytes of weights in transfer at one time.
        weights: The model that SGLang was started with; None: new weights are neither checked nor
            renamed.
        can_sleep: Whether SGLang can release its memory.
    """

    is_shared = False

    def __init__(
        self,
        host: SGLangHost,
        decode: Decode,
        *,
        max_model_len: int,
        tp_size: int = 1,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        weights: ModelWeights | None = None,
        can_sleep: bool = False,
    ) -> None:
        super().__init__(decode, max_model_len)
        self._host = host
        self._backend = SleepingBackend(host, can_sleep=can_sleep)
        self._target = Target(self._backend, tp_size)
        self._transport = TensorTransport.to_children(bucket_bytes)
        self._weights = weights
        self._barrier = CallBarrier()
        self._lock = PerLoop(asyncio.Lock)

    @classmethod
    def start(
        cls,
        needs: SGLangNeeds,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> Self:
        """Start SGLang and wait until it is ready, which takes half a minute or more.

        Raises:
            ConfigError: SGLang does not know a server argument.
            EngineError: SGLang does not start.
        """
        on_cpu = not has_accelerator()
        arguments = server_arguments(needs, on_cpu=on_cpu)
        environment = dict(ENVIRONMENT) | (dict(CPU_ENVIRONMENT) if on_cpu else {})
        return cls(
            SGLangHost(arguments, environment=environment),
            decoder_of(tokenizer),
            max_model_len=needs.max_model_len,
            tp_size=arguments.get("tp_size", 1),
            bucket_bytes=bucket_bytes,
            weights=ModelWeights.of(needs),
            can_sleep=not on_cpu and bool(arguments.get("enable_memory_saver")),
        )

    def new_call(self, request_id: str) -> AbortableCall:
        """Make the call of one `generate`."""
        return InProcessCall(self._backend, request_id)

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        media: Sequence[MediaSpan] = (),
    ) -> Completion:
        """Continue `input_ids` (see `Engine.generate`).

        Raises:
            EngineError: The model has no vision tower, or see `BaseSGLangEngine.generate`.
        """
        if media and self._weights is not None and not self._weights.has_tower:
            raise no_tower(self._backend.name, request_id)
        async with self._barrier.call():
            return await super().generate(input_ids, sampling, request_id=request_id, media=media)

    async def update_weights(
        self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> SyncFigures:
        """Replace the weights while calls wait. Running calls then continue after their tokens.

        Raises:
            EngineError: The update fails. Running calls end with an error, and the engine takes no
                calls until an update succeeds.
        """
        if self._weights is not None:
            named_tensors = self._weights.for_files(named_tensors)
        async with self._lock.get():
            report = await update_weights(
                [self._target],
                named_tensors,
                version=version,
                transport=self._transport,
                on_failure=self._refuse_calls,
            )
            self._barrier.open()
        return report.figures

    async def _refuse_calls(self, _target: Target, error: EngineError) -> None:
        reason = f"an update of the engine's weights failed, it may hold a mixture: {error}"
        await self._barrier.close(EngineError(reason, expected="an update that succeeds"))

    async def flush_cache(self) -> None:
        """Drop every cached prefix. Running calls compute theirs again."""
        async with self._lock.get():
            await flush(self._backend)

    async def sleep(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Release memory until `wake`; running calls wait. Does nothing without an accelerator."""
        async with self._lock.get():
            await self._backend.sleep(tags)

    async def wake(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Allocate memory again; calls continue when none sleeps."""
        async with self._lock.get():
            await self._backend.wake(tags)

    async def close(self) -> None:
        """End SGLang and its processes; running calls end with `EngineError`."""
        await asyncio.to_thread(self._host.close)


class InProcessCall(AbortableCall):
    """An engine call to SGLang inside this process."""

    def __init__(self, backend: Backend, request_id: str) -> None:
        super().__init__(request_id, patience_s=ABORT_PATIENCE_S)
        self._backend = backend

    async def sample(self, fields: JsonFields) -> JsonFields:
        """Send the call to SGLang (see `AbortableCall.sample`)."""
        with self.sent(partial(self._backend.control, "abort_request", {"rid": fields["rid"]})):
            return await self._backend.generate(fields)


class CallBarrier:
    """Lets calls run while it is open. Closing it ends the running calls."""

    def __init__(self) -> None:
        self._closed: EngineError | None = None
        self._running: set[asyncio.Timeout] = set()
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Run a call in the block.

        Raises:
            EngineError: The barrier is closed, or is closed during the call.
        """
        self._raise_if_closed()
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._running.add(scope)
                self._is_idle.clear()
                yield
        except TimeoutError:
            if scope.expired():
                self._raise_if_closed()
            raise
        finally:
            self._running.discard(scope)
            if not self._running:
                self._is_idle.set()

    async def close(self, reason: EngineError) -> None:
        """End the running calls, and refuse new ones until `open`."""
        self._closed = reason
        for scope in self._running:
            scope.reschedule(0)
        await self._is_idle.wait()

    def open(self) -> None:
        """Let calls run again."""
        self._closed = None

    def _raise_if_closed(self) -> None:
        # A new error for each caller: one that is raised twice collects both tracebacks.
        if self._closed is not None:
            raise EngineError(self._closed.args[0], **self._closed.details)
