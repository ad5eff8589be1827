"""Text to tokens, by origin: outside text, the policy's own text, a template's literals.

Outside text (tools, users, rows) is encoded by a clone of the tokenizer that has no added tokens at
all, special or not, so no text can become a control token (outside text is never a control token).
`split_special_tokens` is not enough: tokens such as `<tool_call>` are added but not special.
"""

import asyncio
import json
import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from agentrl.errors import TemplateError
from agentrl.plugins.call import PerLoop

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase


_FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")


class ControlToken(NamedTuple):
    """An added token that is not blank, and whether it absorbs the white space next to it."""

    id: int
    strips_left: bool
    strips_right: bool


class TextEncoder:
    """Encodes and decodes text with one tokenizer, which is not changed.

    Args:
        tokenizer: A tokenizer with a fast backend.

    Raises:
        TemplateError: if the tokenizer has no fast backend to clone.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        backend: Tokenizer | None = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TemplateError(
                f"{type(tokenizer).__name__} has no fast backend",
                expected="a tokenizer with a tokenizer.json",
            )
        untyped: Any = tokenizer
        self._tokenizer = tokenizer
        self._backend = backend
        self.added: dict[str, int] = dict(untyped.get_added_vocab())
        """Content of every added token, special or not, and its id."""
        self.special: frozenset[str] = frozenset(
            token.content for token in untyped.added_tokens_decoder.values() if token.special
        )
        """Those of them that are special."""
        # Some vocabularies (Gemma) add runs of blanks, which control nothing.
        self.control: dict[str, int] = {
            text: id for text, id in self.added.items() if text.strip(" \t\r\n▁")
        }
        self._control_ids = frozenset(self.control.values())
        self._first_signs = frozenset(token[0] for token in self.control)
        decoder = untyped.added_tokens_decoder
        blanks = [decoder[id] for text, id in self.added.items() if text not in self.control]
        self._plain = _clone_without_added_tokens(backend, blanks)
        self.tokens: dict[str, ControlToken] = {
            text: ControlToken(id, decoder[id].lstrip, decoder[id].rstrip)
            for text, id in self.control.items()
        }
        """Every control token by its text."""
        self.control_pattern = any_of(self.control)
        """Matches one control token in a string, the longest where several begin."""

    def encode_text(self, text: str) -> list[int]:
        """Encode outside text as plain characters, whatever it contains."""
        ids = self._encode_plain(text)
        if self._control_ids.isdisjoint(ids):
            return ids
        # The model's vocabulary itself contains the token. A single character never is one.
        return [id for character in text for id in self._encode_plain(character)]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode outside texts as plain characters in one call, which is faster."""
        if len(texts) == 1:
            return [self.encode_text(texts[0])]
        try:
            found = self._plain.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:  # lone surrogates
            return [self.encode_text(text) for text in texts]
        each = zip(texts, (encoding.ids for encoding in found), strict=True)
        return [
            ids if self._control_ids.isdisjoint(ids) else self.encode_text(text)
            for text, ids in each
        ]

    def encode_policy(self, text: str, policy_tokens: re.Pattern[str]) -> list[int]:
        """Encode a policy's text: the tokens that `policy_tokens` matches become control tokens."""
        ids: list[int] = []
        start = 0
        for match in policy_tokens.finditer(text):
            ids += self.encode_text(text[start : match.start()])
            ids.append(self.added[match.group()])
            start = match.end()
        return ids + self.encode_text(text[start:])

    def encode_literal(self, text: str) -> list[int]:
        """Encode a literal of the template, in which control tokens are control tokens."""
        if not text:
            return []
        if self._prefixes:
            anchor = self.encode_rendering("\n")
            ids = self.encode_rendering("\n" + text)
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :]
        return self.encode_rendering(text)

    def split_literal(self, text: str) -> list[str | ControlToken]:
        """Split a literal of the template at its control tokens."""
        parts: list[str | ControlToken] = []
        start = 0
        for match in self.control_pattern.finditer(text):
            parts += [text[start : match.start()], self.tokens[match.group()]]
            start = match.end()
        return [part for part in (*parts, text[start:]) if part]

    def between(self, text: str, before: ControlToken | None, after: ControlToken | None) -> str:
        """Return the text that a tokenizer encodes for a run between two control tokens.

        Some tokens absorb the white space next to them, and some tokenizers put a blank before each
        run.
        """
        if before and before.strips_right:
            text = text.lstrip()
        if after and after.strips_left:
            text = text.rstrip()
        if not before or not text:
            return text
        is_blank, is_blank_too = self._opened
        is_opened = is_blank_too if text[0] == " " else is_blank
        return f" {text}" if is_opened else text

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, with control tokens visible."""
        if not self._prefixes:
            return self._decode(list(ids))
        return self._decode([*self._anchor, *ids])[1:]

    def normalize(self, text: str) -> str:
        """Return the text as decoding returns it: after the tokenizer's own normalization."""
        normalizer: Any = self._plain.normalizer
        if normalizer is None:
            return text
        if normalizer.normalize_str(" ") == " ":
            return normalizer.normalize_str(text)
        # SentencePiece writes a blank as another character; decoding reverses this.
        return " ".join(map(normalizer.normalize_str, text.split(" ")))

    def encode_rendering(self, text: str) -> list[int]:
        """Encode a whole rendering with the tokenizer itself, without adding tokens."""
        return self._tokenizer.encode(_without_surrogates(text), add_special_tokens=False)

    def holds_control(self, text: str) -> bool:
        """Whether a text or a normalized form of it contains a control token."""
        if text.isascii():
            return (
                any(sign in text for sign in self._first_signs)
                and self.control_pattern.search(text) is not None
            )
        forms = {text, *(unicodedata.normalize(form, text) for form in _FORMS)}
        return any(self.control_pattern.search(form) for form in forms)

    def is_inert(self, text: str) -> bool:
        """Whether `text` cannot be a part of a control token, wherever a template puts it.

        A tokenizer finds some added tokens in a text as it is, others in its normalized form. So
        every form of the text is checked: normalization can hide a token (`>` and U+0338 become
        one character) as well as make one.
        """
        return all(map(self._is_inert_form, _forms(text)))

    def _is_inert_form(self, form: str) -> bool:
        if self._folded_pattern.search(form) or form in self._folded_joined:
            return False
        heads, tails, longest = self._fragments
        lengths = range(1, min(len(form), longest) + 1)
        return not any(form[-k:] in heads or form[:k] in tails for k in lengths)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: no token stands for more of a text."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @cached_property
    def _prefixes(self) -> bool:
        # SentencePiece puts a blank before the first word of a text.
        encode = self.encode_rendering
        return encode("\na") != encode("\n") + encode("a")

    @cached_property
    def _opened(self) -> tuple[bool, bool]:
        """Whether a blank is put before a run after a control token; before a run with a blank."""
        plain = [text for text, token in self.tokens.items() if not token.strips_right]
        if not self._prefixes or not plain:
            return False, False

        def opens(run: str) -> bool:
            ids = self.encode_rendering(plain[0] + run)
            return ids[-1:] != [] and ids[1:] == self._encode_plain(
                f" {run}"
            ) != self._encode_plain(run)

        return opens("a"), opens(" a")

    @cached_property
    def _anchor(self) -> list[int]:
        return self._encode_plain("a")

    @cached_property
    def _folded(self) -> list[str]:
        return sorted({form for token in self.control for form in _forms(token)})

    @cached_property
    def _folded_pattern(self) -> re.Pattern[str]:
        return any_of(self._folded)

    @cached_property
    def _folded_joined(self) -> str:
        return "\0".join(self._folded)

    @cached_property
    def _fragments(self) -> tuple[set[str], set[str], int]:
        """Beginnings and ends of control tokens, and the length of the longest token."""
        heads = {token[:k] for token in self._folded for k in range(1, len(token))}
        tails = {token[k:] for token in self._folded for k in range(1, len(token))}
        return heads, tails, max(map(len, self._folded), default=0)

    def _encode_plain(self, text: str) -> list[int]:
        clean = _without_surrogates(text)
        if len(clean) <= MAX_INLINE_CHARACTERS:
            return self._plain.encode(clean, add_special_tokens=False).ids
        # Only a call for several texts releases the interpreter's lock.
        (found,) = self._plain.encode_batch_fast([clean], add_special_tokens=False)
        return found.ids

    def _decode(self, ids: list[int]) -> str:
        # Not the tokenizer's wrapper, which checks every id in Python first.
        return self._backend.decode(ids, skip_special_tokens=False)


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Compile a pattern that matches any of `texts`, the longest first, and nothing for none."""
    longest_first = sorted((text for text in texts if text), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _without_surrogates(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot represent and a tokenizer refuses."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def _forms(text: str) -> set[str]:
    """Return the text and every normalized form of it, case-folded."""
    normalized = {unicodedata.normalize(form, text) for form in _FORMS}
    return {form.casefold() for form in (text, *normalized)}


def _clone_without_added_tokens(backend: "Tokenizer", blanks: list[Any]) -> "Tokenizer":
    """Build a tokenizer with the same model, without control tokens and without a first blank.

    It gets the added runs of blanks if they keep their ids: they control nothing.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    parts: Any = Tokenizer(BPE())
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        setattr(parts, part, getattr(backend, part))
    state = json.loads(parts.to_str())
    edited: Any = Tokenizer.from_str(json.dumps(_without_first_blank(state)))

    def clone(added: list[Any]) -> Any:
        made: Any = Tokenizer(backend.model)
        for part in ("normalizer", "pre_tokenizer", "decoder"):
            setattr(made, part, getattr(edited, part))
        made.add_tokens(sorted(added, key=lambda token: backend.token_to_id(token.content) or 0))
        return made

    found = clone(blanks)
    ids = ((found.token_to_id(t.content), backend.token_to_id(t.content)) for t in blanks)
    return found if all(own == id for own, id in ids) else clone([])


