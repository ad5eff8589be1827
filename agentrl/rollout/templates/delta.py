"""The delta after an assistant turn: its end, a separator, new messages, the generation prompt.

A delta is found by rendering the new messages after fixed context messages, and cutting the result
after the assistant turn of the context. That turn is a plain answer, or tool calls that the new
messages answer if the template requires them. Nothing here knows a model's name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from agentrl.errors import TemplateError
from agentrl.media.positions import Run
from agentrl.media.records import MediaItem
from agentrl.rollout.templates.compiled import CompiledTemplate, Filled
from agentrl.rollout.templates.cutting import (
    Piece,
    Render,
    SlotUse,
    Written,
    common_length,
    cut,
    learn,
    slots_in_order,
)
from agentrl.rollout.templates.slots import (
    CallStyle,
    Node,
    Pairs,
    Slot,
    TextOrigin,
    as_arguments,
    context_slot,
)

RenderNode = Callable[[Sequence[Node], bool], Render]
"""(nodes of messages, whether to add the generation prompt) -> the shape's render function."""


@dataclass(frozen=True, slots=True)
class EndOfTurn:
    """How a template ends an assistant turn that another message follows."""

    text: str
    """What it writes up to the last control token; empty if there is none."""
    is_written: bool
    """False if the turn has no end of its own, and the opening of the next turn ends it."""


@dataclass(frozen=True, slots=True)
class DeltaPieces:
    """A delta, cut after the assistant turn of the context."""

    pieces: tuple[Piece, ...]
    end: str
    """The start of the first literal that ends the assistant turn: what a policy samples as its
    stop."""
    needs_call: bool
    """Whether the new messages were rendered after tool calls, not after a plain answer."""


@dataclass(frozen=True, slots=True)
class _Followed:
    """Pieces after the last text of the context, and how much of them closes the assistant turn."""

    pieces: tuple[Piece, ...]
    common: int
    """Characters of the first literal that the template also writes if nothing follows."""

    @property
    def lead(self) -> str:
        return str(self.pieces[0])


