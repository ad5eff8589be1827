"""Make pictures with small marks, questions about them, and imperfect demonstrations.

A picture has tiles of different colors in three rows, with a small black mark on each. The question
names a color and asks for the mark on that tile. The small policy's processor shrinks a picture so
far that colors remain and marks do not. To answer, the policy must zoom in on the right tile.

The demonstrations are imperfect on purpose. A policy that is warmed up on them can name a mark that
it sees and can zoom in, but mostly it guesses, so that reinforcement learning can improve it.
"""

import io
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image, ImageDraw

from agentrl.config.schema.prepare import PicturesConfig
from agentrl.data.files import Row, write_parquet
from agentrl.data.prepare.manifest import make_once

DATA_SOURCE = "agentrl/pictures"
TOOL = "zoom"
"""Name of the tool in the demonstrations."""
COLORS = {
    "red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (240, 220, 50),
    "orange": (245, 140, 30), "purple": (150, 50, 180), "pink": (250, 150, 190),
    "gray": (140, 140, 140), "white": (240, 240, 240),
}  # fmt: skip
MARKS = ("circle", "square", "triangle", "cross", "ring", "bar")
SIDE = 3
"""Tiles in a row, and in a column."""
TILE, MARK, SHIFT = 48, 14, 4
"""Pixels: of a tile, of a mark, and how far a mark is from the center of its tile at most."""
_VERSION = "pictures/1"
_QUESTIONS = ("What is on the {color} tile?", "Name the mark on the {color} tile.")
_SEEN = "Name the mark."
_GUESSES, _LOOKS = 0.45, 0.25
"""Shares of the demonstrations that guess, and that show one tile and ask for its mark. Of the
others, two of three zoom in on the right tile."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """A picture's content, by tile, row by row."""

    colors: tuple[str, ...]
    marks: tuple[str, ...]
    shifts: tuple[tuple[int, int], ...]

    def draw(self) -> Image.Image:
        """Draw the picture."""
        picture = Image.new("RGB", (SIDE * TILE, SIDE * TILE))
        canvas = ImageDraw.Draw(picture)
        for index, color in enumerate(self.colors):
            left, top, right, bottom = region(index)
            canvas.rectangle((left, top, right - 1, bottom - 1), fill=COLORS[color])
            across, down = self.shifts[index]
            corner = left + (TILE - MARK) // 2 + across, top + (TILE - MARK) // 2 + down
            _draw_mark(canvas, self.marks[index], *corner)
        return picture


class PictureFiles(NamedTuple):
    """The files of `prepare_pictures`."""

    train: Path
    val: Path
    demos: Path
    made: bool
    """Whether they were made now."""


def prepare_pictures(config: PicturesConfig) -> PictureFiles:
    """Make train, val and demos (Parquet, pictures as PNG), unless they exist.

    The same arguments make the same files. The sets have different pictures.

    Raises:
        DataError: If `out_dir` has files of these names and of another origin.
    """
    files = [config.out_dir / f"{name}.parquet" for name in ("train", "val", "demos")]
    arguments = config.model_dump(mode="json", exclude={"out_dir"})

    def write() -> None:
        for file, count in zip(files[:2], (config.num_train, config.num_val), strict=True):
            draw = random.Random(f"{file.stem}/{config.seed}")
            write_parquet(file, [_row(draw, file.stem, index) for index in range(count)])
        draw = random.Random(f"demos/{config.seed}")
        write_parquet(files[2], [demonstrate(draw) for _ in range(config.num_demos)])

    made = make_once(config.out_dir, _VERSION, arguments, files, write)
    train, val, demos = files
    return PictureFiles(train, val, demos, made)


def draw_tiles(draw: random.Random) -> Tiles:
    """Draw a picture's content at random."""
    count = SIDE * SIDE
    colors = draw.sample(sorted(COLORS), count)
    marks = draw.choices(MARKS, k=count)
    shifts = [(draw.randint(-SHIFT, SHIFT), draw.randint(-SHIFT, SHIFT)) for _ in range(count)]
    return Tiles(tuple(colors), tuple(marks), tuple(shifts))


def region(tile: int) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a tile in pixels."""
    row, column = divmod(tile, SIDE)
    return column * TILE, row * TILE, (column + 1) * TILE, (row + 1) * TILE


def demonstrate(draw: random.Random) -> Row:
    """Make one demonstration: messages, and the pictures of their `<image>` marks."""
    tiles, tile = draw_tiles(draw), draw.randrange(SIDE * SIDE)
    picture, way = tiles.draw(), draw.random()
    if way < _LOOKS:
        messages = [_user(_SEEN), _assistant(tiles.marks[tile])]
        return {"messages": messages, "images": [_png(picture.crop(region(tile)))]}
    messages = [_user(draw.choice(_QUESTIONS).format(color=tiles.colors[tile]))]
    if way < _LOOKS + _GUESSES:
        return {"messages": [*messages, _assistant(draw.choice(MARKS))], "images": [_png(picture)]}
    shown = tile if draw.random() < 2 / 3 else draw.randrange(SIDE * SIDE)
    messages += [_call(region(shown)), {"role": "tool", "content": "<image>", "name": TOOL}]
    messages.append(_assistant(tiles.marks[shown]))
    images = [_png(picture), _png(picture.crop(region(shown)))]
    return {"messages": messages, "images": images}


def _row(draw: random.Random, split: str, index: int) -> Row:
    tiles, tile = draw_tiles(draw), draw.randrange(SIDE * SIDE)
    question = draw.choice(_QUESTIONS).format(color=tiles.colors[tile])
    return {
        "data_source": DATA_SOURCE,
        "prompt": [_user(question)],
        "images": [_png(tiles.draw())],
        "reward_model": {"style": "rule", "ground_truth": tiles.marks[tile]},
        "extra_info": {"index": index, "split": split, "region": list(region(tile))},
    }


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": f"<image>{text}"}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _call(box: tuple[int, int, int, int]) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"bbox_2d": list(box)}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _png(picture: Image.Image) -> dict[str, Any]:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def _draw_mark(canvas: ImageDraw.ImageDraw, mark: str, left: int, top: int) -> None:
    right, bottom, third = left + MARK - 1, top + MARK - 1, MARK // 3
    upright = (left + third, top, right - third, bottom)
    flat = (left, top + third, right, bottom - third)
    match mark:
        case "circle":
            canvas.ellipse((left, top, right, bottom), fill="black")
        case "square":
            canvas.rectangle((left + 1, top + 1, right - 1, bottom - 1), fill="black")
        case "triangle":
            canvas.polygon([(left, bottom), (right, bottom), (left + MARK / 2, top)], fill="black")
        case "cross":
            canvas.rectangle(upright, fill="black")
            canvas.rectangle(flat, fill="black")
        case "ring":
            canvas.ellipse((left, top, right, bottom), outline="black", width=MARK // 5)
        case _:
            canvas.rectangle(flat, fill="black")


def score_mark(
    data_source: str, solution_str: str, ground_truth: str, **_: Any
) -> dict[str, float]:
    """Score 1 if the answer is the mark's name, else 0 (`compute_score`).

    Args:
        data_source: Not used.
        solution_str: What the policy wrote.
        ground_truth: The mark.
    """
    words = solution_str.strip().split()
    is_right = float(bool(words) and words[-1].strip(".").lower() == ground_truth)
    return {"score": is_right, "success": is_right}
