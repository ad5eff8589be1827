"""Images and videos of a request: loaded for its prompt, and for what tools and users send later.

The parts of `messages` get their items, from which chat templates make tokens. What users see,
`multi_modal_data`, has the decoded objects.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from agentrl.errors import DataError, ToolCallError
from agentrl.media.loading import MediaLoader, load_media
from agentrl.media.processor import MediaProcessor
from agentrl.media.records import MediaItem, MediaKind
from agentrl.messages import ContentPart, Message, ToolResponse
from agentrl.rollout.request import AsyncRolloutRequest

MediaByKind = dict[str, list[Any]]
"""Decoded images and videos by kind, as in `multi_modal_data`."""


class RequestMedia:
    """Loads the images and videos of requests.

    Args:
        processor: The model's processor; None: the model reads text only. Then the images and
            videos of tools are kept with the request, and the policy does not see them.
    """

    def __init__(self, processor: MediaProcessor | None = None) -> None:
        self.processor = processor
        self._loader = None if processor is None else MediaLoader(processor)
        self._placeholders = set(processor.placeholder_ids.values()) if processor else set[int]()

    def is_placeholder(self, ids: Sequence[int]) -> bool:
        """Whether one of some sampled tokens stands for an image or a video."""
        return not self._placeholders.isdisjoint(ids)

    async def load_prompt(self, request: AsyncRolloutRequest) -> None:
        """Load the images and videos of a prompt, from the sources in `multi_modal_data`.

        Raises:
            DataError: If one cannot be loaded; it names the kind and the index. Or if the model
                reads text only, or messages and sources do not agree.
        """
        asked = find_unread(request.messages, request.multi_modal_data)
        if not asked:
            return
        items = await asyncio.gather(*(self._load(one) for one in asked))
        for one, item in zip(asked, items, strict=True):
            one.part.item = item
        request.multi_modal_data = by_kind(items)

    async def load(self, kind: MediaKind, source: Any) -> MediaItem:
        """Load one image or video.

        Raises:
            DataError: If it cannot be loaded, or the model reads text only.
        """
        if self._loader is None:
            raise _text_only()
        return await self._loader.load(kind, source)

    async def _load(self, asked: "_Asked") -> MediaItem:
        with asked.named_in_errors():
            return await self.load(asked.kind, asked.source)

    async def show(self, message: Message, response: ToolResponse) -> tuple[Message, MediaByKind]:
        """Put the images and videos of a response into its message.

        Args:
            message: The message that `ToolResponse.content` made.
            response: What a tool or an interaction returned.

        Returns:
            The message, and the media to keep with the request.

        Raises:
            ToolCallError: If one cannot be loaded.
        """
        if self._loader is None or not response.media:
            return message, response.media
        sources = [
            (MediaKind(kind), value) for kind, values in response.media.items() for value in values
        ]
        try:
            items = await asyncio.gather(*(self._loader.load(*source) for source in sources))
        except DataError as error:
            what = f"a tool returned an image or video that cannot be shown: {error}"
            raise ToolCallError(what, tool=message.name) from error
        shown = [ContentPart(type=str(item.kind), item=item) for item in items]
        text = message.text if response.text else ""
        texts = [ContentPart(type="text", text=text)] if text else []
        return message.model_copy(update={"content": [*shown, *texts]}), by_kind(items)


class _Asked(NamedTuple):
    """An image or a video that a prompt shows and that is not loaded yet."""

    part: ContentPart
    kind: MediaKind
    number: int
    """Index among those of its kind."""
    source: Any

    @contextmanager
    def named_in_errors(self) -> Iterator[None]:
        """Add kind and index to a `DataError` of the block."""
        try:
            yield
        except DataError as error:
            error.details.setdefault(str(self.kind), self.number)
            raise


def find_unread(messages: Sequence[Message], sources: Mapping[str, Sequence[Any]]) -> list[_Asked]:
    """Find the parts of a prompt that have no item yet, with their sources.

    Args:
        messages: The prompt.
        sources: The images and videos by kind, in the order of the parts.

    Raises:
        DataError: If there is not one source for each part.
    """
    parts = [part for message in messages for part in _media_parts(message)]
    if all(part.item is not None for part in parts):
        return []
    kinds = [MediaKind(part.type) for part in parts]
    for kind in MediaKind:
        if (number := kinds.count(kind)) != len(sources.get(kind, ())):
            raise DataError(
                f"the messages show {number} {kind}s, and there are {len(sources.get(kind, ()))}",
                expected=f"one <{kind}> mark, or one part of type {kind!r}, for each",
            )
    left = {kind: iter(enumerate(sources.get(kind, ()))) for kind in MediaKind}
    return [_Asked(part, kind, *next(left[kind])) for part, kind in zip(parts, kinds, strict=True)]


def load_messages(
    messages: Sequence[Message],
    sources: Mapping[str, Sequence[Any]],
    processor: MediaProcessor | None,
) -> list[Message]:
    """Return copies of messages with their images and videos, loaded on the caller's thread.

    Args:
        messages: A prompt or a conversation.
        sources: Its images and videos by kind, in the order of the parts.
        processor: The model's; None: it reads text only.

    Raises:
        DataError: As `RequestMedia.load_prompt`.
    """
    copies = [message.model_copy(deep=True) for message in messages]
    for one in find_unread(copies, sources):
        if processor is None:
            raise _text_only()
        with one.named_in_errors():
            one.part.item = processor.process(load_media(one.kind, one.source))
    return copies


def by_kind(items: Sequence[MediaItem]) -> MediaByKind:
    """Return the decoded objects of items by kind."""
    found: defaultdict[str, list[Any]] = defaultdict(list)
    for item in items:
        found[str(item.kind)].append(item.loaded.data)
    return dict(found)


def _text_only() -> DataError:
    return DataError(
        "the prompt has images or videos, and the model reads text only",
        expected="a vision-language model in model.path",
    )


def _media_parts(message: Message) -> list[ContentPart]:
    if not isinstance(message.content, list):
        return []
    kinds = set(map(str, MediaKind))
    return [part for part in message.content if part.type in kinds and part.shown is not False]
