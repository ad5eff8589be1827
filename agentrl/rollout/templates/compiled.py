"""A rendering as tokens: the text between two control tokens is encoded together.

A tokenizer splits a rendering at its added tokens, and encodes each run of text between two of them
by itself. So a literal of the template, an outside text and the next literal become one run, which
gets the tokens that the tokenizer gives the rendering. A run is encoded without control tokens, so
no outside text becomes one, alone or together with its neighbors: control tokens come from the
template's literals only, and each literal is searched by itself.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from agentrl.media.positions import Run
from agentrl.media.records import MediaItem
from agentrl.rollout.templates.cutting import Piece, SlotUse, Written, write_pieces
from agentrl.rollout.templates.slots import Slot, TextOrigin
from agentrl.rollout.templates.text import ControlToken, TextEncoder, TokenSpans

Span = tuple[int, int, int]
"""A content: index of its message, start, end."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Pieces between two control tokens, at least one of them a slot use."""

    pieces: tuple[Piece, ...]
    before: ControlToken | None
    after: ControlToken | None
    head_ids: list[int]
    """Tokens of the literal before the first slot use, encoded alone."""
    tail_ids: list[int]
    """Tokens of the literal after the last slot use, encoded alone."""
    only: SlotUse | None
    """The slot use, if the run has exactly one and it is an outside text."""


class _FilledRun(NamedTuple):
    """The text of a run, not encoded yet."""

    text: str
    contents: list[Span]
    """In characters, if `run` is None."""
    run: _Run | None
    """The run, if it has one slot use: then the content is found faster."""


class _Placeholders(NamedTuple):
    """A run of placeholder tokens of an image or a video."""

    ids: list[int]
    slot: int
    message: int
    offset: int
    """Number of placeholder tokens of the same item before it."""


class EncodedMedia(NamedTuple):
    """Tokens, with the images and videos among them."""

    ids: list[int]
    runs: list[Run]
    """The runs of placeholder tokens, in order."""


_Part = list[int] | _FilledRun | _Placeholders


@dataclass(frozen=True, slots=True)
class Filled:
    """A rendering with its texts: known tokens, and runs that are not encoded yet."""

    parts: list[_Part]
    encoder: TextEncoder

    @property
    def texts(self) -> list[str]:
        """The texts to be encoded as outside text, in order."""
        return [part.text for part in self.parts if isinstance(part, _FilledRun)]

    def encode(
        self, encoded: Sequence[Sequence[int]] | None = None
    ) -> tuple[list[int], list[Span]]:
        """Join the tokens.

        Args:
            encoded: Tokens of `texts`; None: they are encoded here.

        Returns:
            The tokens, and the span of each content in them. A token that holds characters of a
            content and of the literal next to it belongs to the content. The tokens of an image
            are a content of its message.
        """
        given = iter(self.encoder.encode_texts(self.texts) if encoded is None else encoded)
        ids: list[int] = []
        spans: list[Span] = []
        for part in self.parts:
            if isinstance(part, list):
                ids += part
                continue
            start = len(ids)
            if isinstance(part, _Placeholders):
                ids += part.ids
                spans.append((part.message, start, len(ids)))
                continue
            own = next(given)
            ids += own
            found = _find_contents(part, own, self.encoder)
            spans += [(message, start + first, start + end) for message, first, end in found]
        return ids, spans

    def find_runs(
        self, encoded: Sequence[Sequence[int]], items: Mapping[int, MediaItem]
    ) -> list[Run]:
        """Return the runs of placeholder tokens among those of `encode`, in order.

        Args:
            encoded: Tokens of `texts`.
            items: The image or video of each slot.
        """
        given, at, runs = iter(encoded), 0, list[Run]()
        for part in self.parts:
            if isinstance(part, _Placeholders):
                runs.append((at, at + len(part.ids), items[part.slot], part.offset))
                at += len(part.ids)
            else:
                at += len(part if isinstance(part, list) else next(given))
        return runs


