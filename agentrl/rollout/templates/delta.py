"""What a template writes behind an assistant turn: its end, a separator, new messages, a prompt.

A delta is found by rendering the new messages behind fixed neighbours, and cutting behind the
neighbour's assistant turn. Neighbours are a plain answer, or tool calls that the new messages
answer where the template asks for them. Nothing here knows a model's name.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from agentrl.errors import TemplateError
from agentrl.rollout.templates.slots import (
    CallStyle,
    Hole,
    Node,
    Pairs,
    Voice,
    as_arguments,
)
from agentrl.rollout.templates.cutting import (
    Piece,
    Place,
    Render,
    common_length,
    cut,
    learn,
    places_in_order,
)

RenderNode = Callable[[Sequence[Node], bool], Render]
"""(nodes of messages, whether to add the generation prompt) -> the shape's render function."""

NEIGHBOUR = 1_000_000
"""Holes from this index on belong to neighbours and are never filled with a text."""


@dataclass(frozen=True, slots=True)
class EndOfTurn:
    """How a template ends an assistant turn that is followed by something."""

    text: str
    """What it writes up to the last control token; empty where it writes none."""
    is_written: bool
    """False where the turn has no end of its own and the next turn's opening stands for it."""


@dataclass(frozen=True, slots=True)
class DeltaPieces:
    """A delta, cut behind the neighbour's assistant turn."""

    pieces: tuple[Piece, ...]
    end: str
    """The literal's start that ends the assistant turn: what a policy samples as its stop."""
    needs_call: bool
    """Whether the new messages were rendered behind tool calls, not behind a plain answer."""


@dataclass(frozen=True, slots=True)
class _Behind:
    """Pieces behind a neighbour's last text, and how much of them closes the neighbour."""

    pieces: tuple[Piece, ...]
    common: int
    """Characters of the first literal that stand there too when nothing follows."""

    @property
    def lead(self) -> str:
        return str(self.pieces[0])


