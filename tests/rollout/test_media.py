"""What a tool shows in pictures stands in the conversation, though only text is generated on."""

import asyncio
import json

import pytest
from PIL import Image

from agentrl.collate import collate
from agentrl.messages import ContentPart, Message, ToolResponse
from agentrl.rollout.records import to_plain
from agentrl.rollout.request import AsyncRolloutRequest
from tests.fakes.plugins import (
    FakeTool,
    calling,
    make_context,
    make_engine,
    make_manager,
    make_prompts,
)


def roll_out(*replies: ToolResponse) -> AsyncRolloutRequest:
    """One request whose tool gives these replies, one in each turn."""
    left = iter(replies)
    tool = FakeTool(reply=lambda _: next(left))
    turns = [calling("lookup", q="x")] * len(replies)
    context = make_context(make_engine(*turns, "Seen."), tools=[tool])
    manager = make_manager(context, n=1)
    requests = manager.make_requests(make_prompts(1), manager.train_plan())
    return asyncio.run(manager.rollout(requests))[0]


def tool_messages(request: AsyncRolloutRequest) -> list[Message]:
    return [message for message in request.messages if message.role == "tool"]


def test_media_of_tools_are_parts_of_the_conversation_in_order() -> None:
    request = roll_out(
        ToolResponse(text="a map", image=["north", "south"], video=["flight"]),
        ToolResponse(text="another", image=["east"]),
    )
    assert request.multi_modal_data == {"image": ["north", "south", "east"], "video": ["flight"]}
    first, second = tool_messages(request)
    assert [part.type for part in first.content or []] == ["image", "image", "video", "text"]
    assert [part.type for part in second.content or []] == ["image", "text"]
    assert (first.text, second.text) == ("a map", "another")


def test_each_image_has_a_part() -> None:
    request = roll_out(ToolResponse(image=["a"]), ToolResponse(text="no picture", image=None))
    parts = [
        part.type
        for message in tool_messages(request)
        if isinstance(message.content, list)
        for part in message.content
    ]
    assert parts.count("image") == len(request.multi_modal_data["image"]) == 1


def test_no_token_of_a_picture_is_observed() -> None:
    with_image = roll_out(ToolResponse(text="a map", image=["PIXELS"]))
    without = roll_out(ToolResponse(text="a map"))
    assert with_image.response_ids == without.response_ids
    assert without.multi_modal_data == {}


def test_the_model_sees_a_placeholder_for_an_image() -> None:
    request = roll_out(ToolResponse(image=["PIXELS", "MORE"]))
    assert tool_messages(request)[0].text == "[image] [image]"


def test_pictures_outlive_saving_and_collating() -> None:
    request = roll_out(ToolResponse(text="a dot", image=[Image.new("RGB", (1, 1), "red")]))
    saved = json.loads(json.dumps(request.model_dump(mode="json", fallback=to_plain)))
    again = AsyncRolloutRequest.model_validate(saved)
    assert again.multi_modal_data["image"][0].startswith("data:image/png;base64,iVBOR")
    column = collate([request], pad_token_id=0).non_tensor_batch["multi_modal_data"]
    assert column[0] == request.multi_modal_data


def test_a_picture_that_should_be_seen_is_refused() -> None:
    picture = [ContentPart(type="image"), ContentPart(type="text", text="What is this?")]
    context = make_context(make_engine("A cat."))
    with pytest.raises(Exception, match="no processor has read"):
        context.template.encode_prompt([Message(role="user", content=picture)])
