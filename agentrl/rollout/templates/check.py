"""Check a finished ledger against the rendering of its whole conversation.

Four comparisons are made:

- The observed tokens with those that the template gives for their messages, token by token.
- The whole text with what the template writes for the whole conversation. Between the starts of two
  outside messages is one sampled turn; a difference there belongs to that turn. Sampled tokens are
  compared as text, because several token sequences can spell the same text.
- The text of the compiled template with what the template itself writes for the texts.
- With `strict`: the observed tokens with those that the tokenizer gives the template's text.

The last two are skipped if an outside text holds a control token: the template and the tokenizer
would treat it as one. The cost is linear in the conversation's length.

A run records the wording of a ledger: the text of each part, as it was encoded or decoded. With
`ignore_strippable`, if the wording equals the rendering of the whole conversation, and no text
holds a string that the template looks for unseen, the check passes without encoding again; the
probe has already tested that texts are unchanged by encoding and decoding.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from agentrl.errors import TemplateError
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.records import TokenDifference, Turn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates.assistant_turn import up_to_end
from agentrl.rollout.templates.cutting import (
    Piece,
    Written,
    cut,
    learn,
    shared_length,
    write_pieces,
    written_text,
)
from agentrl.rollout.templates.slots import ShapedConversation, TextOrigin, context_slot
from agentrl.rollout.templates.structure import TemplateStructure
from agentrl.rollout.templates.template import ChatTemplate

CheckMode = Literal["disable", "strict", "ignore_strippable"]
EXCERPT = 60
"""Characters of an excerpt."""


@dataclass(frozen=True, slots=True)
class _Segment:
    """A part of the ledger: the prompt, a sampled turn, or the observation after one."""

    turn: int
    is_sampled: bool
    ids: list[int]
    first: int
    """Index of its first message."""
    messages: Sequence[Message]


@dataclass(frozen=True, slots=True)
class _Expected:
    """The expected observation of a segment."""

    ids: list[int]
    written: Written
    canonical: Callable[[], tuple[list[int], list[int]]]
    """Returns the tokens with the end of the turn before, and the tokenizer's tokens of the same
    text."""


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
        mode: As in `check_ledger`. With `ignore_strippable`, nothing is encoded again if the
            wording equals the whole rendering.
        wording: The text of each part of the ledger: what was encoded for the prompt and for each
            delta, and what was decoded of each sampled turn. Empty: unknown.
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
    """Find the differences between a ledger and the rendering of its conversation.

    Args:
        template: The run's template.
        messages: The whole conversation; its last assistant messages are the sampled turns.
        tools: The schemas in the prompt.
        prompt_ids: Tokens before the first sampled one.
        response_ids: All tokens after them.
        turns: The request's turns, with their spans in the response.
        mode: `strict` returns every difference, `ignore_strippable` those that are more than white
            space or other tokens for the same text, `disable` none.
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
        read = template.read(messages, tools)
        gen = messages[-1].role != "assistant"
        spliced = _learn_whole(template, read, gen=gen)
        is_cut = not segments[-1].ids and not gen
        found += _check_whole(template, segments, spliced, read.texts, expected, is_cut=is_cut)
        if not _holds_control(template, read):
            found += _check_rendering(template, segments, read, spliced, gen=gen)
            found += _check_canonical(segments, expected) if mode == "strict" else []
    except TemplateError as error:
        found.append(_refusal(segments[-2].turn, error))
    first = {(d.turn, d.kind): d for d in reversed(found)}
    kept = sorted(first.values(), key=lambda d: d.turn)
    return [d for d in kept if mode == "strict" or d.kind != "whitespace"]


def _reads_as_rendered(
    template: ChatTemplate, request: AsyncRolloutRequest, wording: Sequence[str]
) -> bool:
    """Whether the wording of a ledger equals the rendering of the whole conversation."""
    *said, last = wording
    ends_open = request.messages[-1].role == "assistant"
    if ends_open:
        last = _without_stop(template, last)
    options, hidden = template.structure.text_options, template.structure.hidden_markers
    try:
        read = template.read(request.messages, request.tool_schemas, options=options)
        texts = zip(read.message_slots, read.message_texts, strict=True)
        if any(hidden[slot.origin].search(text) for slot, text in texts):
            return False
        whole = written_text(_learn_whole(template, read, gen=not ends_open), read.texts)
    except TemplateError:
        return False
    written = "".join([*said, last])
    if not ends_open:
        return whole == written
    return whole.startswith(written) and not _cut_end(template, whole[len(written) :])


