"""`SGLangEngine`: SGLang in this process's keep."""

import asyncio
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Self

from agentrl.engines.protocol import Completion, EngineCall, SamplingParams
from agentrl.engines.sglang.arguments import SGLangNeeds, has_accelerator, server_arguments
from agentrl.engines.sglang.calls import complete
from agentrl.engines.sglang.host import SGLangHost
from agentrl.engines.sglang.weights import DEFAULT_BUCKET_BYTES, SyncFigures, send_tensors
from agentrl.engines.stopping import Decode
from agentrl.errors import EngineError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

CPU_ENVIRONMENT: Mapping[str, str] = {"SGLANG_PLATFORM": "agentrl_cpu"}
ENVIRONMENT: Mapping[str, str] = {
    # Our context length, and a few tokens that no sequence reaches.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "PYTHONWARNINGS": "ignore",
}


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
    """

    def __init__(
        self,
        host: SGLangHost,
        decode: Decode,
        *,
        max_model_len: int,
        tp_size: int = 1,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.max_model_len = max_model_len
        self.last_sync = SyncFigures()
        self._host = host
        self._decode = decode
        self._tp_size = tp_size
        self._bucket_bytes = bucket_bytes
        self._keys = itertools.count()
        self._running: set[str] = set()
        self._mixed: str | None = None

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

        def decode(token_ids: Sequence[int]) -> str:
            return str(tokenizer.decode(list(token_ids), skip_special_tokens=False))

        return cls(
            SGLangHost(arguments, environment=environment),
            decode,
            max_model_len=needs.max_model_len,
            tp_size=arguments.get("tp_size", 1),
            bucket_bytes=bucket_bytes,
        )

    async def generate(
        self, input_ids: Sequence[int], sampling: SamplingParams, *, request_id: str
    ) -> Completion:
        """Continue `input_ids` (see `Engine.generate`)."""
        call = EngineCall(input_ids=input_ids, sampling=sampling, request_id=request_id)
        if self._mixed is not None:
            raise EngineError(self._mixed, expected="update_weights, whole")
        # SGLang aborts whatever begins with the name that it is given.
        key = f"{request_id}/{next(self._keys)}/"
        self._running.add(key)
        try:
            return await complete(
                self._host, call, key=key, max_model_len=self.max_model_len, decode=self._decode
            )
        finally:
            self._running.discard(key)

    async def generate_together(
        self, calls: Sequence[EngineCall]
    ) -> "list[Completion | BaseException]":
        """Run calls that begin at once (see `Engine.generate_together`)."""
        generating = (
            self.generate(call.input_ids, call.sampling, request_id=call.request_id)
            for call in calls
        )
        return await asyncio.gather(*generating, return_exceptions=True)

    async def abort(self, request_id: str) -> None:
        """End the running calls of a request; they return what they have sampled."""
        for key in [key for key in self._running if key.startswith(f"{request_id}/")]:
            await self._host.control("abort_request", {"rid": key})

    async def update_weights(
        self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> None:
        """Take new weights while calls wait; those that run go on with them from their tokens.

        Raises:
            EngineError: where it fails; until an update succeeds, the engine then takes no calls.
        """
        await self._host.control("pause_generation", {"mode": "retract"})
        self._mixed = "an update of its weights has failed: the engine would serve a mixture"
        await self._host.control("begin_weight_update")
        self.last_sync = await send_tensors(
            self._host, named_tensors, bucket_bytes=self._bucket_bytes, copies=self._tp_size
        )
        await self._host.control("end_weight_update")
        await self._host.control("flush_cache")
        await self._host.control(
            "update_weight_version", {"new_version": str(version), "abort_all_requests": False}
        )
        self._mixed = None
        await self._host.control("continue_generation")

    async def flush_cache(self) -> None:
        """Drop every cached prefix; running calls compute theirs anew."""
        await self._host.control("pause_generation", {"mode": "retract"})
        try:
            await self._host.control("flush_cache")
        finally:
            await self._host.control("continue_generation")

    async def sleep(self) -> None:
        """Give memory back until `wake`."""

    async def wake(self) -> None:
        """Take memory again."""

    async def close(self) -> None:
        """End SGLang and its processes; running calls end with `EngineError`."""
        await asyncio.to_thread(self._host.close)
