"""A conversation in which each call of a tool shows one more picture, by the whole runner.

verl's test of its request (`test_sglang_async_rollout_multimodal_delta.py`, 0.6.1) makes the same
conversation: tokens and inputs of the vision tower are those of the processor for the whole.
"""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from agentrl.collate import collate
from agentrl.data.rows import Prompt
from agentrl.engines.scripted import ScriptedEngine
from agentrl.errors import Fault, RolloutError, TemplateError
from agentrl.media.records import MediaKind
from agentrl.messages import ContentPart, Message, ToolResponse
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.rollout.templates import (
    Capability,
    ChatTemplate,
    TemplateNeeds,
    probe_template,
    require,
)
from tests.fakes.plugins import FakeTool, make_context, make_manager
from tests.fakes.vision_chat import VISION_TEMPLATE, make_vision_template
from tests.fakes.vision_models import FAMILIES, make_hf_processor, make_tokenizer, random_picture
from tests.fakes.vision_rows import with_videos

SIZES = ((40, 24), (16, 16), (24, 56))
SMALLEST = (16, 16)
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"q": "next"}}\n</tool_call>'
"""A call as the template writes it."""


def draw_pictures(*, same_size: bool) -> list[Image.Image]:
    pictures = [random_picture(seed, size) for seed, size in enumerate(SIZES)]
    return [picture.resize(SMALLEST) for picture in pictures] if same_size else pictures


def roll_out(
    template: ChatTemplate, picture: Image.Image, replies: list[ToolResponse], answer: str
) -> tuple[AsyncRolloutRequest, ScriptedEngine]:
    """The user shows a picture, calls of the tool have these replies, and the policy answers."""
    waiting = iter(replies)
    tool = FakeTool(reply=lambda _: next(waiting))
    engine = ScriptedEngine([CALL] * len(replies) + [answer], tokenizer=make_tokenizer())
    context = make_context(engine, tools=[tool], template=template)
    manager = make_manager(context, n=1)
    parts = [ContentPart(type="text", text="The first picture: "), ContentPart(type="image")]
    messages = [
        Message(role="system", content="Describe each picture, and ask for the next."),
        Message(role="user", content=parts),
    ]
    prompt = Prompt(index=0, messages=messages, multi_modal_data={"image": [picture]})
    requests = manager.make_requests([prompt], manager.train_plan())
    (request,) = asyncio.run(manager.rollout(requests))
    return request, engine


def show_pictures(family: str, pictures: list[Image.Image]) -> AsyncRolloutRequest:
    """The user shows the first picture, and each call of the tool shows the next."""
    replies = [ToolResponse(text="The next picture: ", image=[one]) for one in pictures[1:]]
    answer = "A dog, a logo and a cat."
    request, _ = roll_out(make_vision_template(family), pictures[0], replies, answer)
    assert request.stop_reason is StopReason.ANSWERED, request.error
    return request


def render_whole(processor: Any, request: AsyncRolloutRequest, **media: Any) -> dict[str, Any]:
    """What the processor of transformers makes of the whole conversation."""
    text = make_tokenizer().apply_chat_template(
        [message.to_template() for message in request.messages],
        tools=[schema.to_template() for schema in request.tool_schemas or ()],
        chat_template=VISION_TEMPLATE,
        tokenize=False,
    )
    return processor(text=[text], **media, return_tensors="pt")


def assert_tokens(request: AsyncRolloutRequest, expected: dict[str, Any]) -> None:
    """The ledger ends with the sampled stop token; the template writes a line break after it."""
    ids = expected["input_ids"][0].tolist()
    assert ids[: len(request.input_ids)] == request.input_ids
    assert make_tokenizer().decode(ids[len(request.input_ids) :]) == "\n"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("same_size", [False, True])
