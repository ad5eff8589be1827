"""Agent loops with pictures: what they get, which one is behind a token, what is refused."""

import re
import textwrap
from typing import Any

import pytest
from PIL import Image

from agentrl.agent_loops import AgentLoopBase, AgentLoopOutput
from agentrl.agent_loops.registry import LoopEntry
from agentrl.agent_loops.runner import AgentLoopRunner
from agentrl.agent_loops.single_turn import SingleTurnAgentLoop
from agentrl.config.schema.run import RunConfig
from agentrl.engines.protocol import Completion, SamplingParams
from agentrl.engines.scripted import ScriptedEngine
from agentrl.media.records import MediaSpan
from agentrl.messages import ContentPart, Message
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from tests.fakes.plugins import make_context
from tests.fakes.runs import ROOT
from tests.fakes.vision_chat import make_vision_template
from tests.fakes.vision_models import FAMILIES, make_tokenizer, random_picture

CONFIG = RunConfig.model_validate(
    {
        "data": {"max_response_length": 400, "max_prompt_length": 300},
        "model": {"path": "policy"},
    }
)
FIRST, SECOND, OTHER = random_picture(0, (24, 16)), random_picture(1, (16, 40)), random_picture(2)


class NotingEngine(ScriptedEngine):
    """Notes the spans that each call shows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shown: list[tuple[MediaSpan, ...]] = []

    async def generate(self, *args: Any, media: Any = (), **kwargs: Any) -> Completion:
        self.shown.append(tuple(media))
        return await super().generate(*args, media=media, **kwargs)


def picture_request(*pictures: Image.Image) -> AsyncRolloutRequest:
    """A request whose user shows pictures."""
    parts = [*(ContentPart(type="image") for _ in pictures), ContentPart(type="text", text="Hm?")]
    return AsyncRolloutRequest(
        messages=[Message(role="user", content=parts)],
        multi_modal_data={"image": list(pictures)},
        sampling=SamplingParams(
            max_new_tokens=1 << 30, stop_token_ids=make_vision_template("qwen2_vl").stop_token_ids
        ),
    )


async def drive(
    loop: type[AgentLoopBase],
    *answers: Any,
    family: str = "qwen2_vl",
    pictures: tuple[Image.Image, ...] = (FIRST,),
) -> tuple[AsyncRolloutRequest, NotingEngine]:
    template = make_vision_template(family)
    engine = NotingEngine(answers or ("Seen.", "Done."), tokenizer=make_tokenizer())
    context = make_context(engine, template=template)
    runner = AgentLoopRunner(LoopEntry("mine", loop), CONFIG, make_tokenizer())
    return await runner(picture_request(*pictures), context, engine), engine


class ShowingLoop(AgentLoopBase):
    """Two completions; the environment shows a picture between them, as loops of verl do."""

    returned: bool = True
    """Whether the output has the pictures."""

    async def begin(self, row: dict[str, Any]) -> tuple[list[int], list[Any]]:
        images = (await self.process_vision_info(row["raw_prompt"]))["images"]
        return await self.apply_chat_template(row["raw_prompt"], images=images), images

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids, images = await self.begin(kwargs)
        prompt_len, mask = len(ids), list[int]()
        for turn in range(2):
            output = await self.server_manager.generate(
                "1", prompt_ids=ids, sampling_params=sampling_params, image_data=images
            )
            ids += output.token_ids
            mask += [1] * len(output.token_ids)
            if turn == 0:
                more = [{"role": "tool", "content": [{"type": "image"}]}]
                new = await self.apply_chat_template(
                    more, images=[SECOND], remove_system_prompt=True
                )
                images = [*images, SECOND]
                ids += new
                mask += [0] * len(new)
        return AgentLoopOutput(
            prompt_ids=ids[:prompt_len],
            response_ids=ids[prompt_len:],
            response_mask=mask,
            multi_modal_data={"images": images} if self.returned else None,
        )


def load_page() -> Any:
    """The block of docs/agent_loops.md with images, as the body of a method."""
    page = (ROOT / "docs/agent_loops.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(images = \(await .*?)```", page, re.S)
    assert found is not None
    names: dict[str, Any] = {}
    head, end = "async def run(self, sampling_params, row):\n", "    return ids, images, output\n"
    exec(head + textwrap.indent(found[1], "    ") + end, names)
    return names["run"]


class PageLoop(AgentLoopBase):
    """A turn as docs/agent_loops.md writes it."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids, images, output = await load_page()(self, sampling_params, kwargs)
        assert images
        sampled = output.token_ids
        return AgentLoopOutput(
            prompt_ids=ids, response_ids=sampled, response_mask=[1] * len(sampled)
        )