def _without_first_blank(state: Any) -> Any:
    """Copy a tokenizer's state with every prefix blank switched off.

    A text is inserted after other text, so the blank for the start of a string would be a
    character that is not in it.
    """
    if isinstance(state, list):
        kept = (item for item in state if not _is_prepend(item))
        return [_without_first_blank(item) for item in kept]
    if not isinstance(state, dict):
        return state
    copy = {key: None if _is_prepend(item) else item for key, item in state.items()}
    if "prepend_scheme" in copy:
        copy["prepend_scheme"] = "never"
    if "add_prefix_space" in copy and copy.get("type") != "Metaspace":
        copy["add_prefix_space"] = False
    return {key: _without_first_blank(item) for key, item in copy.items()}


def _is_prepend(item: Any) -> bool:
    return isinstance(item, dict) and item.get("type") == "Prepend"


_TORN = "\ufffd"
"""Decoded in place of bytes that are no complete character."""
_LONGEST_WINDOW = 64
"""Maximum tokens that are decoded together, which keeps the cost linear."""


class TokenSpans:
    """Finds the tokens of a span of decoded text.

    The text of each token is cached. If these texts add up to the turn's text, their lengths give
    the offsets in a few microseconds. If they do not (a character is split over tokens, or a
    tokenizer writes the first token differently), the tokens that differ are decoded together with
    their neighbors. The cost is linear in the turn's length.

    Args:
        decode: Returns the text of token ids, with special tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def locate(
        self, ids: Sequence[int], text: str, spans: Sequence[tuple[int, int] | None]
    ) -> list[tuple[int, int] | None]:
        """Find the tokens of each span of characters, as (start, end) with `end` excluded.

        A token of which a part is in the span belongs to it.

        Args:
            ids: The sampled tokens.
            text: Their text.
            spans: Spans of characters; None stays None.
        """
        if not any(spans):
            return [None] * len(spans)
        ends = self._find_ends(ids, text)

        def tokens_of(span: tuple[int, int]) -> tuple[int, int]:
            end = bisect_right(ends, span[1])
            is_cut = end < len(ids) and (end == 0 or ends[end - 1] < span[1])
            return bisect_right(ends, span[0]), end + is_cut

        return [span and tokens_of(span) for span in spans]

    def _find_ends(self, ids: Sequence[int], text: str) -> list[int]:
        """Return for each token the length of the text up to its end."""
        try:
            pieces = [*map(self._pieces.__getitem__, ids)]
        except KeyError:
            new = set(ids).difference(self._pieces)
            self._pieces.update((token, self._decode([token])) for token in new)
            pieces = [self._pieces[token] for token in ids]
        if "".join(pieces) == text:
            return list(accumulate(map(len, pieces)))
        ends: list[int] = []
        position = opened = 0  # end of the located text, first token of the window
        for index, piece in enumerate(pieces):
            is_plain = bool(piece) and _TORN not in piece and text.startswith(piece, position)
            if opened == index and is_plain:
                ends.append(position + len(piece))
            else:
                ends.append(position + self._length(ids, opened, index + 1))
                is_whole = not self._decode(ids[opened : index + 1]).endswith(_TORN)
                if not is_whole and index - opened < _LONGEST_WINDOW:
                    continue
                ends[opened:] = [min(end, ends[-1]) for end in ends[opened:]]
            position, opened = ends[-1], index + 1
        return ends

    def _length(self, ids: Sequence[int], start: int, end: int) -> int:
        """Return the length of the text that tokens add after the token before them."""
        before = ids[max(start - 1, 0) : start]
        return len(self._decode([*before, *ids[start:end]])) - len(self._decode(before))


Encode = Callable[[Sequence[str]], list[list[int]]]
"""Encodes outside texts."""
MAX_INLINE_CHARACTERS = 500
"""Texts that are shorter together are encoded on the event loop: a thread would take longer."""


class EncodingQueue:
    """Collects texts of many requests, and encodes them together on a thread.

    A tokenizer encodes many texts in one call in two thirds of the time, and does not hold the
    interpreter's lock. The texts of one iteration of the event loop are encoded together. Those
    that arrive while others are encoded are encoded together after them. A text that several
    callers ask for at the same time is encoded once.

    Args:
        encode: Encodes the texts (`ChatTemplate.encode_texts`); called on a thread.

    Example:
        >>> async def main(template):
        ...     queue = EncodingQueue(template.encode_texts)
        ...     return await asyncio.gather(queue.encode(["one"]), queue.encode(["two", "three"]))
    """

    def __init__(self, encode: Encode) -> None:
        self._of_loops = PerLoop(lambda: _LoopQueue(encode))

    async def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts, in their order. Do not change the lists of the result.

        Raises:
            Exception: the tokenizer's error for these texts; other callers' texts are not affected.
        """
        return await self._of_loops.get().add(texts)


