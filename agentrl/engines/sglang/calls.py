"""Engine calls as SGLang requests: parameters, answers, aborts."""

import asyncio
import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from agentrl.engines.protocol import (
    Completion,
    EngineCall,
    FinishReason,
    SamplingParams,
    VersionSpan,
    generate_each,
)
from agentrl.engines.sglang.backend import JsonFields, Sampler
from agentrl.engines.sglang.media import media_fields
from agentrl.engines.stopping import Decode, StopCheck
from agentrl.errors import EngineError
from agentrl.media.records import MediaSpan

FIRST_VERSION = "default"
"""SGLang's default name of the weights that it was started with."""
NOTHING_SAMPLED: JsonFields = {
    "output_ids": [],
    "meta_info": {"finish_reason": {"type": "abort"}, "output_token_logprobs": []},
}
"""The answer to a call that is aborted before SGLang has started it."""
ABORT_AGAIN_S = 0.5
"""Seconds between two aborts. SGLang ignores an abort that arrives before the call itself."""
_TINY_TOP_P = 1e-6


@dataclass(slots=True)
class Answer:
    """What one call has sampled so far, in one or more requests to SGLang."""

    token_ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    cached_tokens: int = 0

    def append(self, output: JsonFields) -> None:
        """Append what SGLang sampled.

        Raises:
            EngineError: The answer is incomplete.
        """
        ids, meta = list(output["output_ids"]), output["meta_info"]
        found: list[Sequence[Any]] | None = meta.get("output_token_logprobs")
        if found is None:
            raise EngineError(
                "SGLang returned no log-probabilities", expected="return_logprob: true"
            )
        if [entry[1] for entry in found] != ids:
            raise EngineError(
                f"SGLang returned {len(found)} log-probabilities that do not match the tokens",
                expected=f"one for each of {len(ids)} sampled tokens",
            )
        if not self.token_ids:
            self.cached_tokens = meta.get("cached_tokens", 0)
        self.spans += _spans(meta, len(ids), offset=len(self.token_ids))
        self.token_ids += ids
        log_probs = [entry[0] for entry in found]
        _check_finite(log_probs)
        self.log_probs += log_probs

    def completion(self, reason: FinishReason) -> Completion:
        """Return the caller's result."""
        return Completion(
            token_ids=self.token_ids,
            log_probs=self.log_probs,
            finish_reason=reason,
            weight_versions=tuple(_joined(self.spans)),
            cached_tokens=self.cached_tokens,
        )


async def complete(
    sampler: Sampler, call: EngineCall, *, key: str, max_model_len: int, decode: Decode
) -> Completion:
    """Sample until one of the call's own stops or limits ends it.

    SGLang also stops after the end-of-sequence tokens that the model's files name. If the call does
    not name them, SGLang is asked to continue from there.

    Args:
        sampler: Samples the tokens.
        call: The engine call.
        key: The call's name inside SGLang. It must not be a prefix of another running call's name.
        max_model_len: Most tokens of a sequence, input and output together.
        decode: Token ids to text, for stop strings.

    Raises:
        EngineError: The input leaves no capacity for a token, or SGLang fails.
    """
    sampling, stop = call.sampling, StopCheck.of(call.sampling, decode)
    max_tokens = min(sampling.max_new_tokens, max_model_len - len(call.input_ids))
    if max_tokens < 1:
        raise EngineError(
            f"the input has {len(call.input_ids)} tokens, the engine's limit is {max_model_len}",
            request_id=call.request_id,
        )
    answer = Answer()
    while True:
        rest = replace(sampling, max_new_tokens=max_tokens - len(answer.token_ids))
        input_ids = [*call.input_ids, *answer.token_ids]
        fields = generate_fields(input_ids, rest, key)
        if call.media:
            fields |= await asyncio.to_thread(media_fields, call.media, len(input_ids))
        output = await sampler.generate(fields)
        _check_prompt(output, len(input_ids))
        answer.append(output)
        reason = _reason(output, answer.token_ids, stop, max_tokens)
        if reason is not None:
            return answer.completion(reason)


class AbortableCall(ABC):
    """A `Sampler` for one engine call that can be aborted at any time.

    Args:
        request_id: The request that makes the call.
        patience_s: Seconds that an aborted call has to return what it has sampled. A call that
            waits for a pause to end does not return.
    """

    def __init__(self, request_id: str, *, patience_s: float) -> None:
        self.request_id = request_id
        self.is_aborted = False
        self._patience_s = patience_s
        self._send_abort: Callable[[], Awaitable[None]] | None = None
        self._scope: asyncio.Timeout | None = None
        self._ended = asyncio.Event()

    @abstractmethod
    async def sample(self, fields: JsonFields) -> JsonFields:
        """Send the call to SGLang inside `sent`, and return the answer."""

    async def generate(self, fields: JsonFields) -> JsonFields:
        """Sample one completion (see `Sampler.generate`), without a token if aborted before."""
        if self.is_aborted:
            return NOTHING_SAMPLED
        self._scope = scope = asyncio.timeout(None)
        try:
            async with scope:
                return await self.sample(fields)
        except TimeoutError:
            if not scope.expired():
                raise
            return NOTHING_SAMPLED
        finally:
            self._scope = None

    async def abort(self) -> None:
        """End the call with what SGLang has sampled; without a token if SGLang does not answer."""
        self.is_aborted = True
        deadline = time.monotonic() + self._patience_s
        while self._scope is not None and self._send_abort is not None:
            await self._send_abort()
            if await self._has_ended() or time.monotonic() > deadline:
                break
        if self._scope is not None and not self._scope.expired():
            self._scope.reschedule(0)

    @contextmanager
    def sent(self, abort: Callable[[], Awaitable[None]]) -> Iterator[None]:
        """Mark the call as sent to SGLang while the block runs.

        Args:
            abort: Sends an abort of this call to SGLang.
        """
        self._send_abort = abort
        self._ended.clear()
        try:
            yield
        finally:
            self._send_abort = None
            self._ended.set()

    async def _has_ended(self) -> bool:
        try:
            async with asyncio.timeout(ABORT_AGAIN_S):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True


