"""Hold a finished ledger against the rendering of its whole conversation.

Two things are compared. What was appended as observed must be the very tokens that the template
gives for its messages, turn by turn. And the whole, as text, must be what the template writes for
the conversation at once: between the first words of one message from outside and those of the next
lies one sampled turn, and a difference there is that turn's. Sampled spans are compared as text,
since other tokens may spell the same. The cost is linear in the conversation's length.

All that costs as much as the tokenizer did in the rollout. So a run keeps the wording of a ledger,
each part as it went through the tokenizer: the text that was encoded, or what was decoded. Where
that is what the template writes for the whole conversation, there is nothing to look for: whether
encoding and decoding give a text back is known of the tokenizer since its probe.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from agentrl.errors import TemplateError
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.records import TokenDifference, Turn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates.conversation import up_to_end
from agentrl.rollout.templates.observed import EncodedDelta
from agentrl.rollout.templates.shape import Conversation, Voice
from agentrl.rollout.templates.splice import Place, learn, shared_length, written_text
from agentrl.rollout.templates.template import ChatTemplate

CheckMode = Literal["disable", "strict", "ignore_strippable"]
EXCERPT = 60
"""Characters of an excerpt."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A stretch of the ledger: the prompt, a sampled turn, or what was observed behind one."""

    turn: int
    is_sampled: bool
    ids: list[int]
    first: int
    """Index of its first message."""
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class _Aligned:
    """A text with the places where messages from outside begin in it."""

    text: str
    starts: dict[int, int]
    """By index of the message."""


def check_request(
    template: ChatTemplate,
    request: AsyncRolloutRequest,
    mode: CheckMode,
    *,
    wording: Sequence[str] = (),
) -> list[TokenDifference]:
    """Check a finished request; see `check_ledger`.

    Args:
        template: The run's template.
        request: A finished request.
        mode: As for `check_ledger`. Under `ignore_strippable` nothing is encoded again where the
            wording is that of the whole rendering.
        wording: The ledger part by part: what was encoded for the prompt and for each delta, and
            what was decoded of each sampled turn. Empty: unknown.
    """
    if mode == "ignore_strippable" and wording and _reads_as_rendered(template, request, wording):
        return []
    return check_ledger(
        template,
        request.messages,
        request.tool_schemas,
        prompt_ids=request.prompt_ids,
        response_ids=request.response_ids,
        turns=request.turns,
        mode=mode,
    )


def check_ledger(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[OpenAIFunctionToolSchema],
    *,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    turns: Sequence[Turn],
    mode: CheckMode,
) -> list[TokenDifference]:
    """Find where a ledger and the rendering of its conversation differ.

    Args:
        template: The run's template.
        messages: The whole conversation; its last assistant messages are the sampled turns.
        tools: The schemas in the prompt.
        prompt_ids: Tokens before the first sampled one.
        response_ids: All tokens behind them.
        turns: The request's turns, with their spans in the response.
        mode: `strict` returns every difference, `ignore_strippable` those that are more than white
            space, `disable` none.
    """
    sampled = [turn for turn in turns if turn.role == "assistant"]
    if mode == "disable" or not sampled:
        return []
    spoken = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if len(spoken) < len(sampled):
        expected = f"{len(spoken)} assistant messages"
        actual = f"{len(sampled)} sampled turns"
        return [TokenDifference(turn=-1, kind="missing", expected=expected, actual=actual)]
    segments = _segments(messages, spoken[-len(sampled) :], prompt_ids, response_ids, turns)
    expected = [_expect(template, segments, n, tools) for n in range(0, len(segments), 2)]
    found = _check_observed(template, segments, expected)
    try:
        whole = _render_whole(template, messages, tools, ends_open=not segments[-1].ids)
    except TemplateError as error:
        found.append(_refusal(segments[-2].turn, error))
    else:
        found += _check_whole(template, segments, whole, expected)
    first = {(d.turn, d.kind): d for d in reversed(found)}
    kept = sorted(first.values(), key=lambda d: d.turn)
    return [d for d in kept if mode == "strict" or d.kind != "whitespace"]


