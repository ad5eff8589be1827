"""An engine that answers from a script, for tests and to debug tools without a model."""

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from agentrl.engines.protocol import (
    ALL_MEMORY,
    Completion,
    EngineCall,
    FinishReason,
    MemoryTag,
    SamplingParams,
    SyncFigures,
    VersionSpan,
    generate_each,
)
from agentrl.engines.stopping import StopCheck
from agentrl.errors import EngineError
from agentrl.media.records import MediaSpan

if TYPE_CHECKING:
    import torch

DEFAULT_LOG_PROB = -1.0


class TextCodec(Protocol):
    """The two methods of a tokenizer that a script needs."""

    def encode(self, text: str, /, *, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        ...

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool) -> Any:
        """Return the text of ids."""
        ...


@dataclass(frozen=True, slots=True)
class ScriptedCall:
    """One call of the engine."""

    input_ids: list[int]
    sampling: SamplingParams
    request_id: str
    turn: int
    """Number of this request's earlier calls."""


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """An answer with log-probabilities or a delay."""

    content: str | Sequence[int]
    """Text, or token ids."""
    log_probs: Sequence[float] | None = None
    """One for each token; None: -1.0 for each."""
    delay_s: float = 0.0
    """Seconds before the answer; the call can be aborted during this time."""


Answer = str | Sequence[int] | ScriptedAnswer | BaseException
"""Text, token ids, a full answer, or an error to raise."""

Script = Callable[[Sequence[int], SamplingParams, str, int], Answer | Awaitable[Answer]]
"""(input_ids, sampling, request_id, turn) -> answer. It can be async."""


