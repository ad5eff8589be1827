"""Redraw `docs/trajectory.png` from a real rollout: `python docs/make_trajectory_figure.py`.

Rolls out problems of the quick start with the policy that it trained (run it before), takes the
first conversation that is right and called the calculator twice, and draws its tokens with the
rewards that `agentrl.rewards.placement` lays on them. Overrides of the run file may follow, such as
`trainer.default_local_dir=runs/elsewhere`.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle
from rich.console import Console
from transformers import AutoTokenizer

from agentrl.commands.rollout import RolloutOptions, rollout_from_file
from agentrl.commands.run_file import read_run_file
from agentrl.config import Purpose, load_config
from agentrl.config.schema.reward import RewardConfig
from agentrl.rewards import place_rewards
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.rollouts.transcript import Decode, decode_pieces

ROOT = Path(__file__).resolve().parents[1]
RUN_FILE = ROOT / "examples/gsm8k_multiturn/quickstart.yaml"
PICTURE = ROOT / "docs/trajectory.png"
REWARD = {"tool_call_bonus": 0.2, "max_bonus_calls": 2}
NUM_CALLS = 2
TIMES = "\N{MULTIPLICATION SIGN}"

INK, PAPER, FAINT = "#1f2933", "#ffffff", "#7b8794"
ROLES = {"prompt": "#eceff1", "sampled": "#cfe8d5", "observed": "#fbe3c6"}
WORDS = {
    "prompt": "prompt",
    "sampled": "sampled by the policy: trained",
    "observed": "shown to the policy: masked",
}
LANES = {"last_token": "#1b6ca8", "turn_last_token": "#8e44ad", "tool_call_tokens": "#c0392b"}

# The unit is a character across, and a line of text down.
WIDTH, MARGIN, LABEL, PADDING, GAP = 133.0, 6.0, 16.0, 0.9, 0.22
TEXT_LINE, LANE, BETWEEN = 1.55, 1.15, 0.75
INCHES_ACROSS, INCHES_DOWN = 0.081, 0.185
FONT, SMALL = 9.2, 8.2


class Token(NamedTuple):
    """A token as it is drawn."""

    text: str
    rewards: tuple[float, ...]
    """One for each lane; none, where no reward can lie."""

    @property
    def width(self) -> float:
        """Of its box."""
        return len(self.text) + PADDING


@dataclass(frozen=True)
class Stretch:
    """The prompt or a turn."""

    name: str
    role: str
    tokens: Sequence[Token]

    def lines(self) -> Iterator["Line"]:
        """Break it into lines, each token with its place across."""
        line: Line = []
        x = LABEL
        for token in self.tokens:
            if x + token.width > WIDTH:
                yield line
                line, x = [], LABEL
            line.append((x, token))
            x += token.width + GAP
        yield line

    @property
    def height(self) -> float:
        """Of all its lines, and of the room below."""
        return sum(TEXT_LINE + LANE * len(lanes_of(line)) for line in self.lines()) + BETWEEN


Line = list[tuple[float, Token]]


def lanes_of(line: Line) -> list[int]:
    """The lanes in which a reward lies below a line."""
    return [i for i in range(len(LANES)) if any(t.rewards and t.rewards[i] for _, t in line)]


def main(overrides: Sequence[str]) -> None:
    """Roll out, choose and draw."""
    folder = load_config(RUN_FILE, overrides).trainer.default_local_dir
    options = RolloutOptions(num=16, samples=1, split="train", greedy=True, tokens=False, out=None)
    given = [*overrides, f"model.path={folder}/trained"]
    requests = rollout_from_file(
        read_run_file(RUN_FILE, given, Purpose.ROLLOUT), options, Console(quiet=True)
    )
    chosen = next(r for r in requests if r.reward and r.num_tool_calls == NUM_CALLS)
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/trained")
    stretches = read_stretches(chosen, tokenizer.decode)
    draw(stretches).savefig(PICTURE, dpi=150, metadata={"Software": None})
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


def read_stretches(request: AsyncRolloutRequest, decode: Decode) -> list[Stretch]:
    """Cut a request into what is drawn: the question, and every turn."""
    num_prompt = request.num_prompt_tokens
    texts = [shown(piece) for piece in decode_pieces(request.input_ids, decode)]
    placed = [
        dict(place_rewards(request, RewardConfig.model_validate(REWARD | {"placement": p})).rewards)
        for p in LANES
    ]
    question = len(texts[:num_prompt]) - texts[:num_prompt][::-1].index("user") - 2
    opening = Token(f"… {question} tokens: what to do, the tool …", ())
    prompt = [Token(text, ()) for text in texts[question:num_prompt]]
    stretches = [Stretch("prompt", "prompt", [opening, *prompt])]
    for turn in request.turns:
        role = "sampled" if turn.role == "assistant" else "observed"
        tokens = [
            Token(texts[num_prompt + place], tuple(lane.get(place, 0.0) for lane in placed))
            for place in range(turn.start, turn.end)
        ]
        stretches.append(Stretch(f"turn {turn.index}\n{turn.role}", role, tokens))
    return stretches


def shown(piece: str) -> str:
    """A token's text on one line, its blanks left out; one that stands alone can be seen."""
    return piece.strip(" ").replace("\n", "⏎") or "␣" * len(piece)


