"""Small vision-language models of several families, their processors, and pictures.

Needs no file: the tokenizer has one token for each byte, and the control tokens of the families.
"""

from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava import LlavaProcessor
from transformers.models.qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl import Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl import Qwen3VLProcessor

from agentrl.media.positions import Run, place_runs
from agentrl.media.processor import MediaProcessor
from agentrl.media.records import LoadedMedia, MediaKind, MediaSpan

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Models with three-dimensional positions."""
PLAIN_FAMILY = "llava"
"""A model with plain positions."""
CONTROL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCAB_SIZE = 256 + len(CONTROL_TOKENS)
PATCH, MERGE = 4, 2
HIDDEN, HEADS, HEAD_DIM = 32, 4, 8

_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_TOWER: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "initializer_range": 0.3,
}
_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": HIDDEN,
        "window_size": 2 * PATCH * MERGE,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    },
}
_CLASSES: dict[str, tuple[Any, Any, Any]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration, Qwen2VLProcessor),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLProcessor),
    PLAIN_FAMILY: (LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor),
}


@cache
def make_tokenizer() -> Qwen2Tokenizer:
    """A tokenizer with a token for each byte: ids 0 to 255, then the control tokens."""
    letters = sorted(_byte_letters())
    tokenizer = Qwen2Tokenizer(
        vocab={letter: index for index, letter in enumerate(letters)},
        merges=[],
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.add_tokens(list(CONTROL_TOKENS), special_tokens=True)
    assert len(tokenizer) == VOCAB_SIZE
    return tokenizer


def make_vision_config(family: str, **text: Any) -> Any:
    """The configuration of a small model of a family; `text` overrides its language part."""
    if family == PLAIN_FAMILY:
        return _llava_config(text)
    sections = [2, 1, 1] if family == "qwen3_vl" else [1, 1, 2]
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    if family == "qwen3_vl":
        rope["mrope_interleaved"] = True
    ids = make_tokenizer().convert_tokens_to_ids
    sizes = {"head_dim": HEAD_DIM} if family == "qwen3_vl" else {}
    return _CLASSES[family][0](
        text_config=_TEXT | sizes | {"rope_parameters": rope} | text,
        vision_config=_TOWER | _TOWERS[family],
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=family != "qwen2_vl",
    )


def make_vision_model(family: str, seed: int = 0, **text: Any) -> PreTrainedModel:
    """A model of two layers and a tower of two blocks, with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _CLASSES[family][1](make_vision_config(family, **text)).float().eval()


_positioning_model = cache(make_vision_model)


def model_positions(family: str, ids: Sequence[int], spans: Sequence[Any]) -> np.ndarray[Any, Any]:
    """The positions that the model of a family gives to tokens with these spans of pictures."""
    types = torch.zeros(1, len(ids), dtype=torch.int32)
    for span in spans:
        types[0, span.start : span.end] = 1
    grids = [torch.from_numpy(span.item.inputs()["image_grid_thw"]) for span in spans]
    found, _ = _positioning_model(family).base_model.get_rope_index(
        torch.tensor([ids]), types, image_grid_thw=torch.cat(grids) if grids else None
    )
    return found[:, 0].numpy()


def make_processor(family: str, **kwargs: Any) -> MediaProcessor:
    """The processor of `make_vision_model`; each image becomes 1 to 64 tokens.

    Args:
        family: One of `FAMILIES`, or `PLAIN_FAMILY`.
        **kwargs: `data.mm_processor_kwargs`.
    """
    return MediaProcessor(make_hf_processor(family), make_vision_config(family), kwargs=kwargs)


