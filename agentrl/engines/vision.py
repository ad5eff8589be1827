"""The vision tower of a model, and its language model on tokens of text and of pictures.

The embedded engine and the trainer share this module, so that they compute the same. A picture's
features replace the embeddings of its placeholder tokens by index, not by token id: a placeholder
that the policy sampled is a plain token.

Shape key: S packed tokens, H hidden size of the language model, n tokens of the pictures.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.media.records import MediaItem, MediaKind


class VisionFeatures(NamedTuple):
    """The features of one item, or of some of its tokens."""

    embeds: Tensor
    """`[n, H]`: they replace the embeddings of the placeholders."""
    deepstack: tuple[Tensor, ...] = ()
    """`[n, H]` each: they are added to the states after the first layers (Qwen3-VL)."""

    def take(self, start: int, end: int) -> "VisionFeatures":
        """Return the features of the tokens `[start, end)`."""
        return VisionFeatures(
            self.embeds[start:end], tuple(layer[start:end] for layer in self.deepstack)
        )


class PlacedFeatures(NamedTuple):
    """The features of the packed tokens that are pictures."""

    index: Tensor
    """`[n]`, int64: the packed position of each feature, ascending."""
    features: VisionFeatures
    """`[n, H]`."""

    @classmethod
    def join(cls, parts: Sequence[tuple[int, VisionFeatures]]) -> "PlacedFeatures | None":
        """Join features by the packed position at which each begins; None if there is none."""
        if not parts:
            return None
        embeds = torch.cat([features.embeds for _, features in parts])
        places = [np.arange(start, start + len(found.embeds)) for start, found in parts]
        index = torch.from_numpy(np.concatenate(places)).to(embeds.device)
        layers = zip(*(features.deepstack for _, features in parts), strict=True)
        return cls(index, VisionFeatures(embeds, tuple(torch.cat(layer) for layer in layers)))


def has_vision(config: PretrainedConfig) -> bool:
    """Whether a model has a vision tower."""
    return getattr(config, "vision_config", None) is not None


def language_model(lm: PreTrainedModel) -> Any:
    """Return the body that computes hidden states from embeddings: that of a text model itself."""
    body: Any = lm.base_model
    return body.language_model if has_vision(lm.config) else body


def compute_features(lm: PreTrainedModel, items: Sequence[MediaItem]) -> list[VisionFeatures]:
    """Run the vision tower on items, each once.

    Returns:
        The features of each item, in order.
    """
    found: dict[int, VisionFeatures] = {}
    for kind in MediaKind:
        chosen = [index for index, item in enumerate(items) if item.kind is kind]
        if chosen:
            output = _run_tower(lm, kind, [items[index] for index in chosen])
            found |= zip(chosen, output, strict=True)
    return [found[index] for index in range(len(items))]


def _run_tower(
    lm: PreTrainedModel, kind: MediaKind, items: Sequence[MediaItem]
) -> list[VisionFeatures]:
    body: Any = lm.base_model
    run = body.get_image_features if kind is MediaKind.IMAGE else body.get_video_features
    given = [item.inputs() for item in items]
    inputs = {
        name: torch.from_numpy(np.concatenate([one[name] for one in given])).to(lm.device)
        for name in given[0]
        if name != "second_per_grid_ts"
    }
    output = run(**inputs, return_dict=True)
    lengths = [item.num_tokens for item in items]
    embeds = _split(output.pooler_output, lengths)
    layers = [_split(layer, lengths) for layer in getattr(output, "deepstack_features", None) or ()]
    return [
        VisionFeatures(embeds[index], tuple(layer[index] for layer in layers))
        for index in range(len(items))
    ]


def _split(values: Any, lengths: Sequence[int]) -> Sequence[Tensor]:
    joined = values if isinstance(values, Tensor) else torch.cat(tuple(values))
    return joined.reshape(-1, joined.shape[-1]).split(list(lengths))


def run_body(
    lm: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    placed: PlacedFeatures | None = None,
    **kwargs: Any,
) -> Tensor:
    """Compute the last hidden states of packed tokens.

    Args:
        lm: The Hugging Face model.
        input_ids: `[1, S]`; any valid id where a feature is placed.
        position_ids: `[1, S]`, or `[3, 1, S]` with mrope.
        placed: The features; None: all tokens are text.
        **kwargs: Of the language model, such as the layout that its attention reads.

    Returns:
        `[1, S, H]`.
    """
    body = language_model(lm)
    if placed is None:
        output = body(input_ids=input_ids, position_ids=position_ids, use_cache=False, **kwargs)
        return output.last_hidden_state
    embeds = body.get_input_embeddings()(input_ids)
    index, features = placed
    states = embeds[0].index_copy(0, index, features.embeds.to(embeds))
    if features.deepstack:
        mask = torch.zeros(input_ids.shape, dtype=torch.bool, device=input_ids.device)
        mask[0, index] = True
        kwargs |= {
            "visual_pos_masks": mask,
            "deepstack_visual_embeds": [layer.to(embeds) for layer in features.deepstack],
        }
    output = body(inputs_embeds=states[None], position_ids=position_ids, use_cache=False, **kwargs)
    return output.last_hidden_state
