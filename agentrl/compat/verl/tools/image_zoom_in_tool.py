"""`verl.tools.image_zoom_in_tool`: not here, since no image reaches the policy yet."""

from typing import Any

from agentrl.errors import ConfigError
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.tools.base import BaseTool


class ImageZoomInTool(BaseTool):
    """Says at load that images are not supported yet; a subclass may be defined, and not built."""

    def __init__(
        self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None = None
    ) -> None:
        raise ConfigError(
            f"{type(self).__name__} shows images to the policy, and images are not supported yet",
            expected="tools that answer with text",
        )
