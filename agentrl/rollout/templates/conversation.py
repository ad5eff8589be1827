"""Whole demonstrations as tokens and a mask, built turn by turn as a rollout builds them.

A demonstration's prompt, deltas and generation prompts are those of a rollout, so a policy that is
warmed up on it sees in a rollout what it was trained on. An assistant turn is what the template
writes for it behind the generation prompt, with the token that ends it.
"""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from agentrl.errors import TemplateError
from agentrl.messages import Message
from agentrl.rollout.templates.structure import REASONING_FIELDS, THOUGHTS, Anatomy
from agentrl.rollout.templates.delta import NEIGHBOUR
from agentrl.rollout.templates.compiled import Splice
from agentrl.rollout.templates.slots import Conversation, Hole, Voice
from agentrl.rollout.templates.cutting import Piece, Place, common_length, cut, learn

if TYPE_CHECKING:
    from agentrl.rollout.templates.template import ChatTemplate, Tools


class EncodedConversation(NamedTuple):
    """A demonstration's tokens."""

    ids: list[int]
    loss_mask: list[int]
    """1 on the text of assistant turns and on the token that ends each, else 0."""


def encode_conversation(
    template: "ChatTemplate", messages: Sequence[Message], tools: "Tools"
) -> EncodedConversation:
    """Encode a demonstration for supervised training; see `ChatTemplate.encode_conversation`."""
    turns = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if not turns:
        raise TemplateError("a demonstration without an assistant turn", template=template.name)
    if turns[0] == 0:
        raise TemplateError(
            "a demonstration that begins with an assistant turn",
            template=template.name,
            role="assistant",
            expected="a system or user message before it",
        )
    ids = template.encode_prompt(messages[: turns[0]], tools)
    mask = [0] * len(ids)
    for start, stop in zip(turns, [*turns[1:], None], strict=True):
        replies = [] if stop is None else messages[start + 1 : stop]
        turn = encode_turn(template, messages[start], replies, tools)
        ids += turn
        mask += [1] * len(turn)
        if stop is not None:
            observed = template.encode_delta(replies, last_ids=turn, tools=tools).ids
            ids += observed
            mask += [0] * len(observed)
    return EncodedConversation(ids, mask)


def encode_turn(
    template: "ChatTemplate", message: Message, replies: Sequence[Message], tools: "Tools"
) -> list[int]:
    """Encode an assistant message as a policy would have sampled it, with its end.

    Args:
        template: The chat template.
        message: The assistant's message.
        replies: What follows it; the end of some templates' turns depends on it.
        tools: The schemas in the prompt.
    """
    read = template.read([message], tools)
    splice = template.learn_once("turn", read.key, lambda: _find_turn(template, read))
    if splice is None:
        ids = _encode_raw(template, spoken_text(message))
    else:
        ids = splice.encode(read.texts)
    if not ids or ids[-1] not in template.stop_token_ids:
        ids += _missing_stop(template, replies, tools)
    return ids


def _find_turn(template: "ChatTemplate", read: Conversation) -> Splice | None:
    """What the template writes for an assistant message behind its generation prompt.

    None where it rewrites the message there.
    """
    anatomy = template.anatomy
    user = Hole(NEIGHBOUR, -1, Voice.OUTSIDE, is_content=False)
    asked = {"role": "user", "content": user}
    holes = [user, *read.holes]
    tools, before = read.tools.nodes or anatomy.needed_tools, [*anatomy.preface, asked]
    opened = str(cut(anatomy.render_node(before, tools, True), holes)[-1])
    closed = _behind(learn(anatomy.render_node([*before, *read.nodes], tools, False), holes), user)
    lead = str(closed[0])
    if not lead.startswith(opened) and "tool_calls" not in read.nodes[0]:
        return None
    start = common_length(lead, opened, anatomy.encoder.control_pattern)
    pieces: list[Piece] = [lead[start:], *closed[1:]]
    pieces[-1] = up_to_end(anatomy, str(pieces[-1]))
    return template.splice(pieces)


def _behind(pieces: Sequence[Piece], hole: Hole) -> Sequence[Piece]:
    """Pieces behind the first place of a hole."""
    for number, piece in enumerate(pieces):
        if isinstance(piece, Place) and piece.hole.number == hole.number:
            return pieces[number + 1 :]
    raise TemplateError("the chat template drops the text of a user message", role="user")


def up_to_end(anatomy: Anatomy, literal: str) -> str:
    """Cut a turn's last literal behind what ends the turn; the separator is not the turn's."""
    end = anatomy.end_of_turn
    if end.is_written and end.text in literal:
        return literal[: literal.index(end.text) + len(end.text)]
    control = list(anatomy.encoder.control_pattern.finditer(literal))
    return literal[: control[-1].end()] if control else literal.rstrip()


def _encode_raw(template: "ChatTemplate", text: str) -> list[int]:
    """Encode an answer behind a generation prompt that its template would not write before it.

    Such a prompt opens a thought. An answer that thinks goes on from there; one that does not
    closes the thought first.
    """
    anatomy = template.anatomy
    text = follow_prompt(anatomy, text)
    end = anatomy.end_of_turn.text if anatomy.end_of_turn.is_written else anatomy.last_end_of_turn
    return template.encode_policy_text(text) + anatomy.encoder.encode_literal(end)


def spoken_text(message: Message) -> str:
    """What a policy says in a message, with the thought that is kept apart in it."""
    extra = message.model_extra or {}
    thought = next((extra[name] for name in REASONING_FIELDS if extra.get(name)), None)
    if not isinstance(thought, str):
        return message.text
    opening, closing = next(iter(THOUGHTS.items()))
    return f"{opening}\n{thought}\n{closing}\n\n{message.text}"


def follow_prompt(anatomy: Anatomy, text: str) -> str:
    """What a policy writes of a text behind a generation prompt that may open a thought."""
    prompt = anatomy.generation_prompt
    for opening, closing in THOUGHTS.items():
        if prompt.rfind(opening) > prompt.rfind(closing):
            text = re.sub(rf"\A\s*{re.escape(opening)}\n?", "", text)
            text = text if closing in text else f"\n{closing}\n\n{text}"
    return text


def _missing_stop(
    template: "ChatTemplate", replies: Sequence[Message], tools: "Tools"
) -> list[int]:
    """What a policy samples to end a turn that its template does not end."""
    anatomy = template.anatomy
    stop = anatomy.encoder.encode_literal(anatomy.end_of_turn.text)
    if replies:
        stop = template.encode_delta(replies, last_ids=(), tools=tools).end_of_turn_ids
    return stop or list(template.stop_token_ids[:1])
