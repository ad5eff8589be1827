"""Draw the figures of docs/concepts: `python docs/make_figures.py`.

Each figure is SVG on a light panel of its own, so that it can be read on any page. What a figure
shows is taken from the code: the edges of `agentrl.rollout.states`, the advantages that
`agentrl.algorithms` computes, the tests that docs/invariants.md names. `figures/conversation.json`
is a conversation of the quick start; `python docs/make_figures.py runs/quickstart` records it again
from the rollouts of such a run.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentrl.algorithms import compute_grpo_outcome_advantage
from agentrl.rollout.states import FINAL_STATES, TRANSITIONS, RequestState

DOCS = Path(__file__).resolve().parent
FOLDER = DOCS / "concepts/figures"
CONVERSATION = FOLDER / "conversation.json"
INK, FAINT, PANEL, LINE = "#1f2933", "#616e7c", "#fbfbf8", "#9aa5b1"
GREEN, ORANGE, GRAY, BLUE, RED = "#cfe8d5", "#fbe3c6", "#e4e7eb", "#cfe0f5", "#f5cfcf"
SANS = "Helvetica, Arial, DejaVu Sans, sans-serif"
MONO = "DejaVu Sans Mono, Menlo, Consolas, monospace"
WIDTH = 760.0


@dataclass
class Drawing:
    """The elements of a figure, from top to bottom."""

    height: float
    elements: list[str] = field(default_factory=list[str])

    def text(
        self, x: float, y: float, text: str, *, size: float = 13, color: str = INK,
        anchor: str = "start", font: str = SANS,
    ) -> None:  # fmt: skip
        """Write a line of text, with its base line at y."""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" fill="{color}" text-anchor="{anchor}"'
            f' font-family="{font}" xml:space="preserve">{escape(text)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str, line: str = LINE
    ) -> None:
        """Draw a rectangle with round corners."""
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"'
            f' fill="{fill}" stroke="{line}"/>'
        )

    def label(
        self, x: float, y: float, width: float, text: str, *, fill: str, size: float = 13
    ) -> None:
        """Draw a box of one line with its text in the middle."""
        self.box(x, y, width, 26, fill=fill)
        self.text(x + width / 2, y + 17.5, text, anchor="middle", size=size)

    def arrow(self, *points: tuple[float, float], color: str = FAINT) -> None:
        """Draw a line through points, with a head at its end."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.elements.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.4"'
            ' marker-end="url(#head)"/>'
        )

    def svg(self, title: str) -> str:
        """Return the file."""
        size = f'width="{WIDTH:g}" height="{self.height:g}" viewBox="0 0 {WIDTH:g} {self.height:g}"'
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            f' markerHeight="7" orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{FAINT}"/></marker>'
        )
        panel = (
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1:g}" height="{self.height - 1:g}" rx="8"'
            f' fill="{PANEL}" stroke="{LINE}"/>'
        )
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(title)}</title>",
            f"<defs>{head}</defs>",
            panel,
            *self.elements,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


STATES = {
    RequestState.PENDING: (30.0, 105.0),
    RequestState.RUNNING: (210.0, 105.0),
    RequestState.TOOL_CALLING: (400.0, 40.0),
    RequestState.INTERACTING: (400.0, 170.0),
    RequestState.COMPLETED: (610.0, 75.0),
    RequestState.FAILED: (610.0, 225.0),
}
STATE_WIDTH = 120.0


def request() -> Drawing:
    """Draw the states of a request, and the table of their edges."""
    drawing = Drawing(height=452)
    for state, (x, y) in STATES.items():
        fill = GRAY if state in FINAL_STATES else BLUE
        drawing.label(x, y, STATE_WIDTH, str(state), fill=fill)
    drawing.arrow((150, 118), (208, 118))
    for y, back in ((46.0, 60.0), (190.0, 176.0)):
        side = 105.0 if y < 100 else 131.0
        drawing.arrow((250, side), (250, y), (398, y))
        drawing.arrow((400, back), (290, back), (290, side))
    drawing.arrow((330, 118), (560, 118), (560, 94), (608, 94))
    drawing.arrow((520, 53), (670, 53), (670, 73))
    drawing.arrow((520, 178), (580, 178), (580, 99), (608, 99))
    drawing.arrow((670, 101), (670, 223))
    drawing.arrow((90, 131), (90, 238), (608, 238))
    drawing.text(680, 165, "scoring fails", size=11, color=FAINT)
    drawing.text(100, 256, "from every state: a failure ends it", size=11, color=FAINT)
    drawing.text(30, 290, "from", color=FAINT, size=12)
    drawing.text(210, 290, "to", color=FAINT, size=12)
    for row, (source, targets) in enumerate(TRANSITIONS.items()):
        y = 312 + 22 * row
        drawing.text(30, y, str(source), font=MONO, size=12)
        named = ", ".join(str(state) for state in RequestState if state in targets)
        drawing.text(210, y, named or "nothing: the request has ended", font=MONO, size=12)
    return drawing


