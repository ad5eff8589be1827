"""The processor of the Qwen-VL families, which takes inputs that are ready for the tower."""
# pyright: reportMissingImports=false

import base64
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from safetensors.torch import load
from sglang.srt.multimodal.processors.qwen_vl import QwenVLImageProcessor
from sglang.srt.runtime_context import get_serving

from agentrl.engines.sglang.media import MEDIA_FORMAT, TEXT_PREFIX


class ReadyMediaProcessor(QwenVLImageProcessor):
    """Reads the format of `agentrl.engines.sglang.media`; all else is SGLang's own.

    The token ids of such a request are used as they are.
    """

    models = QwenVLImageProcessor.models

    async def process_mm_data_async(
        self, image_data: Any, input_text: Any, request_obj: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Process the media of one request (called by SGLang)."""
        image_data = _as_processor_output(image_data)
        request_obj.video_data = _as_processor_output(request_obj.video_data)
        return await super().process_mm_data_async(
            image_data, input_text, request_obj, *args, **kwargs
        )

    def _postprocess_mm_items_before_transport(
        self, mm_items: Sequence[Any], *, images: Sequence[Any] | None
    ) -> Sequence[Any]:
        """Set the identity of each item, by which prefixes and features are cached.

        SGLang's own has the features alone: pictures of one color in two shapes are the same to it,
        and features that an earlier tower has computed are used after an update.
        """
        items = super()._postprocess_mm_items_before_transport(mm_items, images=images)
        for item in items:
            if isinstance(item.feature, torch.Tensor):
                item.set_hash(_identity(item, get_serving().weight_version))
        return items


def _as_processor_output(data: Any) -> Any:
    """Return items of our format as SGLang's `processor_output`, and others unchanged."""
    if not isinstance(data, list):
        return data
    found = [(one, _read_tensors(one)) for one in data]
    return [
        one if tensors is None else {"format": "processor_output"} | tensors
        for one, tensors in found
    ]


def _read_tensors(one: Any) -> dict[str, torch.Tensor] | None:
    """Return the tensors of an item of our format, of this process or of a request's JSON."""
    if isinstance(one, dict) and one.get("format") == MEDIA_FORMAT:
        return one["tensors"]
    if isinstance(one, str) and one.startswith(TEXT_PREFIX):
        return load(base64.b64decode(one.removeprefix(TEXT_PREFIX)))
    return None


def _identity(item: Any, weight_version: str) -> int:
    digest = blake2b(weight_version.encode(), digest_size=8)
    shapes = {name: value for name, value in item.model_specific_data.items() if "grid" in name}
    for name, value in sorted(shapes.items()):
        digest.update(f"{name} {torch.as_tensor(value).tolist()}".encode())
    digest.update(item.feature.detach().cpu().contiguous().view(torch.uint8).numpy())
    return int.from_bytes(digest.digest(), "big")
