"""The engine as an agent loop calls it: token ids in, token ids out, every call recorded.

One `AsyncLLMServerManager` belongs to one request. What it sampled is what can be trained:
`agentrl.agent_loops.reconcile` finds these tokens again in what the loop returns.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

from pydantic import BaseModel, Field

from agentrl.agent_loops.placeholders import find_runs, load_given, sampled_places
from agentrl.engines.protocol import Completion, CompletionSource, FinishReason, SamplingParams
from agentrl.errors import AgentError, EngineError
from agentrl.media.positions import place_runs
from agentrl.media.records import MediaItem, MediaSpan
from agentrl.rollout.media import RequestMedia
from agentrl.rollout.records import unix_time
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.seeding import draw_seed
from agentrl.rollout.templates import ChatTemplate

MAX_CALLS_AFTER_BUDGET = 8
"""Calls that get no token because the budget is used up, before a further one raises."""


class TokenOutput(BaseModel):
    """What one call sampled. It is also a sequence of its token ids, as in early versions of verl.

    Changing it does not change what was recorded.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    """Log-probability of each token at sampling."""
    routed_experts: Any = None
    """Always None; part of verl's interface."""
    stop_reason: str | None = None
    """`completed`, or `aborted` if the run stopped the call."""
    num_preempted: int | None = None
    """Always None: engines do not report it."""
    extra_fields: dict[str, Any] = Field(default_factory=dict[str, Any])
    """`global_steps`, `min_global_steps`, `max_global_steps`: versions of the weights."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Any:
        return iter(self.token_ids)

    def __getitem__(self, index: Any) -> Any:
        return self.token_ids[index]


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of the engine and its result."""

    index: int
    prompt_ids: list[int]
    completion: Completion
    sampling: SamplingParams
    parent: "RecordedCall | None"
    """The call that this one continues: its tokens are the beginning of `prompt_ids`."""
    seconds: float
    seconds_started: float
    """Unix time at which the engine was called."""
    media: tuple[MediaSpan, ...] = ()
    """The runs of placeholder tokens in `prompt_ids`."""

    @property
    def token_ids(self) -> list[int]:
        """The sampled tokens."""
        return self.completion.token_ids

    @property
    def items(self) -> list[MediaItem]:
        """The images and videos that the prompt shows, in order."""
        return [span.item for span in self.media if span.offset == 0]

    @property
    def root(self) -> "RecordedCall":
        """The first call of the conversation."""
        call = self
        while call.parent is not None:
            call = call.parent
        return call

    @property
    def depth(self) -> int:
        """Number of calls that this one continues."""
        return 0 if self.parent is None else self.parent.depth + 1

    def is_continued_by(self, prompt_ids: Sequence[int], media: Sequence[MediaSpan]) -> bool:
        """Whether a prompt starts with this call's prompt and at least one sampled token."""
        start = len(self.prompt_ids)
        return (
            bool(self.token_ids)
            and len(prompt_ids) > start
            and prompt_ids[start] == self.token_ids[0]
            and prompt_ids[:start] == self.prompt_ids
            and self.is_shown_in(media)
        )

    def is_shown_in(self, media: Sequence[MediaSpan]) -> bool:
        """Whether a sequence that starts with this call's prompt has the same pictures there."""
        return self.media == tuple(span for span in media if span.end <= len(self.prompt_ids))


