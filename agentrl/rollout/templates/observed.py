"""What a policy is shown behind its turn: planned from messages, then encoded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from agentrl.rollout.templates.compiled import Filled, Splice
from agentrl.rollout.templates.slots import Hole, Node
from agentrl.rollout.templates.cutting import Piece, Place, Written


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """What to append, observed, behind a sampled turn."""

    end_of_turn_ids: list[int]
    """The start of `ids` that ends the assistant turn and that the policy did not sample."""
    ids: list[int]
    """All of it: missing end of turn, separator, new messages, generation prompt."""
    message_spans: list[tuple[int, int, int]]
    """For each content: index of its message among the new ones, start and end in `ids`."""
    written: Callable[[], Written]
    """Returns `ids` as the text that was encoded."""


@dataclass(frozen=True, slots=True)
class PreparedDelta:
    """What a template writes after a turn for messages of one shape."""

    end: str
    """What ends the assistant turn."""
    end_ids: list[int]
    splice: Splice
    """What follows the end."""
    borrowed: list[tuple[int, int]]
    """Names that the template writes over the result of another call: theirs, the call's own."""


@dataclass
class PlannedDelta:
    """A delta that is yet to be encoded."""

    prepared: PreparedDelta
    texts: list[str]
    """A text for each hole."""
    decode: Callable[[Sequence[int]], str]

    @property
    def outside(self) -> list[str]:
        """The texts that are to be encoded as outside text, in order."""
        return self._filled.texts

    def encode(
        self, last_ids: Sequence[int], outside: Sequence[Sequence[int]] | None = None
    ) -> EncodedDelta:
        """Encode it.

        Args:
            last_ids: The sampled turn, or its last few tokens. What of the end of turn was sampled
                is not written again.
            outside: Tokens of `outside`; None: they are encoded here.
        """
        ids, spans = self._filled.encode(outside)
        end_ids = self.prepared.end_ids
        missing = end_ids[_overlap(last_ids, end_ids) :]
        shift = len(missing)
        return EncodedDelta(
            end_of_turn_ids=missing,
            ids=[*missing, *ids],
            message_spans=[(index, start + shift, end + shift) for index, start, end in spans],
            written=lambda: self._write(missing),
        )

    @cached_property
    def _filled(self) -> Filled:
        return self.prepared.splice.fill(self.texts)

    @property
    def whole_text(self) -> str:
        """The delta as text, its end of turn included."""
        return self.prepared.end + self.prepared.splice.write(self.texts).text

    def _write(self, missing: Sequence[int]) -> Written:
        """Return the delta as text, without the part of the end of turn that was sampled."""
        is_missing = len(missing) == len(self.prepared.end_ids)
        end = self.prepared.end if is_missing else self.decode(missing)
        text, starts = self.prepared.splice.write(self.texts)
        return Written(end + text, {index: len(end) + at for index, at in starts.items()})


def borrowed_names(nodes: Sequence[Node], pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Pairs (name written, the tool's own) where a result stands under another call's name."""
    given = [node["name"] for node in nodes if isinstance(node.get("name"), Hole)]
    names = {hole.number: hole for hole in given}
    own = {hole.message: number for number, hole in names.items()}
    found: list[tuple[int, int]] = []
    heading: Hole | None = None
    for piece in pieces:
        if not isinstance(piece, Place):
            continue
        hole = piece.hole
        heading = names.get(hole.number, heading)
        if hole.is_content and heading and hole.message in own and heading.message != hole.message:
            found.append((heading.number, own[hole.message]))
    return found


def _overlap(last_ids: Sequence[int], end_ids: Sequence[int]) -> int:
    """How much of the end of turn was sampled already.

    A turn ends at its first stop token, whatever the template would write behind it.
    """
    tail = list(last_ids[-len(end_ids) :]) if end_ids else []
    sampled = next(k for k in range(len(tail), -1, -1) if tail[len(tail) - k :] == end_ids[:k])
    if not sampled and tail and tail[-1] in end_ids:
        return list(end_ids).index(tail[-1]) + 1
    return sampled
