"""Show the model a region of an image, so that it sees small things."""

import math
import uuid
from typing import Any

from PIL import Image
from pydantic import Field

from agentrl.config.schema.section import Section
from agentrl.errors import ToolCallError, ToolError
from agentrl.media.loading import load_media
from agentrl.media.records import MediaKind
from agentrl.messages import OpenAIFunctionToolSchema, ToolResponse
from agentrl.tools.base import ToolResult
from agentrl.tools.bundled import BundledTool

_Box = tuple[int, int, int, int]

_NUMBER = {"type": "number"}
_SCHEMA = {
    "name": "image_zoom_in_tool",
    "description": "Zoom in on a region of the image.",
    "parameters": {
        "type": "object",
        "properties": {
            "bbox_2d": {
                "type": "array",
                "items": _NUMBER,
                "minItems": 4,
                "maxItems": 4,
                "description": "Left, top, right and bottom of the region, in pixels of the image.",
            },
            "label": {"type": "string", "description": "What the region shows (optional)."},
            "image_index": {
                "type": "integer",
                "minimum": 0,
                "description": "Which image, counted from 0; 0 if it is left out.",
            },
        },
        "required": ["bbox_2d"],
    },
}


class ImageZoomInToolConfig(Section):
    """The own keys of `ImageZoomInTool`."""

    min_side: int = Field(default=28, ge=1, strict=True)
    """Least pixels of a side of a region. A smaller region is enlarged around its center."""
    max_aspect: float = Field(default=100.0, ge=1)
    """Largest ratio of the sides of a region."""


class ImageZoomInTool(BundledTool):
    """Crop a region of an image of the prompt and show it to the model.

    The model's processor scales the crop as any image, so a small region gets as many tokens as the
    whole image. Images are those of the row's prompt; `create_kwargs` may give others: `image`, or
    `images`, in any form that a row's column may have.
    """

    returns_images = True
    keys_class = ImageZoomInToolConfig
    default_schema = OpenAIFunctionToolSchema.model_validate(
        {"type": "function", "function": _SCHEMA}
    )
    why_inline = "cropping takes less time than sending the image to another thread or process"

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        super().__init__(config, tool_schema)
        self._images: dict[str, list[Image.Image]] = {}

    async def create(
        self,
        instance_id: str | None = None,
        *,
        image: Any = None,
        images: list[Any] | None = None,
        prompt_images: list[Any] | None = None,
        **create_kwargs: Any,
    ) -> tuple[str, ToolResponse]:
        """Keep the images of a request.

        Args:
            instance_id: The request's id.
            image: From the row's `create_kwargs`: the image to crop.
            images: From the row's `create_kwargs`: several of them.
            prompt_images: The decoded images of the prompt, from the rollout.
            **create_kwargs: Not used.

        Raises:
            DataError: for an image that cannot be read.
            ToolCallError: if there is no image.
        """
        own_id = instance_id or uuid.uuid4().hex
        given = [image] if image is not None else list(images or ())
        loaded = [load_media(MediaKind.IMAGE, one).data for one in given]
        self._images[own_id] = loaded or list(prompt_images or ())
        if not self._images[own_id]:
            raise ToolCallError(
                "the row has no image to zoom in on",
                tool=self.name,
                expected="images in the row's prompt, or create_kwargs: {image: ...}",
            )
        return own_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Crop `parameters["bbox_2d"]`.

        Raises:
            ToolError: if the region is not one of the image.
        """
        images, index = self._images[instance_id], int(parameters.get("image_index") or 0)
        if not 0 <= index < len(images):
            raise ToolError(f"Error: there is no image {index}; there are {len(images)}.")
        image, asked = images[index], parameters.get("bbox_2d")
        box = find_region(asked, image.size, self._keys.min_side, self._keys.max_aspect)
        text = None if list(box) == asked else f"Region {list(box)}."
        return ToolResult.of(ToolResponse(text=text, image=[image.crop(box)]), tool=self.name)

    async def release(self, instance_id: str, **release_kwargs: Any) -> None:
        """Forget the images."""
        self._images.pop(instance_id, None)


def find_region(
    asked: Any, size: tuple[int, int], min_side: int = 28, max_aspect: float = 100.0
) -> _Box:
    """Return the region of an image that a call asks for, in whole pixels.

    Args:
        asked: Left, top, right, bottom. What is outside of the image is left out.
        size: Width and height of the image.
        min_side: A side with fewer pixels is made longer, if the image is large enough.
        max_aspect: Largest ratio of the sides.

    Raises:
        ToolError: with words for the model.

    Example:
        >>> find_region([10, 10, 20, 20], (100, 50), min_side=20)
        (5, 5, 25, 25)
    """
    width, height = size
    try:
        left, top, right, bottom = map(float, asked)
    except (TypeError, ValueError):
        raise ToolError("Error: bbox_2d must have four numbers: [x1, y1, x2, y2].") from None
    if not all(map(math.isfinite, (left, top, right, bottom))):
        raise ToolError("Error: bbox_2d must have four finite numbers.")
    spans = (left, right, width), (top, bottom, height)
    (left, right), (top, bottom) = ((max(0.0, a), min(float(end), b)) for a, b, end in spans)
    if left >= right or top >= bottom:
        raise ToolError(
            f"Error: {list(asked)} is no region of the image, which has {width} x {height} pixels."
        )
    sides = right - left, bottom - top
    if max(sides) > max_aspect * min(sides):
        raise ToolError("Error: the region is too thin.")
    (left, right), (top, bottom) = (
        _widen(a, b, min_side, end) for a, b, end in ((left, right, width), (top, bottom, height))
    )
    return math.floor(left), math.floor(top), math.ceil(right), math.ceil(bottom)


def _widen(start: float, end: float, least: int, limit: int) -> tuple[float, float]:
    """Make a span at least `least` long around its center, within `[0, limit]`."""
    length = min(least, limit)
    if end - start >= length:
        return start, end
    start = min(max((start + end - length) / 2, 0.0), float(limit - length))
    return start, start + length
