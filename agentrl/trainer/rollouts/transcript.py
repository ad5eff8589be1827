r"""A finished request for a reader: all that was said, token by token, and what is trained of it.

`read_transcript` turns a request into sections of marked tokens; `render_transcript` shows them on
a terminal, `plain_transcript` as text in which each line begins with its tokens' mark:

    + sampled and trained      - sampled, left out of the loss      (blank) shown to the policy

Nothing that a model or a tool wrote reaches the terminal as it is: control characters, escape codes
and invisible characters are shown as `\x1b`, markup is not read.
"""

import json
import math
import re
import sysconfig
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from agentrl.config.schema.reward import RewardConfig
from agentrl.rewards import CombinedReward, RewardPlacement, Source, combine_rewards, place_rewards
from agentrl.rewards.combination import TRAJECTORY_ALONE
from agentrl.rollout.records import CallRecord, Failure, Turn
from agentrl.rollout.request import AsyncRolloutRequest

Decode = Callable[[list[int]], str]
"""Token ids to text: special tokens kept, no clean-up of spaces."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so tokens that it can be split into, at most."""

_SPACE = "\N{OPEN BOX}"
_PART = "\N{HORIZONTAL ELLIPSIS}"
"""Stands in the table for a token that only begins a character."""
_LINE_END = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories that are shown escaped."""


class Mark(StrEnum):
    """What the loss makes of a token; the value is the plain transcript's sign."""

    TRAINED = "+"
    EXCLUDED = "-"
    OBSERVED = " "


_STYLES = {
    Mark.TRAINED: ("green underline", "bright_green underline"),
    Mark.EXCLUDED: ("yellow strike", "bright_yellow strike"),
    Mark.OBSERVED: ("bright_black", "bright_black"),
}
"""By mark, two styles that take turns, so that one sees where a token ends."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token as it is shown."""

    index: int
    """Place in the response; of a prompt token, in the prompt."""
    token_id: int
    text: str
    """What the token adds to the text; empty where it only begins a character."""
    mark: Mark
    log_prob: float | None
    """At sampling; None for what was not sampled."""
    reward: float | None = None
    """What lands on it under the run's `reward` section; None: nothing."""


@dataclass(frozen=True, slots=True)
class Section:
    """The prompt or one turn."""

    name: str
    """`prompt`, or the turn's number and role."""
    facts: str
    """Its tokens, seconds, finish reason, weights, what it was scored, what lands on its tokens."""
    tokens: tuple[TokenView, ...]
    notes: tuple[str, ...] = ()
    """Lines below the tokens: the calls of a completion and what came of them."""

    @property
    def header(self) -> str:
        """The line above the tokens."""
        return escape_line(_line(self.name, self.facts))


@dataclass(frozen=True, slots=True)
class Transcript:
    """A request, ready to be shown."""

    title: str
    sections: tuple[Section, ...]
    outcome: tuple[str, ...]
    """Lines at the end: state, stop reason, rewards, what broke."""


# Reading.


def read_transcript(
    request: AsyncRolloutRequest, decode: Decode, config: RewardConfig = TRAJECTORY_ALONE
) -> Transcript:
    """Take a request apart into what a reader wants to see, in order; text is not yet escaped.

    Args:
        request: Just finished, or read back from a file.
        decode: The tokenizer's decoding.
        config: By which rewards become one, and land on tokens.
    """
    placement = place_rewards(request, config)
    num_prompt = request.num_prompt_tokens
    ends = [num_prompt, *(num_prompt + turn.end for turn in request.turns)]
    texts = decode_pieces(request.input_ids, decode, breaks=ends)
    placed = dict(placement.rewards)
    response = _response_tokens(request, texts[num_prompt:], placed)
    turns = (
        Section(
            _line(f"turn {turn.index}", turn.role),
            _turn_facts(turn, response[turn.start : turn.end]),
            response[turn.start : turn.end],
            _turn_notes(turn),
        )
        for turn in request.turns
    )
    end = read_end(request, combine_rewards(request, config), placement)
    return Transcript(_title(request), (_prompt(request, texts), *turns), end)