def make_hf_processor(family: str) -> Any:
    """The processor of transformers. It reads images, but no videos."""
    if family == PLAIN_FAMILY:
        return _llava_processor()
    side = PATCH * MERGE
    sizes: dict[str, Any] = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    images = Qwen2VLImageProcessorPil(**sizes, min_pixels=side**2, max_pixels=(8 * side) ** 2)
    processor_class = _CLASSES[family][2]

    class WithoutVideos(processor_class):
        """Takes no video processor, whose class needs torchvision."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            """Accept the missing part."""
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    made = WithoutVideos(image_processor=images, tokenizer=make_tokenizer())
    made.__class__ = processor_class
    return made


def _llava_config(text: dict[str, Any]) -> LlavaConfig:
    tower: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    tower |= {"num_attention_heads": 2, "image_size": 16, "patch_size": PATCH}
    return LlavaConfig(
        text_config=Qwen2Config(**_TEXT | text),
        vision_config=CLIPVisionConfig(**tower, initializer_range=0.3),
        image_token_index=VOCAB_SIZE - 2,
        image_seq_length=16,
    )


def _llava_processor() -> LlavaProcessor:
    size = {"height": 16, "width": 16}
    images = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size)
    return LlavaProcessor(
        images,
        make_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        image_token="<|image_pad|>",
        num_additional_image_tokens=1,
    )


def random_picture(seed: int, size: tuple[int, int] = (16, 16)) -> Image.Image:
    """A picture of random colors; `size` is its width and height."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def load_picture(image: Image.Image) -> LoadedMedia:
    """The record of a picture."""
    content = f"{image.size}".encode() + image.tobytes()
    digest = blake2b(content, digest_size=16).hexdigest()
    return LoadedMedia(MediaKind.IMAGE, image, digest)


def encode_with_media(
    processor: MediaProcessor, parts: Sequence[str | LoadedMedia]
) -> tuple[list[int], list[Run]]:
    """Token ids of texts and pictures, and the runs of placeholders among them.

    Each picture is between `<|vision_start|>` and `<|vision_end|>`.
    """
    tokenizer = make_tokenizer()
    ids, runs = list[int](), list[Run]()
    for part in parts:
        if isinstance(part, str):
            ids += tokenizer.encode(part, add_special_tokens=False)
            continue
        item = processor.process(part)
        text = f"<|vision_start|>{item.text}<|vision_end|>"
        new = tokenizer.encode(text, add_special_tokens=False)
        placeholder = processor.placeholder_ids[part.kind]
        places = [len(ids) + index for index, one in enumerate(new) if one == placeholder]
        assert len(places) == item.num_tokens
        for offset in range(0, item.num_tokens, item.run_length):
            start = places[offset]
            runs.append((start, start + item.run_length, item, offset))
        ids += new
    return ids, runs


def load_parts(parts: Sequence[Any]) -> list[Any]:
    """Texts and media as they are; random pictures for `(seed, (width, height))`."""
    return [
        load_picture(random_picture(*part)) if isinstance(part, tuple) else part for part in parts
    ]


def encode_with_spans(
    processor: MediaProcessor, parts: Sequence[Any]
) -> tuple[list[int], list[MediaSpan]]:
    """Token ids of a whole prompt of `load_parts`, and the spans of its media."""
    ids, runs = encode_with_media(processor, load_parts(parts))
    return ids, place_runs([], runs)


@torch.no_grad()
def plain_vision_logits(
    model: PreTrainedModel, ids: Sequence[int], media: Sequence[MediaSpan]
) -> torch.Tensor:
    """Logits [len(ids), V] of the model's own forward pass, without a cache.

    Args:
        model: One of `make_vision_model`.
        ids: They have placeholders only where `media` is.
        media: The runs of placeholders, in order.
    """
    given: dict[str, torch.Tensor] = {"input_ids": torch.tensor([ids])}
    types = torch.zeros(1, len(ids), dtype=torch.int32)
    for span in media:
        types[0, span.start : span.end] = 1 if span.item.kind is MediaKind.IMAGE else 2
    if media and model.config.model_type != PLAIN_FAMILY:
        given["mm_token_type_ids"] = types
    inputs = [span.item.inputs() for span in media if span.offset == 0]
    for name in dict.fromkeys(name for one in inputs for name in one):
        parts = [torch.from_numpy(one[name]) for one in inputs if name in one]
        given[name] = torch.cat(parts)
    return model(**given, use_cache=False).logits[0].float()


def _byte_letters() -> list[str]:
    """The letters that stand for bytes in a byte-level vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel

    return ByteLevel.alphabet()
