"""Small vision-language models in the sizes that SGLang supports, and their folders."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from agentrl.media.processor import MediaProcessor
from tests.fakes.vision_models import make_hf_processor, make_vision_config

PATCH = 14
"""SGLang takes patches of another size for features that are computed already."""
SIDE = 2 * PATCH
"""Pixels of a token's side."""


def make_model(family: str, seed: int = 0) -> PreTrainedModel:
    """A small model with random weights, whose most likely token is no placeholder."""
    config = _make_config(family)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config)
        head: Any = model.get_output_embeddings()
        for token_id in (config.image_token_id, config.video_token_id):
            head.weight[token_id] = 0
    return model.float().eval()


def make_processor(family: str) -> MediaProcessor:
    """The processor of `make_model`, for images and videos."""
    return MediaProcessor(_make_hf_processor(family), _make_config(family))


def save_vision_policy(family: str, folder: Path) -> Path:
    """Write what SGLang is started with."""
    make_model(family).save_pretrained(folder)
    _make_hf_processor(family).save_pretrained(folder)
    return folder


def _make_config(family: str) -> Any:
    config = make_vision_config(family)
    config.vision_config.patch_size = PATCH
    if family == "qwen2_5_vl":
        config.vision_config.window_size = 2 * SIDE
    if family == "qwen2_vl":
        config.vision_config.in_chans = 3  # the released models' name, which SGLang reads
    return config


def _make_hf_processor(family: str) -> Any:
    made = make_hf_processor(family)
    made.image_processor.patch_size = PATCH
    made.image_processor.size = {"shortest_edge": SIDE**2, "longest_edge": (8 * SIDE) ** 2}
    kind: Any = Qwen3VLVideoProcessor if family == "qwen3_vl" else Qwen2VLVideoProcessor
    made.video_processor = kind(
        patch_size=PATCH,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": SIDE**2, "longest_edge": (16 * SIDE) ** 2},
    )
    return made
