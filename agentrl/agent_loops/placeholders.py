"""Images and videos of agent loops and of clients: which picture is behind which token.

A loop passes token ids and decoded images apart, as in verl. Its ids have all placeholder tokens of
each image, so the images are found again in order. A placeholder that the policy sampled shows
nothing.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import numpy as np

from agentrl.data.rows import source_of_part
from agentrl.errors import AgentError, DataError
from agentrl.media.positions import Run
from agentrl.media.processor import MediaProcessor
from agentrl.media.records import MediaItem, MediaKind, MediaSpan
from agentrl.messages import ContentPart, Message
from agentrl.rollout.media import RequestMedia

EXPANDED = (
    "all placeholder tokens of each image, as self.apply_chat_template(messages, images=images) or "
    "self.processor(text=..., images=images) returns them, and the same images in image_data"
)


async def load_given(
    media: RequestMedia, images: Sequence[Any] | None, videos: Sequence[Any] | None
) -> list[MediaItem]:
    """Load the images and videos that a loop passes.

    Raises:
        AgentError: If one cannot be loaded, or the model reads text only.
    """
    given: dict[MediaKind, Sequence[Any]] = {
        MediaKind.IMAGE: images if images is not None else (),
        MediaKind.VIDEO: videos if videos is not None else (),
    }
    asked = [(kind, index, one) for kind, of in given.items() for index, one in enumerate(of)]
    if asked and media.processor is None:
        raise AgentError(
            "images or videos were given, and the model reads text only",
            expected="a vision-language model in model.path",
        )
    items: list[MediaItem] = []
    for kind, index, source in asked:
        try:
            items.append(await media.load(kind, source))
        except DataError as error:
            raise AgentError(f"{kind} {index} cannot be used: {error}") from error
    return items


async def show_media(
    messages: Sequence[Message],
    media: RequestMedia,
    images: Sequence[Any] | None = None,
    videos: Sequence[Any] | None = None,
) -> list[Message]:
    """Return messages whose parts have their images and videos, loaded.

    Args:
        messages: What a loop renders.
        media: Loads them.
        images: The images, in the order of the parts; None: each part has its own.
        videos: As `images`.

    Raises:
        AgentError: If there is not one for each part, or one cannot be loaded.
    """
    found = [source for message in messages for part in message.parts
             if (source := source_of_part(part)) is not None]  # fmt: skip
    chosen: dict[MediaKind, list[Any]] = {}
    for kind, given in ((MediaKind.IMAGE, images), (MediaKind.VIDEO, videos)):
        own = [source for one, source in found if one is kind]
        chosen[kind] = own if given is None else list(given)
        if len(chosen[kind]) != len(own):
            raise AgentError(
                f"the messages show {len(own)} {kind}s, and {len(chosen[kind])} were given",
                expected=f"one content part of type {str(kind)!r} for each",
            )
    items = await load_given(media, chosen[MediaKind.IMAGE], chosen[MediaKind.VIDEO])
    left = {kind: iter([one for one in items if one.kind is kind]) for kind in MediaKind}
    return [_with_items(message, left) for message in messages]


def _with_items(message: Message, left: Mapping[MediaKind, Any]) -> Message:
    parts = list[ContentPart]()
    for part in message.parts:
        found = source_of_part(part)
        shown = (
            part if found is None else ContentPart(type=str(found[0]), item=next(left[found[0]]))
        )
        parts.append(shown)
    return message.model_copy(update={"content": parts}) if parts else message


def sampled_places(ids: Sequence[int], calls: Sequence[tuple[list[int], list[int]]]) -> set[int]:
    """Return the indices of tokens that the policy sampled.

    Args:
        ids: A sequence.
        calls: Prompt and completion of each call of the engine.
    """
    found = set[int]()
    for prompt, completion in calls:
        start = len(prompt)
        if list(ids[:start]) == prompt:
            pairs = zip(completion, ids[start:], strict=False)
            common = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
            end = len(completion) if common is None else common
            found.update(range(start, min(start + end, len(ids))))
    return found


def find_runs(
    ids: Sequence[int],
    items: Sequence[MediaItem],
    processor: MediaProcessor,
    *,
    sampled: Collection[int] = (),
    name: str = "prompt_ids",
    may_be_unused: bool = False,
) -> list[Run]:
    """Find the runs of placeholder tokens of images and videos.

    Args:
        ids: A sequence, in which each image has all its placeholder tokens.
        items: The images and videos; those of one kind in the order in which they are shown.
        processor: The model's processor.
        sampled: Indices of tokens that the policy sampled.
        name: What `ids` are, for errors.
        may_be_unused: Whether items may be left over at the end.

    Raises:
        AgentError: If tokens and items do not agree. Names the first index.
    """
    kinds = {id: kind for kind, id in processor.placeholder_ids.items()}
    waiting = {kind: [one for one in items if one.kind is kind][::-1] for kind in MediaKind}
    current = dict.fromkeys(MediaKind, cast("tuple[MediaItem, int] | None", None))
    runs, end = list[Run](), 0
    for start in np.flatnonzero(np.isin(np.asarray(ids), list(kinds))).tolist():
        if start < end or start in sampled:
            continue
        kind = kinds[ids[start]]
        if current[kind] is None and not waiting[kind]:
            num = sum(one.kind is kind for one in items)
            raise AgentError(
                f"{name}[{start}] stands for {kind} {num}, and {num} {kind}s were given",
                expected=EXPANDED,
            )
        item, offset = current[kind] or (waiting[kind].pop(), 0)
        end = start + item.run_length
        own = range(start, min(end, len(ids)))
        num_found = next((n for n, at in enumerate(own) if ids[at] != ids[start]), len(own))
        if num_found < item.run_length or any(at in sampled for at in own):
            raise AgentError(
                f"{name}[{start}] begins a run of {num_found} placeholder tokens, and the {kind} "
                f"has {item.run_length}",
                expected=EXPANDED,
            )
        runs.append((start, end, item, offset))
        offset += item.run_length
        current[kind] = (item, offset) if offset < item.num_tokens else None
    unused = sum(map(len, waiting.values())) if not may_be_unused else 0
    if unused or any(current.values()):
        raise AgentError(
            f"{name} has no placeholder tokens for {unused or 'a part of a video'}"
            + (" of the images and videos" if unused else ""),
            expected=EXPANDED,
        )
    return runs


def runs_between(spans: Sequence[MediaSpan], start: int, end: int) -> list[Run]:
    """Return the runs in tokens `[start, end)` of a sequence, counted from `start`."""
    return [
        (span.start - start, span.end - start, span.item, span.offset)
        for span in spans
        if start <= span.start and span.end <= end
    ]


def read_tokens(
    ids: Sequence[int], runs: Sequence[Run], decode: Callable[[Sequence[int]], str]
) -> str | list[ContentPart]:
    """Return the content of observed tokens: a text, or parts if they show images or videos."""
    if not runs:
        return decode(ids)
    parts, at = list[ContentPart](), 0
    for start, end, item, offset in runs:
        parts.append(ContentPart(type="text", text=decode(ids[at:start])))
        if offset == 0:
            parts.append(ContentPart(type=str(item.kind), item=item))
        at = end
    parts.append(ContentPart(type="text", text=decode(ids[at:])))
    return [part for part in parts if part.type != "text" or part.text]
