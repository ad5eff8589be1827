"""Fit prompts, and the texts of tools and users, into their token budgets."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from agentrl.errors import DataError
from agentrl.media.positions import Run
from agentrl.messages import Message
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates import ChatTemplate
from agentrl.rollout.templates.compiled import EncodedMedia

Truncation = Literal["error", "left", "right", "middle"]
"""The part of a prompt that is removed. `error` refuses to cut."""
Side = Literal["left", "middle", "right"]
"""The part of an observation that is kept, as verl names it: `left` keeps the beginning, `right`
the end, `middle` both ends."""

MAX_CACHED_GROUPS = 1024
"""Number of groups whose prompts are cached. More are not in flight at the same time for long."""
CUT_MARKER = " ... "
"""Replaces the text that was cut out."""
_MAX_TOKEN_CHARS = 64
"""A token of ordinary text has fewer characters. Longer texts are clipped before encoding."""


def fit_prompt(
    ids: Sequence[int], max_length: int, truncation: Truncation, *, has_media: bool = False
) -> list[int]:
    """Cut the tokens of a prompt to `max_length`. A prompt that fits is returned unchanged.

    Args:
        ids: The rendered prompt.
        max_length: Tokens to keep, at least 1.
        truncation: The side to remove; `error` refuses to cut.
        has_media: Whether the prompt has images or videos, for the error: it is never cut.

    Raises:
        DataError: If the prompt is too long and `truncation` is `error`.

    Example:
        >>> fit_prompt([1, 2, 3, 4, 5], 3, "middle")
        [1, 4, 5]
    """
    if len(ids) <= max_length:
        return list(ids)
    if truncation == "error":
        ways = "a larger data.max_prompt_length, data.filter_overlong_prompts, or "
        ways += (
            "smaller images (data.mm_processor_kwargs); a prompt with images is not cut"
            if (has_media)
            else "data.truncation left, right or middle"
        )
        raise DataError(
            f"a prompt of {len(ids)} tokens is longer than data.max_prompt_length, {max_length}",
            expected=ways,
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    return [*ids[:head], *ids[len(ids) - (max_length - head) :]]


class EncodedPrompt(NamedTuple):
    """A prompt within its budget."""

    ids: list[int]
    """Its tokens, generation prompt included."""
    num_cut: int
    """Number of tokens that were cut."""
    text: str
    """Text of the tokens; empty if tokens were cut."""
    runs: list[Run]
    """The runs of placeholder tokens of images and videos in `ids`, in order."""


@dataclass(eq=False, slots=True)
class _CachedPrompt:
    """The prompt of a group, or the promise that one of its requests encodes it."""

    messages: list[Message]
    tools: list[str]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    prompt: EncodedPrompt | None = None
    """None until it is encoded, and if encoding failed."""


class PromptEncoder:
    """Render the prompt of each group once, within its budget.

    Args:
        template: The chat template of the run.
        max_tokens: Budget of a prompt.
        truncation: The side of a longer prompt to remove, or `error`. The generation prompt is
            always kept.
    """

    def __init__(self, template: ChatTemplate, *, max_tokens: int, truncation: Truncation) -> None:
        self._template = template
        self._max_tokens = max_tokens
        self._truncation: Truncation = truncation
        self._cached: dict[str, _CachedPrompt] = {}

    async def encode(self, request: AsyncRolloutRequest) -> EncodedPrompt:
        """Return the prompt of a request. Prompts of one moment are encoded together.

        Raises:
            DataError: If the prompt exceeds its budget and `truncation` is `error`.
            TemplateError: If the template cannot render the messages.
        """
        tools = [tool.name for tool in request.tool_schemas]
        # Compare the contents: tools may start each sample of a group with other messages, and
        # users may reuse a uid.
        while (
            (cached := self._cached.get(request.uid))
            and cached.messages == request.messages
            and cached.tools == tools
        ):
            if cached.prompt is not None:
                return cached.prompt
            await cached.ended.wait()
        if len(self._cached) >= MAX_CACHED_GROUPS:
            del self._cached[next(iter(self._cached))]
        cached = self._cached[request.uid] = _CachedPrompt(list(request.messages), tools)
        try:
            planned = self._template.plan_prompt(request.messages, request.tool_schemas)
            encoded = await self._template.encode_planned(planned)
            cached.prompt = self._fit(encoded, planned.text)
            return cached.prompt
        finally:
            if cached.prompt is None and self._cached.get(request.uid) is cached:
                del self._cached[request.uid]
            cached.ended.set()

    def _fit(self, encoded: EncodedMedia, text: str) -> EncodedPrompt:
        ids, runs = encoded
        # A cut could divide an image, or leave out what a text refers to.
        truncation: Truncation = "error" if runs else self._truncation
        kept = self._generation_prompt(ids) if truncation != "error" else []
        head = ids[: len(ids) - len(kept)]
        fitted = fit_prompt(head, self._max_tokens - len(kept), truncation, has_media=bool(runs))
        num_cut = len(head) - len(fitted)
        return EncodedPrompt([*fitted, *kept], num_cut, "" if num_cut else text, runs)

    def _generation_prompt(self, ids: Sequence[int]) -> list[int]:
        """Return the last tokens, which are not cut; none if nothing else would fit."""
        decode, end = self._template.decode, self._template.generation_prompt_ids
        text = decode(end)
        # The first token of some generation prompts is merged with the text before it.
        lengths = (n for n in range(1, len(end) + 1) if decode(ids[-n:]).endswith(text))
        kept = next(lengths, 0)
        return list(ids[-kept:]) if 0 < kept < self._max_tokens else []


class FittedText(NamedTuple):
    """A text within its budget."""

    text: str
    num_cut: int
    """Number of tokens that were cut; an estimate if the text was clipped before encoding."""


class TextFitter:
    """Cut texts to a token budget.

    Args:
        template: Encodes and decodes the texts.
        max_tokens: Budget of one observation.
        side: The part to keep (`tool_response_truncate_side`).
    """

    def __init__(self, template: ChatTemplate, *, max_tokens: int, side: Side) -> None:
        self._template = template
        self._max_tokens = max_tokens
        self._side: Side = side

    def fit(self, text: str) -> FittedText:
        """Return the text, cut if it exceeds the budget."""
        # Clip first: encoding megabytes would block the event loop.
        clipped = clip_text(text, self._max_tokens * _MAX_TOKEN_CHARS, self._side)
        clipped = as_unicode(clipped)
        # A token has at least one byte, so a text with fewer bytes than the budget fits.
        if len(text) <= self._max_tokens and len(clipped.encode()) <= self._max_tokens:
            return FittedText(clipped, 0)
        ids = self._template.encode_text(clipped)
        if len(clipped) < len(text):
            num_clipped = len(ids) * (len(text) - len(clipped)) // len(clipped)
            fitted = self._cut(ids, min(self._max_tokens, len(ids) - 1))
            return FittedText(fitted.text, fitted.num_cut + num_clipped)
        if len(ids) > self._max_tokens:
            return self._cut(ids, self._max_tokens)
        return FittedText(clipped, 0)

    def _cut(self, ids: Sequence[int], max_tokens: int) -> FittedText:
        """Cut tokens until their text fits.

        A cut text may encode to more tokens: a character is split, or two parts are joined.
        """
        marker_ids = self._template.encode_text(CUT_MARKER)
        while True:
            cut = cut_observation(ids, max_tokens, self._side, marker_ids=marker_ids)
            text = self._template.decode(cut.ids)
            excess = len(self._template.encode_text(text)) - self._max_tokens
            if excess <= 0:
                return FittedText(text, cut.num_cut)
            max_tokens = max(max_tokens - excess, 0)


class Cut(NamedTuple):
    """Tokens of an observation within their budget."""

    ids: list[int]
    num_cut: int
    """Number of tokens that were cut."""


def cut_observation(
    ids: Sequence[int], max_tokens: int, side: Side = "middle", *, marker_ids: Sequence[int] = ()
) -> Cut:
    """Cut the tokens of an observation to their budget.

    Args:
        ids: Token ids of the text.
        max_tokens: The budget, marker included. If the marker does not fit, it is omitted.
        side: The part to keep.
        marker_ids: Token ids that replace the part that is cut out.

    Example:
        >>> cut_observation([1, 2, 3, 4, 5, 6], 5, "middle", marker_ids=[0])
        Cut(ids=[1, 2, 0, 5, 6], num_cut=2)
    """
    ids = list(ids)
    if len(ids) <= max_tokens:
        return Cut(ids, 0)
    marker = list(marker_ids) if len(marker_ids) < max_tokens else []
    kept = max_tokens - len(marker)
    head = {"left": kept, "middle": (kept + 1) // 2, "right": 0}[side]
    tail = kept - head
    return Cut(ids[:head] + marker + ids[len(ids) - tail :], len(ids) - kept)


def clip_text(text: str, max_characters: int, side: Side = "middle") -> str:
    """Clip a long text before it is encoded, so that encoding takes bounded time.

    Choose `max_characters` so large that the clipped text still exceeds the token budget.
    """
    if len(text) <= max_characters:
        return text
    head = {"left": max_characters, "middle": max_characters // 2, "right": 0}[side]
    tail = max_characters - head
    return text[:head] + text[len(text) - tail :]


def as_unicode(text: str) -> str:
    """Replace lone surrogates, which no tokenizer can encode."""
    return text.encode("utf-8", "replace").decode("utf-8")
