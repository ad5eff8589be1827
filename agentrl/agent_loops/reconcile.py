"""Find the sampled tokens in what an agent loop returns (train what was sampled).

A call of the engine is part of a sequence if the sequence has exactly the tokens of the call's
prompt, followed by tokens of its completion. So a token with mask 1 was sampled, after exactly the
tokens before it. A loop that gives mask 1 to any other token is refused, with the place.
"""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Any

from pydantic import BaseModel, ValidationError

from agentrl.agent_loops.output import AgentLoopOutput
from agentrl.agent_loops.server_manager import AsyncLLMServerManager, RecordedCall
from agentrl.errors import AgentError
from agentrl.media.records import MediaItem, MediaSpan

LOG_PROB_TOLERANCE = 1e-4
"""How far a loop's log-probability may be from the recorded one: loops may round to float32."""
_RESULT = "an AgentLoopOutput, or a list of them"


SampledToken = tuple[int, int]
"""The index of a call, and the index of a token in its completion."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens `[start, end)` of a response: of one call with one mask, or observed."""

    start: int
    end: int
    call: RecordedCall | None = None
    """The call that sampled them; None if the loop added them."""
    offset: int = 0
    """Index of the first token in the completion."""
    is_trained: bool = False
    is_repeated: bool = False
    """Whether an earlier output of the trajectory trains the tokens."""

    @property
    def tokens(self) -> set[SampledToken]:
        """The tokens, if a call sampled them."""
        if self.call is None:
            return set()
        length = self.end - self.start
        return {(self.call.index, n) for n in range(self.offset, self.offset + length)}


@dataclass(frozen=True, slots=True)
class CheckedSequence:
    """A checked output: its tokens and the origin of each."""

    prompt_ids: list[int]
    response_ids: list[int]
    runs: list[TokenRun]
    media: list[MediaSpan]
    """The runs of placeholder tokens of images and videos; they count from the first token of the
    prompt."""

    @property
    def calls(self) -> list[RecordedCall]:
        """The calls that sampled its tokens, in order."""
        found = {run.call.index: run.call for run in self.runs if run.call is not None}
        return list(found.values())


def read_outputs(returned: object) -> list[AgentLoopOutput]:
    """Read the return value of a loop: one output, or a list; an output may be a dict.

    Raises:
        AgentError: If it is something else, or a field has a wrong type.
    """
    items: list[object] = [*returned] if isinstance(returned, list | tuple) else [returned]
    if not items:
        raise AgentError("the loop returned an empty list", expected=_RESULT)
    return [_read_output(item, index) for index, item in enumerate(items)]


def _read_output(item: Any, index: int) -> AgentLoopOutput:
    if isinstance(item, AgentLoopOutput):
        item = vars(item)  # a loop may have assigned fields, which pydantic does not check
    elif isinstance(item, BaseModel):
        item = item.model_dump()
    if not isinstance(item, dict):
        raise AgentError(f"the loop returned a {type(item).__name__}", expected=_RESULT)
    try:
        return AgentLoopOutput.model_validate(item)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise AgentError(f"output {index}, {field}: {first['msg']}", expected=_RESULT) from None


def check_sequence(
    output: AgentLoopOutput,
    manager: AsyncLLMServerManager,
    trained_before: Collection[SampledToken] = frozenset(),
    items: Sequence[MediaItem] = (),
) -> CheckedSequence:
    """Check an output against the recorded calls, and find the origin of every token.

    Args:
        output: One sequence.
        manager: Has the calls of the request.
        trained_before: Tokens that earlier outputs of the trajectory train. They are not trained
            again.
        items: The output's images and videos; if there are none, those of its calls.

    Raises:
        AgentError: If lengths disagree, a mask is not 0 or 1, an id is not in the vocabulary, or a
            token with mask 1 was not sampled after exactly the tokens before it.
    """
    _check_form(output, manager)
    media = _place_media(output, manager, items)
    covers = _cover(output, manager.calls, trained_before, media)
    mask, runs, end = output.response_mask, list[TokenRun](), 0
    for cover in [*covers, None]:
        start = len(mask) if cover is None else cover.start
        if end < start:
            _refuse_trained(output, manager.calls, end, start)
            runs.append(TokenRun(end, start))
        if cover is not None:
            runs.extend(_split(cover, mask, trained_before))
            end = cover.end
    sequence = CheckedSequence(output.prompt_ids, output.response_ids, runs, media)
    _check_log_probs(output, sequence)
    return sequence


