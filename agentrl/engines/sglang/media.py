"""Images and videos as fields of a SGLang request.

SGLang gets what the trainer computes on: the token ids with all placeholders, the inputs of the
vision tower, where their features are, and the position ids. So it decodes, resizes and tokenizes
nothing. The format is agentrl's own; `processors.qwen_vl`, which runs inside SGLang, reads it.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import save

from agentrl.engines.sglang.backend import JsonFields
from agentrl.errors import EngineError
from agentrl.media.positions import compute_position_ids, position_of
from agentrl.media.records import MediaKind, MediaSpan

MEDIA_FORMAT = "agentrl"
"""The value of `format` in an item of `image_data` or `video_data`. A SGLang without
`arguments.PROCESSOR_PACKAGE` refuses it."""
TEXT_PREFIX = "data:application/x-agentrl;base64,"
"""Begins an item that is sent to a server; its tensors follow, as safetensors in base64."""
_FIELDS = {kind: f"{kind}_data" for kind in MediaKind}


def media_fields(media: Sequence[MediaSpan], num_tokens: int) -> dict[str, Any]:
    """Return the media of a sequence as fields of `GenerateReqInput`.

    It may compute the inputs of the tower, which takes a while.

    Args:
        media: All runs of placeholders of the sequence, in order.
        num_tokens: Tokens of the sequence.
    """
    fields = dict[str, Any]()
    for kind, name in _FIELDS.items():
        spans = [span for span in media if span.item.kind is kind]
        if spans:
            tensors = _tower_inputs(spans)
            tensors["offsets"] = torch.tensor([place for span in spans for place in _places(span)])
            tensors["mrope_positions"] = torch.from_numpy(
                compute_position_ids(media, 0, num_tokens)
            )
            next_position = position_of(media[-1], num_tokens)
            tensors["mrope_position_delta"] = torch.tensor([[next_position - num_tokens]])
            fields[name] = [{"format": MEDIA_FORMAT, "tensors": tensors}]
    return fields


def _tower_inputs(spans: Sequence[MediaSpan]) -> dict[str, torch.Tensor]:
    """Return the inputs of the items, in their order; an item that occurs twice is there twice.

    Each frame of a video is an item to SGLang: its tower of Qwen2.5-VL would let the frames of a
    video attend to each other, but the model's tower sees each frame alone.
    """
    inputs = [span.item.inputs() for span in spans if span.offset == 0]
    tensors = {
        name: torch.from_numpy(np.concatenate([one[name] for one in inputs]))
        for name in inputs[0]
        if name != "second_per_grid_ts"  # of positions, which are computed already
    }
    for name, value in tensors.items():
        if name.endswith("grid_thw"):
            frames = value.repeat_interleave(value[:, 0], dim=0)
            frames[:, 0] = 1
            tensors[name] = frames
    return tensors


def _places(span: MediaSpan) -> list[tuple[int, int]]:
    """Return the first and last token of each frame of a run."""
    inputs = span.item.inputs()
    num_frames = int(inputs[f"{span.item.kind}_grid_thw"][0, 0])
    size = span.item.num_tokens // num_frames
    return [(start, start + size - 1) for start in range(span.start, span.end, size)]


def has_media(fields: JsonFields) -> bool:
    """Return whether a request has images or videos."""
    return any(name in fields for name in _FIELDS.values())


def no_tower(name: str, request_id: str) -> EngineError:
    """Return the error of a call with media to a SGLang that would ignore them."""
    return EngineError(
        f"{name} has a model without a vision tower, and the call has images or videos",
        request_id=request_id,
        expected="a vision-language model (model.path)",
    )


def as_json(fields: JsonFields) -> JsonFields:
    """Return the fields of a request with its media as text: servers take no other format."""
    found: Mapping[str, Any] = {
        name: [
            TEXT_PREFIX + base64.b64encode(save(one["tensors"])).decode() for one in fields[name]
        ]
        for name in _FIELDS.values()
        if name in fields
    }
    return {**fields, **found}
