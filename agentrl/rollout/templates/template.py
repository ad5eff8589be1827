"""A chat template as a function between messages and tokens, the same for every template.

The prompt is rendered once. What comes after an assistant turn is rendered as a delta and spliced
behind the tokens that were sampled; nothing that was sampled is ever rendered again (law 2), and no
text from outside becomes a control token (law 3).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any

from agentrl.errors import TemplateError
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.templates.delta import NEIGHBOUR, DeltaFinder, EndOfTurn
from agentrl.rollout.templates.markers import Markers, find_markers
from agentrl.rollout.templates.rendering import Renderer
from agentrl.rollout.templates.shape import (
    CallStyle,
    Hole,
    Node,
    Pairs,
    Reading,
    ShapeBuilder,
    Voice,
    as_arguments,
    fill,
    shape_key,
)
from agentrl.rollout.templates.splice import (
    Piece,
    Render,
    Splice,
    common_length,
    cut,
    learn,
    places_in_order,
)
from agentrl.rollout.templates.text import TextEncoder, any_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CACHED_SHAPES = 1024
"""Shapes kept; a run sees a handful, hostile input could make many."""

_THOUGHTS = {"<think>": "</think>", "<thinking>": "</thinking>", "[THINK]": "[/THINK]"}
_STYLES = tuple(
    CallStyle(arguments_as_json=as_json, empty_content=content)
    for as_json in (False, True)
    for content in ("", None)
)

Tools = Sequence[OpenAIFunctionToolSchema]


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """What to append, observed, behind a sampled turn."""

    ids: list[int]
    """All of it: missing end of turn, separator, new messages, generation prompt."""
    end_of_turn_ids: list[int]
    """The start of `ids` that ends the assistant turn and that the policy did not sample."""
    message_spans: list[tuple[int, int, int]]
    """For each content: index of its message among the new ones, start and end in `ids`."""


@dataclass(frozen=True, slots=True)
class _PreparedTools:
    """Schemas as nodes, with the texts that must not enter a rendering."""

    schemas: tuple[OpenAIFunctionToolSchema, ...]
    """Kept so that their identity stays theirs while they are cached."""
    nodes: list[Node]
    holes: list[Hole]
    texts: list[str]


@dataclass(frozen=True, slots=True)
class _PreparedDelta:
    splice: Splice
    end_ids: list[int]


class ChatTemplate:
    """One tokenizer's chat template.

    Args:
        tokenizer: A tokenizer with a fast backend; it is not changed.
        custom_template: Replaces the tokenizer's template: its text, or the path of a file.
        template_kwargs: Further variables of the template, such as `enable_thinking`.
        now: The date for templates that write one; frozen, so that every prompt of a run agrees.

    Raises:
        TemplateError: where there is no template, or it is no valid Jinja.

    Example:
        >>> template = ChatTemplate(tokenizer)
        >>> prompt_ids = template.encode_prompt([Message(role="user", content="2 + 2?")])
        >>> completion_ids = [*template.encode_text("4"), template.stop_token_ids[0]]
        >>> reply = Message(role="user", content="Are you sure?")
        >>> template.encode_delta([reply], last_ids=completion_ids[-8:]).ids
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        custom_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
    ) -> None:
        self.renderer = Renderer(
            tokenizer,
            custom_template=custom_template,
            template_kwargs=template_kwargs or {},
            now=now or datetime.now(),
        )
        self.encoder = TextEncoder(tokenizer)
        self._eos_id: int | None = tokenizer.eos_token_id
        self._prompts: dict[tuple[int, ...] | str, Splice] = {}
        self._deltas: dict[tuple[int, ...] | str, _PreparedDelta] = {}
        self._tools: dict[tuple[int, ...], _PreparedTools] = {}

    @property
    def name(self) -> str:
        """The tokenizer's name, or that of the custom template's file."""
        return self.renderer.name

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn: the tokenizer's and the template's, no others.

        Where a template writes no end of its own, the tokens that open a user's and a tool's turn
        (the policy samples those).
        """
        found = [] if self._eos_id is None else [self._eos_id]
        for end in self._ends_of_turn:
            found += self.encoder.encode_literal(end)[-1:]
        return tuple(dict.fromkeys(found))

    @cached_property
    def generation_prompt(self) -> str:
        """What the template writes to open an assistant turn.

        Raises:
            TemplateError: where it writes nothing.
        """
        user = Hole(NEIGHBOUR, -1, Voice.OUTSIDE, is_content=False)
        messages = [{"role": "user", "content": user}]
        opened, closed = (
            str(cut(self.render_node(messages, [], gen), [user])[-1]) for gen in (True, False)
        )
        prompt = opened[common_length(opened, closed, self.encoder.control_pattern) :]
        if not prompt:
            raise TemplateError(
                "the chat template writes no generation prompt",
                template=self.name,
                role="assistant",
                expected="text under `add_generation_prompt`; see model.custom_chat_template",
            )
        return prompt

    @cached_property
    def generation_prompt_ids(self) -> list[int]:
        """Tokens of the generation prompt; observed, mask 0."""
        return self.encoder.encode_literal(self.generation_prompt)

    @cached_property
    def starts_in_thought(self) -> bool:
        """Whether the generation prompt leaves a thought open, so that a turn starts inside it."""
        prompt = self.generation_prompt
        return any(
            prompt.rfind(opening) > prompt.rfind(closing) for opening, closing in _THOUGHTS.items()
        )

    def encode_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Encode a whole conversation and the generation prompt behind it.

        Raises:
            TemplateError: where the template refuses the conversation, drops the text of a message
                that is no assistant's, or writes no generation prompt.
        """
        _ = self.generation_prompt
        prepared, builder, nodes = self._read(messages, tools)
        texts = [*prepared.texts, *builder.texts]
        key = f"{self._tools_key(tools)}{shape_key(nodes)}"
        splice = self._prompts.get(key)
        if splice is None:
            holes = [*prepared.holes, *builder.holes]
            splice = self.splice(learn(self.render_node(nodes, prepared.nodes, True), holes))
            self._refuse_losses(messages, builder.holes, splice)
            _remember(self._prompts, key, splice)
        return splice.encode(texts)[0]

    def encode_delta(
        self, messages: Sequence[Message], *, last_ids: Sequence[int], tools: Tools = ()
    ) -> EncodedDelta:
        """Encode what comes behind a sampled turn: its end, new messages, generation prompt.

        Costs what encoding the new texts costs, however long the conversation is.

        Args:
            messages: The new messages, none of them an assistant's; may be none at all.
            last_ids: The tail of the sampled turn, at least its last few tokens. What of the end
                of turn was sampled is not written again.
            tools: The same schemas as in the prompt.

        Raises:
            TemplateError: where the template cannot carry these messages behind a turn.
        """
        prepared, builder, nodes = self._read(messages, tools)
        texts = [*prepared.texts, *builder.texts]
        key = f"{self._tools_key(tools)}{shape_key(nodes)}"
        delta = self._deltas.get(key)
        if delta is None:
            delta = self._prepare_delta(nodes, [*prepared.holes, *builder.holes], prepared)
            _remember(self._deltas, key, delta)
        ids, spans = delta.splice.encode(texts)
        sampled = _overlap(last_ids, delta.end_ids)
        moved = [(message, start - sampled, end - sampled) for message, start, end in spans]
        return EncodedDelta(ids[sampled:], delta.end_ids[sampled:], moved)

    def encode_text(self, text: str) -> list[int]:
        """Encode text from outside as plain characters, whatever it contains."""
        return self.encoder.encode_text(text)

    def encode_policy_text(self, text: str) -> list[int]:
        """Encode text in the policy's voice, as it would have been sampled.

        Control tokens that a policy may write inside its turn (a thought, a tool call) are live;
        those that end a turn or open another are plain characters.
        """
        return self.encoder.encode_policy(text, self.live_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled tokens with control tokens visible, for a tool parser."""
        return self.encoder.decode(ids)

    # For the modules beside this one.

    @cached_property
    def markers(self) -> Markers:
        """Strings that the template looks for in texts."""
        return find_markers(self.renderer.source)

    @cached_property
    def reading(self) -> Reading:
        """How messages are read for this template."""
        return Reading(self._separators, self.call_style or CallStyle())

    @cached_property
    def call_style(self) -> CallStyle | None:
        """How the template wants tool calls; None where it cannot carry them."""
        return next((style for style in _STYLES if self._carries_calls(style)), None)

    @cached_property
    def end_of_turn(self) -> EndOfTurn:
        """How a plain answer ends."""
        return self.finder([]).end_of_turn()

    @cached_property
    def live_tokens(self) -> re.Pattern[str]:
        """Control tokens that a policy may write inside its turn."""
        control = set(self.encoder.control_pattern.findall("\0".join(self.encoder.added)))
        in_use = {t for t in control if t not in self.encoder.special or t in self._source}
        stops = {text for text, id in self.encoder.added.items() if id in self.stop_token_ids}
        return any_of(in_use - self._frame_tokens - stops)

    def render_node(self, messages: Sequence[Node], tools: Sequence[Node], gen: bool) -> Render:
        """Make the function that renders these nodes with texts in their holes."""

        def render(texts: Mapping[int, str]) -> str:
            return self.renderer.render(
                fill(list(messages), texts), fill(list(tools), texts), add_generation_prompt=gen
            )

        return render

    def splice(self, pieces: Sequence[Piece]) -> Splice:
        """Encode the literals of pieces."""
        return Splice(pieces, self.encoder, self.live_tokens)

    def finder(self, tools: Sequence[Node]) -> DeltaFinder:
        """Find deltas in conversations with these tools."""
        return DeltaFinder(
            lambda messages, gen: self.render_node(messages, tools, gen),
            self.encoder.control_pattern,
            self.call_style or CallStyle(),
        )

    def read(self, messages: Sequence[Message], tools: Tools = ()) -> "_Read":
        """Read messages and tools into nodes, holes and texts."""
        prepared, builder, nodes = self._read(messages, tools)
        return _Read(
            nodes,
            prepared.nodes,
            [*prepared.holes, *builder.holes],
            [*prepared.texts, *builder.texts],
        )

    # Private.

    @property
    def _source(self) -> str:
        return self.renderer.source

    @cached_property
    def _ends_of_turn(self) -> list[str]:
        found = [self.end_of_turn.text]
        call = Message(role="tool", content="result", name="tool", tool_call_id="call00000")
        builder = ShapeBuilder(Reading(any_of(()), self.call_style or CallStyle()))
        nodes = builder.messages([call])
        try:
            found.append(self.finder([]).find(nodes, builder.holes).end)
        except TemplateError:
            pass  # it carries no tool results: no turn of it ends in a call
        return [*found, *self._closing_end]

    @cached_property
    def _closing_end(self) -> list[str]:
        """The end of the last turn of a conversation, where it differs."""
        return []

    @cached_property
    def _separators(self) -> re.Pattern[str]:
        control = self.encoder.control_pattern
        return any_of(
            marker
            for marker in self.markers.inside
            if marker.strip() and all(map(self.live_tokens.fullmatch, control.findall(marker)))
        )

    @cached_property
    def _frame_tokens(self) -> set[str]:
        """Control tokens with which the template frames turns, other than inside a policy's."""
        user, reply, other = (
            Hole(NEIGHBOUR + i, -1, Voice.OUTSIDE, is_content=False) for i in range(3)
        )
        first = {"role": "user", "content": user}
        answer = {"role": "assistant", "content": reply}
        system = {"role": "system", "content": other}
        literals = [*self._literals([system, first], user), self._opening(first, answer)]
        for role in ("user", "tool"):
            literals += self._literals([first, answer, {"role": role, "content": other}], reply)
        return {token for text in literals for token in self.encoder.control_pattern.findall(text)}

    def _literals(self, nodes: list[Node], behind: Hole) -> list[str]:
        holes = [Hole(NEIGHBOUR + i, -1, Voice.OUTSIDE, is_content=False) for i in range(3)]
        try:
            pieces = cut(self.render_node(nodes, [], False), holes)
        except TemplateError:
            return []
        places = places_in_order(pieces)
        is_first = places and nodes[0]["content"].index == behind.index
        start = 2 * places.index(behind.index) + 2 if behind.index in places else 0
        return [str(piece) for piece in pieces[0 if is_first else start :: 2]]

    def _opening(self, first: Node, answer: Node) -> str:
        holes = [first["content"], answer["content"]]
        try:
            pieces = cut(self.render_node([first, answer], [], False), holes)
        except TemplateError:
            return ""
        opened = str(pieces[2]) if len(pieces) > 2 else ""
        prompt = cut(self.render_node([first], [], True), holes)
        common = common_length(opened, str(prompt[-1]), self.encoder.control_pattern)
        return "".join(map(str, pieces[:1])) + opened[:common]

    def _carries_calls(self, style: CallStyle) -> bool:
        holes = [Hole(NEIGHBOUR + i, -1, Voice.OUTSIDE, is_content=False) for i in range(5)]
        function = {
            "name": holes[2],
            "arguments": as_arguments(Pairs(((holes[3], holes[4]),)), style),
        }
        call = {"id": "call00000", "type": "function", "function": function}
        asked = {"role": "user", "content": holes[0]}
        calls = {"role": "assistant", "content": style.empty_content, "tool_calls": [call]}
        try:
            pieces = cut(self.render_node([asked, calls], [], False), holes)
        except TemplateError:
            return False
        return {hole.index for hole in holes[2:]} <= set(places_in_order(pieces))

    def _read(
        self, messages: Sequence[Message], tools: Tools
    ) -> tuple[_PreparedTools, ShapeBuilder, list[Node]]:
        prepared = self._prepare_tools(tools)
        builder = ShapeBuilder(self.reading, first_hole=len(prepared.holes))
        return prepared, builder, builder.messages(messages)

    def _prepare_tools(self, tools: Tools) -> _PreparedTools:
        key = self._tools_key(tools)
        prepared = self._tools.get(key)
        if prepared is None:
            builder = ShapeBuilder(self.reading)
            nodes = [
                builder.structure(tool.to_template(), self.encoder.is_inert) for tool in tools
            ]
            prepared = _PreparedTools(tuple(tools), nodes, builder.holes, builder.texts)
            _remember(self._tools, key, prepared)
        return prepared

    def _tools_key(self, tools: Tools) -> tuple[int, ...]:
        return tuple(map(id, tools))

    def _prepare_delta(
        self, nodes: list[Node], holes: list[Hole], prepared: _PreparedTools
    ) -> _PreparedDelta:
        _ = self.generation_prompt
        try:
            found = self.finder(prepared.nodes).find(nodes, holes)
        except TemplateError as error:
            raise TemplateError(
                f"the chat template cannot carry {_roles(nodes)} behind an assistant turn",
                template=self.name,
                role=error.details.get("role"),
                reason=str(error.args[0]),
            ) from error
        used = set(places_in_order(found.pieces))
        if any(index >= NEIGHBOUR for index in used):
            raise TemplateError(
                "the chat template writes the name of the tool with its result",
                template=self.name,
                role="tool",
                expected="`name` on each tool message",
            )
        end_ids = self.encoder.encode_literal(found.end)
        return _PreparedDelta(self.splice(found.pieces), end_ids)

    def _refuse_losses(
        self, messages: Sequence[Message], holes: Sequence[Hole], splice: Splice
    ) -> None:
        written = set(places_in_order(splice.pieces))
        for hole in holes:
            role = messages[hole.message].role
            if hole.is_content and hole.index not in written and role != "assistant":
                raise TemplateError(
                    f"the chat template drops the text of message {hole.message}",
                    template=self.name,
                    role=role,
                )


@dataclass(frozen=True, slots=True)
class _Read:
    """A conversation as a shape and its texts."""

    nodes: list[Node]
    tool_nodes: list[Node]
    holes: list[Hole]
    texts: list[str]


def _overlap(last_ids: Sequence[int], end_ids: Sequence[int]) -> int:
    """How much of the end of turn was sampled already."""
    tail = list(last_ids[-len(end_ids) :]) if end_ids else []
    return next(k for k in range(len(tail), -1, -1) if tail[len(tail) - k :] == end_ids[:k])


def _roles(nodes: Sequence[Node]) -> str:
    roles = [node["role"] for node in nodes] or ["a generation prompt"]
    return ", ".join(dict.fromkeys(roles)) + (" messages" if nodes else "")


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= MAX_CACHED_SHAPES:
        cache.clear()
    cache[key] = value