class DeltaFinder:
    """Find deltas of one template.

    Args:
        render_node: Renders nodes, with the run's tools.
        control: Matches a control token in a rendering.
        style: How the template wants tool calls.
        tool_holes: Holes in the run's tools.
    """

    def __init__(
        self,
        render_node: RenderNode,
        control: re.Pattern[str],
        style: CallStyle,
        tool_holes: Sequence[Hole] = (),
    ) -> None:
        self._tool_holes = tool_holes
        self._render_node = render_node
        self._control = control
        self._style = style

    def end_of_turn(self) -> EndOfTurn:
        """How a plain answer ends when a user follows.

        Raises:
            TemplateError: where the template does not carry an assistant's answer.
        """
        follower = {"role": "user", "content": _neighbour(9)}
        behind = self._behind_answer([follower], [_neighbour(9)], gen=False, read=cut)
        return self._end_of(behind)

    def find(
        self,
        new: Sequence[dict[str, Node]],
        holes: Sequence[Hole],
        *,
        add_generation_prompt: bool = True,
    ) -> DeltaPieces:
        """Find the delta of new messages and the next generation prompt.

        Raises:
            TemplateError: where the template refuses the messages behind an assistant turn, or
                loses their text.
        """
        gen = add_generation_prompt
        calls: _Behind | TemplateError | None = None
        if any(node["role"] == "tool" for node in new):
            calls = self._attempt(self._behind_calls, new, holes, gen)
            if isinstance(calls, _Behind):
                return self._after_calls(calls)
        answer = self._attempt(self._behind_answer, new, holes, gen)
        if isinstance(answer, _Behind):
            return DeltaPieces(answer.pieces, self._end_of(answer).text, needs_call=False)
        # A template that drops the call itself has nothing to say on results behind calls.
        if calls is None or calls.details.get("role") == "assistant":
            raise answer
        raise calls

    def _after_calls(self, behind: _Behind) -> DeltaPieces:
        """The delta behind tool calls.

        Behind a call stands first what closes the call itself, which the policy samples. The turn
        ends as an answer does, or with the last token that no call is closed by. If it has no end
        of its own, the opening of the next turn ends it.
        """
        end, lead = self.end_of_turn(), behind.lead
        if end.is_written and end.text in lead:
            start = lead.index(end.text)
            stop = start + len(end.text)
        else:
            start, stop = self._find_end_of_calls(lead, behind.common)
        return DeltaPieces((lead[start:], *behind.pieces[1:]), lead[start:stop], needs_call=True)

    def _find_end_of_calls(self, lead: str, common: int) -> tuple[int, int]:
        """Where an end of their own ends the calls: `common` characters are the turn's."""
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
            {"role": "tool", "content": _neighbour(40 + n), "tool_call_id": f"call0000{n}"}
            for n in range(2)
        ]
        holes = [_neighbour(40), _neighbour(41)]
        try:
            pieces = self._behind_calls(results, holes, gen=False, read=cut, anchor_call=0).pieces
        except TemplateError:
            return set()
        second = {_neighbour(13).number, _neighbour(14).number}  # its name and its argument
        is_followed = second.intersection(places_in_order(pieces[1:2]))
        return set(self._control.findall(str(pieces[0]))) if is_followed else set()

    def _end_of(self, behind: _Behind) -> EndOfTurn:
        closing = list(self._control.finditer(behind.lead, 0, behind.common))
        if closing:
            return EndOfTurn(behind.lead[: closing[-1].end()], is_written=True)
        opening = self._control.search(behind.lead)
        return EndOfTurn(behind.lead[: opening.end()] if opening else "", is_written=False)

    def _attempt(
        self,
        behind: Callable[..., _Behind],
        new: Sequence[dict[str, Node]],
        holes: Sequence[Hole],
        gen: bool,
    ) -> "_Behind | TemplateError":
        try:
            found = behind(new, holes, gen=gen, read=learn)
            last = found.pieces[-1]
            silent = gen and behind(new, holes, gen=False, read=cut).pieces[-1] == last
            opening = self._opening(behind, new, holes, str(last)) if silent else ""
        except TemplateError as error:
            return error
        lost = {hole.number: hole for hole in holes if hole.is_content}
        for index in places_in_order(found.pieces):
            lost.pop(index, None)
        if lost:
            role = new[next(iter(lost.values())).message]["role"]
            return TemplateError(f"the template drops the text of a {role} message", role=role)
        if opening.strip():
            return TemplateError(
                f"the template writes no generation prompt, and {opening!r} before an answer",
                role=_last_role(new),
            )
        return found

    def _opening(
        self,
        behind: Callable[..., _Behind],
        new: Sequence[dict[str, Node]],
        holes: Sequence[Hole],
        last: str,
    ) -> str:
        """What the template writes between the new messages, which end in `last`, and an answer."""
        answer = _neighbour(8, Voice.POLICY)
        nodes = [*new, {"role": "assistant", "content": answer}]
        return opening_of(behind(nodes, [*holes, answer], gen=False, read=cut).pieces, answer, last)

    def _behind_answer(
        self, new: Sequence[Node], holes: Sequence[Hole], *, gen: bool, read: Any
    ) -> _Behind:
        anchor = _neighbour(1, Voice.POLICY)
        before = [{"role": "assistant", "content": anchor}]
        return self._behind(before, [anchor], [anchor], new, holes, gen=gen, read=read)

    def _behind_calls(
        self,
        new: Sequence[Node],
        holes: Sequence[Hole],
        *,
        gen: bool,
        read: Any,
        anchor_call: int | None = None,
    ) -> _Behind:
        answered = [node for node in new if node["role"] == "tool"]
        spares = [[_neighbour(10 + 3 * n + i) for i in range(3)] for n in range(len(answered))]
        calls = [self._call_for(node, spare) for node, spare in zip(answered, spares, strict=True)]
        content = self._style.empty_content
        before = [{"role": "assistant", "content": content, "tool_calls": calls}]
        own = [hole for spare in spares for hole in spare]
        # A format in tags may write the argument's name again behind its value.
        anchored = spares if anchor_call is None else spares[anchor_call : anchor_call + 1]
        values = [hole for spare in anchored for hole in spare[1:]]
        return self._behind(before, values, own, new, holes, gen=gen, read=read)

    def _call_for(self, result: dict[str, Node], spare: Sequence[Hole]) -> Node:
        """The call that a tool message answers; its one argument's value comes last in it."""
        name, key, value = spare
        arguments = as_arguments(Pairs(((key, value),)), self._style)
        function = {"name": result.get("name", name), "arguments": arguments}
        return {
            "id": result.get("tool_call_id", "call00000"),
            "type": "function",
            "function": function,
        }

    def _behind(
        self,
        before: list[Node],
        anchors: list[Hole],
        own: list[Hole],
        new: Sequence[Node],
        holes: Sequence[Hole],
        *,
        gen: bool,
        read: Any,
    ) -> _Behind:
        """Render [a user, the neighbour, the new messages]; keep what is behind the anchors."""
        user = _neighbour(0)
        start = [{"role": "user", "content": user}, *before]
        every = [user, *own, *self._tool_holes, *holes]
        followed = _tail(read(self._render_node([*start, *new], gen), every), anchors)
        closed = _tail(cut(self._render_node(start, False), every), anchors)
        ids = {hole.number for hole in holes}
        while ids.intersection(places_in_order(closed[1:2])).intersection(
            places_in_order(followed[1:2])
        ):
            # A call may end with its id, which comes after its arguments.
            closed, followed = closed[2:], followed[2:]
        common = common_length(str(followed[0]), str(closed[0]), self._control)
        return _Behind(followed, common)


def opening_of(pieces: Sequence[Piece], answer: Hole, last: str) -> str:
    """What stands between the literal `last` and an answer; blank: the answer follows directly.

    Raises:
        TemplateError: if the template writes no such answer.
    """
    for literal, place in pairwise(pieces):
        if isinstance(place, Place) and place.hole.number == answer.number:
            text = str(literal)
            return text[len(last) :] if text.startswith(last) else text
    raise TemplateError("the template drops the text of an assistant message", role="assistant")


def _last_role(new: Sequence[dict[str, Node]]) -> str:
    return new[-1]["role"] if new else "assistant"


def _neighbour(number: int, voice: Voice = Voice.OUTSIDE) -> Hole:
    return Hole(NEIGHBOUR + number, -1, voice, is_content=False)


def _tail(pieces: Sequence[Piece], anchors: Sequence[Hole]) -> tuple[Piece, ...]:
    """Pieces behind the last place of an anchor."""
    indices = {hole.number for hole in anchors}
    for number in range(len(pieces) - 1, -1, -1):
        piece = pieces[number]
        if isinstance(piece, Place) and piece.hole.number in indices:
            return tuple(pieces[number + 1 :])
    raise TemplateError("the template drops the text of an assistant message", role="assistant")