def _reads_as_rendered(
    template: ChatTemplate, request: AsyncRolloutRequest, wording: Sequence[str]
) -> bool:
    """Whether the wording of a ledger is what the template writes for the whole conversation."""
    *said, last = wording
    ends_open = request.messages[-1].role == "assistant"
    if ends_open:
        last = _without_stop(template, last)
    reading = template.anatomy.text_reading
    try:
        read = template.read(request.messages, request.tool_schemas, reading=reading)
        pieces = _learn_whole_once(template, read, gen=not ends_open, is_cut=ends_open)
    except TemplateError:
        return False
    return "".join([*said, last]) == written_text(pieces, read.texts)


def _segments(
    messages: Sequence[Message],
    spoken: Sequence[int],
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    turns: Sequence[Turn],
) -> list[_Segment]:
    """The ledger as prompt, sampled, observed, sampled, observed, ..."""
    sampled = [turn for turn in turns if turn.role == "assistant"]
    segments = [_Segment(-1, False, list(prompt_ids), 0, messages[: spoken[0]])]
    stops = [*(turn.start for turn in sampled[1:]), len(response_ids)]
    nexts = [*spoken[1:], len(messages)]
    for turn, stop, at, until in zip(sampled, stops, spoken, nexts, strict=True):
        own = [t.index for t in turns if turn.end <= t.start < stop and t.role != "assistant"]
        observed = own[0] if own else turn.index
        ids = list(response_ids[turn.start : turn.end])
        segments.append(_Segment(turn.index, True, ids, at, messages[at : at + 1]))
        ids = list(response_ids[turn.end : stop])
        segments.append(_Segment(observed, False, ids, at + 1, messages[at + 1 : until]))
    return segments


def _expect(
    template: ChatTemplate,
    segments: Sequence[_Segment],
    number: int,
    tools: Sequence[OpenAIFunctionToolSchema],
) -> EncodedDelta | TemplateError:
    """What should have been observed in a segment."""
    segment = segments[number]
    try:
        if number == 0:
            return EncodedDelta([], template.encode_prompt(segment.messages, tools), [])
        last_ids = segments[number - 1].ids
        return template.encode_delta(segment.messages, last_ids=last_ids, tools=tools)
    except TemplateError as error:
        return error


def _check_observed(
    template: ChatTemplate,
    segments: Sequence[_Segment],
    expected: Sequence[EncodedDelta | TemplateError],
) -> list[TokenDifference]:
    """Compare what the policy was shown, token by token."""
    found: list[TokenDifference] = []
    for segment, delta in zip(segments[0::2], expected, strict=True):
        # A request may end before what follows its last turn was appended, or all of it.
        is_last = segment is segments[-1]
        if is_last and not segment.ids:
            continue
        if isinstance(delta, TemplateError):
            found.append(_refusal(segment.turn, delta))
            continue
        ids = delta.ids[: len(segment.ids)] if is_last else delta.ids
        if ids != segment.ids:
            texts = template.decode(ids), template.decode(segment.ids)
            if texts[0] == texts[1]:  # other tokens for the same words
                texts = f"tokens {ids}", f"tokens {segment.ids}"
            found.append(_difference(segment.turn, "observed_tokens", *texts))
    return found


def _check_whole(
    template: ChatTemplate,
    segments: Sequence[_Segment],
    whole: _Aligned,
    deltas: Sequence[EncodedDelta | TemplateError],
) -> list[TokenDifference]:
    """Compare texts between the beginnings of messages from outside."""
    actual, offsets = _read_ledger(template, segments, deltas)
    shared = sorted(whole.starts.keys() & actual.starts.keys())
    places = [(0, 0), *((whole.starts[i], actual.starts[i]) for i in shared)]
    places.append((len(whole.text), len(actual.text)))
    found: list[TokenDifference] = []
    for (w_start, a_start), (w_stop, a_stop) in pairwise(places):
        ours, theirs = actual.text[a_start:a_stop], whole.text[w_start:w_stop]
        if ours != theirs:
            at = a_start + shared_length(ours, theirs)
            segment = segments[min(bisect_right(offsets, at), len(segments)) - 1]
            kind = "sampled_text" if segment.is_sampled else "observed_tokens"
            found.append(_difference(segment.turn, kind, theirs, ours))
    return found