def load_conversation() -> list[dict[str, Any]]:
    """Return the tokens of the recorded conversation."""
    return json.loads(CONVERSATION.read_text(encoding="utf-8"))["tokens"]


def lines_of(
    tokens: Sequence[dict[str, Any]], size: float
) -> Iterator[list[tuple[float, float, Any]]]:
    """Break tokens into lines; yields place and width of each."""
    line, x = list[tuple[float, float, Any]](), 20.0
    for token in tokens:
        shown = max(len(token["text"]), 5 if token["mask"] else 1)
        width = 0.605 * size * shown + 9
        if line and x + width > WIDTH - 20:
            yield line
            line, x = [], 20.0
        line.append((x, width, token))
        x += width + 4
    yield line


def ledger() -> Drawing:
    """Draw a conversation of the quick start, token by token."""
    size = 12.0
    lines = list(lines_of(load_conversation(), size))
    drawing = Drawing(height=68 + 58 * len(lines))
    for x, fill, name in (
        (20.0, GRAY, "prompt"),
        (250.0, GREEN, "sampled: mask 1"),
        (490.0, ORANGE, "observed: mask 0"),
    ):
        drawing.box(x, 16, 22, 16, fill=fill)
        drawing.text(x + 30, 29, name)
    for number, line in enumerate(lines):
        y = 52.0 + 58 * number
        for x, width, token in line:
            drawing.box(
                x, y, width, 22, fill={"prompt": GRAY, "sampled": GREEN}.get(token["role"], ORANGE)
            )
            drawing.text(
                x + width / 2, y + 15.5, token["text"], anchor="middle", font=MONO, size=size
            )
            if token["role"] != "prompt":
                below = f"{token['log_prob']:.2f}" if token["mask"] else "0"
                drawing.text(
                    x + width / 2, y + 37, below, anchor="middle", font=MONO, size=10, color=FAINT
                )
    return drawing


REWARDS = (1.0, 0.0, 1.0, None)
"""Of four samples of one prompt; the scorer of the last one failed."""
SHAPES = ((5, 3, 4), (3, 3, 6), (6, 4, 2), (4, 3, 3))
"""Sampled, observed, sampled tokens of each."""


def credit() -> Drawing:
    """Draw the advantages of a group of four, as GRPO computes them."""
    length = max(sum(shape) for shape in SHAPES)
    mask = torch.zeros(len(SHAPES), length)
    rewards = torch.zeros(len(SHAPES), length)
    for row, ((first, middle, last), reward) in enumerate(zip(SHAPES, REWARDS, strict=True)):
        if reward is not None:
            mask[row, :first] = 1
            mask[row, first + middle : first + middle + last] = 1
            rewards[row, first + middle + last - 1] = reward
    advantages, _ = compute_grpo_outcome_advantage(
        rewards, mask, np.array([0] * len(SHAPES)),
        in_baseline=torch.tensor([reward is not None for reward in REWARDS]),
    )  # fmt: skip
    drawing = Drawing(height=52 + 62 * len(SHAPES) + 34)
    for x, name in (
        (20.0, "sample"),
        (90.0, "reward"),
        (165.0, "advantage of each response token"),
    ):
        drawing.text(x, 32, name, color=FAINT)
    for row, reward in enumerate(REWARDS):
        y = 50.0 + 62 * row
        drawing.text(30, y + 24, str(row + 1))
        drawing.text(90, y + 24, "failed" if reward is None else f"{reward:g}")
        for place in range(sum(SHAPES[row])):
            trained = bool(mask[row, place])
            value = float(advantages[row, place])
            fill = (
                (GREEN if value > 0 else RED) if trained else (GRAY if reward is None else ORANGE)
            )
            drawing.box(165 + 46 * place, y + 6, 43, 28, fill=fill)
            text = f"{value:+.2f}" if trained else "0"
            drawing.text(186.5 + 46 * place, y + 25, text, anchor="middle", font=MONO, size=11)
    y = 50.0 + 62 * len(SHAPES) + 8
    notes = (
        (GREEN, "better than the group"),
        (RED, "worse"),
        (ORANGE, "observed: never trained"),
        (GRAY, "failed: in no baseline"),
    )
    for x, (fill, name) in zip((20.0, 220.0, 320.0, 530.0), notes, strict=True):
        drawing.box(x, y - 12, 20, 15, fill=fill)
        drawing.text(x + 28, y, name, size=12)
    return drawing


