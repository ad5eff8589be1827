"""What an MCP server answered, as the conversation takes it."""

import json
from typing import TYPE_CHECKING, Any

from agentrl.errors import ToolError
from agentrl.messages import ToolResponse

if TYPE_CHECKING:
    from mcp_types import CallToolResult


def read_result(result: "CallToolResult") -> ToolResponse:
    """Read a result: texts in their order, pictures and films beside them, the rest named.

    A text is shown as it is, an embedded text behind its address. Pictures and films are kept as
    JSON can hold them: `{"type": "image", "mimeType": "image/png", "data": base64}`. Sounds, other
    data and links are named in the text, each in a line. Structured content is shown, as JSON,
    where there is no text: servers that speak of it repeat it there.

    Raises:
        ToolError: for a result that the server marks as an error, with its text.
    """
    texts: list[str] = []
    media: dict[str, list[Any]] = {"image": [], "video": []}
    for part in result.content:
        fields = part.model_dump(mode="json", by_alias=True, exclude_none=True)
        _read_part(fields, texts, media)
    if not texts and result.structured_content is not None:
        texts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(texts)
    if result.is_error:
        raise ToolError(text or "Error: the tool failed, and did not say why")
    return ToolResponse(text=text, image=media["image"] or None, video=media["video"] or None)


def _read_part(part: dict[str, Any], texts: list[str], media: dict[str, list[Any]]) -> None:
    match part:
        case {"type": "text", "text": str(text)}:
            texts.append(text)
        case {"type": "image" | "audio" as kind, "mimeType": str(mime), "data": str(data)}:
            _read_data(kind, mime, data, texts, media)
        case {"type": "resource", "resource": {"text": str(text), "uri": uri}}:
            texts.append(f"[{uri}]\n{text}")
        case {"type": "resource", "resource": {"blob": str(data), "uri": uri, **rest}}:
            mime = str(rest.get("mimeType", "application/octet-stream"))
            _read_data(str(uri), mime, data, texts, media)
        case {"type": "resource_link", "uri": uri, "name": name, **rest}:
            about = f": {rest['description']}" if "description" in rest else ""
            texts.append(f"[link to {name}, {uri}{about}]")
        case _:
            texts.append(json.dumps(part, ensure_ascii=False))


def _read_data(
    name: str, mime: str, data: str, texts: list[str], media: dict[str, list[Any]]
) -> None:
    kind = mime.partition("/")[0]
    if kind in media:
        media[kind].append({"type": kind, "mimeType": mime, "data": data})
    else:
        texts.append(f"[{name}: {mime}, {len(data) * 3 // 4} bytes, not shown]")
