"""`SGLangEngine`: SGLang in this process's keep."""

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Self

from agentrl.engines.protocol import (
    ALL_MEMORY,
    Completion,
    EngineCall,
    MemoryTag,
    SamplingParams,
    SyncFigures,
    generate_each,
)
from agentrl.engines.sglang.arguments import (
    CPU_ENVIRONMENT,
    ENVIRONMENT,
    SGLangNeeds,
    has_accelerator,
    server_arguments,
)
from agentrl.engines.sglang.backend import SleepingBackend, flush
from agentrl.engines.sglang.calls import complete
from agentrl.engines.sglang.inprocess.barrier import CallGate
from agentrl.engines.sglang.inprocess.calls import OwnCall
from agentrl.engines.sglang.inprocess.host import SGLangHost
from agentrl.engines.sglang.weights.buckets import ModelWeights
from agentrl.engines.sglang.weights.sync import DEFAULT_BUCKET_BYTES, Target, update_weights
from agentrl.engines.sglang.weights.tensor import TensorTransport
from agentrl.engines.stopping import Decode, decoder_of
from agentrl.errors import EngineError
from agentrl.plugins.call import PerLoop

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


class SGLangEngine:
    """Generates through `sglang.Engine`, whose processes are this process's children.

    Calls go to SGLang's own loop on a thread; they batch with each other and share prefixes by its
    radix cache. Without an accelerator the shipped platform plug-in is turned on.

    Args:
        host: The running SGLang.
        decode: Token ids to text, for stop strings.
        max_model_len: Most tokens of a sequence.
        tp_size: Its tensor-parallel ranks.
        bucket_bytes: Most bytes of weights that are on their way at one time.
        weights: What it was started with; None: new weights are neither checked nor renamed.
        can_sleep: Whether it can give memory back.
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
        self.max_model_len = max_model_len
        self._host = host
        self._decode = decode
        self._backend = SleepingBackend(host, can_sleep=can_sleep)
        self._target = Target(self._backend, tp_size)
        self._transport = TensorTransport.to_children(bucket_bytes)
        self._weights = weights
        self._gate = CallGate()
        self._turns = PerLoop(asyncio.Lock)
        self._keys = itertools.count()
        self._running: set[OwnCall] = set()

    @classmethod
    def start(
        cls,
        needs: SGLangNeeds,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> Self:
        """Start SGLang and wait until it is ready (half a minute and more).

        Raises:
            ConfigError: for a server argument that it does not know.
            EngineError: where it does not start.
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
            weights=ModelWeights.of(
                needs.model_path,
                trust_remote_code=needs.trust_remote_code,
                overrides=needs.override_config,
            ),
            can_sleep=not on_cpu and bool(arguments.get("enable_memory_saver")),
        )

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Continue `input_ids` (see `Engine.generate`)."""
        call = EngineCall(input_ids=input_ids, sampling=sampling, request_id=request_id)
        # SGLang aborts whatever begins with the name that it is given: no name begins another.
        key = f"{next(self._keys)}-{request_id}"
        running = OwnCall(self._backend, request_id)
        self._running.add(running)
        try:
            async with self._gate.passing():
                return await complete(
                    running,
                    call,
                    key=key,
                    max_model_len=self.max_model_len,
                    decode=self._decode,
                )
        finally:
            self._running.remove(running)

    async def generate_together(
        self, calls: Sequence[EngineCall]
    ) -> "list[Completion | BaseException]":
        """Run calls that begin at once (see `Engine.generate_together`)."""
        return await generate_each(self, calls)

    async def abort(self, request_id: str) -> None:
        """End the running calls of a request; they return what they have sampled."""
        calls = [call for call in self._running if call.request_id == request_id]
        await asyncio.gather(*(call.abort() for call in calls))

    async def update_weights(
        self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> SyncFigures:
        """Take new weights while calls wait; those that run go on with them from their tokens.

        Raises:
            EngineError: where it fails; until an update succeeds, the engine then takes no calls,
                and those that ran have ended with an error.
        """
        if self._weights is not None:
            named_tensors = self._weights.for_files(named_tensors)
        async with self._turns.get():
            report = await update_weights(
                [self._target],
                named_tensors,
                version=version,
                transport=self._transport,
                on_failure=self._refuse_calls,
            )
            self._gate.open()
        return report.figures

    async def _refuse_calls(self, _target: Target, error: EngineError) -> None:
        reason = f"an update of the engine's weights failed, it may hold a mixture: {error}"
        await self._gate.close(EngineError(reason, expected="an update that goes through whole"))

    async def flush_cache(self) -> None:
        """Drop every cached prefix; running calls compute theirs anew."""
        async with self._turns.get():
            await flush(self._backend)

    async def sleep(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Give memory back until `wake`; running calls wait. Without an accelerator: nothing."""
        async with self._turns.get():
            await self._backend.sleep(tags)

    async def wake(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Take memory again; when all is awake, calls go on."""
        async with self._turns.get():
            await self._backend.wake(tags)

    async def close(self) -> None:
        """End SGLang and its processes; running calls end with `EngineError`."""
        await asyncio.to_thread(self._host.close)
