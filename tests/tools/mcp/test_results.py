"""What an MCP server answers, as the conversation takes it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import CallToolResult

from agentrl.errors import ToolError
from agentrl.messages import ToolResponse
from agentrl.tools.mcp_tool import read_result

PNG = {"type": "image", "mimeType": "image/png", "data": "iVBORw0KGgo="}


def read(*content: dict[str, Any], **more: Any) -> ToolResponse:
    return read_result(CallToolResult.model_validate({"content": content, **more}))


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def embedded(**resource: Any) -> dict[str, Any]:
    return {"type": "resource", "resource": {"uri": "demo://1", **resource}}


def test_texts_keep_their_order_and_pictures_are_separate():
    response = read(text("one"), PNG, text("two"), PNG | {"mimeType": "image/webp"})
    assert response.text == "one\ntwo"
    assert response.image is not None
    assert response.image[0] == PNG
    assert [image["mimeType"] for image in response.image] == ["image/png", "image/webp"]
    assert json.loads(response.model_dump_json())["image"][0] == PNG  # JSON holds it


def test_embedded_data_is_what_it_is_of():
    assert read(embedded(text="words")).text == "[demo://1]\nwords"
    film = read(embedded(blob="AAAA", mimeType="video/mp4"))
    assert film.video == [{"type": "video", "mimeType": "video/mp4", "data": "AAAA"}]
    assert (read(embedded(blob="AAAA", mimeType="image/png")).image or [])[0]["data"] == "AAAA"
    assert read(embedded(blob="AAAA")).text == (
        "[demo://1: application/octet-stream, 3 bytes, not shown]"
    )


def test_what_cannot_be_shown_is_named():
    sound = {"type": "audio", "mimeType": "audio/wav", "data": "AAAA"}
    assert read(sound).text == "[audio: audio/wav, 3 bytes, not shown]"
    link = {"type": "resource_link", "uri": "demo://2", "name": "a page"}
    assert read(link).text == "[link to a page, demo://2]"
    assert read(link | {"description": "of it"}).text == "[link to a page, demo://2: of it]"


def test_structured_content_is_shown_where_no_text_repeats_it():
    assert read(structuredContent={"a": ["é", None]}).text == '{"a": ["é", null]}'
    assert read(PNG, structuredContent={"a": 1}).text == '{"a": 1}'
    assert read(text("so"), structuredContent={"a": 1}).text == "so"
    assert read().text == ""


@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        ([text("")], "{}"),
        ([text(" \n"), text("")], "{}"),
        ([text(""), PNG], "{}"),
        ([embedded(text="words")], "[demo://1]\nwords\n{}"),
        (
            [embedded(blob="AAAA"), text("")],
            "[demo://1: application/octet-stream, 3 bytes, not shown]\n{}",
        ),
        ([{"type": "resource_link", "uri": "demo://2", "name": "a"}], "[link to a, demo://2]\n{}"),
        (
            [{"type": "audio", "mimeType": "audio/wav", "data": "AA=="}],
            "[audio: audio/wav, 3 bytes, not shown]\n{}",
        ),
        ([text("so"), embedded(text="words")], "so\n[demo://1]\nwords"),
        ([text(""), text("so")], "\nso"),
    ],
)
def test_structured_content_is_hidden_by_words_alone(
    parts: list[dict[str, Any]], shown: str, is_error: bool
):
    shown = shown.replace("{}", '{"a": 1}')
    if is_error:
        with pytest.raises(ToolError) as error:
            read(*parts, structuredContent={"a": 1}, isError=True)
        assert str(error.value) == shown
    else:
        assert read(*parts, structuredContent={"a": 1}).text == shown


def test_an_error_is_reported_with_the_servers_text():
    with pytest.raises(ToolError, match=r"^not so\nand not so$"):
        read(text("not so"), text("and not so"), isError=True)
    with pytest.raises(ToolError, match="gave no reason"):
        read(isError=True)


@given(st.lists(st.text(max_size=20), max_size=4))
def test_control_tokens_texts_are_shown_as_they_are(texts: list[str]):
    assert read(*map(text, texts)).text == "\n".join(texts)