@dataclass(slots=True)
class _Filling:
    """Fills a run of several texts, of a policy's text, or of an image."""

    encoder: TextEncoder
    policy_tokens: re.Pattern[str]
    placeholder_ids: frozenset[int]
    parts: list[_Part] = field(default_factory=list[_Part])
    text: str = ""
    contents: list[Span] = field(default_factory=list[Span])

    def fill(self, run: _Run, texts: Sequence[str]) -> None:
        """Fill the run; the control tokens in a policy's texts split it."""
        before = run.before
        for piece in run.pieces:
            if isinstance(piece, str):
                self.text += piece
                continue
            written, start = piece.written(texts[piece.slot.number]), len(self.text)
            if piece.slot.origin is TextOrigin.POLICY:
                before = self._add_policy(written, before)
                continue
            if piece.slot.origin is TextOrigin.MEDIA:
                before = self._add_media(written, piece.slot, before)
                continue
            self.text += written
            if piece.slot.is_content:
                if self.contents and self.contents[-1][0] == piece.slot.message:
                    start = self.contents.pop()[1]
                self.contents.append((piece.slot.message, start, len(self.text)))
        self._close(before, run.after)

    def _add_policy(self, written: str, before: ControlToken | None) -> ControlToken | None:
        start = 0
        for match in self.policy_tokens.finditer(written):
            token = self.encoder.tokens[match.group()]
            self.text += written[start : match.start()]
            self._close(before, token)
            self.parts.append([token.id])
            before, start = token, match.end()
        self.text += written[start:]
        return before

    def _add_media(
        self, written: str, slot: Slot, before: ControlToken | None
    ) -> ControlToken | None:
        """Add what a processor writes for an image or a video, as a literal of the template."""
        offset = 0
        for part, repeated in groupby(self.encoder.split_literal(written)):
            if isinstance(part, str):
                self.text += part
                continue
            ids = [part.id for _ in repeated]
            self._close(before, part)
            before = part
            if part.id in self.placeholder_ids:
                self.parts.append(_Placeholders(ids, slot.number, slot.message, offset))
                offset += len(ids)
            else:
                self.parts.append(ids)
        return before

    def _close(self, before: ControlToken | None, after: ControlToken | None) -> None:
        text = self.encoder.between(self.text, before, after)
        if text:
            self.parts.append(_FilledRun(text, self.contents, None))
        self.text, self.contents = "", []


