"""Cut a prompt to its budget."""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

from agentrl.errors import DataError
from agentrl.messages import Message
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates import ChatTemplate

Truncation = Literal["error", "left", "right", "middle"]


def fit_prompt(ids: Sequence[int], max_length: int, truncation: Truncation) -> list[int]:
    """Cut a prompt's tokens to `max_length`; a prompt that fits comes back as it is.

    Args:
        ids: The rendered prompt.
        max_length: Tokens that may be left, at least 1.
        truncation: The side that is cut away; `error` refuses to cut.

    Raises:
        DataError: for an overlong prompt under `error`.

    Example:
        >>> fit_prompt([1, 2, 3, 4, 5], 3, "middle")
        [1, 4, 5]
    """
    if len(ids) <= max_length:
        return list(ids)
    if truncation == "error":
        raise DataError(
            f"a prompt of {len(ids)} tokens is longer than data.max_prompt_length, {max_length}",
            expected="a larger data.max_prompt_length, data.filter_overlong_prompts, or "
            "data.truncation left, right or middle",
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    return [*ids[:head], *ids[len(ids) - (max_length - head) :]]


Side = Literal["left", "middle", "right"]
"""Which end of a text is kept, as verl names it: `left` keeps the beginning, `right` the end,
`middle` cuts the middle out and keeps both ends."""

CUT_MARKER = " ... "
"""Stands where something was cut."""
_CHARACTERS_PER_TOKEN = 64
"""No tokenizer packs more of ordinary text into a token: what is longer is clipped unencoded."""


class FittedText(NamedTuple):
    """A text within its budget."""

    text: str
    num_cut: int
    """Tokens that it lost; an estimate where it was too long to be encoded whole."""


class TextFitter:
    """Cut texts to a budget of tokens, and leave those alone that cannot exceed it.

    Args:
        template: Encodes and decodes outside text.
        max_tokens: Budget of one observation.
        side: Which end is kept (`tool_response_truncate_side`).
    """

    def __init__(self, template: ChatTemplate, *, max_tokens: int, side: Side) -> None:
        self._template = template
        self._max_tokens = max_tokens
        self._side: Side = side

    def fit(self, text: str) -> FittedText:
        """Return the text, cut where it is longer than the budget."""
        # Clipped before all else: encoding and decoding megabytes holds up the event loop.
        clipped = clip_text(text, self._max_tokens * _CHARACTERS_PER_TOKEN, self._side)
        clipped = as_unicode(clipped)
        # A token is at least one byte: a text of fewer bytes than the budget fits unencoded.
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

    def _cut(self, ids: Sequence[int], room: int) -> FittedText:
        """Cut tokens so that their text keeps to the budget.

        Encoded again, a cut text can be a little longer: a character is torn, two pieces meet.
        """
        while True:
            cut = cut_observation(ids, room, self._side, marker_ids=self._marker_ids)
            text = self._template.decode(cut.ids)
            excess = len(self._template.encode_text(text)) - self._max_tokens
            if excess <= 0:
                return FittedText(text, cut.num_cut)
            room = max(room - excess, 0)

    @cached_property
    def _marker_ids(self) -> list[int]:
        return self._template.encode_text(CUT_MARKER)


class Cut(NamedTuple):
    """Tokens of an observation within their budget."""

    ids: list[int]
    num_cut: int
    """Tokens of the observation that are gone."""


def cut_observation(
    ids: Sequence[int], max_tokens: int, side: Side = "middle", *, marker_ids: Sequence[int] = ()
) -> Cut:
    """Cut an observation to its budget, in tokens.

    Args:
        ids: Token ids of the observation's text.
        max_tokens: The budget; the marker counts. A marker that leaves no room is left out.
        side: Which end is kept.
        marker_ids: Token ids that stand where something was cut.

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
    """Clip a text before it is encoded, so that a megabyte costs no megabyte of tokens.

    Choose `max_characters` so that what is left is still more than the token budget, and
    `cut_observation` cuts the rest.
    """
    if len(text) <= max_characters:
        return text
    head = {"left": max_characters, "middle": max_characters // 2, "right": 0}[side]
    tail = max_characters - head
    return text[:head] + text[len(text) - tail :]


def as_unicode(text: str) -> str:
    """Replace what no tokenizer can encode (lone surrogates)."""
    return text.encode("utf-8", "replace").decode("utf-8")


MAX_CACHED_GROUPS = 1024
"""Groups whose prompt is kept; more are never in flight at once for long."""


class EncodedPrompt(NamedTuple):
    """A prompt within its budget."""

    ids: list[int]
    """Its tokens, generation prompt included."""
    num_cut: int
    """Tokens that it lost."""
    text: str
    """What the tokens say; empty where they were cut."""


class _Cached(NamedTuple):
    messages: list[Message]
    tools: list[str]
    prompt: EncodedPrompt


class PromptEncoder:
    """Render each group's prompt once, within its budget.

    Args:
        template: The run's chat template.
        max_tokens: Budget of a prompt.
        truncation: What becomes of a longer one: `error`, or the side that is cut away. The
            generation prompt is kept, whichever side it is.
    """

    def __init__(self, template: ChatTemplate, *, max_tokens: int, truncation: Truncation) -> None:
        self._template = template
        self._max_tokens = max_tokens
        self._truncation: Truncation = truncation
        self._cached: dict[str, _Cached] = {}

    def encode(self, request: AsyncRolloutRequest) -> EncodedPrompt:
        """Give the prompt's tokens.

        Raises:
            DataError: for a prompt over its budget under `truncation: error`.
            TemplateError: where the template cannot carry its messages.
        """
        tools = [tool.name for tool in request.tool_schemas]
        cached = self._cached.get(request.uid)
        # Compared, not trusted: tools may open each sample of a group in another way, and a uid of
        # the user's own may come again.
        if cached and cached.messages == request.messages and cached.tools == tools:
            return cached.prompt
        conversation = request.messages, request.tool_schemas
        ids = self._template.encode_prompt(*conversation)
        prompt = self._fit(ids, self._template.write_prompt(*conversation))
        self._remember(request.uid, _Cached(list(request.messages), tools, prompt))
        return prompt

    def _fit(self, ids: Sequence[int], text: str) -> EncodedPrompt:
        kept = self._generation_prompt(ids) if self._truncation != "error" else []
        head = ids[: len(ids) - len(kept)]
        fitted = fit_prompt(head, self._max_tokens - len(kept), self._truncation)
        num_cut = len(head) - len(fitted)
        return EncodedPrompt([*fitted, *kept], num_cut, "" if num_cut else text)

    def _generation_prompt(self, ids: Sequence[int]) -> list[int]:
        """The end of a prompt that no cut may touch; none where it would be all that is left."""
        end = self._template.generation_prompt_ids
        text = self._template.decode(end)
        # The first token of some generation prompts is joined with the text before it.
        kept = next((n for n in range(1, len(end) + 1) if self._ends_with(ids[-n:], text)), 0)
        return list(ids[-kept:]) if 0 < kept < self._max_tokens else []

    def _ends_with(self, ids: Sequence[int], text: str) -> bool:
        return self._template.decode(ids).endswith(text)

    def _remember(self, uid: str, cached: _Cached) -> None:
        if len(self._cached) >= MAX_CACHED_GROUPS:
            del self._cached[next(iter(self._cached))]
        self._cached[uid] = cached