def test_pictures_of_tools_are_added_as_the_processor_renders_the_whole(
    family: str, same_size: bool
) -> None:
    pictures = draw_pictures(same_size=same_size)
    request = show_pictures(family, pictures)
    expected = render_whole(make_hf_processor(family), request, images=pictures)
    assert_tokens(request, expected)
    shown = request.multi_modal_data["image"]
    assert [picture.tobytes() for picture in shown] == [one.tobytes() for one in pictures]

    batch = collate([request], pad_token_id=0, processor=make_vision_template(family).media)
    inputs = batch.non_tensor_batch["multi_modal_inputs"][0]
    assert set(inputs) == {"pixel_values", "image_grid_thw"}
    for name, value in inputs.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_pictures_of_one_size_add_the_same_number_of_tokens() -> None:
    request = show_pictures("qwen2_5_vl", draw_pictures(same_size=True))
    first, second = (turn for turn in request.turns if turn.role == "tool")
    assert first.num_tokens == second.num_tokens


@pytest.mark.sglang
@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_of_a_tool_is_seen_by_the_policy(family: str) -> None:
    pytest.importorskip("torchvision", reason="the processors of videos need it")
    processor = with_videos(family)
    template = ChatTemplate(make_tokenizer(), custom_template=VISION_TEMPLATE, media=processor)
    picture = random_picture(0, SMALLEST)
    frames = np.random.default_rng(0).integers(0, 256, (4, 32, 24, 3), dtype=np.uint8)
    reply = ToolResponse(text="The film: ", video=[{"video": frames, "fps": 2.0}])
    request, engine = roll_out(template, picture, [reply], "A race.")
    assert request.stop_reason is StopReason.ANSWERED, request.error

    metadata = [{"total_num_frames": 4, "fps": 2.0, "frames_indices": [0, 1, 2, 3]}]
    expected = render_whole(
        processor.processor,
        request,
        images=[picture],
        videos=[frames],
        video_metadata=metadata,
        do_sample_frames=False,
    )
    assert_tokens(request, expected)
    video = processor.placeholder_ids[MediaKind.VIDEO]
    assert video in engine.records[-1].input_ids
    trained = zip(request.response_ids, request.loss_mask, strict=True)
    assert not any(mask for token, mask in trained if token == video)
    batch = collate([request], pad_token_id=0, processor=processor)
    inputs = batch.non_tensor_batch["multi_modal_inputs"][0]
    for name in ("pixel_values", "pixel_values_videos", "video_grid_thw"):
        torch.testing.assert_close(inputs[name], expected[name], rtol=0, atol=0)


def test_a_sampled_placeholder_ends_the_request() -> None:
    """No engine continues a sequence whose placeholder has no picture."""
    template = make_vision_template("qwen2_5_vl")
    picture = random_picture(0, SMALLEST)
    request, engine = roll_out(template, picture, [], "I see <|image_pad|>.")
    assert request.stop_reason is StopReason.SAMPLED_PLACEHOLDER, request.error
    assert len(engine.records) == 1
    assert len(request.media_spans) == 1


TEXTS_ONLY = {
    "drops images": "message.content if message.content is string else "
    "(message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join)",
    "refuses parts": "'' + message.content",
}


@pytest.mark.parametrize("what", TEXTS_ONLY)
def test_the_policy_is_not_blamed_if_the_template_shows_no_images_of_tools(what: str) -> None:
    source = VISION_TEMPLATE.replace("show(message.content)", TEXTS_ONLY[what], 1)
    template = make_vision_template("qwen2_5_vl", source)
    pictures = draw_pictures(same_size=True)
    replies = [ToolResponse(text="The next picture: ", image=[pictures[1]])]
    with pytest.raises(RolloutError) as failed:
        roll_out(template, pictures[0], replies, "A dog.")
    assert f"1 x {Fault.LIMIT}: TemplateError" in str(failed.value)
    report = probe_template(template)
    require(report, TemplateNeeds(tools=True))
    with pytest.raises(TemplateError, match="images in a tool result"):
        require(report, TemplateNeeds(tools=True, tool_images=True))


def test_a_tool_that_returns_images_starts_with_a_template_that_shows_them() -> None:
    report = probe_template(make_vision_template("qwen2_5_vl"))
    assert report.carries(Capability.TOOL_IMAGES)
    require(report, TemplateNeeds(tools=True, tool_images=True))