class DeltaFinder:
    """Finds deltas of one template.

    Args:
        render_node: Renders nodes, with the run's tools.
        control: Matches a control token in a rendering.
        style: How the template expects tool calls.
        tool_slots: Slots in the run's tools.
    """

    def __init__(
        self,
        render_node: RenderNode,
        control: re.Pattern[str],
        style: CallStyle,
        tool_slots: Sequence[Slot] = (),
    ) -> None:
        self._tool_holes = tool_slots
        self._render_node = render_node
        self._control = control
        self._style = style

    def end_of_turn(self) -> EndOfTurn:
        """Return how a plain answer ends if a user follows.

        Raises:
            TemplateError: if the template refuses or drops an assistant's answer.
        """
        follower = {"role": "user", "content": context_slot(9)}
        followed = self._after_answer([follower], [context_slot(9)], gen=False, read=cut)
        return self._end_of(followed)

    def find(
        self,
        new: Sequence[dict[str, Node]],
        slots: Sequence[Slot],
        *,
        add_generation_prompt: bool = True,
    ) -> DeltaPieces:
        """Find the delta of new messages and the next generation prompt.

        Raises:
            TemplateError: if the template refuses the messages after an assistant turn, or drops
                their text.
        """
        gen = add_generation_prompt
        calls: _Followed | TemplateError | None = None
        if any(node["role"] == "tool" for node in new):
            calls = self._attempt(self._after_calls, new, slots, gen)
            if isinstance(calls, _Followed):
                return self._split_calls(calls)
        answer = self._attempt(self._after_answer, new, slots, gen)
        if isinstance(answer, _Followed):
            return DeltaPieces(answer.pieces, self._end_of(answer).text, needs_call=False)
        # If the template drops the call itself, the error about the answer is the relevant one.
        if calls is None or calls.details.get("role") == "assistant":
            raise answer
        raise calls

    def _split_calls(self, followed: _Followed) -> DeltaPieces:
        """Return the delta after tool calls.

        The text after a call starts with what closes the call itself, which the policy samples.
        The turn ends as an answer does, or with the last token that closes no call. If the turn has
        no end of its own, the opening of the next turn ends it.
        """
        end, lead = self.end_of_turn(), followed.lead
        if end.is_written and end.text in lead:
            start = lead.index(end.text)
            stop = start + len(end.text)
        else:
            start, stop = self._find_end_of_calls(lead, followed.common)
        return DeltaPieces((lead[start:], *followed.pieces[1:]), lead[start:stop], needs_call=True)

    def _find_end_of_calls(self, lead: str, common: int) -> tuple[int, int]:
        """Return the span of the end of the calls; `common` characters belong to the turn."""
        own = self._tokens_between_calls
        tokens = list(self._control.finditer(lead))
        others = [match for match in tokens if match.group() not in own]
        if written := [match for match in others if match.end() <= common]:
            return written[-1].span()
        closing = [match.end() for match in tokens if match.end() <= common]
        start = closing[-1] if closing else common
        return start, others[0].end() if others else start

    @cached_property
    def _tokens_between_calls(self) -> set[str]:
        """Control tokens that the template writes between two calls of a turn."""
        results = [
            {"role": "tool", "content": context_slot(40 + n), "tool_call_id": f"call0000{n}"}
            for n in range(2)
        ]
        slots = [context_slot(40), context_slot(41)]
        try:
            pieces = self._after_calls(results, slots, gen=False, read=cut, anchor_call=0).pieces
        except TemplateError:
            return set()
        second = {context_slot(13).number, context_slot(14).number}  # its name and its argument
        is_followed = second.intersection(slots_in_order(pieces[1:2]))
        return set(self._control.findall(str(pieces[0]))) if is_followed else set()

    def _end_of(self, followed: _Followed) -> EndOfTurn:
        closing = list(self._control.finditer(followed.lead, 0, followed.common))
        if closing:
            return EndOfTurn(followed.lead[: closing[-1].end()], is_written=True)
        opening = self._control.search(followed.lead)
        return EndOfTurn(followed.lead[: opening.end()] if opening else "", is_written=False)

    def _attempt(
        self,
        render: Callable[..., _Followed],
        new: Sequence[dict[str, Node]],
        slots: Sequence[Slot],
        gen: bool,
    ) -> "_Followed | TemplateError":
        try:
            found = render(new, slots, gen=gen, read=learn)
            last = found.pieces[-1]
            silent = gen and render(new, slots, gen=False, read=cut).pieces[-1] == last
            opening = self._opening(render, new, slots, str(last)) if silent else ""
        except TemplateError as error:
            return error
        lost = {slot.number: slot for slot in slots if slot.is_content}
        for index in slots_in_order(found.pieces):
            lost.pop(index, None)
        if lost:
            role = new[next(iter(lost.values())).message]["role"]
            return TemplateError(f"the template drops the text of a {role} message", role=role)
        if opening.strip():
            return TemplateError(
                f"the template writes no generation prompt, and {opening!r} before an answer",
                role=new[-1]["role"] if new else "assistant",
            )
        return found

    def _opening(
        self,
        render: Callable[..., _Followed],
        new: Sequence[dict[str, Node]],
        slots: Sequence[Slot],
        last: str,
    ) -> str:
        """Return the text between the new messages, which end in `last`, and an answer."""
        answer = context_slot(8, TextOrigin.POLICY)
        nodes = [*new, {"role": "assistant", "content": answer}]
        return opening_of(render(nodes, [*slots, answer], gen=False, read=cut).pieces, answer, last)

    def _after_answer(
        self, new: Sequence[Node], slots: Sequence[Slot], *, gen: bool, read: Any
    ) -> _Followed:
        anchor = context_slot(1, TextOrigin.POLICY)
        before = [{"role": "assistant", "content": anchor}]
        return self._after(before, [anchor], [anchor], new, slots, gen=gen, read=read)

    def _after_calls(
        self,
        new: Sequence[Node],
        slots: Sequence[Slot],
        *,
        gen: bool,
        read: Any,
        anchor_call: int | None = None,
    ) -> _Followed:
        answered = [node for node in new if node["role"] == "tool"]
        spares = [[context_slot(10 + 3 * n + i) for i in range(3)] for n in range(len(answered))]
        calls = [self._call_for(node, spare) for node, spare in zip(answered, spares, strict=True)]
        content = self._style.empty_content
        before = [{"role": "assistant", "content": content, "tool_calls": calls}]
        own = [slot for spare in spares for slot in spare]
        # A format in tags may write the argument's name again after its value.
        anchored = spares if anchor_call is None else spares[anchor_call : anchor_call + 1]
        values = [slot for spare in anchored for slot in spare[1:]]
        return self._after(before, values, own, new, slots, gen=gen, read=read)

    def _call_for(self, result: dict[str, Node], spare: Sequence[Slot]) -> Node:
        """Make the call that a tool message answers. Its last text is its argument's value."""
        name, key, value = spare
        arguments = as_arguments(Pairs(((key, value),)), self._style)
        function = {"name": result.get("name", name), "arguments": arguments}
        return {
            "id": result.get("tool_call_id", "call00000"),
            "type": "function",
            "function": function,
        }

    def _after(
        self,
        before: list[Node],
        anchors: list[Slot],
        own: list[Slot],
        new: Sequence[Node],
        slots: Sequence[Slot],
        *,
        gen: bool,
        read: Any,
    ) -> _Followed:
        """Render [a user, the assistant turn, the new messages]; keep what follows the anchors."""
        user = context_slot(0)
        start = [{"role": "user", "content": user}, *before]
        every = [user, *own, *self._tool_holes, *slots]
        followed = _tail(read(self._render_node([*start, *new], gen), every), anchors)
        closed = _tail(cut(self._render_node(start, False), every), anchors)
        ids = {slot.number for slot in slots}
        while ids.intersection(slots_in_order(closed[1:2])).intersection(
            slots_in_order(followed[1:2])
        ):
            # A call may end with its id, which comes after its arguments.
            closed, followed = closed[2:], followed[2:]
        common = common_length(str(followed[0]), str(closed[0]), self._control)
        return _Followed(followed, common)


