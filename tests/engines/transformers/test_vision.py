"""The embedded engine with pictures: each result is that of the model's own forward pass."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import PreTrainedModel

from agentrl.engines import SamplingParams, TransformersEngine, TransformersEngineSettings
from agentrl.engines.protocol import Completion, EngineCall
from agentrl.engines.transformers.continuous_batching import _KERNELS
from agentrl.engines.transformers.engine import choose_attention
from agentrl.engines.transformers.paged_attention import ATTENTION_NAME
from agentrl.engines.transformers.paged_kernel import find_paged_kernel
from agentrl.engines.transformers.vision_inputs import (
    MAX_PREFIX_ID,
    PrefixIds,
    Scheduled,
    VisionInputs,
)
from agentrl.engines.vision import PlacedFeatures, compute_features, run_body
from agentrl.errors import EngineError
from agentrl.media.positions import compute_position_ids, place_runs
from agentrl.media.processor import MediaProcessor
from agentrl.media.records import LoadedMedia, MediaItem, MediaKind, MediaSpan
from tests.fakes.engines import read_pages, tiny_model
from tests.fakes.vision_models import (
    FAMILIES,
    PLAIN_FAMILY,
    VOCAB_SIZE,
    encode_with_media,
    load_picture,
    make_processor,
    make_vision_model,
    plain_vision_logits,
    random_picture,
)

WHOLE = TransformersEngineSettings(page_size=4, num_pages=3000, seed=0)
CUT = TransformersEngineSettings(page_size=4, num_pages=3000, seed=0, max_batch_tokens=10)
"""Its steps have fewer tokens than a picture."""
PICTURES = [load_picture(random_picture(seed, (40, 24))) for seed in range(4)]


@dataclass
class Conversation:
    """Tokens and pictures, as a request keeps them."""

    processor: MediaProcessor
    ids: list[int] = field(default_factory=list[int])
    spans: list[MediaSpan] = field(default_factory=list[MediaSpan])

    def append(self, *parts: str | LoadedMedia) -> "Conversation":
        ids, runs = encode_with_media(self.processor, parts)
        self.spans += place_runs(self.spans, runs, shift=len(self.ids))
        self.ids += ids
        return self

    def call(self, name: str = "a", *, seed: int = 0, max_new_tokens: int = 8) -> EngineCall:
        return EngineCall(
            input_ids=list(self.ids),
            sampling=SamplingParams(max_new_tokens=max_new_tokens, seed=seed),
            request_id=name,
            media=list(self.spans),
        )


@asynccontextmanager
async def engine_of(
    model: PreTrainedModel, settings: TransformersEngineSettings = WHOLE
) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine.from_model(model, settings=settings)
    yield engine
    await engine.close()


async def run(engine: TransformersEngine, call: EngineCall) -> Completion:
    return await engine.generate(
        call.input_ids, call.sampling, request_id=call.request_id, media=call.media
    )


async def run_together(engine: TransformersEngine, calls: Sequence[EngineCall]) -> list[Completion]:
    completions = await engine.generate_together(calls)
    assert all(isinstance(completion, Completion) for completion in completions), completions
    return completions  # pyright: ignore[reportReturnType]


def before_placeholder(ids: list[int]) -> list[int]:
    """The sampled tokens before the first placeholder: the model's own forward takes no others."""
    ends = [place for place, one in enumerate(ids) if one in (VOCAB_SIZE - 2, VOCAB_SIZE - 1)]
    return ids[: ends[0]] if ends else ids


def expected_log_probs(
    model: PreTrainedModel, call: EngineCall, completion: Completion
) -> torch.Tensor:
    """Score the tokens up to the first placeholder, and that one."""
    ids = before_placeholder(completion.token_ids)
    logits = plain_vision_logits(model, [*call.input_ids, *ids], call.media)
    chosen = torch.tensor(completion.token_ids[: len(ids) + 1])
    scored = logits[len(call.input_ids) - 1 :][: len(chosen)].log_softmax(-1)
    return scored.gather(1, chosen[:, None])[:, 0]