def _check_form(output: AgentLoopOutput, manager: AsyncLLMServerManager) -> None:
    num_tokens = len(output.response_ids)
    if not output.prompt_ids or not num_tokens:
        part = "response_ids" if output.prompt_ids else "prompt_ids"
        raise AgentError(f"{part} are empty", expected="at least one token")
    lengths = {"response_mask": output.response_mask, "response_logprobs": output.response_logprobs}
    for name, values in lengths.items():
        if values is not None and len(values) != num_tokens:
            raise AgentError(
                f"{name} has {len(values)} entries and response_ids {num_tokens}",
                expected="one for each token",
            )
    for index, value in enumerate(output.response_mask):
        if value not in (0, 1):
            raise AgentError(f"response_mask[{index}] is {value}", expected="0 or 1")
    for index, value in enumerate(output.response_logprobs or ()):
        if not (math.isfinite(value) and value <= LOG_PROB_TOLERANCE):
            raise AgentError(
                f"response_logprobs[{index}] is {value}", expected="a finite number <= 0"
            )
    for name, ids in (("prompt_ids", output.prompt_ids), ("response_ids", output.response_ids)):
        if (index := manager.find_unknown(ids)) is not None:
            raise AgentError(
                f"{name}[{index}] is {ids[index]}", expected=f"0 to {manager.vocab_size - 1}"
            )


def _place_media(
    output: AgentLoopOutput, manager: AsyncLLMServerManager, items: Sequence[MediaItem]
) -> list[MediaSpan]:
    """Find the tokens of the images and videos of an output.

    Raises:
        AgentError: If they do not agree, or the prompt ends within an image.
    """
    ids = output.prompt_ids + output.response_ids
    if not manager.media.is_placeholder(ids):
        return []
    if not items:
        matching = [
            call for call in manager.calls if ids[: len(call.prompt_ids)] == call.prompt_ids
        ]
        longest = max(matching, key=lambda call: _num_common(call, ids), default=None)
        items = longest.items if longest else []
    # A loop may have images of an observation that did not fit into its budget.
    media = manager.place(ids, items, name="prompt_ids + response_ids", may_be_unused=True)
    end = len(output.prompt_ids)
    if any(span.start < end < span.end for span in media):
        raise AgentError("prompt_ids end within an image", expected="whole images in prompt_ids")
    return media


def _num_common(call: RecordedCall, ids: Sequence[int]) -> int:
    start = len(call.prompt_ids)
    return start + _common_length(call.token_ids, ids[start : start + len(call.token_ids)])


def _cover(
    output: AgentLoopOutput,
    calls: Sequence[RecordedCall],
    trained_before: Collection[SampledToken],
    media: Sequence[MediaSpan],
) -> list[TokenRun]:
    """Find the spans of the response that calls sampled, in order and without overlap."""
    prompt_len = len(output.prompt_ids)
    ids = output.prompt_ids + output.response_ids
    best: dict[int, TokenRun] = {}
    repeated = {call for call, _ in trained_before}
    for call in sorted(calls, key=lambda call: call.index in repeated):
        start = len(call.prompt_ids)
        end = _num_common(call, ids)
        known = best.get(start)
        is_longer = end > max(start, prompt_len) and (known is None or end > known.end + prompt_len)
        if is_longer and ids[:start] == call.prompt_ids and call.is_shown_in(media):
            first = max(start, prompt_len)
            best[start] = TokenRun(first - prompt_len, end - prompt_len, call, first - start)
    chosen: list[TokenRun] = []
    for _, run in sorted(best.items()):
        if chosen and run.end <= chosen[-1].end:
            continue
        if chosen and run.start < chosen[-1].end:  # the loop cut a completion and sampled again
            last = chosen.pop()
            if last.start < run.start:
                chosen.append(TokenRun(last.start, run.start, last.call, last.offset))
        chosen.append(run)
    return chosen


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    if left == right:
        return len(left)
    return sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False))
    )


