"""A conversation in which each call of a tool shows one more picture, by the whole runner.

verl's test of its request (`test_sglang_async_rollout_multimodal_delta.py`, 0.6.1) makes the same
conversation: tokens and inputs of the vision tower are those of the processor for the whole.
"""

import asyncio
from typing import Any

import pytest
import torch
from PIL import Image

from agentrl.collate import collate
from agentrl.data.rows import Prompt
from agentrl.engines.scripted import ScriptedEngine
from agentrl.messages import ContentPart, Message, ToolResponse
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from tests.fakes.plugins import FakeTool, make_context, make_manager
from tests.fakes.vision_chat import make_vision_template
from tests.fakes.vision_models import FAMILIES, make_hf_processor, make_tokenizer, random_picture

SIZES = ((40, 24), (16, 16), (24, 56))
SMALLEST = (16, 16)
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"q": "next"}}\n</tool_call>'
"""A call as the template writes it."""


def draw_pictures(*, same_size: bool) -> list[Image.Image]:
    pictures = [random_picture(seed, size) for seed, size in enumerate(SIZES)]
    return [picture.resize(SMALLEST) for picture in pictures] if same_size else pictures


def roll_out(family: str, pictures: list[Image.Image]) -> AsyncRolloutRequest:
    """The user shows the first picture, and each call of the tool shows the next."""
    waiting = iter(pictures[1:])
    tool = FakeTool(reply=lambda _: ToolResponse(text="The next picture: ", image=[next(waiting)]))
    turns = [CALL] * (len(pictures) - 1)
    engine = ScriptedEngine([*turns, "A dog, a logo and a cat."], tokenizer=make_tokenizer())
    context = make_context(engine, tools=[tool], template=make_vision_template(family))
    manager = make_manager(context, n=1)
    parts = [ContentPart(type="text", text="The first picture: "), ContentPart(type="image")]
    messages = [
        Message(role="system", content="Describe each picture, and ask for the next."),
        Message(role="user", content=parts),
    ]
    prompt = Prompt(index=0, messages=messages, multi_modal_data={"image": [pictures[0]]})
    requests = manager.make_requests([prompt], manager.train_plan())
    (request,) = asyncio.run(manager.rollout(requests))
    assert request.stop_reason is StopReason.ANSWERED, request.error
    return request


def render_whole(
    family: str, request: AsyncRolloutRequest, pictures: list[Image.Image]
) -> dict[str, Any]:
    """What the processor of transformers makes of the whole conversation."""
    text = make_tokenizer().apply_chat_template(
        [message.to_template() for message in request.messages],
        tools=[schema.to_template() for schema in request.tool_schemas or ()],
        chat_template=make_vision_template(family).structure.renderer.source,
        tokenize=False,
    )
    return make_hf_processor(family)(text=[text], images=pictures, return_tensors="pt")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("same_size", [False, True])
def test_pictures_of_tools_are_added_as_the_processor_renders_the_whole(
    family: str, same_size: bool
) -> None:
    pictures = draw_pictures(same_size=same_size)
    request = roll_out(family, pictures)
    expected = render_whole(family, request, pictures)
    # The ledger ends with the sampled stop token; the template writes a line break after it.
    ids = expected["input_ids"][0].tolist()
    assert ids[: len(request.input_ids)] == request.input_ids
    assert make_tokenizer().decode(ids[len(request.input_ids) :]) == "\n"
    shown = request.multi_modal_data["image"]
    assert [picture.tobytes() for picture in shown] == [one.tobytes() for one in pictures]

    batch = collate([request], pad_token_id=0, processor=make_vision_template(family).media)
    inputs = batch.non_tensor_batch["multi_modal_inputs"][0]
    assert set(inputs) == {"pixel_values", "image_grid_thw"}
    for name, value in inputs.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_pictures_of_one_size_add_the_same_number_of_tokens() -> None:
    request = roll_out("qwen2_5_vl", draw_pictures(same_size=True))
    first, second = (turn for turn in request.turns if turn.role == "tool")
    assert first.num_tokens == second.num_tokens
