r"""A finished request for a reader: the whole conversation, token by token, and what is trained.

`read_transcript` turns a request into sections of tokens with a status. `render_transcript` shows
them on a terminal; `plain_transcript` writes text in which each line begins with a sign:

    + sampled and trained      - sampled, left out of the loss      (blank) not sampled

Text of a model or a tool is escaped before it is shown: control characters, escape codes and
invisible characters appear as `\x1b`, and markup is not interpreted.
"""

import math
import re
import sysconfig
import unicodedata
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from agentrl.config.schema.reward import RewardConfig
from agentrl.messages import dump_json
from agentrl.rewards import CombinedReward, RewardPlacement, Source, combine_rewards, place_rewards
from agentrl.rewards.combination import TRAJECTORY_ALONE
from agentrl.rollout.records import CallRecord, MediaRun, Turn
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.rollouts.pictures import ShownPicture, draw_picture

Decode = Callable[[list[int]], str]
"""Token ids to text: special tokens kept, no clean-up of spaces."""

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, and so the maximum of tokens that it can be split into."""

_SPACE = "\N{OPEN BOX}"
_PART = "\N{HORIZONTAL ELLIPSIS}"
"""Shown in the table for a token that does not complete a character."""
_LINE_END = "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}"
_ESCAPED_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories of invisible characters."""
_FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>.+)$', re.M)
_LIBRARY_PREFIXES = (
    str(Path(__file__).resolve().parents[2]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<",
)
"""Prefixes of the files of agentrl and of libraries."""


class TokenStatus(StrEnum):
    """How the loss uses a token; the value is the sign in a plain transcript."""

    TRAINED = "+"
    EXCLUDED = "-"
    OBSERVED = " "


_STYLES = {
    TokenStatus.TRAINED: ("green underline", "bright_green underline"),
    TokenStatus.EXCLUDED: ("yellow strike", "bright_yellow strike"),
    TokenStatus.OBSERVED: ("bright_black", "bright_black"),
}
"""By status, two styles that alternate, so that the ends of tokens are visible."""


@dataclass(frozen=True, slots=True)
class TokenView:
    """One token as it is shown."""

    index: int
    """Index in the response, or in the prompt."""
    token_id: int
    text: str
    """The text that the token adds; empty if it does not complete a character."""
    status: TokenStatus
    log_prob: float | None = None
    """Log-probability at sampling; None for a token that was not sampled."""
    reward: float | None = None
    """Reward on the token under the run's `reward` section; None for no reward."""


@dataclass(frozen=True, slots=True)
class Section:
    """The prompt or one turn."""

    name: str
    """`prompt`, or the turn's number and role."""
    facts: str
    """Tokens, seconds, finish reason, weights, score, and the reward on the tokens."""
    tokens: tuple[TokenView, ...]
    notes: tuple[str, ...] = ()
    """Lines after the tokens: the calls of a completion and their results."""
    pictures: tuple[ShownPicture, ...] = ()
    """The images and videos among the tokens, in order."""

    @property
    def header(self) -> str:
        """The line before the tokens."""
        return escape_line(_line(self.name, self.facts))


@dataclass(frozen=True, slots=True)
class Transcript:
    """A request, ready to be shown."""

    title: str
    sections: tuple[Section, ...]
    outcome: tuple[str, ...]
    """Lines at the end: state, stop reason, rewards, error."""


# Reading.


def read_transcript(
    request: AsyncRolloutRequest, decode: Decode, config: RewardConfig = TRAJECTORY_ALONE
) -> Transcript:
    """Split a request into sections, in order; text is not yet escaped.

    Args:
        request: A request that has just finished, or was read from a file.
        decode: The tokenizer's decoding.
        config: How rewards are combined and placed on tokens.
    """
    placement = place_rewards(request, config)
    sections: list[Section] = []
    num_response = num_trained = 0
    for one, part in zip(request.sequences, placement.by_sequence(), strict=True):
        is_left_out = request.is_finished and not (request.is_trained and one.is_trained)
        mask = [0] * one.num_response_tokens if is_left_out else one.loss_mask
        num_response, num_trained = num_response + len(mask), num_trained + sum(mask)
        prefix = _sequence_name(one) if request.branches else ""
        sections += _read_sections(one, mask, dict(part.rewards), decode, prefix)
    share = f" ({num_trained / num_response:.0%})" if num_response else ""
    title = _line(
        f"request {request.request_id}",
        f"sample {request.rollout_offset} of group {request.uid}",
        request.branches and _count(len(request.sequences), "sequence"),
        _count(request.num_prompt_tokens, "prompt token"),
        _count(num_response, "response token"),
        f"{num_trained} trained{share}",
    )
    end = read_end(request, combine_rewards(request, config), placement)
    return Transcript(title, tuple(sections), end)


def _sequence_name(one: AsyncRolloutRequest) -> str:
    """Name a sequence by its id, its cause, and why it ended if it is a branch."""
    cause = one.branch_cause and f"{one.branch_cause}: {one.stop_reason}"
    return f"{one.request_id} ({cause or 'the last sequence'}) "


def _read_sections(
    request: AsyncRolloutRequest,
    mask: Sequence[int],
    rewards: dict[int, float],
    decode: Decode,
    prefix: str,
) -> Iterator[Section]:
    """Split one sequence into its prompt and its turns."""
    num_prompt, ids = request.num_prompt_tokens, request.input_ids
    shown = _ShownTokens.of(request, decode)
    prompt = tuple(
        TokenView(index, ids[index], shown.texts[index], TokenStatus.OBSERVED)
        for index in shown.indices(0, num_prompt)
    )
    pictures = shown.pictures(0, num_prompt)
    yield Section(f"{prefix}prompt", _count(num_prompt, "token"), prompt, pictures=pictures)
    for turn in request.turns:
        span = num_prompt + turn.start, num_prompt + turn.end
        tokens = tuple(
            _read_token(
                request, index - num_prompt, shown.texts[index], turn, mask[index - num_prompt],
                rewards,
            )
            for index in shown.indices(*span)
        )  # fmt: skip
        kind = turn.is_compaction and ("summary" if turn.role == "assistant" else "compaction")
        name, facts = (
            _line(f"{prefix}turn {turn.index}", turn.role, kind),
            _turn_facts(turn, tokens),
        )
        notes = tuple(map(_call_note, turn.calls))
        yield Section(name, facts, tokens, notes, shown.pictures(*span))


@dataclass(frozen=True, slots=True)
class _ShownTokens:
    """The tokens of a sequence that are shown: of each image, one for all its placeholders."""

    texts: dict[int, str]
    """The text that a token of `input_ids` adds, by its index."""
    runs: Sequence[MediaRun]
    media: Mapping[str, Sequence[Any]]
    """`multi_modal_data` of the request."""

    @classmethod
    def of(cls, request: AsyncRolloutRequest, decode: Decode) -> "_ShownTokens":
        """Decode the tokens that are shown."""
        runs, ids, num_prompt = request.media_runs, request.input_ids, request.num_prompt_tokens
        hidden = {index for run in runs for index in range(run.start + 1, run.end)}
        indices = [index for index in range(len(ids)) if index not in hidden]
        ends = [num_prompt, *(num_prompt + turn.end for turn in request.turns)]
        breaks = [bisect_left(indices, end) for end in ends]
        pieces = decode_pieces([ids[index] for index in indices], decode, breaks=breaks)
        texts = dict(zip(indices, pieces, strict=True))
        names = {run.start: f"[{run.kind}: {_count(run.end - run.start, 'token')}]" for run in runs}
        return cls(texts | names, runs, request.multi_modal_data)

    def indices(self, start: int, end: int) -> list[int]:
        """Return the shown tokens of `[start, end)`."""
        return [index for index in range(start, end) if index in self.texts]

    def pictures(self, start: int, end: int) -> tuple[ShownPicture, ...]:
        """Return the images and videos that begin in `[start, end)`."""
        found = [run for run in self.runs if start <= run.start < end and not run.offset]
        return tuple(ShownPicture(self._picture(run), run.source) for run in found)

    def _picture(self, run: MediaRun) -> Any:
        media = self.media.get(run.kind, ())
        return media[run.index] if run.index is not None and run.index < len(media) else None


def decode_pieces(ids: Sequence[int], decode: Decode, *, breaks: Sequence[int] = ()) -> list[str]:
    """Return the text that each token adds.

    A byte-level token may hold only a part of a character. Then its piece is empty, and the token
    that completes the character gets all of it. Each token is decoded together with the few tokens
    before it, because some tokenizers write a token differently at the start of a text.

    Args:
        ids: Tokens of one text.
        decode: The tokenizer's decoding.
        breaks: Indices at which a character must end, in any order: ends of turns.
    """
    pieces = [""] * len(ids)
    ends = set(breaks)
    shown = start = 0  # `ids[start:shown]` is the context, `ids[shown:]` is not shown yet
    for index in range(len(ids)):
        before = decode(list(ids[start:shown]))
        piece = decode(list(ids[start : index + 1]))[len(before) :]
        is_partial = piece.endswith(_REPLACEMENT) and index + 1 - shown < _LONGEST_CHARACTER
        if is_partial and index + 1 < len(ids) and index + 1 not in ends:
            continue
        pieces[index] = piece
        # A partial character must not become context: it would join with the next bytes.
        start = index + 1 if piece.endswith(_REPLACEMENT) else shown
        shown = index + 1
    return pieces


def _read_token(
    request: AsyncRolloutRequest,
    index: int,
    text: str,
    turn: Turn,
    is_trained: int,
    rewards: dict[int, float],
) -> TokenView:
    token_id, reward = request.response_ids[index], rewards.get(index) or None
    if turn.role != "assistant":
        return TokenView(index, token_id, text, TokenStatus.OBSERVED, reward=reward)
    status = TokenStatus.TRAINED if is_trained else TokenStatus.EXCLUDED
    return TokenView(index, token_id, text, status, request.rollout_log_probs[index], reward)


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


def _call_note(call: CallRecord) -> str:
    arguments = dump_json(call.arguments, default=str)
    return _line(
        f"{call.name}({arguments}) -> {call.outcome}",
        f"{call.seconds:.3f} s",
        _count(call.num_tokens, "token"),
        call.num_cut_tokens and f"{call.num_cut_tokens} tokens cut away",
        call.reward is not None and f"scored {call.reward:g}",
        # An error has a line for each of its details; a call has one line.
        _line(*map(str.strip, call.message.splitlines())),
    )


def read_end(
    request: AsyncRolloutRequest, reward: CombinedReward, placement: RewardPlacement
) -> tuple[str, ...]:
    """Describe how a request ended, line by line; text is not yet escaped."""
    lines = [f"{request.state}: {request.stop_reason or 'not finished'}"]
    if request.dropped:
        lines.append(f"dropped: {request.dropped}")
    if (error := request.error) is not None:
        first, *more = error.message.splitlines() or [""]
        message = f": {first}" if first else ""
        lines.append(f"fault of the {error.fault} in turn {error.turn}: {error.kind}{message}")
        lines += [f"  {line.strip()}" for line in more]
        if (frame := find_user_frame(error.traceback)) is not None:
            lines.append(f"  at {frame}")
    lines += _reward_lines(request, reward, placement)
    lines += [f"reward of tool {name}: {value:g}" for name, value in request.tool_rewards.items()]
    shown = {part.source for part in reward.parts}  # `reward_extra_info` has bonuses too
    extra = request.reward_extra_info
    lines += [f"{name}: {value}" for name, value in extra.items() if name not in shown]
    lines += [
        f"tokens differ from the rendering in turn {d.turn} ({d.kind}): "
        f"expected {d.expected!r}, have {d.actual!r}"
        for d in request.differences
    ]
    return tuple(lines)


def find_user_frame(traceback: str) -> str | None:
    """Find the last frame of a traceback that is in the user's own code.

    Example:
        >>> find_user_frame('  File "/home/me/tools.py", line 3, in execute')
        '/home/me/tools.py:3, in execute'
    """
    frames = [m for m in _FRAME.finditer(traceback) if not m["file"].startswith(_LIBRARY_PREFIXES)]
    return f"{frames[-1]['file']}:{frames[-1]['line']}, in {frames[-1]['name']}" if frames else None


def _reward_lines(
    request: AsyncRolloutRequest, reward: CombinedReward, placement: RewardPlacement
) -> Iterator[str]:
    """Describe the trained reward, and its parts if it is not just the scorer's number."""
    is_scored = request.reward is not None
    if not is_scored and (request.error is not None or not reward.parts):
        yield "reward: not scored"
        return
    tokens = [placed.position for placed in placement.rewards if placed.value]
    if placement.index is None:
        position = ", on no token: none is trained"
    elif request.branches:
        position = f", on {_count(len(tokens), 'token')} of {len(placement.starts)} sequences"
    elif len(tokens) > 1:
        position = f", on {len(tokens)} tokens, the last is response token {tokens[-1]}"
    else:
        position = f", on response token {tokens[0] if tokens else placement.index}"
    yield f"reward: {reward.total:g}{position}"
    if is_scored and reward.total == request.reward and len(reward.parts) <= 1:
        return
    earned = {part.source: reward.of(part.source) for part in reward.parts}
    yield from (f"  {source}: {earned[source]:g}" for source in Source if source in earned)
    if not is_scored:
        yield "  scorer: not scored"
    elif earned.get(Source.TRAJECTORY) != request.reward:
        yield f"  scorer: {request.reward:g}"


def _line(*parts: object) -> str:
    return " · ".join(str(part) for part in parts if part)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# Showing.


def print_transcript(console: Console, transcript: Transcript) -> None:
    """Show a transcript in colors, or as plain text if the console has no colors (a log file)."""
    if console.is_terminal and console.color_system is not None:
        console.print(render_transcript(transcript))
    else:
        console.out(plain_transcript(transcript), highlight=False)


def render_transcript(transcript: Transcript) -> Group:
    """Draw a transcript for a terminal: trained tokens green and underlined, observed ones gray."""
    lines = [Text(escape_line(transcript.title), style="bold")]
    for section in transcript.sections:
        lines.append(Text(f"\n── {section.header}", style="bold cyan"))
        text = Text()
        for number, token in enumerate(section.tokens):
            text.append(escape(token.text), style=_STYLES[token.status][number % 2])
        if text.plain.endswith("\n"):
            text.right_crop(1)
        lines.append(text)
        for picture in section.pictures:
            lines += [draw_picture(picture.data), Text(f"  {escape_line(picture.describe())}")]
        lines += [Text(f"  > {escape_line(note)}", style="magenta") for note in section.notes]
    lines.append(Text("\n── end", style="bold cyan"))
    lines += [Text(escape_line(line)) for line in transcript.outcome]
    return Group(*lines)


def plain_transcript(transcript: Transcript) -> str:
    """Write a transcript as text, each line of tokens after their sign: `+`, `-` or a blank."""
    lines = [f"=== {escape_line(transcript.title)}"]
    for section in transcript.sections:
        lines += ["", f"--- {section.header}"]
        for status, run in groupby(section.tokens, key=lambda token: token.status):
            text = escape("".join(token.text for token in run))
            lines += [f"{status} | {line}" for line in text.removesuffix("\n").split("\n")]
        lines += [f"  {escape_line(picture.describe())}" for picture in section.pictures]
        lines += [f"  > {escape_line(note)}" for note in section.notes]
    return "\n".join([*lines, "", "--- end", *map(escape_line, transcript.outcome), ""])


def token_table(transcript: Transcript) -> Table:
    """List the response: each token's id, text, sign, log-probability, probability and reward."""
    titles = ("token", "id", "text", "mark", "log-prob", "prob", "reward")
    table = Table(*titles, title="response tokens")
    for section in transcript.sections[1:]:
        table.add_row("", "", Text(section.name, style="bold cyan"))
        for token in section.tokens:
            text = escape_line(token.text).replace(" ", _SPACE) or _PART
            log_prob = token.log_prob
            table.add_row(
                str(token.index),
                str(token.token_id),
                Text(text, style=_STYLES[token.status][0]),
                token.status.value,
                "" if log_prob is None else f"{log_prob + 0.0:.4f}",
                "" if log_prob is None else f"{math.exp(log_prob):.3f}",
                "" if token.reward is None else f"{token.reward:g}",
            )
    return table


# Escaping.


def escape(text: str) -> str:
    """Make characters visible that would control a terminal or be invisible; keep line ends."""
    return "".join(map(_escape_character, text))


def escape_line(text: str) -> str:
    """Escape a text that must stay on one line."""
    return "\\n".join(map(escape, text.split("\n")))


def _escape_character(character: str) -> str:
    if character == "\n":
        return f"{_LINE_END}\n"
    if unicodedata.category(character) not in _ESCAPED_CATEGORIES:
        return character
    return character.encode("unicode_escape").decode("ascii")