async def test_the_page_s_block_shows_the_pictures_of_the_row() -> None:
    request, engine = await drive(PageLoop)
    assert request.stop_reason is StopReason.ANSWERED, request.error
    (span,) = request.media_spans
    assert span.item.loaded.data.tobytes() == FIRST.tobytes()
    assert engine.shown == [(span,)]


class SilentLoop(ShowingLoop):
    returned = False


class ProcessorLoop(ShowingLoop):
    """Renders its prompt with the processor, as loops of verl 0.6.1 do."""

    async def begin(self, row: dict[str, Any]) -> tuple[list[int], list[Any]]:
        images = row["multi_modal_data"]["image"]
        text = self.tokenizer.apply_chat_template(
            row["raw_prompt"],
            chat_template=make_vision_template("qwen2_vl").structure.renderer.source,
            tokenize=False,
            add_generation_prompt=True,
        )
        return list(self.processor(text=[text], images=images)["input_ids"][0]), images


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("loop", [ShowingLoop, SilentLoop])
async def test_a_loop_shows_pictures_in_its_prompt_and_between_turns(
    loop: type[AgentLoopBase], family: str
) -> None:
    request, engine = await drive(loop, family=family)
    assert request.stop_reason is StopReason.ANSWERED, request.error
    shown = [span.item.loaded.data for span in request.media_spans]
    assert [picture.tobytes() for picture in shown] == [FIRST.tobytes(), SECOND.tobytes()]
    pad = make_tokenizer().convert_tokens_to_ids("<|image_pad|>")
    places = [index for index, one in enumerate(request.input_ids) if one == pad]
    assert places == [i for span in request.media_spans for i in range(span.start, span.end)]
    assert engine.shown == [request.media_spans[:1], request.media_spans]


class CopyingLoop(ShowingLoop):
    """Passes equal copies of its pictures to each call, and returns others."""

    async def begin(self, row: dict[str, Any]) -> tuple[list[int], list[Any]]:
        ids, images = await super().begin(row)
        return ids, [image.copy() for image in images]

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        assert output.multi_modal_data is not None
        output.multi_modal_data["images"] = [
            image.copy() for image in output.multi_modal_data["images"]
        ]
        return output


async def test_an_equal_copy_is_the_same_picture() -> None:
    request, engine = await drive(CopyingLoop)
    assert request.stop_reason is StopReason.ANSWERED, request.error
    same, _ = await drive(ShowingLoop)
    assert sum(request.loss_mask) > 0
    assert (request.input_ids, request.loss_mask) == (same.input_ids, same.loss_mask)
    assert engine.shown == [request.media_spans[:1], request.media_spans]


@pytest.mark.parametrize("loop", [ShowingLoop, ProcessorLoop])
async def test_the_prompt_is_that_of_the_state_machine(loop: type[AgentLoopBase]) -> None:
    request, _ = await drive(loop)
    template = make_vision_template("qwen2_vl")
    assert request.prompt_ids == template.encode_prompt(request.messages[:1])
    assert request.stop_reason is StopReason.ANSWERED, request.error