class BaseSGLangEngine(ABC):
    """Runs and aborts calls. The subclasses know where SGLang runs.

    Args:
        decode: Token ids to text, for stop strings.
        max_model_len: Most tokens of a sequence.
    """

    loads_tower = True

    def __init__(self, decode: Decode, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self._decode = decode
        self._counter = itertools.count()
        self._running: set[AbortableCall] = set()

    @abstractmethod
    def new_call(self, request_id: str) -> AbortableCall:
        """Make the call of one `generate`."""

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
            EngineError: The input leaves no capacity for a token, or SGLang cannot answer.
        """
        call = EngineCall(
            input_ids=input_ids, sampling=sampling, request_id=request_id, media=media
        )
        running = self.new_call(request_id)
        self._running.add(running)
        try:
            # SGLang aborts each call whose name starts with the given one: the number comes first.
            return await complete(
                running,
                call,
                key=f"{next(self._counter)}-{request_id}/",
                max_model_len=self.max_model_len,
                decode=self._decode,
            )
        finally:
            self._running.remove(running)

    async def generate_together(
        self, calls: Sequence[EngineCall]
    ) -> "list[Completion | BaseException]":
        """Run calls that start together (see `Engine.generate_together`)."""
        return await generate_each(self, calls)

    async def abort(self, request_id: str) -> None:
        """End the running calls of a request; they return what they have sampled."""
        calls = [call for call in self._running if call.request_id == request_id]
        await asyncio.gather(*(call.abort() for call in calls))


def generate_fields(input_ids: list[int], sampling: SamplingParams, key: str) -> dict[str, Any]:
    """Return a call as the fields of SGLang's `GenerateReqInput`."""
    return {
        "rid": key,
        "input_ids": input_ids,
        "sampling_params": sampling_fields(sampling),
        "return_logprob": True,
    }


def sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters as SGLang's."""
    fields: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        "stop": list(filter(None, sampling.stop)),
        "no_stop_trim": True,
        "skip_special_tokens": False,
    }
    if sampling.top_k == 1 and sampling.temperature > 0:
        # SGLang scores `top_k = 1` as a greedy call, at temperature 1. A tiny top_p samples the
        # same token and keeps the temperature.
        fields |= {"top_k": -1, "top_p": _TINY_TOP_P}
    if sampling.seed is not None:
        fields["sampling_seed"] = sampling.seed
    return fields


def _reason(
    output: JsonFields, token_ids: Sequence[int], stop: StopCheck, max_tokens: int
) -> FinishReason | None:
    """Return why the call has ended; None if SGLang stopped by a rule of its own."""
    ended: JsonFields = output["meta_info"]["finish_reason"]
    if ended["type"] == "abort":
        if ended.get("status_code"):
            raise EngineError(f"SGLang ended the call: {ended.get('message')}")
        return FinishReason.ABORT
    if stop.is_met(token_ids):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(token_ids) >= max_tokens else None


def _check_prompt(output: JsonFields, num_tokens: int) -> None:
    """Check that SGLang has used as many input tokens as it was given."""
    used = output["meta_info"].get("prompt_tokens", num_tokens)
    if used != num_tokens:
        raise EngineError(
            f"SGLang has changed the input: it used {used} tokens",
            expected=f"the {num_tokens} tokens of the call",
        )


def _check_finite(log_probs: Iterable[float | None]) -> None:
    for log_prob in log_probs:
        if log_prob is None or not math.isfinite(log_prob):
            raise EngineError(
                f"SGLang sampled a token of log-probability {log_prob}: the weights have diverged"
            )


def _spans(meta: JsonFields, num_tokens: int, *, offset: int) -> list[VersionSpan]:
    """Return which weights sampled which tokens; `offset` tokens were sampled before."""
    whole = {"version": meta.get("weight_version", FIRST_VERSION), "start": 0, "end": num_tokens}
    return [
        VersionSpan(_version(span["version"]), offset + span["start"], offset + span["end"])
        for span in meta.get("weight_versions") or [whole]
        if span["start"] < span["end"]
    ]


def _version(name: str) -> int:
    if name == FIRST_VERSION:
        return 0
    try:
        return int(name)
    except ValueError:
        raise EngineError(
            f"SGLang serves weights of version {name!r}", expected="a policy version"
        ) from None


def _joined(spans: Iterable[VersionSpan]) -> Iterable[VersionSpan]:
    """Join neighboring spans of the same weights."""
    last: VersionSpan | None = None
    for span in spans:
        if last is not None and last.version == span.version:
            last = VersionSpan(last.version, last.start, span.end)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last