def check(model: PreTrainedModel, call: EngineCall, completion: Completion) -> None:
    expected = expected_log_probs(model, call, completion)
    actual = torch.tensor(completion.log_probs[: len(expected)])
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@contextmanager
def tower_runs(engine: TransformersEngine) -> Iterator[list[int]]:
    """Count the pictures of each run of the engine's tower."""
    counts: list[int] = []
    body: Any = engine._weights.module.base_model
    own = body.get_image_features

    def counted(pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **rest: Any) -> Any:
        counts.append(len(image_grid_thw))
        return own(pixel_values, image_grid_thw, **rest)

    body.get_image_features = counted
    yield counts
    del body.get_image_features


async def num_sampled(engine: TransformersEngine, more_than: int) -> None:
    """Wait until the running calls have sampled more than so many tokens."""
    while sum(len(c.token_ids) for c in engine._worker._running.values()) <= more_than:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("settings", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("family", [*FAMILIES, PLAIN_FAMILY])
async def test_log_probs_are_those_of_a_plain_forward_in_every_turn(
    family: str, settings: TransformersEngineSettings
):
    model = make_vision_model(family)
    conversation = Conversation(make_processor(family)).append("look: ", PICTURES[0], "well")
    async with engine_of(model, settings) as engine:
        for turn in range(3):
            call = conversation.call(seed=10 + turn)
            completion = await run(engine, call)
            check(model, call, completion)
            assert (completion.cached_tokens > 0) == (turn > 0)
            conversation.ids += before_placeholder(completion.token_ids)
            conversation.append("and", PICTURES[turn + 1], PICTURES[turn], "?")


@pytest.mark.parametrize("settings", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_calls_of_the_same_text_and_other_pictures_do_not_mix(
    family: str, settings: TransformersEngineSettings
):
    model, processor = make_vision_model(family), make_processor(family)
    calls = [
        Conversation(processor).append("what is this? ", picture, "answer:").call(f"{place}")
        for place, picture in enumerate([PICTURES[0], PICTURES[1], PICTURES[0], PICTURES[2]])
    ]
    calls.append(Conversation(processor).append("what is this? ").call("text"))
    async with engine_of(model, settings) as engine:
        for _ in range(2):
            completions = await run_together(engine, calls)
            for call, completion in zip(calls, completions, strict=True):
                check(model, call, completion)
            assert completions[0].log_probs == pytest.approx(completions[2].log_probs, abs=1e-5)
            assert completions[0].log_probs != pytest.approx(completions[1].log_probs, abs=1e-2)


async def test_only_equal_pictures_share_a_prefix():
    model, processor = make_vision_model("qwen3_vl"), make_processor("qwen3_vl")
    text = "12345678"
    first, other, again = (
        Conversation(processor).append(text, picture, "and so on").call()
        for picture in (PICTURES[0], PICTURES[1], load_picture(random_picture(0, (40, 24))))
    )
    async with engine_of(model) as engine:
        await run(engine, first)
        cached = [(await run(engine, call)).cached_tokens for call in (other, again)]
    assert cached[0] == len(text)
    assert cached[1] == (len(again.input_ids) - 1) // 4 * 4


async def test_the_tower_runs_once_for_a_picture_of_a_group_and_of_later_turns():
    model, processor = make_vision_model("qwen2_5_vl"), make_processor("qwen2_5_vl")
    conversation = Conversation(processor).append("one", PICTURES[0], "two", PICTURES[1])
    async with engine_of(model, CUT) as engine:
        with tower_runs(engine) as runs:
            group = [conversation.call(f"{seed}", seed=seed) for seed in range(4)]
            for call, completion in zip(group, await run_together(engine, group), strict=True):
                check(model, call, completion)
            assert sum(runs) == 2
            conversation.append(PICTURES[0], PICTURES[2], "three")
            check(model, call := conversation.call(), await run(engine, call))
            assert sum(runs) == 3
            await engine.update_weights(model.named_parameters(), version=1)
            check(model, call, await run(engine, call))
            assert sum(runs) == 6
            await engine.sleep()
            await engine.wake()
            await run(engine, call)
            assert sum(runs) == 9


@pytest.mark.parametrize("family", FAMILIES)
async def test_features_of_old_weights_are_not_used(family: str):
    model, processor = make_vision_model(family), make_processor(family)
    call = Conversation(processor).append("one", PICTURES[0], "two").call()
    async with engine_of(model) as engine:
        before = await run(engine, call)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "visual" in name:
                    parameter.add_(0.1 * torch.randn(parameter.shape))
        await engine.update_weights(model.named_parameters(), version=1)
        after = await run(engine, call)
    check(model, call, after)
    assert after.log_probs != pytest.approx(before.log_probs, abs=1e-2)


@pytest.mark.parametrize("settings", [WHOLE, CUT], ids=["whole", "cut"])
async def test_a_running_call_continues_with_new_weights(settings: TransformersEngineSettings):
    model, processor = make_vision_model("qwen3_vl"), make_processor("qwen3_vl")
    call = Conversation(processor).append(PICTURES[0], "two").call(max_new_tokens=1500)
    async with engine_of(model, settings) as engine:
        task = asyncio.create_task(run(engine, call))
        await num_sampled(engine, 3)
        other = make_vision_model("qwen3_vl", seed=1)
        with torch.no_grad():
            for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
                parameter.copy_(new)
        await engine.update_weights(model.named_parameters(), version=1)
        await num_sampled(engine, sum(len(c.token_ids) for c in engine._worker._running.values()))
        await engine.abort("a")
        completion = await task
    assert [span.version for span in completion.weight_versions] == [0, 1]
    start = completion.weight_versions[1].start
    expected = expected_log_probs(model, call, completion)
    actual = torch.tensor(completion.log_probs[: len(expected)])
    assert len(expected) > start
    torch.testing.assert_close(actual[start:], expected[start:], atol=1e-5, rtol=1e-5)
    assert (actual[:start] - expected[:start]).abs().max() > 1e-2


async def test_calls_restart_when_the_cache_is_full():
    model, processor = make_vision_model("qwen2_vl"), make_processor("qwen2_vl")
    calls = [
        Conversation(processor)
        .append("text", PICTURES[place % 4], "more")
        .call(f"{place}", seed=place, max_new_tokens=40)
        for place in range(6)
    ]
    small = TransformersEngineSettings(page_size=4, num_pages=50, max_model_len=120)
    async with engine_of(model, small) as engine:
        for call, completion in zip(calls, await run_together(engine, calls), strict=True):
            check(model, call, completion)


@pytest.mark.parametrize("settings", [WHOLE, CUT], ids=["whole", "cut"])
async def test_a_kernel_that_reads_pages_in_place_gives_the_same(
    settings: TransformersEngineSettings,
):
    model, processor = make_vision_model("qwen3_vl"), make_processor("qwen3_vl")
    calls = [
        Conversation(processor).append("text", picture, "more").call(f"{place}", seed=place)
        for place, picture in enumerate(PICTURES)
    ]
    async with engine_of(model, settings) as engine:
        module = engine._weights.module
        kernel = find_paged_kernel(module, 4, attend=read_pages)
        assert kernel is not None
        _KERNELS[module] = kernel
        for call, completion in zip(calls, await run_together(engine, calls), strict=True):
            check(model, call, completion)


async def test_a_sampled_placeholder_is_a_plain_token():
    model, processor = make_vision_model("qwen3_vl"), make_processor("qwen3_vl")
    placeholder = processor.placeholder_ids[MediaKind.IMAGE]
    conversation = Conversation(processor).append("one", PICTURES[0])
    conversation.ids += [placeholder, 65, placeholder]
    call = conversation.append(PICTURES[1], "two").call()
    async with engine_of(model, CUT) as engine:
        completion = await run(engine, call)
    ids = [*call.input_ids, *completion.token_ids]
    positions = torch.from_numpy(compute_position_ids(call.media, 0, len(ids))).unsqueeze(1)
    with torch.no_grad():
        features = compute_features(model, [span.item for span in call.media])
        starts = [span.start for span in call.media]
        placed = PlacedFeatures.join(list(zip(starts, features, strict=True)))
        head: Any = model.get_output_embeddings()
        logits = head(run_body(model, torch.tensor([ids]), positions, placed))[0]
    scored = logits[len(call.input_ids) - 1 : -1].log_softmax(-1)
    expected = scored.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=1e-5)


class GivenInputs:
    """An encoder with the inputs of one item."""

    key = "given"

    def __init__(self, inputs: dict[str, NDArray[Any]]) -> None:
        self.inputs = inputs

    def encode(self, _: LoadedMedia) -> dict[str, NDArray[Any]]:
        return self.inputs


def video_of_two_runs() -> MediaItem:
    """Two frames of 2 x 2 tokens, as Qwen3-VL has them: one run for each frame."""
    pixels = np.random.default_rng(0).standard_normal((32, 3 * 2 * 4 * 4)).astype(np.float32)
    grid = np.array([[2, 4, 4]])
    encoder: Any = GivenInputs({"pixel_values_videos": pixels, "video_grid_thw": grid})
    loaded = LoadedMedia(MediaKind.VIDEO, None, "a video")
    positions = np.indices((1, 2, 2)).reshape(3, -1)
    return MediaItem(loaded, "", 8, 4, positions, 2, encoder)


@pytest.mark.parametrize("settings", [WHOLE, CUT], ids=["whole", "cut"])
async def test_a_video_may_have_a_run_for_each_frame(settings: TransformersEngineSettings):
    model, processor = make_vision_model("qwen3_vl"), make_processor("qwen3_vl")
    video = processor.placeholder_ids[MediaKind.VIDEO]
    item, conversation = video_of_two_runs(), Conversation(processor).append("a", PICTURES[0], "b")
    for offset in (0, 4):
        start = len(conversation.ids) + 1
        run_of_frame = (start, start + 4, item, offset)
        conversation.spans += place_runs(conversation.spans, [run_of_frame])
        conversation.ids += [65 + offset, *[video] * 4, 66]
    call = conversation.append("c", PICTURES[1]).call()
    async with engine_of(model, settings) as engine:
        check(model, call, await run(engine, call))


@pytest.mark.parametrize("family", [*FAMILIES, PLAIN_FAMILY])
async def test_the_compute_type_may_have_16_bits(family: str):
    model = make_vision_model(family)
    call = Conversation(make_processor(family)).append("one", PICTURES[0]).call()
    engine = TransformersEngine.from_model(model, dtype=torch.bfloat16, settings=WHOLE)
    completion = await run(engine, call)
    await engine.close()
    expected = expected_log_probs(model.bfloat16(), call, completion)
    actual = torch.tensor(completion.log_probs[: len(expected)])
    torch.testing.assert_close(actual, expected, atol=0.3, rtol=0)


@pytest.mark.parametrize("family", [*FAMILIES, PLAIN_FAMILY])
def test_weights_are_shared_and_only_the_text_part_has_paged_attention(family: str):
    model = make_vision_model(family)
    engine = TransformersEngine.from_model(model, settings=WHOLE)
    module = engine._weights.module
    own = dict(module.named_parameters())
    assert all(own[name].data_ptr() == p.data_ptr() for name, p in model.named_parameters())
    assert module.config.get_text_config()._attn_implementation == ATTENTION_NAME
    assert module.config.vision_config._attn_implementation == "sdpa"
    assert choose_attention(model, WHOLE, dtype=torch.bfloat16) == ATTENTION_NAME
    assert model.config.get_text_config()._attn_implementation == "sdpa"


async def test_a_text_model_refuses_pictures():
    call = Conversation(make_processor("qwen3_vl")).append("a", PICTURES[0]).call()
    async with engine_of(tiny_model(vocab_size=263).eval()) as engine:
        with pytest.raises(EngineError, match="has no vision tower"):
            await run(engine, call)


async def test_a_model_with_sliding_windows_refuses_pictures_and_reads_text():
    model = make_vision_model(
        "qwen2_5_vl",
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["full_attention", "sliding_attention"],
    )
    conversation = Conversation(make_processor("qwen2_5_vl")).append("a longer text")
    settings = TransformersEngineSettings(
        page_size=4, num_pages=300, max_batch_tokens=64, max_model_len=1000
    )
    async with engine_of(model, settings) as engine:
        check(model, call := conversation.call(), await run(engine, call))
        conversation.append(PICTURES[0])
        with pytest.raises(EngineError, match=r"only with its own attention, not with 'sdpa'"):
            await run(engine, conversation.call())


async def test_runs_that_are_not_those_of_the_item_are_refused_alone():
    model, processor = make_vision_model("qwen3_vl"), make_processor("qwen3_vl")
    conversation = Conversation(processor).append("one", PICTURES[0], "two", PICTURES[1])
    first, second = conversation.spans
    bad = [
        ([second, first], "not in order"),
        ([first, second._replace(end=second.end + 50)], "not in order"),
        ([first._replace(end=first.end - 1)], "not a whole run"),
        ([first._replace(offset=1)], "not a whole run"),
    ]
    good = conversation.call()
    calls = [
        EngineCall(
            input_ids=good.input_ids, sampling=good.sampling, request_id=f"{place}", media=spans
        )
        for place, (spans, _) in enumerate(bad)
    ]
    async with engine_of(model) as engine:
        *refused, completion = await engine.generate_together([*calls, good])
    assert isinstance(completion, Completion)
    check(model, good, completion)
    for error, (_, message) in zip(refused, bad, strict=True):
        assert isinstance(error, EngineError)
        assert message in str(error)


def test_numbers_of_pictures_are_used_again_in_the_end():
    processor = make_processor("qwen3_vl")
    numbers = PrefixIds(vocab_size=300)
    one, two = (Conversation(processor).append("a", picture).call() for picture in PICTURES[:2])
    first, other = (numbers.replace(call.input_ids, call.media) for call in (one, two))
    assert numbers.replace(one.input_ids, one.media) == first
    assert first[:2] == other[:2] == one.input_ids[:2]
    assert not set(first[2:-1]) & set(other[2:-1])
    assert min(first[2:-1]) >= 300
    assert numbers.plain(first)[2:-1] == [0] * 15
    numbers._next = MAX_PREFIX_ID - 3
    three = Conversation(processor).append("a", PICTURES[2]).call()
    assert numbers.replace(three.input_ids, three.media) == first


def test_features_are_kept_up_to_a_limit():
    model, processor = make_vision_model("qwen3_vl"), make_processor("qwen3_vl")
    items = [processor.process(picture) for picture in PICTURES]
    nbytes = 15 * 32 * 4 * 3
    for limit, kept in ((0, 0), (nbytes - 1, 0), (nbytes, 1), (3 * nbytes, 3), (9 * nbytes, 4)):
        inputs = VisionInputs(model, max_bytes=limit)
        span = [MediaSpan(0, 15, item, 0, 0) for item in items]
        scheduled = [Scheduled([one], 0, 15 * row, 15) for row, one in enumerate(span)]
        with torch.no_grad():
            placed = inputs.place_features(scheduled)
        assert placed is not None
        assert placed.index.tolist() == list(range(60))
        assert len(inputs._kept) == kept


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4),
    cuts=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=4),
)
def test_positions_are_those_of_the_whole_sequence(lengths: list[int], cuts: list[tuple[int, int]]):
    inputs = VisionInputs(make_vision_model("qwen2_vl"))
    parts = [part for place, n in enumerate(lengths) for part in ("x" * n, PICTURES[place])]
    conversation = Conversation(make_processor("qwen2_vl")).append(*parts)
    expected = compute_position_ids(conversation.spans, 0, 100)
    scheduled, row = list[Scheduled](), 0
    for past, count in cuts:
        scheduled.append(Scheduled(conversation.spans, past, row, count))
        row += count
    index = torch.cat([torch.arange(past, past + count) for past, count in cuts])
    found = inputs.place_positions(scheduled, index)
    whole = np.concatenate([expected[:, past : past + count] for past, count in cuts], axis=1)
    assert found.shape == (3, 1, row)
    assert (found[:, 0].numpy() == whole).all()
    text = [part._replace(media=()) for part in scheduled]
    assert torch.equal(inputs.place_positions(text, index), index[None])
