"""Processed pictures: their text, tokens, inputs, and what is kept."""

import pickle

import numpy as np
import pytest
from PIL import Image

from agentrl.errors import DataError
from agentrl.media import processor as module
from agentrl.media.processor import MediaProcessor
from agentrl.media.records import LoadedMedia, MediaKind, Video
from tests.fakes.vision_models import (
    FAMILIES,
    load_picture,
    make_hf_processor,
    make_processor,
    make_tokenizer,
    make_vision_config,
    random_picture,
)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_what_the_processor_writes(family: str) -> None:
    picture, processor = random_picture(0, (40, 24)), make_processor(family)
    item = processor.process(load_picture(picture))
    whole = make_hf_processor(family)(
        text=["a<|vision_start|><|image_pad|><|vision_end|>b"], images=[picture]
    )
    text = f"a<|vision_start|>{item.text}<|vision_end|>b"
    assert make_tokenizer().encode(text) == list(whole["input_ids"][0])
    assert item.num_tokens == 15


def test_equal_pictures_are_one_item() -> None:
    processor = make_processor("qwen2_vl")
    first, second = (processor.process(load_picture(random_picture(0))) for _ in range(2))
    assert first is second
    assert processor.process(load_picture(random_picture(1))) is not first


def test_an_item_computes_its_inputs_in_another_process() -> None:
    item = make_processor("qwen2_5_vl").process(load_picture(random_picture(0)))
    sent = pickle.dumps(item)
    module._cache.clear()
    again = pickle.loads(sent)
    expected = item.inputs()
    assert all(np.array_equal(again.inputs()[name], expected[name]) for name in expected)
    assert len(sent) < 100_000  # no tokenizer, no pixel values


def test_inputs_are_computed_again_if_they_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    item = make_processor("qwen2_vl").process(load_picture(random_picture(0)))
    before = item.inputs()
    assert item.inputs() is before
    module._cache.clear()
    again = item.inputs()
    assert again is not before
    assert np.array_equal(again["pixel_values"], before["pixel_values"])


def test_a_refused_picture_names_its_file() -> None:
    long = LoadedMedia(MediaKind.IMAGE, Image.new("RGB", (1000, 2)), "0", "pictures/line.png")
    with pytest.raises(DataError, match=r"(?s)refuses this image.*pictures/line\.png"):
        make_processor("qwen2_vl").process(long)


def test_a_video_needs_a_model_that_reads_videos() -> None:
    frames = Video(np.zeros((4, 16, 16, 3), np.uint8), 2.0)
    video = LoadedMedia(MediaKind.VIDEO, frames, "0", "clip.mp4")
    config = make_vision_config("llava")
    with pytest.raises(DataError, match=r"reads no videos|refuses this video"):
        MediaProcessor(make_hf_processor("llava"), config).process(video)