def templates() -> Drawing:
    """Draw which tokens of the conversation a template, the outside and the policy wrote."""
    size = 12.0
    tokens = [token | {"mask": 0} for token in load_conversation()]
    lines = list(lines_of(tokens, size))
    drawing = Drawing(height=66 + 34 * len(lines))
    fills = {"template": GRAY, "outside": ORANGE, "policy": GREEN}
    names = ("written by the template", "text from outside", "sampled by the policy")
    for x, fill, name in zip((20.0, 250.0, 490.0), fills.values(), names, strict=True):
        drawing.box(x, 16, 22, 16, fill=fill)
        drawing.text(x + 30, 29, name)
    for number, line in enumerate(lines):
        y = 50.0 + 34 * number
        for x, width, token in line:
            drawing.box(x, y, width, 24, fill=fills[token["writer"]])
            drawing.text(
                x + width / 2, y + 16.5, token["text"], anchor="middle", font=MONO, size=size
            )
    return drawing


def weight_sync() -> Drawing:
    """Draw two steps: which version of the weights samples, and when it changes."""
    drawing = Drawing(height=238)
    for y, name in ((70.0, "engine"), (140.0, "trainer")):
        drawing.text(20, y + 18, name)
    for step, x in ((1, 90.0), (2, 410.0)):
        drawing.text(x + 150, 32, f"step {step}", anchor="middle", color=FAINT)
        drawing.label(x, 70, 130, f"rollout: version {step - 1}", fill=BLUE)
        drawing.label(x + 140, 140, 100, "update", fill=GREEN)
        drawing.label(x + 250, 140, 56, "sync", fill=ORANGE)
        drawing.arrow((x + 65, 96), (x + 65, 153), (x + 138, 153))
        end = x + 278
        drawing.arrow((end, 140), (end, 98))
        drawing.text(end - 6, 88, f"version {step}", anchor="middle", size=12)
    drawing.text(
        90,
        196,
        "Each sampled token keeps the version that sampled it: Turn.weight_versions.",
        size=12,
        color=FAINT,
    )
    drawing.text(
        90,
        216,
        "A sync sends buckets of at most weight_sync.bucket_bytes; a failed one is repeated.",
        size=12,
        color=FAINT,
    )
    return drawing


def resume() -> Drawing:
    """Draw a run that was killed, and the run that continues it."""
    drawing = Drawing(height=250)
    for y, name in ((50.0, "killed in step 5"), (130.0, "the same command")):
        drawing.text(20, y + 18, name, size=12)
    for step in range(1, 9):
        x = 150.0 + 74 * (step - 1)
        if step <= 5:
            drawing.label(x, 50, 58, str(step), fill=RED if step == 5 else BLUE)
        if step >= 4:
            drawing.label(x, 130, 58, str(step), fill=BLUE)
    x = 150.0 + 74 * 2 + 29
    drawing.label(x - 120, 92, 150, "checkpoint of step 3", fill=GREEN, size=12)
    drawing.arrow((x, 76), (x, 90))
    drawing.arrow((x + 30, 105), (x + 74, 105), (x + 74, 128))
    facts = (
        "The checkpoint has weights, moments, the position in the data and all random streams.",
        "So steps 4 and 5 repeat with the same rows and the same seeds.",
        "With rollout.deterministic: true on a CPU the results are equal to the last bit.",
    )
    for number, fact in enumerate(facts):
        drawing.text(20, 190 + 20 * number, fact, size=12, color=FAINT)
    return drawing


