"""The vision tower of a model, and its language model on tokens of text and of pictures.

The embedded engine and the trainer share this module, so that they compute the same. A picture's
features replace the embeddings of its placeholder tokens by index, not by token id: a placeholder
that the policy sampled is a plain token.

Shape key: S packed tokens, H hidden size of the language model, n tokens of the pictures.
"""

import inspect
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.errors import ConfigError
from agentrl.media.positions import compute_position_ids, has_mrope, place_runs
from agentrl.media.processor import MediaEncoder, MediaProcessor, TowerInputs
from agentrl.media.records import LoadedMedia, MediaItem, MediaKind, MediaSpan


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

    def clone(self) -> "VisionFeatures":
        """Return a copy in memory of its own."""
        return VisionFeatures(self.embeds.clone(), tuple(layer.clone() for layer in self.deepstack))

    @property
    def nbytes(self) -> int:
        """Bytes of all features."""
        return self.embeds.nbytes + sum(layer.nbytes for layer in self.deepstack)


class PlacedFeatures(NamedTuple):
    """The features of the packed tokens that are pictures."""

    index: Tensor  # pyright: ignore[reportIncompatibleMethodOverride]
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
    for group in group_items(items):
        output = _run_tower(lm, [items[index] for index in group])
        found |= zip(group, output, strict=True)
    return [found[index] for index in range(len(items))]