def draw(stretches: Sequence[Stretch]) -> Figure:
    """Draw all stretches below one another."""
    height = sum(stretch.height for stretch in stretches) + 4.2
    figure = Figure(
        figsize=((WIDTH + MARGIN) * INCHES_ACROSS, height * INCHES_DOWN), facecolor=PAPER
    )
    axes = figure.add_axes((0.012, 0.0, 0.976, 1.0))
    axes.set(xlim=(0, WIDTH + MARGIN), ylim=(height, 0))
    axes.axis("off")
    largest = draw_legend(axes, [token for stretch in stretches for token in stretch.tokens])
    y = 4.4
    for stretch in stretches:
        draw_stretch(axes, stretch, y, largest)
        y += stretch.height
    return figure


def draw_legend(axes: Axes, tokens: Sequence[Token]) -> list[float]:
    """Say what the colours are, and what each placement sums to; returns the largest of each."""
    step = (WIDTH - LABEL) / len(LANES)
    for number, (role, words) in enumerate(WORDS.items()):
        draw_box(axes, LABEL + number * step, 0.5, 2.2, ROLES[role])
        told = LABEL + number * step + 3.0
        axes.text(told, 1.12, words, fontsize=FONT, color=INK, va="center")
    lanes = list(zip(*(token.rewards for token in tokens if token.rewards), strict=True))
    for number, (name, colour) in enumerate(LANES.items()):
        draw_bar(axes, LABEL + number * step, 3.05, 2.2, 0.6, colour)
        words = f"{name}, in all {sum(lanes[number]):.1f}"
        told = LABEL + number * step + 3.0
        axes.text(told, 2.72, words, fontsize=FONT, color=INK, va="center")
    return [max(lane) for lane in lanes]


def draw_stretch(axes: Axes, stretch: Stretch, y: float, largest: Sequence[float]) -> None:
    """Draw the name, and line by line the tokens and what lies on them."""
    name, _, role = stretch.name.partition("\n")
    axes.text(0, y + 0.62, name, fontsize=FONT, color=INK, va="center", weight="bold")
    axes.text(6.7, y + 0.62, role, fontsize=FONT, color=FAINT, va="center")
    for line in stretch.lines():
        for x, token in line:
            draw_box(axes, x, y, token.width, ROLES[stretch.role])
            axes.text(x + token.width / 2, y + 0.66, token.text, fontsize=FONT, color=INK,
                      va="center", ha="center", family="monospace")  # fmt: skip
        y += TEXT_LINE
        for lane in lanes_of(line):
            y += LANE
            draw_lane(
                axes, [(x, t.width, t.rewards[lane]) for x, t in line], y - 0.1, lane, largest
            )


def draw_box(axes: Axes, x: float, y: float, width: float, colour: str) -> None:
    """Draw the ground of a token."""
    style = "round,pad=0,rounding_size=0.3"
    axes.add_patch(FancyBboxPatch((x, y), width, 1.25, boxstyle=style, fc=colour, ec="none"))


def draw_bar(axes: Axes, x: float, bottom: float, width: float, height: float, colour: str) -> None:
    """Draw the reward of a token."""
    axes.add_patch(Rectangle((x, bottom - height), width, height, color=colour, lw=0))


def draw_lane(
    axes: Axes,
    line: Sequence[tuple[float, float, float]],
    bottom: float,
    lane: int,
    largest: Sequence[float],
) -> None:
    """Draw one placement's rewards below a line of tokens, each value told once.

    Args:
        axes: Of the figure.
        line: Place, width and reward of each token.
        bottom: Where the bars stand.
        lane: Which placement.
        largest: Reward of each placement: as high as its bars become.
    """
    end = line[-1][0] + line[-1][1]
    axes.plot([LABEL, end], [bottom, bottom], color="#d5dbe0", lw=0.6, zorder=0)
    for value, run in groupby(line, key=lambda token: round(token[2], 4)):
        tokens = list(run)
        if value:
            for x, width, _ in tokens:
                height = 0.92 * value / largest[lane]
                draw_bar(axes, x, bottom, width, height, list(LANES.values())[lane])
            told = f"{len(tokens)} {TIMES} {value:.3g}" if len(tokens) > 1 else f"{value:.3g}"
            x = tokens[-1][0] + tokens[-1][1] + 0.6
            axes.text(x, bottom - 0.42, told, fontsize=SMALL, color=INK, va="center")


if __name__ == "__main__":
    main(sys.argv[1:])
