"""Rows with pictures, and what plain transformers computes for them, one row at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentrl.config.schema.training import FsdpConfig
from agentrl.media.inputs import MultiModalInputs
from agentrl.media.positions import place_runs
from agentrl.media.processor import MediaProcessor
from agentrl.media.records import LoadedMedia, MediaKind, MediaSpan, Video
from agentrl.protocol import DataProto
from agentrl.protocol.columns import object_array
from agentrl.workers.actor import Actor
from agentrl.workers.distributed import World
from agentrl.workers.load import enable_checkpointing
from agentrl.workers.model import PolicyModel
from agentrl.workers.offload import OffloadedMemory
from agentrl.workers.shards import local_tensor
from agentrl.workers.vision_tower import freeze_tower
from tests.fakes.training import GradientTrap, Layout, Row, make_actor, make_batch
from tests.fakes.update_equality import Update
from tests.fakes.vision_models import (
    MERGE,
    PATCH,
    encode_with_media,
    load_parts,
    make_hf_processor,
    make_processor,
    make_vision_config,
    make_vision_model,
)

TEMPERATURE = 0.8


@dataclass(frozen=True)
class PictureRow(Row):
    """A sequence with pictures, and their runs of placeholder tokens."""

    spans: tuple[MediaSpan, ...] = field(default=())

    @property
    def ids(self) -> list[int]:
        """All tokens."""
        return self.prompt + self.response


def picture_row(
    processor: MediaProcessor,
    parts: Sequence[Any],
    num_prompt_parts: int,
    mask_of: Callable[[int], int],
    **fields: Any,
) -> PictureRow:
    """A row of texts and pictures; a placeholder token is never trained.

    Args:
        processor: Of the model.
        parts: Texts, records of media, and numbers of pictures with their sizes:
            `(seed, (width, height))`.
        num_prompt_parts: How many of them are the prompt.
        mask_of: Whether the token of the response with an index is trained.
        **fields: Of the row.
    """
    loaded = load_parts(parts)
    ids, runs = encode_with_media(processor, loaded)
    length = len(encode_with_media(processor, loaded[:num_prompt_parts])[0])
    inside = {index for start, end, *_ in runs for index in range(start, end)}
    mask = [int(at not in inside and mask_of(at - length)) for at in range(length, len(ids))]
    spans = tuple(place_runs([], runs))
    return PictureRow(ids[:length], ids[length:], mask, spans=spans, **fields)


@cache
def make_rows(family: str) -> tuple[PictureRow, ...]:
    """Seven rows of four groups.

    Two samples of one prompt with a picture, of which one sees another picture later. A prompt of
    the same text with a picture of another content and the same size. Two rows of text. One row of
    two pictures, with a third one after the last trained token. A row that samples a placeholder
    token, which is a plain token.
    """
    processor = make_processor(family)

    def row(
        uid: str,
        advantage: float,
        prompt: Sequence[Any],
        response: Sequence[Any],
        mask: Callable[[int], int] = lambda at: at % 3 != 1,
    ) -> PictureRow:
        return picture_row(
            processor, [*prompt, *response], len(prompt), mask, uid=uid, advantage=advantage
        )

    first, other, wide = (1, (32, 24)), (2, (32, 24)), (3, (48, 16))
    question = ["What is in the picture? ", first, " Look at it."]
    again = ["What is in the picture? ", other, " Look at it."]
    rows = [
        row("a", 1.0, question, ["A cat on a mat."]),
        row("a", -0.7, question, ["crop", wide, "It is a dog."]),
        row("b", 0.5, again, ["A cat on a mat."]),
        row("c", -1.1, ["Count to three: "], ["one two three"]),
        row("c", 0.4, ["Count to three: "], ["one two"]),
        row("d", 0.9, [first, wide, "Same?"], ["No. ", other], lambda at: at < 3),
    ]
    ids = processor.placeholder_ids
    sampled = [*b"abc", *ids.values(), *b"def"]
    rows.append(PictureRow([*b"Say it: "], sampled, [1] * len(sampled), uid="b", advantage=-0.6))
    return tuple(rows)


def make_video_rows(family: str) -> tuple[PictureRow, ...]:
    """Two samples of a prompt with a video, and one of a prompt with a picture and another video.

    The processors of videos need torchvision.
    """
    processor = with_videos(family)
    frames = np.random.default_rng(0).integers(0, 256, (2, 6, 32, 24, 3), dtype=np.uint8)
    first, second = (
        LoadedMedia(MediaKind.VIDEO, Video(one, 2.0), f"video {index}")
        for index, one in enumerate(frames)
    )

    def row(parts: Sequence[Any], uid: str, advantage: float) -> PictureRow:
        return picture_row(processor, parts, 3, lambda _: 1, uid=uid, advantage=advantage)

    return (
        row(["See ", first, " now.", "It is a film."], "a", 1.0),
        row(["See ", first, " now.", "It is none."], "a", -0.7),
        row([(1, (32, 24)), " and ", second, "are two."], "b", 0.4),
    )


def with_videos(family: str) -> MediaProcessor:
    """The processor of a small model of a family, also for videos."""
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    made = make_hf_processor(family)
    video_class = Qwen3VLVideoProcessor if family == "qwen3_vl" else Qwen2VLVideoProcessor
    made.video_processor = video_class(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": 128, "longest_edge": 32_768},
    )
    return MediaProcessor(made, make_vision_config(family))


def picture_batch(rows: Sequence[PictureRow], layout: Layout | None = None) -> DataProto:
    """Lay rows out as `collate` does, with the spans of their pictures."""
    layout = layout or Layout()
    batch = make_batch(rows, layout)
    order = range(len(rows)) if layout.order is None else layout.order
    inputs = [MultiModalInputs(rows[index].spans) for index in order]
    batch.non_tensor_batch["multi_modal_inputs"] = object_array(inputs)
    return batch


def plain_inputs(lm: PreTrainedModel, row: PictureRow) -> dict[str, Tensor]:
    """The arguments of the model's own forward pass, with pixels."""
    ids = torch.tensor([row.ids])
    if not row.spans:
        # Its code takes every placeholder for a picture, also one that was sampled.
        return {"inputs_embeds": lm.get_input_embeddings()(ids)}
    inputs = {"input_ids": ids, **MultiModalInputs(row.spans)}
    if "image_grid_thw" in inputs or "video_grid_thw" in inputs:
        inputs["mm_token_type_ids"] = torch.zeros_like(ids, dtype=torch.int32)
        for span in row.spans:
            kind = 1 + (span.item.kind is MediaKind.VIDEO)
            inputs["mm_token_type_ids"][0, span.start : span.end] = kind
    return inputs


