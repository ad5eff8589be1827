"""`verl.utils.dataset.vision_utils`: not here, since images are not supported yet."""

from typing import Any, NoReturn

from agentrl.errors import DataError


def process_image(image: Any, *args: Any, **kwargs: Any) -> NoReturn:
    """Refuse an image.

    Raises:
        DataError: always.
    """
    raise DataError("images are not supported yet", expected="rows and tools of text alone")


process_video = process_image