def opening_of(pieces: Sequence[Piece], answer: Slot, last: str) -> str:
    """Return the text between the literal `last` and an answer; blank if there is none.

    Raises:
        TemplateError: if the template writes no such answer.
    """
    for literal, place in pairwise(pieces):
        if isinstance(place, SlotUse) and place.slot.number == answer.number:
            text = str(literal)
            return text[len(last) :] if text.startswith(last) else text
    raise TemplateError("the template drops the text of an assistant message", role="assistant")


def _tail(pieces: Sequence[Piece], anchors: Sequence[Slot]) -> tuple[Piece, ...]:
    """Return the pieces after the last use of an anchor."""
    indices = {slot.number for slot in anchors}
    for number in range(len(pieces) - 1, -1, -1):
        piece = pieces[number]
        if isinstance(piece, SlotUse) and piece.slot.number in indices:
            return tuple(pieces[number + 1 :])
    raise TemplateError("the template drops the text of an assistant message", role="assistant")


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """The observed tokens to append after a sampled turn."""

    end_of_turn_ids: list[int]
    """The start of `ids` that ends the assistant turn and that the policy did not sample."""
    ids: list[int]
    """All tokens: missing end of turn, separator, new messages, generation prompt."""
    runs: list[Run]
    """The runs of placeholder tokens of images and videos in `ids`, in order."""
    message_spans: list[tuple[int, int, int]]
    """For each content: index of its message among the new ones, start and end in `ids`."""
    written: Callable[[], Written]
    """Returns `ids` as the text that was encoded."""