def decode_pieces(ids: Sequence[int], decode: Decode, *, breaks: Sequence[int] = ()) -> list[str]:
    """Say what each token adds to the text.

    A byte-level token may hold a part of a character only: its piece is empty, and the token that
    completes the character gets the whole. Each token is decoded with the few before it, since
    some tokenizers write a token differently at the start of a text.

    Args:
        ids: Tokens of one text.
        decode: The tokenizer's decoding.
        breaks: Places behind which no character goes on, in any order: ends of turns.
    """
    pieces = [""] * len(ids)
    ends = set(breaks)
    shown = start = 0  # `ids[start:shown]` is the context, `ids[shown:]` waits to be shown
    for place in range(len(ids)):
        before = decode(list(ids[start:shown]))
        piece = decode(list(ids[start : place + 1]))[len(before) :]
        waits = piece.endswith(_REPLACEMENT) and place + 1 - shown < _LONGEST_CHARACTER
        if waits and place + 1 < len(ids) and place + 1 not in ends:
            continue
        pieces[place] = piece
        # Half a character is no context: it would join with what follows.
        start = place + 1 if piece.endswith(_REPLACEMENT) else shown
        shown = place + 1
    return pieces


def _prompt(request: AsyncRolloutRequest, texts: Sequence[str]) -> Section:
    ids = request.prompt_ids
    tokens = tuple(
        TokenView(index, token_id, texts[index], Mark.OBSERVED, None)
        for index, token_id in enumerate(ids)
    )
    return Section("prompt", _count(len(ids), "token"), tokens)


def _response_tokens(
    request: AsyncRolloutRequest, texts: Sequence[str], placed: Mapping[int, float]
) -> tuple[TokenView, ...]:
    is_sampled = [
        turn.role == "assistant" for turn in request.turns for _ in range(turn.num_tokens)
    ]
    marks = map(_mark, is_sampled, _trained_mask(request))
    log_probs = (
        log_prob if sampled else None
        for log_prob, sampled in zip(request.rollout_log_probs, is_sampled, strict=True)
    )
    rewards = (placed.get(place) or None for place in range(request.num_response_tokens))
    columns = zip(request.response_ids, texts, marks, log_probs, rewards, strict=True)
    return tuple(TokenView(index, *column) for index, column in enumerate(columns))


def _trained_mask(request: AsyncRolloutRequest) -> list[int]:
    """The loss mask, empty where the whole request was left out of the loss."""
    left_out = request.is_finished and not request.is_trained
    return [0] * request.num_response_tokens if left_out else request.loss_mask


def _mark(is_sampled: bool, is_trained: int) -> Mark:
    if not is_sampled:
        return Mark.OBSERVED
    return Mark.TRAINED if is_trained else Mark.EXCLUDED


def _title(request: AsyncRolloutRequest) -> str:
    num_trained = sum(_trained_mask(request))
    num_response = request.num_response_tokens
    share = f" ({num_trained / num_response:.0%})" if num_response else ""
    return _line(
        f"request {request.request_id}",
        f"sample {request.rollout_offset} of group {request.uid}",
        _count(request.num_prompt_tokens, "prompt token"),
        _count(num_response, "response token"),
        f"{num_trained} trained{share}",
    )


def _turn_facts(turn: Turn, tokens: Sequence[TokenView]) -> str:
    rewards = [token.reward for token in tokens if token.reward is not None]
    versions = sorted({span.version for span in turn.weight_versions})
    return _line(
        _count(turn.num_tokens, "token"),
        f"{turn.seconds:.2f} s",
        turn.finish_reason and f"finish: {turn.finish_reason}",
        versions and f"weights v{', v'.join(map(str, versions))}",
        turn.cached_tokens and f"{turn.cached_tokens} cached",
        turn.reward is not None and f"scored {turn.reward:g}",
        rewards and f"reward {math.fsum(rewards):g}",
        turn.excluded and f"left out of the loss: {turn.excluded}",
        turn.cut and f"cut: {turn.cut}",
    )