class _LoopQueue:
    """The texts of one event loop that wait to be encoded."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._loop = asyncio.get_running_loop()
        self._waiting: list[tuple[asyncio.Future[list[list[int]]], Sequence[str]]] = []
        self._is_busy = False

    def add(self, texts: Sequence[str]) -> asyncio.Future[list[list[int]]]:
        future: asyncio.Future[list[list[int]]] = self._loop.create_future()
        self._waiting.append((future, texts))
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._begin)
        return future

    def _begin(self) -> None:
        """Encode everything that waits: long texts on a thread."""
        batch, self._waiting = self._waiting, []
        asked = [texts for _, texts in batch]
        if sum(len(text) for texts in asked for text in texts) <= MAX_INLINE_CHARACTERS:
            self._answer(batch, _encode_batch(self._encode, asked))
            return
        work = self._loop.run_in_executor(None, _encode_batch, self._encode, asked)
        work.add_done_callback(lambda done: done.cancelled() or self._answer(batch, done.result()))

    def _answer(
        self,
        batch: list[tuple[asyncio.Future[list[list[int]]], Sequence[str]]],
        answers: list[list[list[int]] | Exception],
    ) -> None:
        for (future, _), answer in zip(batch, answers, strict=True):
            if future.done():  # cancelled
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        self._is_busy = bool(self._waiting)
        if self._is_busy:
            self._loop.call_soon(self._begin)


def _encode_batch(
    encode: Encode, asked: Sequence[Sequence[str]]
) -> list[list[list[int]] | Exception]:
    """Encode the texts of each caller; an invalid text fails only its own caller."""
    unique = list(dict.fromkeys(text for texts in asked for text in texts))
    try:
        ids = dict(zip(unique, encode(unique), strict=True))
    except Exception as error:  # noqa: BLE001 - raised for its caller
        return [error] if len(asked) == 1 else [_encode_batch(encode, [t])[0] for t in asked]
    return [[ids[text] for text in texts] for texts in asked]