def _segments(
    messages: Sequence[Message],
    spoken: Sequence[int],
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    turns: Sequence[Turn],
) -> list[_Segment]:
    """Split the ledger into prompt, sampled, observed, sampled, observed, ..."""
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
) -> _Expected | TemplateError:
    """Return the expected observation of a segment."""
    segment, encoder = segments[number], template.structure.encoder
    try:
        if number == 0:
            ids = template.encode_prompt(segment.messages, tools)
            text = template.write_prompt(segment.messages, tools)
            return _Expected(ids, Written(text, {}), lambda: (ids, encoder.encode_rendering(text)))
        planned = template.plan_delta(segment.messages, tools=tools)
        delta = planned.encode(segments[number - 1].ids)
        end_ids = planned.prepared.end_ids
        own = delta.ids[len(delta.end_of_turn_ids) :]
        return _Expected(
            delta.ids,
            delta.written(),
            lambda: ([*end_ids, *own], encoder.encode_literal(planned.whole_text)),
        )
    except TemplateError as error:
        return error


def _check_observed(
    template: ChatTemplate,
    segments: Sequence[_Segment],
    expected: Sequence[_Expected | TemplateError],
) -> list[TokenDifference]:
    """Compare the observed tokens, token by token."""
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
            if texts[0] == texts[1]:
                texts = f"tokens {ids}", f"tokens {segment.ids}"
            found.append(_difference(segment.turn, "observed_tokens", *texts))
    return found


def _check_whole(
    template: ChatTemplate,
    segments: Sequence[_Segment],
    pieces: Sequence[Piece],
    texts: Sequence[str],
    expected: Sequence[_Expected | TemplateError],
    *,
    is_cut: bool,
) -> list[TokenDifference]:
    """Compare the texts between the starts of outside messages."""
    end = _cut_end(template, str(pieces[-1])) if is_cut else str(pieces[-1])
    whole = write_pieces([*pieces[:-1], end], texts)
    actual, offsets = _read_ledger(template, segments, expected)
    encoder = template.structure.encoder
    shared = sorted(whole.starts.keys() & actual.starts.keys())
    places = [(0, 0), *((whole.starts[i], actual.starts[i]) for i in shared)]
    places.append((len(whole.text), len(actual.text)))
    found: list[TokenDifference] = []
    for (w_start, a_start), (w_stop, a_stop) in pairwise(places):
        ours, theirs = actual.text[a_start:a_stop], whole.text[w_start:w_stop]
        # Compare what is decoded too: some tokens absorb adjacent white space.
        if ours == theirs or (
            encoder.decode(encoder.encode_literal(ours))
            == encoder.decode(encoder.encode_literal(theirs))
        ):
            continue
        at = a_start + shared_length(ours, theirs)
        segment = segments[min(bisect_right(offsets, at), len(segments)) - 1]
        kind = "sampled_text" if segment.is_sampled else "observed_tokens"
        found.append(_difference(segment.turn, kind, theirs, ours))
    return found


def _check_rendering(
    template: ChatTemplate,
    segments: Sequence[_Segment],
    read: ShapedConversation,
    pieces: Sequence[Piece],
    *,
    gen: bool,
) -> list[TokenDifference]:
    """Compare the compiled template's text with what the template itself writes."""
    ours = write_pieces(pieces, _as_rendered(template, read))
    theirs = _render(template, read, gen=gen)
    if ours.text == theirs:
        return []
    at = shared_length(ours.text, theirs)
    message = max((i for i, start in ours.starts.items() if start <= at), default=0)
    segment = max((s for s in segments if s.first <= message), key=lambda s: s.first)
    return [_difference(segment.turn, "rendering", theirs, ours.text)]