def plain_log_probs(lm: PreTrainedModel, row: PictureRow) -> Tensor:
    """Log-probabilities of the response."""
    logits = lm(**plain_inputs(lm, row), use_cache=False).logits[0, len(row.prompt) - 1 : -1]
    every = (logits.float() / TEMPERATURE).log_softmax(-1)
    return every.gather(1, torch.tensor(row.response)[:, None]).squeeze(1)


def plain_loss(lm: PreTrainedModel, rows: Sequence[PictureRow]) -> Tensor:
    """The clipped loss of `make_batch`'s old log-probabilities, mean over tokens."""
    losses: list[Tensor] = []
    for row in rows:
        log_probs = plain_log_probs(lm, row)[torch.tensor(row.mask).bool()]
        ratio, advantage = (log_probs + 4.0).exp(), row.advantage
        loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        losses.append(loss.clamp(max=-advantage * 3.0) if advantage < 0 else loss)
    return torch.cat(losses).mean()


@torch.no_grad()
def expected_log_probs(lm: PreTrainedModel, rows: Sequence[PictureRow]) -> list[Tensor]:
    """Log-probabilities of the trained tokens of each row; 0 elsewhere."""
    return [plain_log_probs(lm, row) * torch.tensor(row.mask) for row in rows]


def naive_update(
    family: str, *, is_frozen: bool = False, rows: Sequence[PictureRow] | None = None
) -> Update:
    """The loss of some rows, and its gradient, without packing; None: those of `make_rows`."""
    lm = make_vision_model(family)
    if is_frozen:
        freeze_tower(lm)
    loss = plain_loss(lm, rows or make_rows(family))
    loss.backward()
    found = {name: weight.grad for name, weight in lm.named_parameters() if weight.grad is not None}
    return Update(loss.item(), found)


def build(
    world: World,
    family: str,
    *,
    is_frozen: bool = False,
    checkpointing: bool = False,
    activations_in_host: bool = False,
    offloads: bool = False,
    fsdp: FsdpConfig | None = None,
    budget: int = 120,
    **config: Any,
) -> Actor:
    """An actor of a small model of a family."""
    lm = make_vision_model(family)
    if is_frozen:
        freeze_tower(lm)
    if checkpointing:
        enable_checkpointing(lm)
    policy = PolicyModel(lm, world, torch.float32, fsdp or FsdpConfig())
    policy.offloads_activations = activations_in_host
    actor = make_actor(policy, Layout(budget=budget), **config)
    if offloads:
        weights = [local_tensor(weight.detach()) for _, weight in policy.named_weights()]
        policy.offload = OffloadedMemory(lambda: weights)
        with actor.on_device():
            pass
        assert not any(weight.untyped_storage().nbytes() for weight in weights)
    return actor


def packed_update(actor: Actor, batch: DataProto) -> Update:
    """The actor's update of this rank's rows."""
    trap = GradientTrap(actor)
    metrics = actor.update_policy(batch, temperature=TEMPERATURE).metrics
    return Update(metrics["actor/pg_loss"], trap.seen[0])