def invariants() -> Drawing:
    """Draw the invariants of docs/invariants.md below the package whose test proves them."""
    page = (DOCS / "invariants.md").read_text(encoding="utf-8")
    stages: dict[str, list[str]] = {}
    for name, file in re.findall(r"^\| ([\w -]+) \| `tests/(\w+)/", page, re.M):
        stages.setdefault(file, []).append(name)
    order = [
        name
        for name in ("config", "rollout", "rewards", "algorithms", "workers", "trainer")
        if name in stages
    ]
    drawing = Drawing(height=40 + sum(24 + 28 * len(stages[name]) for name in order))
    y = 20.0
    for number, stage in enumerate(order):
        height = 28.0 * len(stages[stage]) + 12
        drawing.box(20, y, 720, height, fill=GRAY if number % 2 else BLUE)
        drawing.text(36, y + height / 2 + 5, f"agentrl/{stage}", font=MONO)
        for row, name in enumerate(stages[stage]):
            drawing.text(220, y + 25 + 28 * row, name[0].upper() + name[1:])
        y += height
        if number < len(order) - 1:
            drawing.arrow((90, y), (90, y + 11))
        y += 12
    return drawing


FIGURES: dict[str, tuple[str, Callable[[], Drawing]]] = {
    "request": ("The states of a request and their edges", request),
    "ledger": ("A conversation token by token: mask and log-probabilities", ledger),
    "templates": ("Who wrote each token of a conversation", templates),
    "credit": ("The advantages of a group of four samples", credit),
    "weight_sync": ("Two steps: rollout, update, sync", weight_sync),
    "resume": ("A run that was killed and continued", resume),
    "invariants": ("The thirteen invariants by package", invariants),
}


def figures() -> dict[str, str]:
    """Return each figure by the name of its file."""
    return {f"{name}.svg": draw().svg(title) for name, (title, draw) in FIGURES.items()}


def record(run: Path) -> None:
    """Record the shortest conversation with one call and a right answer."""
    from transformers import AutoTokenizer

    from agentrl.trainer.rollouts.files import read_rollouts
    from agentrl.trainer.rollouts.transcript import decode_pieces

    tokenizer = AutoTokenizer.from_pretrained(run / "trained")
    file = sorted((run / "rollouts").glob("step_*.jsonl.zst"))[0]
    good = [r for r in read_rollouts(file) if r.reward and r.num_tool_calls == 1]
    chosen = min(good, key=lambda r: len(r.input_ids))
    pieces = decode_pieces(chosen.input_ids, tokenizer.decode)
    start = max(chosen.num_prompt_tokens - 40, 0)
    tokens = list[dict[str, Any]]()
    for place, piece in enumerate(pieces):
        response = place - chosen.num_prompt_tokens
        sampled = response >= 0 and bool(chosen.loss_mask[response])
        role = "prompt" if response < 0 else "sampled" if sampled else "observed"
        log_prob = round(chosen.rollout_log_probs[response], 2) if sampled else 0.0
        shown = piece.replace("\n", "⏎").replace(" ", "·")
        tokens.append({"text": shown, "role": role, "mask": int(sampled), "log_prob": log_prob})
    note_writers(tokens, [m.text for m in chosen.messages if m.role in {"user", "tool"}])
    content = {"request_id": chosen.request_id, "tokens": tokens[start:]}
    CONVERSATION.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", "utf-8")


def note_writers(tokens: list[dict[str, Any]], outside: Sequence[str]) -> None:
    """Add who wrote each token: the policy, the template, or somebody outside."""
    whole = "".join(token["text"] for token in tokens)
    spans, begin = list[tuple[int, int]](), 0
    for text in outside:
        shown = text.replace("\n", "⏎").replace(" ", "·")
        begin = whole.index(shown, begin)
        spans.append((begin, begin + len(shown)))
        begin += len(shown)
    at = 0
    for token in tokens:
        is_outside = any(first <= at < last for first, last in spans)
        token["writer"] = "policy" if token["mask"] else "outside" if is_outside else "template"
        at += len(token["text"])


if __name__ == "__main__":
    if sys.argv[1:]:
        record(Path(sys.argv[1]))
    for file, content in figures().items():
        (FOLDER / file).write_text(content, encoding="utf-8")