def _render_whole(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[OpenAIFunctionToolSchema],
    *,
    ends_open: bool,
) -> _Aligned:
    """What the template writes for the whole conversation, texts spliced in."""
    read = template.read(messages, tools)
    gen = messages[-1].role != "assistant"
    is_cut = ends_open and not gen
    pieces = _learn_whole_once(template, read, gen=gen, is_cut=is_cut)
    written: list[str] = []
    starts: dict[int, int] = {}
    length = 0
    for piece in pieces:
        if isinstance(piece, Place) and piece.hole.is_content:
            starts.setdefault(piece.hole.message, length)
        written.append(_written(template, piece, read.texts))
        length += len(written[-1])
    outside = {i: at for i, at in starts.items() if messages[i].role != "assistant"}
    return _Aligned("".join(written), outside)


def _learn_whole_once(
    template: ChatTemplate, read: Conversation, *, gen: bool, is_cut: bool
) -> list[str | Place]:
    kind = f"whole {gen} {is_cut}"
    return template.learn_once(
        kind, read.key, lambda: _learn_whole(template, read, gen=gen, is_cut=is_cut)
    )


def _learn_whole(
    template: ChatTemplate, read: Conversation, *, gen: bool, is_cut: bool
) -> list[str | Place]:
    """What the template writes for a conversation of this shape; literals through their tokens."""
    encoder = template.anatomy.encoder
    pieces = learn(template.anatomy.render_node(read.nodes, read.tools.nodes, gen), read.holes)
    if is_cut:
        pieces[-1] = _without_stop(template, up_to_end(template.anatomy, str(pieces[-1])))
    return [
        encoder.decode(encoder.encode_literal(piece)) if isinstance(piece, str) else piece
        for piece in pieces
    ]


def _written(template: ChatTemplate, piece: str | Place, texts: Sequence[str]) -> str:
    """A piece as text; what is from outside through the same tokens as in a ledger."""
    if isinstance(piece, str):
        return piece
    encoder = template.anatomy.encoder
    text = piece.written(texts[piece.hole.number])
    if piece.hole.voice is Voice.POLICY:
        return text
    return encoder.decode(encoder.encode_text(text))


def _read_ledger(
    template: ChatTemplate,
    segments: Sequence[_Segment],
    deltas: Sequence[EncodedDelta | TemplateError],
) -> tuple[_Aligned, list[int]]:
    """The ledger as text, and where each of its segments starts."""
    texts = [template.decode(segment.ids) for segment in segments]
    if not segments[-1].ids:
        texts[-2] = _without_stop(template, texts[-2])
    offsets = [0, *accumulate(map(len, texts))][:-1]
    starts: dict[int, int] = {}
    observed = zip(segments[2::2], deltas[1:], offsets[2::2], strict=True)
    for segment, delta, offset in observed:
        if isinstance(delta, EncodedDelta) and delta.ids == segment.ids and delta.message_spans:
            message, start, _ = delta.message_spans[0]
            head = template.decode(segment.ids[:start])
            starts[segment.first + message] = offset + len(head)
    return _Aligned("".join(texts), starts), offsets


def _without_stop(template: ChatTemplate, text: str) -> str:
    """A last turn without its end: it may have been cut by a budget, which is no difference."""
    ends = [template.anatomy.end_of_turn.text, template.anatomy.last_end_of_turn]
    ends += [template.decode([id]) for id in template.stop_token_ids]
    return next((text.removesuffix(end) for end in ends if end and text.endswith(end)), text)


def _difference(turn: int, kind: str, expected: str, actual: str) -> TokenDifference:
    """Describe a difference, from its first character on."""
    at = shared_length(expected, actual)
    if "".join(expected.split()) == "".join(actual.split()):
        kind = "whitespace"
    start = max(0, at - EXCERPT // 3)
    return TokenDifference(
        turn=turn,
        kind=kind,
        expected=expected[start : at + EXCERPT],
        actual=actual[start : at + EXCERPT],
    )


def _refusal(turn: int, error: TemplateError) -> TokenDifference:
    words = f"the template refuses: {error.args[0]}"
    return TokenDifference(turn=turn, kind="missing", expected=words, actual="")
