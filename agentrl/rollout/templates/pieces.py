"""From places in the text of a turn to the tokens that were sampled there."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate


class TokenPieces:
    """Find the tokens behind pieces of a decoded text.

    What a token adds to a text is looked up, and where the pieces make up the text as it is, their
    lengths tell: a few microseconds for a turn. Where they do not (a character split over tokens,
    a tokenizer that writes a token differently at the start), beginnings of the turn are decoded.

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
        places, end_of = range(len(ids)), self._find_ends(ids, text)

        def tokens_of(span: tuple[int, int]) -> tuple[int, int]:
            behind = bisect_right(places, span[1], key=end_of)
            is_cut = behind < len(ids) and (behind == 0 or end_of(behind - 1) < span[1])
            return bisect_right(places, span[0], key=end_of), behind + is_cut

        return [span and tokens_of(span) for span in spans]

    def _find_ends(self, ids: Sequence[int], text: str) -> Callable[[int], int]:
        """Tell behind which character of the text a token ends, by the token's place."""
        pieces = [self._piece(token) for token in ids]
        if "".join(pieces) == text:
            return list(accumulate(map(len, pieces))).__getitem__
        return lambda place: len(self._decode(ids[: place + 1]))

    def _piece(self, token: int) -> str:
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._decode([token])
        return piece