def _as_rendered(template: ChatTemplate, read: ShapedConversation) -> list[str]:
    """Return the texts, with the placeholders that the template itself writes for media."""
    texts = read.texts
    for number, item in read.items.items():
        assert template.media is not None  # it has processed the item
        texts[number] = template.media.placeholders[item.kind]
    return texts


def _check_canonical(
    segments: Sequence[_Segment], expected: Sequence[_Expected | TemplateError]
) -> list[TokenDifference]:
    """Compare the observed tokens with the tokenizer's tokens of the template's text."""
    found: list[TokenDifference] = []
    for segment, delta in zip(segments[0::2], expected, strict=True):
        if segment.ids and isinstance(delta, _Expected):
            ours, theirs = delta.canonical()
            if ours != theirs:
                texts = f"tokens {theirs}", f"tokens {ours}"
                found.append(_difference(segment.turn, "other_tokens", *texts))
    return found


def _holds_control(template: ChatTemplate, read: ShapedConversation) -> bool:
    """Whether an outside text holds a control token, in any of its forms."""
    holds = template.structure.encoder.holds_control
    texts = zip(read.slots, read.texts, strict=True)
    return any(slot.origin is TextOrigin.OUTSIDE and holds(text) for slot, text in texts)


def _render(template: ChatTemplate, read: ShapedConversation, *, gen: bool) -> str:
    """Return what the template writes for the texts themselves."""
    render = template.structure.render_node(read.nodes, read.tools.nodes, gen)
    return render(dict(enumerate(read.texts)))


def _learn_whole(template: ChatTemplate, read: ShapedConversation, *, gen: bool) -> list[Piece]:
    """Learn what the template writes for a whole conversation of this shape, once."""
    render = template.structure.render_node(read.nodes, read.tools.nodes, gen)
    return template.learn_once(
        f"whole {gen}",
        read.key,
        lambda: template.place_media(learn(render, read.slots), read),
    )


def _read_ledger(
    template: ChatTemplate,
    segments: Sequence[_Segment],
    expected: Sequence[_Expected | TemplateError],
) -> tuple[Written, list[int]]:
    """Return the ledger as text, and where each of its segments starts."""
    texts = [template.decode(segment.ids) for segment in segments]
    if not segments[-1].ids:
        texts[-2] = _without_stop(template, texts[-2])
    own: dict[int, dict[int, int]] = {}
    for number, delta in zip(range(0, len(segments), 2), expected, strict=True):
        if isinstance(delta, _Expected) and delta.ids == segments[number].ids:
            texts[number], own[number] = delta.written
    offsets = [0, *accumulate(map(len, texts))][:-1]
    starts = {
        segments[number].first + message: offsets[number] + start
        for number, placed in own.items()
        for message, start in _first(placed)
    }
    return Written("".join(texts), starts), offsets


def _first(starts: dict[int, int]) -> Iterable[tuple[int, int]]:
    return list(starts.items())[:1]


def _cut_end(template: ChatTemplate, literal: str) -> str:
    """Return the last literal of a turn without the turn's end and what follows it."""
    closing = template.learn_once("closing", None, lambda: _find_closing(template.structure))
    if closing and literal.endswith(closing):
        return literal.removesuffix(closing)
    return _without_stop(template, up_to_end(template.structure, literal))


def _find_closing(structure: TemplateStructure) -> str:
    """Return what the template writes after the last answer of a conversation; empty if nothing."""
    user, answer = context_slot(0), context_slot(1)
    nodes = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    return str(cut(structure.render_after_preface(nodes, False), [user, answer])[-1])


def _without_stop(template: ChatTemplate, text: str) -> str:
    """Return a last turn without its end: a budget may have cut it, which is not a difference."""
    ends = [template.structure.end_of_turn.text, template.structure.last_end_of_turn]
    ends += [template.decode([id]) for id in template.stop_token_ids]
    return next((text.removesuffix(end) for end in ends if end and text.endswith(end)), text)


def _difference(turn: int, kind: str, expected: str, actual: str) -> TokenDifference:
    """Describe a difference, starting at its first character."""
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
    message = f"the template refuses: {error.args[0]}"
    return TokenDifference(turn=turn, kind="missing", expected=message, actual="")