def _split(
    cover: TokenRun, mask: Sequence[int], trained_before: Collection[SampledToken]
) -> Iterator[TokenRun]:
    """Split a call's tokens by the mask, and by whether an earlier output trains them."""
    assert cover.call is not None  # `_cover` returns spans of calls
    index, shift = cover.call.index, cover.offset - cover.start

    def kind(at: int) -> tuple[bool, bool]:
        is_repeated = (index, at + shift) in trained_before
        return bool(mask[at]) and not is_repeated, is_repeated

    for (is_trained, is_repeated), group in groupby(range(cover.start, cover.end), kind):
        places = list(group)
        start, end = places[0], places[-1] + 1
        yield TokenRun(start, end, cover.call, start + shift, is_trained, is_repeated)


def _refuse_trained(
    output: AgentLoopOutput, calls: Sequence[RecordedCall], start: int, end: int
) -> None:
    """Raise for the first trained token of a span that no call sampled."""
    if 1 not in output.response_mask[start:end]:
        return
    index = output.response_mask.index(1, start, end)
    raise AgentError(
        f"response_ids[{index}] is {output.response_ids[index]} with mask 1, but it was not "
        f"sampled after the tokens before it: {_explain(output, calls, index)}",
        expected="mask 1 only on tokens that server_manager.generate returned for exactly the "
        "tokens before them, unchanged and in order; mask 0 on all others",
    )


def _explain(output: AgentLoopOutput, calls: Sequence[RecordedCall], index: int) -> str:
    """Say how the tokens differ from the call that agrees with them for longest."""
    if not calls:
        return "the loop did not call generate"
    ids = output.prompt_ids + output.response_ids
    agreeing = [_common_length(call.prompt_ids + call.token_ids, ids) for call in calls]
    length, call = max(zip(agreeing, calls, strict=True), key=lambda pair: pair[0])
    whole, start = call.prompt_ids + call.token_ids, len(call.prompt_ids)
    if length >= len(whole):
        return f"call {call.index} ends before it, at response token {length - _prompt(output)}"
    if length >= start:
        return f"call {call.index} sampled {whole[length]} as its token {length - start}"
    where = length - _prompt(output)
    place = f"response_ids[{where}]" if where >= 0 else f"prompt_ids[{length}]"
    got = ids[length] if length < len(ids) else "the end"
    return (
        f"the tokens before it are not those that call {call.index} got: {place} is {got}, and "
        f"prompt_ids[{length}] of the call was {whole[length]}"
    )


def _prompt(output: AgentLoopOutput) -> int:
    return len(output.prompt_ids)


def _check_log_probs(output: AgentLoopOutput, sequence: CheckedSequence) -> None:
    given = output.response_logprobs
    if given is None:
        return
    for run in sequence.runs:
        if run.call is None or not run.is_trained:
            continue
        recorded = run.call.completion.log_probs[run.offset : run.offset + run.end - run.start]
        for index, (own, theirs) in enumerate(zip(recorded, given[run.start :], strict=False)):
            if abs(own - theirs) > LOG_PROB_TOLERANCE:
                raise AgentError(
                    f"response_logprobs[{run.start + index}] is {theirs}, and the engine reported "
                    f"{own}",
                    expected="the log-probabilities that generate returned, or None",
                )