async def test_the_record_shows_the_pictures_once() -> None:
    request, _ = await drive(ShowingLoop)
    assert [message.role for message in request.messages] == [
        "user", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert request.messages[2].part_types == ["text", "image", "text"]
    items = [span.item for span in request.media_spans]
    assert [part.item for one in request.messages for part in one.parts if part.item] == items
    kept = request.multi_modal_data["image"]
    assert all(own is item.loaded.data for own, item in zip(kept, items, strict=True))


async def test_the_samples_of_a_group_share_their_picture() -> None:
    seen: list[Any] = []

    class Noting(ShowingLoop):
        async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
            seen.append(kwargs["raw_prompt"][0]["content"][0]["image"])
            seen.append(kwargs["multi_modal_data"]["image"][0])
            return await super().run(sampling_params, **kwargs)

    one, _ = await drive(Noting)
    two, _ = await drive(Noting)
    pictures = [span.item.loaded.data for span in (one.media_spans[0], two.media_spans[0])]
    assert all(each is pictures[0] for each in [*seen, *pictures])


async def test_the_bundled_loop_shows_the_pictures_of_its_row() -> None:
    request, _ = await drive(SingleTurnAgentLoop, "A cat.", pictures=(FIRST, SECOND))
    assert request.stop_reason is StopReason.ANSWERED, request.error
    assert len(request.media_spans) == 2


class Refused(ShowingLoop):
    """Passes other pictures or tokens to the engine."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        ids, images = await self.begin(kwargs)
        ids, images = self.spoil(ids, images)
        output = await self.server_manager.generate(
            "1", prompt_ids=ids, sampling_params=sampling_params, image_data=images
        )
        return AgentLoopOutput(
            prompt_ids=ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            multi_modal_data={"images": self.returned_images(images)},
        )

    def spoil(self, ids: list[int], images: list[Any]) -> tuple[list[int], list[Any]]:
        return ids, images

    def returned_images(self, images: list[Any]) -> list[Any]:
        return images


def spoiled(spoil: Any) -> type[Refused]:
    return type("Spoiled", (Refused,), {"spoil": lambda _, ids, images: spoil(ids, images)})


def unexpanded(ids: list[int], images: list[Any]) -> tuple[list[int], list[Any]]:
    pad = make_tokenizer().get_vocab()["<|image_pad|>"]
    first = ids.index(pad)
    return [one for at, one in enumerate(ids) if one != pad or at == first], images


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda ids, images: (ids, []), r"stands for image 0, and 0 images were given"),
        (lambda ids, images: (ids, [*images, OTHER]), "no placeholder tokens for 1 of the images"),
        (lambda ids, images: (ids, [OTHER]), "stands for image 1, and 1 images were given"),
        (unexpanded, "begins a run of 1 placeholder tokens, and the image has 6"),
        (lambda ids, images: (ids, ["gone.png"]), "image 0 cannot be used: the image cannot be"),
    ],
)
async def test_pictures_that_do_not_fit_the_tokens_are_refused(spoil: Any, message: str) -> None:
    request, _ = await drive(spoiled(spoil))
    assert request.stop_reason is StopReason.FAILED
    assert request.error is not None
    assert message in request.error.message


async def test_a_token_that_was_sampled_after_another_picture_is_not_trained() -> None:
    loop = type("Swaps", (Refused,), {"returned_images": lambda *_: [random_picture(5, (24, 16))]})
    request, _ = await drive(loop)
    assert request.error is not None
    assert "with mask 1, but it was not sampled after" in request.error.message


@pytest.mark.parametrize("loop", [ShowingLoop, Refused])
async def test_a_sampled_placeholder_ends_the_request(loop: type[AgentLoopBase]) -> None:
    request, engine = await drive(loop, "I see <|image_pad|>.", "Never sampled.")
    assert request.stop_reason is StopReason.SAMPLED_PLACEHOLDER, request.error
    assert len(engine.records) == 1
    assert {span.item.loaded.data.tobytes() for span in request.media_spans} <= {
        FIRST.tobytes(), SECOND.tobytes(),
    }  # fmt: skip


async def test_a_model_of_text_refuses_pictures() -> None:
    engine = ScriptedEngine(["Hm."], tokenizer=make_tokenizer())
    context = make_context(engine)
    runner = AgentLoopRunner(LoopEntry("mine", ShowingLoop), CONFIG, make_tokenizer())
    request = await runner(picture_request(FIRST), context, engine)
    assert request.error is not None
    assert "the model reads text only" in request.error.message
