"""Cut renderings at random placeholders, and learn what a template does to the texts there.

A conversation's shape is rendered with a fresh random number in each slot, so no text of a user or
a tool ever enters the rendered string. A template may strip a text or escape it in JSON. Further
renderings of the same shape reveal this, and the same change is made to the text before it is
encoded (`agentrl.rollout.templates.compiled`).
"""

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from agentrl.errors import TemplateError
from agentrl.rollout.templates.slots import SLOT_WIDTH, Slot

Render = Callable[[Mapping[int, str]], str]
"""Renders one shape with the given texts in its slots."""

BLANKS = "\n "
"""The blanks that are tried; a template that strips both is assumed to strip all white space."""
SERIAL_DIGITS = 6
"""Digits of a placeholder that number the slots; the other digits are random in each rendering."""
SHORTEST_SERIAL = 16
"""Shorter placeholders consist of random digits only."""
_AWKWARD = "Aé/\n\"\\'<&>\u2028"


@dataclass(frozen=True, slots=True)
class Escape:
    """How a template escapes a text."""

    name: str
    apply: Callable[[str], str]


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_ascii(text: str) -> str:
    return json.dumps(text)[1:-1]


def _safe(dump: Callable[[str], str]) -> Callable[[str], str]:
    codes = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&'"}
    return lambda text: dump(text).translate(codes)


_HTML = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&#34;", "'": "&#39;"})
VERBATIM = Escape("verbatim", lambda text: text)
UNKNOWN = Escape("unknown", lambda text: text)
"""The template changes the text in an unknown way; the text is kept unchanged."""
ESCAPES = (
    VERBATIM,
    Escape("json", _json),
    Escape("json, ASCII", _json_ascii),
    Escape("json, HTML-safe", _safe(_json)),
    Escape("json, ASCII, HTML-safe", _safe(_json_ascii)),
    Escape("json in json", lambda text: _json(_json(text))),
    Escape("json in ASCII json", lambda text: _json_ascii(_json(text))),
    Escape("html", lambda text: text.translate(_HTML)),
    Escape("upper case", str.upper),
    Escape("lower case", str.lower),
    Escape("python", lambda text: repr(text)[1:-1]),
)


@dataclass(frozen=True, slots=True)
class SlotUse:
    """One use of a slot in a rendering, and what the template does to the text there."""

    slot: Slot
    escape: Escape = VERBATIM
    strips_left: str = ""
    """Characters that are stripped from the text's start; `BLANKS` for all white space."""
    strips_right: str = ""
    """Characters that are stripped from the text's end."""

    def written(self, text: str) -> str:
        """Return the text as the template writes it here."""
        if self.strips_left:
            text = text.lstrip() if self.strips_left == BLANKS else text.lstrip(self.strips_left)
        if self.strips_right:
            text = text.rstrip() if self.strips_right == BLANKS else text.rstrip(self.strips_right)
        return self.escape.apply(text)


@dataclass(frozen=True, slots=True)
class Placeholders:
    """The placeholders of one rendering."""

    texts: list[str]
    """One for each slot, in order."""
    pattern: re.Pattern[str]
    """Matches any of them, as a group."""


Piece = str | SlotUse
"""A literal of the template, or the use of a slot."""


def cut(render: Render, slots: Sequence[Slot]) -> list[Piece]:
    """Render a shape and cut it: literals and slot uses alternate, literals are at both ends."""
    placeholders = _placeholders(slots)
    by_placeholder = dict(zip(placeholders.texts, slots, strict=True))
    pieces = placeholders.pattern.split(render(_by_index(slots, placeholders.texts)))
    return [SlotUse(by_placeholder[p]) if i % 2 else p for i, p in enumerate(pieces)]


def learn(render: Render, slots: Sequence[Slot]) -> list[Piece]:
    """Cut a shape, and learn what the template does to the text of each slot use."""
    pieces = cut(render, slots)
    if len(pieces) == 1:
        return pieces
    escapes = _learn_escapes(render, slots, pieces)
    uses = [
        replace(use, escape=escape)
        for use, escape in zip(pieces[1::2], escapes, strict=True)
        if isinstance(use, SlotUse)
    ]
    learned: list[Piece] = list(pieces)
    learned[1::2] = _learn_strips(render, slots, pieces[0::2], uses)
    return learned


def place_media(
    pieces: Sequence[Piece], media: Sequence[tuple[Slot, str]], placeholder: re.Pattern[str]
) -> list[Piece]:
    """Replace the placeholders that a template wrote by the slots of the images and videos.

    Texts are in slots of their own, so every placeholder in a literal is the template's.

    Args:
        pieces: A rendering.
        media: The slot of each image and video in order, and the placeholder of its kind.
        placeholder: Matches any placeholder.

    Raises:
        TemplateError: If the template does not write their placeholders in this order.
    """
    placed, written = list[Piece](), list[str]()
    slots = iter(slot for slot, _ in media)
    for piece in pieces:
        if isinstance(piece, SlotUse):
            placed.append(piece)
            continue
        start = 0
        for match in placeholder.finditer(piece):
            written.append(match.group())
            if (slot := next(slots, None)) is not None:
                placed += [piece[start : match.start()], SlotUse(slot)]
                start = match.end()
        placed.append(piece[start:])
    if written != (expected := [text for _, text in media]):
        raise TemplateError(
            f"the chat template writes {' '.join(written) or 'nothing'} for images and videos",
            expected=" ".join(expected),
        )
    return placed


