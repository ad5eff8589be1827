"""From places in the text of a turn to the tokens that were sampled there."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

_TORN = "\ufffd"
"""What decoding writes for bytes that are no whole character."""
_LONGEST_WINDOW = 64
"""Tokens that are decoded together at most: the cost stays linear whatever was sampled."""


class TokenPieces:
    """Find the tokens of pieces of a decoded text.

    The text of each token is looked up. If these pieces make up the turn's text, their lengths are
    the offsets: a few microseconds for a turn. If they do not (a character is split over tokens, a
    tokenizer writes a token differently at the start), the few tokens that differ are decoded
    together with their neighbors. The cost is linear in the turn's length.

    Args:
        decode: Token ids to text, special tokens kept.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._pieces: dict[int, str] = {}

    def locate(
        self, ids: Sequence[int], text: str, spans: Sequence[tuple[int, int] | None]
    ) -> list[tuple[int, int] | None]:
        """Find the tokens of each span of characters; both first, and behind the last.

        A token of which a part is in the span belongs to it.

        Args:
            ids: What was sampled.
            text: Its text.
            spans: Of characters; None: not known, and none is found.
        """
        if not any(spans):
            return [None] * len(spans)
        ends = self._find_ends(ids, text)

        def tokens_of(span: tuple[int, int]) -> tuple[int, int]:
            behind = bisect_right(ends, span[1])
            is_cut = behind < len(ids) and (behind == 0 or ends[behind - 1] < span[1])
            return bisect_right(ends, span[0]), behind + is_cut

        return [span and tokens_of(span) for span in spans]

    def _find_ends(self, ids: Sequence[int], text: str) -> list[int]:
        """Return for each token how long the text is up to its end."""
        pieces = [self._piece(token) for token in ids]
        if "".join(pieces) == text:
            return list(accumulate(map(len, pieces)))
        ends: list[int] = []
        position = opened = 0  # end of the text that is done, first token of the window
        for place, piece in enumerate(pieces):
            is_plain = bool(piece) and _TORN not in piece and text.startswith(piece, position)
            if opened == place and is_plain:
                ends.append(position + len(piece))
            else:
                ends.append(position + self._length(ids, opened, place + 1))
                is_whole = not self._decode(ids[opened : place + 1]).endswith(_TORN)
                if not is_whole and place - opened < _LONGEST_WINDOW:
                    continue
                ends[opened:] = [min(end, ends[-1]) for end in ends[opened:]]
            position, opened = ends[-1], place + 1
        return ends

    def _length(self, ids: Sequence[int], start: int, end: int) -> int:
        """Return the length of tokens' text in the turn: after the token before them."""
        before = ids[max(start - 1, 0) : start]
        return len(self._decode([*before, *ids[start:end]])) - len(self._decode(before))

    def _piece(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        return piece