def _turn_notes(turn: Turn) -> tuple[str, ...]:
    return tuple(_call_note(call) for call in turn.calls)


def _call_note(call: CallRecord) -> str:
    arguments = json.dumps(call.arguments, ensure_ascii=False, default=str)
    return _line(
        f"{call.name}({arguments}) -> {call.outcome}",
        f"{call.seconds:.3f} s",
        _count(call.num_tokens, "token"),
        call.num_cut_tokens and f"{call.num_cut_tokens} tokens cut away",
        call.reward is not None and f"scored {call.reward:g}",
        # An error has a line for each of its details; a call has one line.
        _line(*map(str.strip, call.message.splitlines())),
    )


def _line(*parts: object) -> str:
    return " · ".join(str(part) for part in parts if part)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# Showing.


def print_transcript(console: Console, transcript: Transcript) -> None:
    """Show a transcript as the console can: in colours, or plain where it has none (a log file)."""
    if console.is_terminal and console.color_system is not None:
        console.print(render_transcript(transcript))
    else:
        console.out(plain_transcript(transcript), highlight=False)


def render_transcript(transcript: Transcript) -> Group:
    """Draw a transcript for a terminal: trained tokens green and underlined, observed ones grey."""
    lines = [Text(escape_line(transcript.title), style="bold")]
    for section in transcript.sections:
        lines.append(Text(f"\n── {section.header}", style="bold cyan"))
        lines.append(_coloured(section.tokens))
        lines += [Text(f"  > {escape_line(note)}", style="magenta") for note in section.notes]
    lines.append(Text("\n── end", style="bold cyan"))
    lines += [Text(escape_line(line)) for line in transcript.outcome]
    return Group(*lines)


def _coloured(tokens: Sequence[TokenView]) -> Text:
    text = Text()
    for place, token in enumerate(tokens):
        text.append(escape(token.text), style=_STYLES[token.mark][place % 2])
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


def plain_transcript(transcript: Transcript) -> str:
    """Write a transcript as text, each line of tokens behind their mark: `+`, `-` or a blank."""
    lines = [f"=== {escape_line(transcript.title)}"]
    for section in transcript.sections:
        lines += ["", f"--- {section.header}", *_marked_lines(section.tokens)]
        lines += [f"  > {escape_line(note)}" for note in section.notes]
    return "\n".join([*lines, "", "--- end", *map(escape_line, transcript.outcome), ""])


def _marked_lines(tokens: Sequence[TokenView]) -> Iterator[str]:
    for mark, run in groupby(tokens, key=lambda token: token.mark):
        text = escape("".join(token.text for token in run))
        yield from (f"{mark} | {line}" for line in text.removesuffix("\n").split("\n"))


def token_table(transcript: Transcript) -> Table:
    """List the response: each token's id, text, mark, log-probability, probability and reward."""
    titles = ("token", "id", "text", "mark", "log-prob", "prob", "reward")
    table = Table(*titles, title="response tokens")
    for section in transcript.sections[1:]:
        table.add_row("", "", Text(section.name, style="bold cyan"))
        for token in section.tokens:
            table.add_row(*_cells(token))
    return table


def _cells(token: TokenView) -> tuple[Text, ...]:
    shown = escape_line(token.text).replace(" ", _SPACE) or _PART
    text = Text(shown, style=_STYLES[token.mark][0])
    return (
        Text(str(token.index)),
        Text(str(token.token_id)),
        text,
        Text(token.mark.value),
        *map(Text, _figures(token.log_prob)),
        Text("" if token.reward is None else f"{token.reward:g}"),
    )