class AsyncLLMServerManager:
    """Generates for one request. Loops get it as `self.server_manager`.

    Calls of one conversation stay on one server. Each call gets the tokens that the budgets of the
    request leave: a call that continues an earlier one shares its budget. When no token is left, a
    call returns none.

    Args:
        request: The request; its budgets, sampling parameters and seed count.
        source: Generates.
        template: The chat template of the run; for the helpers of `AgentLoopBase`.
        media: Loads images and videos.
        vocab_size: Number of token ids.
        max_calls: Most calls, those without a token included.
        is_serial: Whether calls wait for each other (`rollout.deterministic`).
    """

    def __init__(
        self,
        request: AsyncRolloutRequest,
        source: CompletionSource,
        *,
        template: ChatTemplate,
        media: RequestMedia,
        vocab_size: int,
        max_calls: int,
        is_serial: bool = False,
    ) -> None:
        self.template = template
        self.media = media
        self.calls: list[RecordedCall] = []
        """Every call that returned, in the order in which they returned."""
        self.engine_error: EngineError | None = None
        """Why the engine failed in the last call; None if it did not. A loop may have caught it."""
        self.num_calls_after_budget = 0
        self.num_calls_after_placeholder = 0
        """Calls that continue a sampled placeholder of an image. They get no token."""
        self.is_over_limit = asyncio.Event()
        """Set as soon as the loop calls more often than it may."""
        self._max_calls = max_calls
        self._num_calls = 0
        self._request = request
        self._source = source
        self.vocab_size = vocab_size
        self._lock = asyncio.Lock() if is_serial else nullcontext()
        self._loop = asyncio.get_running_loop()
        self._seeds: Counter[int] = Counter()
        self._conversations: dict[str, str] = {}
        self._running: set[asyncio.Task[Completion]] = set()
        self._idle_since: float | None = self._loop.time()
        self._is_closed = False

    @property
    def idle_s(self) -> float:
        """Seconds since the last call ended; 0 while a call runs."""
        return 0.0 if self._idle_since is None else self._loop.time() - self._idle_since

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any],
        image_data: Sequence[Any] | None = None,
        video_data: Sequence[Any] | None = None,
        audio_data: Sequence[Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Continue `prompt_ids`.

        Args:
            request_id: The loop's own id of the conversation; calls with the same id use the same
                server.
            prompt_ids: All tokens so far; each image and video has all its placeholder tokens.
            sampling_params: As verl passes them: `temperature`, `top_p`, `top_k`, `max_tokens` or
                `max_new_tokens`, `stop`, `stop_token_ids`; those left out are the run's.
            image_data: The images that `prompt_ids` show, in order.
            video_data: As `image_data`.
            audio_data: Must be empty.
            mm_processor_kwargs: Not used.
            **kwargs: Not used (`priority`, `mm_processor_output`).

        Raises:
            AgentError: For media that `prompt_ids` do not show or that cannot be loaded, for tokens
                that are not in the vocabulary, for a sampling parameter that would make
                log-probabilities wrong, after the end of the request, for a call beyond the limit.
            EngineError: The engine failed.
        """
        await asyncio.sleep(0)  # a loop that ignores errors must not block the event loop
        if self._is_closed or asyncio.get_running_loop() is not self._loop:
            raise AgentError(
                "generate was called after the loop had returned"
                if self._is_closed
                else "generate was called on another event loop",
                expected="a call within `run`, on the event loop of the loop (`self.loop`)",
            )
        if self._num_calls >= self._max_calls:
            self.is_over_limit.set()
            self.raise_over_limit()
        self._num_calls += 1
        if audio_data is not None and len(audio_data):
            raise AgentError("audio was given", expected="text, images and videos")
        ids = self._read_ids(prompt_ids)
        async with self._lock:
            items = await load_given(self.media, image_data, video_data)
            if self.has_sampled_placeholder(ids):
                self.num_calls_after_placeholder += 1
                return self._return_nothing(self.num_calls_after_placeholder)
            spans = tuple(self.place(ids, items))
            return await self._generate(request_id, ids, spans, sampling_params)

    def place(
        self,
        ids: Sequence[int],
        items: Sequence[MediaItem],
        *,
        name: str = "prompt_ids",
        may_be_unused: bool = False,
    ) -> list[MediaSpan]:
        """Find the tokens of images and videos in a sequence; see `find_runs`.

        Raises:
            AgentError: If tokens and items do not agree.
        """
        processor = self.media.processor
        if processor is None or not (items or self.media.is_placeholder(ids)):
            return []
        runs = find_runs(
            ids, items, processor,
            sampled=self._sampled_places(ids), name=name, may_be_unused=may_be_unused,
        )  # fmt: skip
        return place_runs([], runs)

    def has_sampled_placeholder(self, ids: Sequence[int]) -> bool:
        """Whether the policy sampled a token of a sequence that stands for an image."""
        is_placeholder = self.media.is_placeholder
        if not is_placeholder(ids):
            return False
        return is_placeholder([ids[index] for index in self._sampled_places(ids)])

    def _sampled_places(self, ids: Sequence[int]) -> set[int]:
        return sampled_places(ids, [(call.prompt_ids, call.token_ids) for call in self.calls])

    async def _generate(
        self,
        request_id: str,
        ids: list[int],
        spans: tuple[MediaSpan, ...],
        sampling_params: Mapping[str, Any],
    ) -> TokenOutput:
        earlier = reversed(self.calls)
        parent = next((call for call in earlier if call.is_continued_by(ids, spans)), None)
        limit = self._tokens_left(ids, parent)
        sampling = read_sampling(sampling_params, self._request.sampling, limit)
        if sampling.max_new_tokens <= 0:
            return self._refuse(limit)
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._draw_seed(parent))
        started, clock = self._loop.time(), time.monotonic()
        conversation = self._conversation(request_id)
        coroutine = self._source.generate(ids, sampling, request_id=conversation, media=spans)
        task = self._loop.create_task(cast("Any", coroutine))
        self._running.add(task)
        self._idle_since = None
        try:
            completion = await task
            if len(completion.token_ids) > sampling.max_new_tokens:
                raise EngineError(
                    f"the engine sampled {len(completion.token_ids)} tokens",
                    expected=f"at most {sampling.max_new_tokens}",
                )
        except EngineError as error:
            self.engine_error = error
            raise
        finally:
            self._running.discard(task)
            if not self._running:
                self._idle_since = self._loop.time()
        self.engine_error = None
        seconds = self._loop.time() - started
        self.calls.append(
            RecordedCall(
                len(self.calls), ids, completion, sampling, parent, seconds, unix_time(clock), spans
            )
        )
        return _to_output(completion)

    def raise_over_limit(self) -> None:
        """Raise if the loop called more often than it may.

        Raises:
            AgentError: It did.
        """
        if self.is_over_limit.is_set():
            raise AgentError(
                f"the loop called generate more than {self._max_calls} times",
                key="rollout.agent.max_loop_calls",
                expected="a loop that ends, or a larger limit",
            )

    async def close(self) -> None:
        """Refuse further calls, and cancel those that still run."""
        self._is_closed = True
        for task in self._running:
            task.cancel()
        if self._running:
            await asyncio.wait(self._running)

    def _read_ids(self, prompt_ids: Sequence[int]) -> list[int]:
        try:
            ids = list(map(int, prompt_ids))
        except (TypeError, ValueError) as error:
            raise AgentError(
                f"prompt_ids are no token ids: {error}", expected="a list of integers"
            ) from None
        if not ids:
            raise AgentError("prompt_ids are empty", expected="at least one token")
        if (index := self.find_unknown(ids)) is not None:
            raise AgentError(
                f"prompt_ids[{index}] is {ids[index]}", expected=f"0 to {self.vocab_size - 1}"
            )
        return ids

    def find_unknown(self, ids: Sequence[int]) -> int | None:
        """Return the index of the first id that is not in the vocabulary; None if all are.

        A model may have more embeddings than its tokenizer has tokens, and sample their ids.
        """
        if not ids or (min(ids) >= 0 and max(ids) < self.vocab_size):
            return None
        sampled = {id for call in self.calls for id in call.token_ids}
        unknown = (
            index
            for index, id in enumerate(ids)
            if not 0 <= id < self.vocab_size and id not in sampled
        )
        return next(unknown, None)

    def _tokens_left(self, ids: Sequence[int], parent: RecordedCall | None) -> int:
        budgets = self._request.budgets
        num_used = 0 if parent is None else len(ids) - len(parent.root.prompt_ids)
        left = min(budgets.max_response_tokens - num_used, budgets.max_model_len - len(ids))
        return min(left, budgets.max_turn_tokens or left)

    def _refuse(self, limit: int) -> TokenOutput:
        if limit > 0:
            raise AgentError("max_tokens is not positive", expected="at least 1")
        self.num_calls_after_budget += 1
        return self._return_nothing(self.num_calls_after_budget)

    @staticmethod
    def _return_nothing(num_calls: int) -> TokenOutput:
        if num_calls > MAX_CALLS_AFTER_BUDGET:
            raise AgentError(
                f"generate was called {num_calls} times after the budget of the request was used "
                "up, or after a sampled placeholder of an image",
                expected="a loop that returns when a call returns no token",
            )
        return TokenOutput(token_ids=[], log_probs=[], stop_reason="completed")

    def _draw_seed(self, parent: RecordedCall | None) -> int:
        """Draw the seed of a call: that of the state machine, if each turn is sampled once."""
        turn = 0 if parent is None else 2 * (parent.depth + 1)
        repeated = self._seeds[turn]
        self._seeds[turn] += 1
        name = f"{self._request.seed}:{self._request.attempt}:{turn}"
        return draw_seed(f"{name}:{repeated}" if repeated else name)

    def _conversation(self, request_id: str) -> str:
        own = self._request.request_id
        number = len(self._conversations)
        return self._conversations.setdefault(request_id, f"{own}.{number}" if number else own)


def _to_output(completion: Completion) -> TokenOutput:
    versions = [span.version for span in completion.weight_versions]
    steps = {}
    if versions:
        steps = {
            "global_steps": versions[-1],
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
        }
    is_aborted = completion.finish_reason is FinishReason.ABORT
    return TokenOutput(
        token_ids=list(completion.token_ids),
        log_probs=list(completion.log_probs),
        stop_reason="aborted" if is_aborted else "completed",
        extra_fields=steps,
    )


_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "repetition_penalty": (1, None),
    "frequency_penalty": (0, None),
    "presence_penalty": (0, None),
    "min_p": (0, None),
    "n": (1, None),
    "logit_bias": (None, {}),
    "ignore_eos": (False, None),
    "min_tokens": (0, None),
    "min_new_tokens": (0, None),
}
"""Parameters that change the distribution or the number of samples, with the values that do not."""
_UNREAD = frozenset({
    "logprobs", "prompt_logprobs", "return_logprob", "skip_special_tokens", "detokenize",
    "spaces_between_special_tokens", "include_stop_str_in_output", "no_stop_trim",
})  # fmt: skip
"""Parameters without a meaning here: tokens and log-probabilities are always returned."""
_LIMITS = ("max_tokens", "max_new_tokens")


def read_sampling(
    given: Mapping[str, Any], run: SamplingParams, max_new_tokens: int
) -> SamplingParams:
    """Read a loop's sampling parameters; those left out are the run's.

    Args:
        given: As a loop passes them, with verl's names.
        run: The parameters of the request.
        max_new_tokens: Tokens that the budgets leave.

    Raises:
        AgentError: For a parameter that agentrl does not have.
    """
    chosen: dict[str, Any] = {}
    for name, value in given.items():
        if name in _UNREAD:
            continue
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise AgentError(
                    f"the sampling parameter {name} is {value!r}: the trainer computes "
                    "log-probabilities without it",
                    expected=f"{name}={_NEUTRAL[name][0]}",
                )
        elif name in _LIMITS:
            if value is not None:
                max_new_tokens = min(max_new_tokens, int(value))
        elif name in ("temperature", "top_p"):
            chosen[name] = float(value)
        elif name in ("top_k", "seed"):
            chosen[name] = None if value is None else int(value)
        elif name == "stop":
            texts = [value] if isinstance(value, str) else list(value or ())
            chosen[name] = tuple(dict.fromkeys([*run.stop, *texts]))
        elif name == "stop_token_ids":
            chosen[name] = tuple(dict.fromkeys([*run.stop_token_ids, *map(int, value or ())]))
        else:
            known = [*SamplingParams.__dataclass_fields__, *_LIMITS]
            raise AgentError(
                f"unknown sampling parameter {name!r}", expected=f"one of {', '.join(known)}"
            )
    return replace(run, max_new_tokens=max_new_tokens, **chosen)
