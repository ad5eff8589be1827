"""Zooming in on images."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from agentrl.errors import ConfigError, ToolCallError, ToolError
from agentrl.tools.image_zoom_in_tool import ImageZoomInTool, find_region
from tests.fakes.vision_models import random_picture

PICTURE = random_picture(0, (100, 60))


async def zoom(parameters: dict[str, Any], **create: Any) -> Any:
    tool = ImageZoomInTool({})
    await tool.create("1", **({"prompt_images": [PICTURE]} | create))
    result = await tool.execute("1", parameters)
    await tool.release("1")
    return result.response


async def test_a_region_is_shown() -> None:
    shown = await zoom({"bbox_2d": [10, 20, 50, 60]})
    assert shown.text is None
    assert shown.image[0].tobytes() == PICTURE.crop((10, 20, 50, 60)).tobytes()


async def test_a_small_region_is_enlarged_and_named() -> None:
    shown = await zoom({"bbox_2d": [0, 0, 4, 4]})
    assert shown.image[0].size == (28, 28)
    assert shown.text == "Region [0, 0, 28, 28]."


async def test_a_row_may_name_another_image() -> None:
    other = random_picture(1, (40, 40))
    shown = await zoom({"bbox_2d": [0, 0, 40, 40]}, image=other)
    assert shown.image[0].tobytes() == other.tobytes()
    shown = await zoom({"bbox_2d": [0, 0, 40, 40], "image_index": 1}, images=[PICTURE, other])
    assert shown.image[0].tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({}, "four numbers"),
        ({"bbox_2d": [1, 2, 3]}, "four numbers"),
        ({"bbox_2d": ["a", 2, 3, 4]}, "four numbers"),
        ({"bbox_2d": [0, 0, float("nan"), 4]}, "finite"),
        ({"bbox_2d": [50, 0, 10, 4]}, "no region"),
        ({"bbox_2d": [200, 0, 300, 4]}, "100 x 60"),
        ({"bbox_2d": [0, 0, 100, 0.5]}, "too thin"),
        ({"bbox_2d": [0, 0, 9, 9], "image_index": 1}, "no image 1"),
    ],
)
async def test_the_model_reads_what_is_wrong(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolError, match=words):
        await zoom(parameters)


async def test_a_row_without_images_is_reported() -> None:
    with pytest.raises(ToolCallError, match="no image to zoom in on"):
        await zoom({}, prompt_images=[])


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match="min_size"):
        ImageZoomInTool({"min_size": 3})


SIDE = st.floats(-50, 150)


@given(st.tuples(SIDE, SIDE, SIDE, SIDE), st.integers(1, 100), st.integers(1, 100))
def test_a_region_is_inside_of_the_image(box: Any, width: int, height: int) -> None:
    try:
        left, top, right, bottom = find_region(box, (width, height))
    except ToolError:
        return
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height
    assert right - left >= min(28, width)
    assert bottom - top >= min(28, height)
    assert Image.new("L", (width, height)).crop((left, top, right, bottom)).size[0] > 0
