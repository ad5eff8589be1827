"""What a policy is shown behind its turn: planned from messages, then encoded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrl.rollout.templates.shape import Conversation, Hole, Node
from agentrl.rollout.templates.splice import Piece, Place, Splice


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """What to append, observed, behind a sampled turn."""

    end_of_turn_ids: list[int]
    """The start of `ids` that ends the assistant turn and that the policy did not sample."""
    ids: list[int]
    """All of it: missing end of turn, separator, new messages, generation prompt."""
    message_spans: list[tuple[int, int, int]]
    """For each content: index of its message among the new ones, start and end in `ids`."""
    write: Callable[[], str] = str
    """Gives what was encoded, as text."""


@dataclass(frozen=True, slots=True)
class PreparedDelta:
    """What a template writes behind a turn for messages of one shape."""

    splice: Splice
    end: str
    """The start that ends the assistant turn, as its tokens read."""
    end_ids: list[int]
    borrowed: list[tuple[int, int]]
    """Names that the template writes over the result of another call: theirs, the call's own."""


@dataclass(frozen=True, slots=True)
class PlannedDelta:
    """A delta that is yet to be encoded."""

    prepared: PreparedDelta
    read: Conversation
    decode: Callable[[Sequence[int]], str]

    @property
    def outside(self) -> list[str]:
        """The texts from outside as they are to be encoded, in order."""
        return self.prepared.splice.outside(self.read.texts)

    def encode(
        self, last_ids: Sequence[int], outside: Sequence[Sequence[int]] | None = None
    ) -> EncodedDelta:
        """Encode it.

        Args:
            last_ids: The sampled turn, or its last few tokens. What of the end of turn was sampled
                is not written again.
            outside: Tokens of the texts from outside; None: they are encoded here.
        """
        prepared, texts = self.prepared, self.read.texts
        ids, spans = prepared.splice.encode(texts, outside)
        sampled = _overlap(last_ids, prepared.end_ids)
        return EncodedDelta(
            end_of_turn_ids=prepared.end_ids[sampled:],
            ids=ids[sampled:],
            message_spans=[(index, start - sampled, end - sampled) for index, start, end in spans],
            write=lambda: self._write(sampled),
        )

    def _write(self, sampled: int) -> str:
        """The delta as text, without the part of the end of turn that was sampled."""
        prepared = self.prepared
        is_whole = sampled == len(prepared.end_ids)
        said = prepared.end if is_whole else self.decode(prepared.end_ids[:sampled])
        return prepared.splice.write(self.read.texts).removeprefix(said)


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
    """How much of the end of turn was sampled already."""
    if end_ids and last_ids and last_ids[-1] == end_ids[-1]:
        return len(end_ids)
    tail = list(last_ids[-len(end_ids) :]) if end_ids else []
    return next(k for k in range(len(tail), -1, -1) if tail[len(tail) - k :] == end_ids[:k])