def written_text(pieces: Sequence[Piece], texts: Mapping[int, str] | Sequence[str]) -> str:
    """Return the rendering with texts in their slots, as the template would write it."""
    return "".join(
        [
            piece if isinstance(piece, str) else piece.written(texts[piece.slot.number])
            for piece in pieces
        ]
    )


def _placeholders(slots: Sequence[Slot]) -> "Placeholders":
    """Make a random number for each slot: it is unchanged by any change of case and by any escape.

    Long ones of one width share their random start, so that one pattern finds them all.
    """
    nonces: dict[int, str] = {}
    texts: list[str] = []
    patterns: list[str] = []
    for number, slot in enumerate(slots):
        if slot.width < SHORTEST_SERIAL:
            texts.append(_random_digits(slot.width))
            patterns.append(texts[-1])
            continue
        nonce = nonces.setdefault(slot.width, _random_digits(slot.width - SERIAL_DIGITS))
        texts.append(f"{nonce}{number:0{SERIAL_DIGITS}d}")
    found = [f"{nonce}[0-9]{{{SERIAL_DIGITS}}}" for _, nonce in sorted(nonces.items())[::-1]]
    return Placeholders(texts, re.compile("(" + ("|".join(found + patterns) or "(?!)") + ")"))


def _random_digits(length: int) -> str:
    """Return random digits; the first is not zero, because a placeholder can be a number."""
    return str(10 ** (length - 1) + secrets.randbelow(9 * 10 ** (length - 1)))


def _by_index(slots: Sequence[Slot], texts: Sequence[str]) -> dict[int, str]:
    return {slot.number: text for slot, text in zip(slots, texts, strict=True)}


def _learn_escapes(render: Render, slots: Sequence[Slot], pieces: Sequence[Piece]) -> list[Escape]:
    """Find the escape of each slot use, with a text that contains every special character."""
    starts, ends = _placeholders(slots), _placeholders(slots)
    texts = [
        start + _AWKWARD + end if _is_tried(slot) else start
        for slot, start, end in zip(slots, starts.texts, ends.texts, strict=True)
    ]
    uses = [piece for piece in pieces if isinstance(piece, SlotUse)]
    try:
        rendered = render(_by_index(slots, texts))
    except TemplateError:
        return [UNKNOWN] * len(uses)
    expected = dict(zip((slot.number for slot in slots), ends.texts, strict=True))
    found = starts.pattern.split(rendered)[2::2]
    if len(found) != len(uses):
        return [UNKNOWN] * len(uses)
    escapes = [VERBATIM] * len(uses)
    for index, (use, following) in enumerate(zip(uses, found, strict=True)):
        if _is_tried(use.slot):
            end = expected[use.slot.number]
            written = following.partition(end)[0] if end in following else None
            known = (escape for escape in ESCAPES if escape.apply(_AWKWARD) == written)
            escapes[index] = next(known, UNKNOWN)
    return escapes


def _is_tried(slot: Slot) -> bool:
    """Whether a text may be longer than its placeholder; an id may not."""
    return slot.width == SLOT_WIDTH


def _learn_strips(
    render: Render, slots: Sequence[Slot], literals: Sequence[Piece], uses: list[SlotUse]
) -> list[SlotUse]:
    """Put a blank on each side of every text, and check whether it is written."""
    plain = [literal for literal in literals if isinstance(literal, str)]
    for blank in BLANKS:
        before = _literals_with(render, slots, before=blank)
        after = _literals_with(render, slots, after=blank)
        for number, use in enumerate(uses):
            kept = use.escape.apply(blank)
            if _is_stripped(before, plain, number, plain[number] + kept):
                use = replace(use, strips_left=use.strips_left + blank)
            if _is_stripped(after, plain, number + 1, kept + plain[number + 1]):
                use = replace(use, strips_right=use.strips_right + blank)
            uses[number] = use
    return uses


def _is_stripped(found: list[str], plain: list[str], number: int, kept: str) -> bool:
    return len(found) == len(plain) and found[number] == plain[number] != kept


def _literals_with(
    render: Render, slots: Sequence[Slot], *, before: str = "", after: str = ""
) -> list[str]:
    placeholders = _placeholders(slots)
    texts = [
        before + text + after if _is_tried(slot) else text
        for slot, text in zip(slots, placeholders.texts, strict=True)
    ]
    try:
        return placeholders.pattern.split(render(_by_index(slots, texts)))[0::2]
    except TemplateError:
        return []


class Written(NamedTuple):
    """A rendering as text."""

    text: str
    starts: dict[int, int]
    """The index at which each message's content starts in the text, by the message's index."""


def write_pieces(pieces: Sequence[Piece], texts: Mapping[int, str] | Sequence[str]) -> Written:
    """Return the rendering with texts in their slots, and where each message's content starts."""
    written: list[str] = []
    starts: dict[int, int] = {}
    length = 0
    for piece in pieces:
        if isinstance(piece, SlotUse):
            if piece.slot.is_content:
                starts.setdefault(piece.slot.message, length)
            piece = piece.written(texts[piece.slot.number])
        written.append(piece)
        length += len(piece)
    return Written("".join(written), starts)


def shared_length(first: str, second: str) -> int:
    """Return the length of the common prefix of two strings."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def common_length(first: str, second: str, control: re.Pattern[str]) -> int:
    """Return the length of the common prefix of two renderings, never inside a control token."""
    length = shared_length(first, second)
    for text in (first, second):
        for match in control.finditer(text):
            if match.start() < length < match.end():
                length = match.start()
    return length


def slots_in_order(pieces: Sequence[Piece]) -> list[int]:
    """Return the slot number of each use, in order."""
    return [piece.slot.number for piece in pieces if isinstance(piece, SlotUse)]