class CompiledTemplate:
    """Pieces with encoded literals: takes texts, returns tokens.

    Args:
        pieces: The result of `learn`, or a part of it.
        encoder: Encodes literals now and texts later.
        policy_tokens: Control tokens that a policy may write inside its turn.
        before: The text before the pieces; it matters whether it ends in a control token.
        placeholder_ids: The tokens that stand for images and videos.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        encoder: TextEncoder,
        policy_tokens: re.Pattern[str],
        *,
        before: str = "",
        placeholder_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.pieces = tuple(pieces)
        self._placeholder_ids = placeholder_ids
        self.encoder = encoder
        self._policy_tokens = policy_tokens
        self._steps = self._compile(before)

    def fill(self, texts: Sequence[str]) -> Filled:
        """Put texts into their slots, without encoding them.

        Args:
            texts: A text for each slot.
        """
        parts: list[_Part] = []
        for step in self._steps:
            if isinstance(step, list):
                parts.append(step)
            elif use := step.only:  # as most runs have
                written = use.written(texts[use.slot.number])
                text = "".join([p if isinstance(p, str) else written for p in step.pieces])
                text = self.encoder.between(text, step.before, step.after)
                contents = [(use.slot.message, 0, 0)] if use.slot.is_content else []
                parts += [_FilledRun(text, contents, step)] if text else []
            else:
                filling = _Filling(self.encoder, self._policy_tokens, self._placeholder_ids)
                filling.fill(step, texts)
                parts += filling.parts
        return Filled(parts, self.encoder)

    def encode(self, texts: Sequence[str]) -> list[int]:
        """Encode with these texts."""
        return self.fill(texts).encode()[0]

    def write(self, texts: Sequence[str]) -> Written:
        """Return the text that `encode` encodes."""
        return write_pieces(self.pieces, texts)

    def _compile(self, before: str) -> list[list[int] | _Run]:
        """Split the pieces at control tokens, and encode the runs that have no slot use."""
        steps: list[list[int] | _Run] = []
        run: list[Piece] = []
        opened = next(reversed(self.encoder.split_literal(before)), None)
        last = opened if isinstance(opened, ControlToken) else None
        for piece in self.pieces:
            for part in (
                [piece] if isinstance(piece, SlotUse) else self.encoder.split_literal(piece)
            ):
                if isinstance(part, ControlToken):
                    steps += [self._make_run(run, last, part), [part.id]]
                    run, last = [], part
                else:
                    run.append(part)
        return [*steps, self._make_run(run, last, None)]

    def _make_run(
        self, pieces: list[Piece], before: ControlToken | None, after: ControlToken | None
    ) -> list[int] | _Run:
        encoder = self.encoder
        if not any(isinstance(piece, SlotUse) for piece in pieces):
            return encoder.encode_text(encoder.between("".join(map(str, pieces)), before, after))
        uses = [piece for piece in pieces if isinstance(piece, SlotUse)]
        is_outside = len(uses) == 1 and uses[0].slot.origin is TextOrigin.OUTSIDE
        head = pieces[0] if isinstance(pieces[0], str) else ""
        tail = pieces[-1] if isinstance(pieces[-1], str) else ""
        return _Run(
            tuple(pieces),
            before,
            after,
            encoder.encode_text(encoder.between(head, before, None)),
            encoder.encode_text(encoder.between(tail, None, after)),
            uses[0] if is_outside else None,
        )


class PlannedPrompt:
    """A prompt that is not encoded yet.

    Args:
        compiled: The template for prompts of its shape.
        texts: A text for each slot.
        items: The image or video of a slot, by the slot's number.
    """

    def __init__(
        self,
        compiled: CompiledTemplate,
        texts: Sequence[str],
        items: Mapping[int, MediaItem] | None = None,
    ) -> None:
        self._compiled, self._given, self._items = compiled, texts, items or {}
        self._filled = compiled.fill(texts)
        self.texts = self._filled.texts
        """The texts to be encoded as outside text, in order."""

    @property
    def text(self) -> str:
        """The prompt as text."""
        return self._compiled.write(self._given).text

    def encode(self, encoded: Sequence[Sequence[int]]) -> list[int]:
        """Return the tokens of the prompt, from those of `texts`."""
        return self._filled.encode(encoded)[0]

    def encode_media(self, encoded: Sequence[Sequence[int]]) -> EncodedMedia:
        """Return the tokens, and the runs of placeholder tokens among them."""
        runs = self._filled.find_runs(encoded, self._items) if self._items else []
        return EncodedMedia(self.encode(encoded), runs)


def _find_contents(part: _FilledRun, ids: Sequence[int], encoder: TextEncoder) -> list[Span]:
    """Find the tokens of each content in a run."""
    if not part.contents:
        return []
    if part.run is None:
        spans = [(start, end) for _, start, end in part.contents]
        found = TokenSpans(encoder.decode).locate(ids, part.text, spans)
        each = zip(part.contents, found, strict=True)
        return [(message, *span) for (message, _, _), span in each if span]
    head, tail = part.run.head_ids, part.run.tail_ids
    start = _num_equal(head, ids)
    num_left = len(ids) - start
    end = len(ids) - min(num_left, _num_equal(tail[::-1], ids[: ~len(tail) : -1]))
    return [(part.contents[0][0], start, end)]


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    if first == second[: len(first)]:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