def group_items(items: Sequence[MediaItem]) -> list[list[int]]:
    """Group the indices of items by calls of the tower: one kind, and inputs that concatenate."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for index, item in enumerate(items):
        shapes = tuple((name, value.shape[1:]) for name, value in item.inputs().items())
        groups[item.kind, shapes].append(index)
    return list(groups.values())


def compute_no_features(lm: PreTrainedModel, encoder: MediaEncoder) -> VisionFeatures:
    """Run the tower on a small gray picture, and return none of its features.

    A rank without pictures calls it, so that it takes part in the collectives of a sharded tower.
    """
    side = np.full((64, 64, 3), 127, np.uint8)
    gray = LoadedMedia(MediaKind.IMAGE, Image.fromarray(side), "a gray picture of 64 pixels")
    body: Any = lm.base_model
    output = body.get_image_features(
        **_join_inputs([encoder.encode(gray)], lm.device), return_dict=True
    )
    layers = getattr(output, "deepstack_features", None) or ()
    return VisionFeatures(
        _flatten(output.pooler_output)[:0], tuple(_flatten(layer)[:0] for layer in layers)
    )


def _run_tower(lm: PreTrainedModel, items: Sequence[MediaItem]) -> list[VisionFeatures]:
    """Run the tower on items of one kind, the inputs of which can be concatenated."""
    body: Any = lm.base_model
    is_image = items[0].kind is MediaKind.IMAGE
    run = body.get_image_features if is_image else body.get_video_features
    inputs = _join_inputs([item.inputs() for item in items], lm.device)
    output = run(**inputs, return_dict=True)
    lengths = [item.num_tokens for item in items]
    embeds = _split(output.pooler_output, lengths)
    layers = [_split(layer, lengths) for layer in getattr(output, "deepstack_features", None) or ()]
    return [
        VisionFeatures(embeds[index], tuple(layer[index] for layer in layers))
        for index in range(len(items))
    ]


def _join_inputs(inputs: Sequence[TowerInputs], device: torch.device) -> dict[str, Tensor]:
    return {
        name: torch.from_numpy(np.concatenate([one[name] for one in inputs])).to(device)
        for name in inputs[0]
        if name != "second_per_grid_ts"  # of positions; the tower does not take it
    }


def _split(values: Any, lengths: Sequence[int]) -> Sequence[Tensor]:
    return _flatten(values).split(list(lengths))


def _flatten(values: Any) -> Tensor:
    """Join the features of all items, `[n, H]`."""
    joined = values if isinstance(values, Tensor) else torch.cat(tuple(values))
    return joined.reshape(-1, joined.shape[-1])


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
    kwargs = {"use_cache": False} | kwargs
    if placed is None:
        output = body(input_ids=input_ids, position_ids=position_ids, **kwargs)
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
    output = body(inputs_embeds=states[None], position_ids=position_ids, **kwargs)
    return output.last_hidden_state


def compute_logits(
    lm: PreTrainedModel,
    input_ids: Tensor,
    position_ids: Tensor,
    placed: PlacedFeatures | None,
    *,
    logits_to_keep: Tensor,
    **kwargs: Any,
) -> Tensor:
    """Compute the logits of packed tokens: `[1, n, V]` at the n indices `logits_to_keep`."""
    hidden = run_body(lm, input_ids, position_ids, placed, **kwargs)
    head: Any = lm.get_output_embeddings()
    return head(hidden[:, logits_to_keep])


@torch.no_grad()
def check_vision(lm: PreTrainedModel, processor: MediaProcessor) -> None:
    """Compare positions and logits of a picture with those of the model's own code.

    Args:
        lm: A model that is whole on this rank, with an attention of transformers. Any weights will
            do.
        processor: The model's processor.

    Raises:
        ConfigError: They differ, or the model's code cannot be called like this.
    """
    if MediaKind.IMAGE not in processor.placeholders:
        return
    was_training = lm.training
    lm.eval()
    try:
        problem = _find_difference(lm, _Probe.of(processor))
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError) as error:
        problem = f"{type(error).__name__}: {error}"
    finally:
        lm.train(was_training)
    if problem is not None:
        raise ConfigError(
            f"{type(lm).__name__} cannot be used with pictures: {problem}",
            key="model.path",
            expected="a model with the interface of transformers' Qwen2-VL, Qwen2.5-VL or Qwen3-VL",
        )


class _Probe(NamedTuple):
    """A short text with one picture."""

    input_ids: list[int]
    item: MediaItem
    spans: list[MediaSpan]

    @classmethod
    def of(cls, processor: MediaProcessor) -> "_Probe":
        height, width = np.indices((64, 96))
        pixels = np.stack([4 * height, 2 * width, height + width], axis=2).astype(np.uint8)
        loaded = LoadedMedia(MediaKind.IMAGE, Image.fromarray(pixels), "a picture for a check")
        item = processor.process(loaded)
        tokenizer: Any = processor.processor.tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        ids = [
            token_id
            for text in ("A picture: ", item.text, ". What is it?")
            for token_id in tokenizer.encode(text, add_special_tokens=False)
        ]
        at = np.flatnonzero(np.array(ids) == processor.placeholder_ids[MediaKind.IMAGE])
        starts = at[:: item.run_length].tolist()
        runs = [
            (start, start + item.run_length, item, index * item.run_length)
            for index, start in enumerate(starts)
        ]
        return cls(ids, item, place_runs([], runs))


def _find_difference(lm: PreTrainedModel, probe: _Probe) -> str | None:
    """Return how the results differ, or None."""
    body: Any = lm.base_model
    ids = torch.tensor([probe.input_ids], device=lm.device)
    is_picture = torch.zeros_like(ids, dtype=torch.int32)
    for span in probe.spans:
        is_picture[0, span.start : span.end] = 1
    given = {"input_ids": ids, "mm_token_type_ids": is_picture}
    given |= _join_inputs([probe.item.inputs()], lm.device)
    positions = torch.from_numpy(compute_position_ids(probe.spans, 0, ids.shape[1])).to(lm.device)
    if not has_mrope(lm.config):
        positions = positions[:1]
    elif hasattr(body, "get_rope_index"):
        theirs = body.get_rope_index(**_accepted(body.get_rope_index, given))[0][:, 0]
        if not torch.equal(theirs.to(positions), positions):
            return "its get_rope_index gives other positions"
    (features,) = compute_features(lm, [probe.item])
    placed = PlacedFeatures.join(
        [(s.start, features.take(s.offset, s.offset + s.end - s.start)) for s in probe.spans]
    )
    own = run_body(lm, ids, positions.unsqueeze(1) if has_mrope(lm.config) else positions, placed)
    head = lm.get_output_embeddings()
    if head is None:
        theirs = body(**_accepted(body.forward, given)).last_hidden_state
    else:
        own, theirs = head(own), lm(**_accepted(lm.forward, given)).logits
    distance = ((own - theirs).abs().max() / theirs.abs().max()).item()
    limit = 1e-3 if own.dtype.itemsize > 2 else 5e-2
    return None if distance < limit else f"its logits differ from ours by {distance:.1e}"


def _accepted(function: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the arguments that a function has."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in given.items() if name in names}
