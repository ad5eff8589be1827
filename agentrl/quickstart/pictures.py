"""Make pictures with small dots, questions about their colors, and imperfect demonstrations.

A gray picture has a dot at each of nine places. The question names a place and asks for the color
of its dot. A dot is surrounded by two rings whose colors balance it: the average color is the gray
of the picture. So all pictures are the same after the small policy's processor has shrunk them, and
no policy can answer without the tool. To answer, the policy must zoom in on the right place.

The demonstrations are imperfect on purpose. A policy that is warmed up on them can name a color
that it sees and can zoom in, but mostly it guesses, or looks at another place, so that
reinforcement learning can improve it.
"""

import io
import random
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
    "red": (1, -1, -1), "green": (-1, 1, -1), "blue": (-1, -1, 1),
    "cyan": (-1, 1, 1), "magenta": (1, -1, 1), "yellow": (1, 1, -1),
}  # fmt: skip
"""Colors of the dots: how red, green and blue differ from the gray."""
PLACES = (
    "top left", "top", "top right", "left", "center", "right", "bottom left", "bottom",
    "bottom right",
)  # fmt: skip
SIDE, CELL, MARK = 3, 160, 32
"""Places in a row and in a column; pixels of a place; pixels of a dot with its rings."""
GRAY = 128
RINGS = ((32, 25), (24, -66), (12, 120))
"""Side in pixels and brightness of the outer ring, the inner ring and the dot, drawn in this order.
Weighted by their areas, the brightnesses add up to 0, and so do their second moments (0.2 % are
left, because pixels have whole numbers)."""
_VERSION = "pictures/3"
_QUESTIONS = ("What color is the dot at the {place}?", "Name the color at the {place}.")
_SEEN = "Name the color."
_GUESSES, _LOOKS, _RIGHT = 0.5, 0.15, 0.5
"""Shares of the demonstrations that guess, and that show one dot and ask for its color; of the
others, the share that zooms in on the right place, not on a random one."""


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


def draw_colors(draw: random.Random) -> tuple[str, ...]:
    """Draw the color of each place at random."""
    return tuple(draw.choices(sorted(COLORS), k=len(PLACES)))


def draw_picture(colors: tuple[str, ...]) -> Image.Image:
    """Draw a picture with dots of these colors, row by row."""
    picture = Image.new("RGB", (SIDE * CELL, SIDE * CELL), (GRAY, GRAY, GRAY))
    canvas = ImageDraw.Draw(picture)
    for place, color in enumerate(colors):
        left, top, _, _ = region(place)
        for side, brightness in RINGS:
            edge = (MARK - side) // 2
            box = left + edge, top + edge, left + edge + side - 1, top + edge + side - 1
            red, green, blue = (GRAY + brightness * sign for sign in COLORS[color])
            canvas.rectangle(box, fill=(red, green, blue))
    return picture


def region(place: int) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of the dot at a place, with its rings."""
    row, column = divmod(place, SIDE)
    left, top = (number * CELL + (CELL - MARK) // 2 for number in (column, row))
    return left, top, left + MARK, top + MARK


def demonstrate(draw: random.Random) -> Row:
    """Make one demonstration: messages, and the pictures of their `<image>` marks."""
    colors, place = draw_colors(draw), draw.randrange(len(PLACES))
    picture, way = draw_picture(colors), draw.random()
    if way < _LOOKS:
        messages = [_user(_SEEN), _assistant(colors[place])]
        return {"messages": messages, "images": [_png(picture.crop(region(place)))]}
    messages = [_user(draw.choice(_QUESTIONS).format(place=PLACES[place]))]
    if way < _LOOKS + _GUESSES:
        messages.append(_assistant(f"I guess {draw.choice(sorted(COLORS))}."))
        return {"messages": messages, "images": [_png(picture)]}
    shown = place if draw.random() < _RIGHT else draw.randrange(len(PLACES))
    messages += [_call(region(shown)), {"role": "tool", "content": "<image>", "name": TOOL}]
    messages.append(_assistant(colors[shown]))
    return {"messages": messages, "images": [_png(picture), _png(picture.crop(region(shown)))]}


def _row(draw: random.Random, split: str, index: int) -> Row:
    colors, place = draw_colors(draw), draw.randrange(len(PLACES))
    question = draw.choice(_QUESTIONS).format(place=PLACES[place])
    return {
        "data_source": DATA_SOURCE,
        "prompt": [_user(question)],
        "images": [_png(draw_picture(colors))],
        "reward_model": {"style": "rule", "ground_truth": colors[place]},
        "extra_info": {"index": index, "split": split, "region": list(region(place))},
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
    picture.save(buffer, "PNG", compress_level=1)
    return {"bytes": buffer.getvalue(), "path": None}


def score_color(
    data_source: str, solution_str: str, ground_truth: str, **_: Any
) -> dict[str, float]:
    """Score 1 if the answer is the name of the color, else 0 (`compute_score`).

    Args:
        data_source: Not used.
        solution_str: What the policy wrote.
        ground_truth: The color.
    """
    words = solution_str.strip().split()
    is_right = float(bool(words) and words[-1].strip(".").lower() == ground_truth)
    return {"score": is_right, "success": is_right}