@dataclass(frozen=True, slots=True)
class PreparedDelta:
    """What a template writes after a turn for messages of one shape."""

    end: str
    """The text that ends the assistant turn."""
    end_ids: list[int]
    compiled: CompiledTemplate
    """What follows the end."""
    borrowed: list[tuple[int, int]]
    """Slots of names that the template writes over the result of another call: that name, the own
    name."""


@dataclass
class PlannedDelta:
    """A delta that is not encoded yet."""

    prepared: PreparedDelta
    texts: list[str]
    """A text for each slot."""
    decode: Callable[[Sequence[int]], str]
    items: Mapping[int, MediaItem] = field(default_factory=dict[int, MediaItem])
    """The image or video of a slot, by the slot's number."""

    @property
    def outside(self) -> list[str]:
        """The texts to be encoded as outside text, in order."""
        return self._filled.texts

    def encode(
        self, last_ids: Sequence[int], outside: Sequence[Sequence[int]] | None = None
    ) -> EncodedDelta:
        """Encode the delta.

        Args:
            last_ids: The sampled turn, or its last few tokens. The part of the end of turn that was
                sampled is not written again.
            outside: Tokens of `outside`; None: they are encoded here.
        """
        if outside is None:
            outside = self.prepared.compiled.encoder.encode_texts(self.outside)
        ids, spans = self._filled.encode(outside)
        runs = self._filled.find_runs(outside, self.items) if self.items else []
        end_ids = self.prepared.end_ids
        missing = end_ids[_overlap(last_ids, end_ids) :]
        shift = len(missing)
        return EncodedDelta(
            end_of_turn_ids=missing,
            ids=[*missing, *ids],
            runs=[(start + shift, end + shift, item, of) for start, end, item, of in runs],
            message_spans=[(index, start + shift, end + shift) for index, start, end in spans],
            written=lambda: self._write(missing),
        )

    @cached_property
    def _filled(self) -> Filled:
        return self.prepared.compiled.fill(self.texts)

    @property
    def whole_text(self) -> str:
        """The delta as text, with its end of turn."""
        return self.prepared.end + self.prepared.compiled.write(self.texts).text

    def _write(self, missing: Sequence[int]) -> Written:
        """Return the delta as text, without the sampled part of the end of turn."""
        is_missing = len(missing) == len(self.prepared.end_ids)
        end = self.prepared.end if is_missing else self.decode(missing)
        text, starts = self.prepared.compiled.write(self.texts)
        return Written(end + text, {index: len(end) + at for index, at in starts.items()})


def borrowed_names(nodes: Sequence[Node], pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Return slot pairs (name written, the tool's own) of results under another call's name."""
    given = [node["name"] for node in nodes if isinstance(node.get("name"), Slot)]
    names = {slot.number: slot for slot in given}
    own = {slot.message: number for number, slot in names.items()}
    found: list[tuple[int, int]] = []
    heading: Slot | None = None
    for piece in pieces:
        if not isinstance(piece, SlotUse):
            continue
        slot = piece.slot
        heading = names.get(slot.number, heading)
        if slot.is_content and heading and slot.message in own and heading.message != slot.message:
            found.append((heading.number, own[slot.message]))
    return found


def _overlap(last_ids: Sequence[int], end_ids: Sequence[int]) -> int:
    """Return how many tokens of the end of turn were sampled already.

    A turn ends at its first stop token, even if the template writes more after it.
    """
    tail = list(last_ids[-len(end_ids) :]) if end_ids else []
    sampled = next(k for k in range(len(tail), -1, -1) if tail[len(tail) - k :] == end_ids[:k])
    if not sampled and tail and tail[-1] in end_ids:
        return list(end_ids).index(tail[-1]) + 1
    return sampled