def _figures(log_prob: float | None) -> tuple[str, str]:
    if log_prob is None:
        return "", ""
    return f"{log_prob + 0.0:.4f}", f"{math.exp(log_prob):.3f}"


# Escaping.


def escape(text: str) -> str:
    """Make visible what would act on a terminal or could not be seen; lines still end."""
    return "".join(map(_escape_character, text))


def escape_line(text: str) -> str:
    """Escape a text that has to stay on one line."""
    return "\\n".join(map(escape, text.split("\n")))


def _escape_character(character: str) -> str:
    if character == "\n":
        return f"{_LINE_END}\n"
    if unicodedata.category(character) not in _HIDDEN:
        return character
    return character.encode("unicode_escape").decode("ascii")


_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$', re.M)
_NOT_THE_USERS = (
    str(Path(__file__).resolve().parents[2]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)
"""Where files of agentrl and of libraries begin."""


def read_end(
    request: AsyncRolloutRequest, reward: CombinedReward, placement: RewardPlacement
) -> tuple[str, ...]:
    """Say how a request ended, line by line; text is not yet escaped."""
    lines = [f"{request.state}: {request.stop_reason or 'not finished'}"]
    if request.dropped:
        lines.append(f"dropped: {request.dropped}")
    if request.error is not None:
        lines += _failure_lines(request.error)
    lines += _reward_lines(request, reward, placement)
    lines += [f"reward of tool {name}: {value:g}" for name, value in request.tool_rewards.items()]
    said = {part.source for part in reward.parts}  # a bonus stands in both
    extra = request.reward_extra_info
    lines += [f"{name}: {value}" for name, value in extra.items() if name not in said]
    lines += [
        f"tokens differ from the rendering in turn {d.turn} ({d.kind}): "
        f"expected {d.expected!r}, have {d.actual!r}"
        for d in request.differences
    ]
    return tuple(lines)


def _failure_lines(error: Failure) -> Iterator[str]:
    first, *more = error.message.splitlines() or [""]
    told = f": {first}" if first else ""
    yield f"fault of the {error.fault} in turn {error.turn}: {error.kind}{told}"
    yield from (f"  {line.strip()}" for line in more)
    if (place := find_place(error.traceback)) is not None:
        yield f"  at {place}"


def find_place(traceback: str) -> str | None:
    """Find the last frame of a traceback that is the user's own code; None: there is none.

    Example:
        >>> find_place('  File "/home/me/tools.py", line 3, in execute')
        '/home/me/tools.py:3, in execute'
    """
    frames = [m for m in _FRAME.finditer(traceback) if not m["file"].startswith(_NOT_THE_USERS)]
    return f"{frames[-1]['file']}:{frames[-1]['line']}, in {frames[-1]['name']}" if frames else None


def _reward_lines(
    request: AsyncRolloutRequest, reward: CombinedReward, placement: RewardPlacement
) -> Iterator[str]:
    """Tell what is trained; and of what it is made, where that is not the scorer's number alone."""
    is_scored = request.reward is not None
    if not is_scored and (request.error is not None or not reward.parts):
        yield "reward: not scored"
        return
    yield f"reward: {reward.total:g}{_place(placement)}"
    if is_scored and reward.total == request.reward and len(reward.parts) <= 1:
        return
    earned = {part.source: reward.of(part.source) for part in reward.parts}
    yield from (f"  {source}: {earned[source]:g}" for source in Source if source in earned)
    if not is_scored:
        yield "  scorer: not scored"
    elif earned.get(Source.TRAJECTORY) != request.reward:
        yield f"  scorer: {request.reward:g}"


def _place(placement: RewardPlacement) -> str:
    if placement.index is None:
        return ", on no token: none is trained"
    tokens = [placed.position for placed in placement.rewards if placed.value]
    if len(tokens) > 1:
        return f", on {len(tokens)} tokens, the last is response token {tokens[-1]}"
    return f", on response token {tokens[0] if tokens else placement.index}"
