"""A chat template as a function between messages and tokens, the same for every template.

The prompt is rendered once. The messages after an assistant turn are rendered as a delta, which is
appended to the sampled tokens. A sampled token is never rendered again (train what was sampled),
and no outside text becomes a control token (outside text is never a control token).
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from cachetools import LRUCache

from agentrl.errors import TemplateError
from agentrl.media.processor import MediaProcessor
from agentrl.messages import Message, OpenAIFunctionToolSchema, opens_thought
from agentrl.rollout.templates.compiled import (
    CompiledTemplate,
    EncodedMedia,
    PlannedPrompt,
)
from agentrl.rollout.templates.cutting import Piece, cut, learn, place_media, slots_in_order
from agentrl.rollout.templates.delta import (
    EncodedDelta,
    PlannedDelta,
    PreparedDelta,
    borrowed_names,
    opening_of,
)
from agentrl.rollout.templates.rendering import Renderer
from agentrl.rollout.templates.slots import (
    CONTEXT_SLOT,
    Node,
    PreparedTools,
    ShapeBuilder,
    ShapedConversation,
    ShapeOptions,
    Slot,
    TextOrigin,
    context_slot,
)
from agentrl.rollout.templates.structure import TemplateStructure
from agentrl.rollout.templates.text import EncodingQueue, TextEncoder, TokenSpans, any_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_CACHED_RUNS = 64
"""Maximum number of text runs in prompts for which tokens are cached."""
_MAX_CACHED_CHARACTERS = 256 << 10
"""Tokens of longer text runs are not cached."""
MAX_CACHED_SHAPES = 1024
"""Maximum number of cached shapes; hostile input could create many."""

T = TypeVar("T")
Tools = Sequence[OpenAIFunctionToolSchema]


class ChatTemplate:
    """One tokenizer's chat template.

    Args:
        tokenizer: A tokenizer with a fast backend; it is not changed.
        custom_template: Replaces the tokenizer's template: its text, or the path of a file.
        template_kwargs: Further variables of the template, such as `enable_thinking`.
        now: The date for templates that write one; frozen, so that all prompts of a run agree.
        model_stops: Further tokens that end a turn, such as those of `generation_config.json`.
        media: The processor of a model that reads images or videos; None: it reads text only.

    Attributes:
        structure: The parts of the template.
        queue: Encodes texts of many requests together.
        token_spans: Finds the tokens of a span of sampled text.

    Raises:
        TemplateError: if there is no template, or it is not valid Jinja.

    Example:
        >>> template = ChatTemplate(tokenizer)
        >>> prompt_ids = template.encode_prompt([Message(role="user", content="2 + 2?")])
        >>> completion_ids = [*template.encode_text("4"), template.stop_token_ids[0]]
        >>> reply = Message(role="user", content="Are you sure?")
        >>> template.encode_delta([reply], last_ids=completion_ids).ids
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        custom_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        now: datetime | None = None,
        model_stops: Sequence[int] = (),
        media: MediaProcessor | None = None,
    ) -> None:
        renderer = Renderer(
            tokenizer,
            custom_template=custom_template,
            template_kwargs=template_kwargs or {},
            now=now or datetime.now(),
        )
        eos_id: Any = tokenizer.eos_token_id
        self.media = media
        placeholders = media.placeholders.values() if media else ()
        self.structure = TemplateStructure(
            renderer, TextEncoder(tokenizer), eos_id, model_stops, placeholders=placeholders
        )
        self.queue = EncodingQueue(self.encode_texts)
        self.token_spans = TokenSpans(self.decode)
        # Many prompts of a run start with the same system message and tools.
        self._runs: LRUCache[str, list[int]] = LRUCache(MAX_CACHED_RUNS)
        self._shapes: dict[Any, Any] = {}
        self._tools: dict[tuple[int, ...], PreparedTools] = {}

    @property
    def name(self) -> str:
        """The tokenizer's name, or that of the custom template's file."""
        return self.structure.renderer.name

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an assistant turn: the tokenizer's, the model's and the template's.

        If a template writes no end of its own, these are the tokens that open a user's and a tool's
        turn (the policy samples them).
        """
        return self.structure.stop_token_ids

    @cached_property
    def stop_texts(self) -> dict[int, str]:
        """The text of each stop token, by its id."""
        return {id: self.decode([id]) for id in self.stop_token_ids}

    @property
    def longest_token(self) -> int:
        """Characters of the vocabulary's longest token."""
        return self.structure.encoder.longest_token

    @property
    def generation_prompt_ids(self) -> list[int]:
        """The tokens that open an assistant turn; observed, mask 0.

        Raises:
            TemplateError: if the template writes none.
        """
        return self.structure.encoder.encode_literal(self.structure.generation_prompt)

    @property
    def starts_in_thought(self) -> bool:
        """Whether the generation prompt leaves a thought open, so that a turn starts inside it."""
        return self.structure.starts_in_thought

    def is_in_thought(self, prompt_end: Sequence[int] | None, tags: Mapping[str, str]) -> bool:
        """Whether a turn starts inside a thought.

        Only the template's own text counts: what follows the last control token that is not a part
        of a tag.

        Args:
            prompt_end: The last tokens before the turn; None: those of the generation prompt.
            tags: Opening and closing tags of thoughts.
        """
        parts, control = "".join([*tags, *tags.values()]), self.structure.encoder.control
        others = self.learn_once(
            "others", parts, lambda: {id for text, id in control.items() if text not in parts}
        )
        ends = [index for index, id in enumerate(prompt_end or ()) if id in others]
        if prompt_end is None or not ends:
            return self.structure.starts_in_thought
        return opens_thought(self.decode(prompt_end[ends[-1] + 1 :]), tags)

    def encode_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Encode a whole conversation and the generation prompt after it.

        Raises:
            TemplateError: If the template refuses the conversation, drops the text of a message
                that is not an assistant's, or writes no generation prompt; if a part is not text.
        """
        return self.encode_prompt_media(messages, tools).ids

    def encode_prompt_media(self, messages: Sequence[Message], tools: Tools = ()) -> EncodedMedia:
        """Encode as `encode_prompt` does; also return the runs of placeholder tokens.

        Raises:
            TemplateError: as `encode_prompt`.
        """
        planned = self.plan_prompt(messages, tools)
        return planned.encode_media([self._encode_run(text) for text in planned.texts])

    async def encode_planned(self, planned: PlannedPrompt) -> EncodedMedia:
        """Encode a prompt as `encode_prompt` does, together with the texts of other requests."""
        runs = {text: self._runs[text] for text in planned.texts if text in self._runs}
        missing = [text for text in planned.texts if text not in runs]
        if missing:
            runs |= zip(missing, await self.queue.encode(missing), strict=True)
            short = (text for text in missing if len(text) <= _MAX_CACHED_CHARACTERS)
            self._runs.update((text, runs[text]) for text in short)
        return planned.encode_media([runs[text] for text in planned.texts])

    def write_prompt(self, messages: Sequence[Message], tools: Tools = ()) -> str:
        """Return the text that `encode_prompt` encodes.

        Raises:
            TemplateError: as `encode_prompt`.
        """
        return self.plan_prompt(messages, tools).text

    def plan_prompt(
        self,
        messages: Sequence[Message],
        tools: Tools = (),
        *,
        assistant: TextOrigin = TextOrigin.POLICY,
    ) -> PlannedPrompt:
        """Prepare `encode_prompt` without encoding, so that its texts can be encoded with others.

        Args:
            messages: The conversation.
            tools: The schemas in the prompt.
            assistant: Who wrote the assistant messages. `OUTSIDE` for those of a client: none of
                their texts becomes a control token.

        Raises:
            TemplateError: as `encode_prompt`.
        """
        options = None
        if assistant is not TextOrigin.POLICY:
            options = replace(self.structure.options, assistant=assistant)
        read = self.read(messages, tools, options=options)
        return PlannedPrompt(self._compiled_prompt(messages, read), read.texts, read.items)

    def encode_delta(
        self, messages: Sequence[Message], *, last_ids: Sequence[int], tools: Tools = ()
    ) -> EncodedDelta:
        """Encode what follows a sampled turn: its end, new messages, the generation prompt.

        The cost is that of encoding the new texts, whatever the length of the conversation.

        Args:
            messages: The new messages, none of them an assistant's; may be empty.
            last_ids: The sampled turn, or its last few tokens. The part of the end of turn that was
                sampled is not written again.
            tools: The schemas in the prompt.

        Raises:
            TemplateError: if the template refuses these messages after a turn; for parts that are
            not
                text.
        """
        return self.plan_delta(messages, tools=tools).encode(last_ids)

    def plan_delta(self, messages: Sequence[Message], *, tools: Tools = ()) -> PlannedDelta:
        """Prepare `encode_delta` without encoding, so that its texts can be encoded with others.

        Raises:
            TemplateError: as `encode_delta`.
        """
        read = self.read(messages, tools)
        delta = self.learn_once("delta", read.key, lambda: self._prepare_delta(read))
        self._refuse_borrowed(delta, read.texts)
        return PlannedDelta(delta, read.texts, self.decode, read.items)

    def _encode_run(self, text: str) -> list[int]:
        if (ids := self._runs.get(text)) is None:
            ids = self._runs[text] = self.encode_text(text)
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Encode outside text as plain characters, whatever it contains."""
        return self.structure.encoder.encode_text(text)

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode outside texts in one call, which is faster than one by one."""
        return self.structure.encoder.encode_texts(texts)

    def encode_policy_text(self, text: str) -> list[int]:
        """Encode a policy's text, as it would have been sampled.

        Control tokens that a policy may write inside its turn (a thought, a tool call) become
        control tokens. Those that end a turn or open another one become plain characters.
        """
        return self.structure.encoder.encode_policy(text, self.structure.policy_tokens)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of sampled tokens with control tokens visible, for a tool parser."""
        return self.structure.encoder.decode(ids)

    def read(
        self, messages: Sequence[Message], tools: Tools = (), *, options: ShapeOptions | None = None
    ) -> ShapedConversation:
        """Read messages and tools into a shape and its texts.

        `options` says how; None: as for tokens.

        Raises:
            TemplateError: for a message with parts that are neither text nor processed media.
        """
        self._refuse_unread(messages)
        prepared = self._prepare_tools(tools)
        chosen = options or self.structure.options
        builder = ShapeBuilder(chosen, first_slot=len(prepared.slots))
        nodes = builder.messages(messages)
        return ShapedConversation(nodes, prepared, builder.slots, builder.texts, builder.media)

    def compile(self, pieces: Sequence[Piece], *, before: str = "") -> CompiledTemplate:
        """Encode the literals of pieces, which follow the text `before`."""
        ids = self.media.placeholder_ids.values() if self.media else ()
        return CompiledTemplate(
            pieces,
            self.structure.encoder,
            self.structure.policy_tokens,
            before=before,
            placeholder_ids=frozenset(ids),
        )

    def place_media(self, pieces: Sequence[Piece], read: ShapedConversation) -> list[Piece]:
        """Replace the placeholders of a rendering by the slots of its images and videos.

        Raises:
            TemplateError: If the template does not write one for each, in order.
        """
        if self.media is None or not read.media:
            return list(pieces)
        texts = [self.media.placeholders[item.kind] for item in read.media]
        try:
            return place_media(
                pieces,
                list(zip(read.media_slots, texts, strict=True)),
                any_of(self.media.placeholders.values()),
            )
        except TemplateError as error:
            error.details |= {"template": self.name, "role": _roles(read.nodes)}
            raise

    def learn_once(self, what: str, shape: Hashable, find: Callable[[], T]) -> T:
        """Find something that depends on a conversation's shape alone, once for each shape."""
        key = (what, shape)
        if key not in self._shapes:
            _remember(self._shapes, key, find())
        return self._shapes[key]

    def _refuse_unread(self, messages: Sequence[Message]) -> None:
        # A template would write an image's token, but no image would be passed to the model.
        for index, message in enumerate(messages):
            if not isinstance(message.content, list):
                continue
            parts = [part for part in message.content if part.type != "text"]
            unread = [part.type for part in parts if part.shown is not False and part.item is None]
            if unread:
                raise TemplateError(
                    f"message {index} has a part of type {unread[0]!r} that no processor has read",
                    template=self.name,
                    role=message.role,
                    part=unread[0],
                    expected="parts of type 'text', or a model that reads images and videos",
                )

    def _prepare_tools(self, tools: Tools) -> PreparedTools:
        key = tuple(map(id, tools))
        prepared = self._tools.get(key)
        if prepared is None:
            builder = ShapeBuilder(self.structure.options)
            is_inert = self.structure.encoder.is_inert
            nodes = [builder.schema(tool.to_template(), is_inert) for tool in tools]
            prepared = PreparedTools(tuple(tools), nodes, builder.slots, builder.texts)
            _remember(self._tools, key, prepared)
        return prepared

    def _compiled_prompt(
        self, messages: Sequence[Message], read: ShapedConversation
    ) -> CompiledTemplate:
        return self.learn_once("prompt", read.key, lambda: self._prepare_prompt(messages, read))

    def _prepare_prompt(
        self, messages: Sequence[Message], read: ShapedConversation
    ) -> CompiledTemplate:
        render = self.structure.render_node(read.nodes, read.tools.nodes, True)
        pieces = learn(render, read.slots)
        placed = self.place_media(pieces, read)
        closed = cut(self.structure.render_node(read.nodes, read.tools.nodes, False), read.slots)
        if closed[-1] == pieces[-1] and not self._answer_follows(read, str(closed[-1])):
            raise TemplateError(
                f"the chat template writes no generation prompt after {_roles(read.nodes[-1:])}",
                template=self.name,
                role=messages[-1].role,
            )
        self._refuse_losses(messages, read.message_slots, pieces)
        return self.compile(placed)

    def _answer_follows(self, read: ShapedConversation, last: str) -> bool:
        """Whether an answer directly follows this conversation, which ends in `last`."""
        answer = context_slot(0, TextOrigin.POLICY)
        nodes = [*read.nodes, {"role": "assistant", "content": answer}]
        render = self.structure.render_node(nodes, read.tools.nodes, False)
        try:
            # Raises if a policy could not see that its turn starts.
            _ = self.structure.generation_prompt
            return not opening_of(cut(render, [*read.slots, answer]), answer, last).strip()
        except TemplateError:
            return False

    def _prepare_delta(self, read: ShapedConversation) -> PreparedDelta:
        try:
            finder = self.structure.finder(read.tools.nodes, read.tools.slots)
            found = finder.find(read.nodes, read.message_slots)
        except TemplateError as error:
            raise TemplateError(
                f"the chat template does not support {_roles(read.nodes)} after an assistant turn",
                template=self.name,
                role=error.details.get("role") or _roles(read.nodes[:1]),
                reason=str(error.args[0]),
            ) from error
        if any(index >= CONTEXT_SLOT for index in slots_in_order(found.pieces)):
            raise TemplateError(
                "the chat template writes the name of the tool with its result",
                template=self.name,
                role="tool",
                expected="`name` on each tool message",
            )
        end_ids = self.structure.encoder.encode_literal(found.end)
        borrowed = borrowed_names(read.nodes, found.pieces)
        # The policy samples the end or a part of it, so no token may span its boundary.
        lead, *rest = self.place_media(found.pieces, read)
        after_end = [str(lead).removeprefix(found.end), *rest]
        compiled = self.compile(after_end, before=found.end)
        return PreparedDelta(found.end, end_ids, compiled, borrowed)

    def _refuse_borrowed(self, delta: PreparedDelta, texts: Sequence[str]) -> None:
        for written, own in delta.borrowed:
            if texts[written] != texts[own]:
                raise TemplateError(
                    f"the chat template would give the result of {texts[own]} to {texts[written]}",
                    template=self.name,
                    role="tool",
                    expected="results of one tool in one turn",
                )

    def _refuse_losses(
        self, messages: Sequence[Message], slots: Sequence[Slot], pieces: Sequence[Piece]
    ) -> None:
        written = set(slots_in_order(pieces))
        for slot in slots:
            role = messages[slot.message].role
            if slot.is_content and slot.number not in written and role != "assistant":
                raise TemplateError(
                    f"the chat template drops the text of message {slot.message}",
                    template=self.name,
                    role=role,
                )


def _roles(nodes: Sequence[Node]) -> str:
    return ", ".join(dict.fromkeys(node["role"] for node in nodes)) or "a generation prompt"


def _remember(cache: dict[Any, Any], key: Any, value: Any) -> None:
    if len(cache) >= MAX_CACHED_SHAPES:
        cache.clear()
    cache[key] = value