class ScriptedEngine:
    """Answers each request's turns from a list, or by a function.

    A list contains the answers of one request's turns. Every request starts with the first answer,
    and the last one is repeated. A text without a stop gets the first of the call's
    `stop_token_ids` at its end, as from a model; token ids are returned unchanged. Budgets, stop
    tokens, stop strings and aborts have their usual effect.

    Example:
        >>> engine = ScriptedEngine(["Let me see.", "It is 5."], tokenizer=tokenizer)
        >>> engine = ScriptedEngine(lambda ids, sampling, request_id, turn: [1, 2, 3])

    Args:
        answers: The script.
        tokenizer: Needed for texts and for stop strings.
        max_model_len: Most tokens of a sequence.
    """

    is_shared = False

    def __init__(
        self,
        answers: Sequence[Answer] | Script,
        *,
        tokenizer: TextCodec | None = None,
        max_model_len: int = 32_768,
    ) -> None:
        self.max_model_len = max_model_len
        self.calls: list[list[int]] = []
        """The `input_ids` of every call, in order."""
        self.records: list[ScriptedCall] = []
        """Every call, in order."""
        self.version = 0
        """The version of the last `update_weights`."""
        self.num_flushes = 0
        """How often the prefixes were dropped."""
        self._script = answers if callable(answers) else _script_of(answers)
        self._tokenizer = tokenizer
        self._turns: Counter[str] = Counter()
        self._waiting: dict[asyncio.Future[bool], str] = {}
        self._asleep: set[MemoryTag] = set()
        self._awake = asyncio.Event()
        self._awake.set()
        self._is_closed = False

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        media: Sequence[MediaSpan] = (),
    ) -> Completion:
        """Answer the next turn of `request_id` (see `Engine.generate`).

        Raises:
            EngineError: The engine is closed, the input leaves no capacity for a token, or a text
                or stop string needs a tokenizer.
            BaseException: From the script.
        """
        max_tokens = self.max_model_len - len(input_ids)
        self._raise_if_impossible(len(input_ids), max_tokens)
        call = ScriptedCall(list(input_ids), sampling, request_id, self._turns[request_id])
        self._turns[request_id] += 1
        self.calls.append(call.input_ids)
        self.records.append(call)
        answer = await self._answer(call)
        await self._awake.wait()
        self._raise_if_impossible(len(input_ids), max_tokens)
        if not await self._wait(answer.delay_s, request_id):
            return self._completion([], [], FinishReason.ABORT)
        return self._cut(answer, sampling, min(sampling.max_new_tokens, max_tokens))

    async def generate_together(
        self, calls: Sequence[EngineCall]
    ) -> "list[Completion | BaseException]":
        """Answer every call, in their order (see `Engine.generate_together`)."""
        return await generate_each(self, calls)

    async def abort(self, request_id: str) -> None:
        """End the calls of a request that wait for their answer; they return no token."""
        for waiting, owner in self._waiting.items():
            if owner == request_id and not waiting.done():
                waiting.set_result(False)

    async def update_weights(
        self, named_tensors: "Iterable[tuple[str, torch.Tensor]]", *, version: int
    ) -> SyncFigures:
        """Store the version; the tensors are read and dropped."""
        for _ in named_tensors:
            pass
        self.version = version
        await self.flush_cache()
        return SyncFigures()

    async def flush_cache(self) -> None:
        """Count the call: there is nothing to drop."""
        self.num_flushes += 1

    async def sleep(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Delay answers until `wake`."""
        self._asleep.update(tags)
        self._awake.clear()

    async def wake(self, tags: Sequence[MemoryTag] = ALL_MEMORY) -> None:
        """Answer again when no memory sleeps."""
        self._asleep.difference_update(tags)
        if not self._asleep:
            self._awake.set()

    async def close(self) -> None:
        """Answer no more; waiting calls end with `EngineError`."""
        self._is_closed = True
        self._awake.set()
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_exception(EngineError("the engine was closed"))

    def _raise_if_impossible(self, num_input: int, max_tokens: int) -> None:
        if self._is_closed:
            raise EngineError("the engine was closed")
        if max_tokens < 1:
            raise EngineError(
                f"the input has {num_input} tokens, the engine's limit is {self.max_model_len}"
            )

    async def _answer(self, call: ScriptedCall) -> ScriptedAnswer:
        answer = self._script(call.input_ids, call.sampling, call.request_id, call.turn)
        if isinstance(answer, ScriptedAnswer):
            return answer
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, BaseException):
            raise answer
        return answer if isinstance(answer, ScriptedAnswer) else ScriptedAnswer(answer)

    async def _wait(self, delay_s: float, request_id: str) -> bool:
        """Wait for the delay; return False if the call was aborted."""
        if delay_s <= 0:
            await asyncio.sleep(0)
            return True
        loop = asyncio.get_running_loop()
        waiting: asyncio.Future[bool] = loop.create_future()
        self._waiting[waiting] = request_id
        clock = loop.call_later(delay_s, _end_wait, waiting)
        try:
            return await waiting
        finally:
            clock.cancel()
            del self._waiting[waiting]

    def _cut(self, answer: ScriptedAnswer, sampling: SamplingParams, max_tokens: int) -> Completion:
        """Cut the answer at its first stop or budget."""
        token_ids = self._encode(answer.content)
        end = StopCheck.of(sampling, self._decode).first_end(token_ids)
        if end is None and isinstance(answer.content, str) and sampling.stop_token_ids:
            token_ids.append(sampling.stop_token_ids[0])
            end = len(token_ids)
        is_cut = end > max_tokens if end is not None else len(token_ids) >= max_tokens
        token_ids = token_ids[: min(end or max_tokens, max_tokens)]
        log_probs = list(answer.log_probs or [])[: len(token_ids)]
        log_probs += [DEFAULT_LOG_PROB] * (len(token_ids) - len(log_probs))
        reason = FinishReason.LENGTH if is_cut else FinishReason.STOP
        return self._completion(token_ids, log_probs, reason)

    def _completion(
        self, token_ids: list[int], log_probs: list[float], reason: FinishReason
    ) -> Completion:
        spans = (VersionSpan(self.version, 0, len(token_ids)),) if token_ids else ()
        return Completion(
            token_ids=token_ids, log_probs=log_probs, finish_reason=reason, weight_versions=spans
        )

    def _encode(self, content: str | Sequence[int]) -> list[int]:
        if not isinstance(content, str):
            return list(content)
        if self._tokenizer is None:
            raise EngineError(
                f"the script answers with text ({content[:40]!r}) and needs a tokenizer"
            )
        return list(self._tokenizer.encode(content, add_special_tokens=False))

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            raise EngineError("stop strings need the engine's tokenizer")
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def _end_wait(waiting: asyncio.Future[bool]) -> None:
    if not waiting.done():
        waiting.set_result(True)


def _script_of(answers: Sequence[Answer]) -> Script:
    """Return a script that gives each request the answers in order and repeats the last."""
    if not answers:
        raise EngineError("a script needs at least one answer")

    def script(_ids: Sequence[int], _sampling: SamplingParams, _id: str, turn: int) -> Answer:
        return answers[min(turn, len(answers) - 1)]

    return script
