"""The vision tower and the language model, against the model's own forward pass."""

from functools import wraps
from typing import Any

import pytest
import torch

from agentrl.engines.vision import (
    PlacedFeatures,
    check_vision,
    compute_features,
    has_vision,
    run_body,
)
from agentrl.errors import ConfigError
from agentrl.media.positions import compute_position_ids
from tests.fakes.engines import tiny_model
from tests.fakes.vision_models import (
    FAMILIES,
    PLAIN_FAMILY,
    encode_with_spans,
    load_picture,
    make_processor,
    make_vision_model,
    plain_vision_logits,
    random_picture,
)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_pictures_by_index_give_the_states_of_the_models_own_forward(family: str):
    model, processor = make_vision_model(family), make_processor(family)
    first, second, third = [(seed, (40, 8 * (seed + 1))) for seed in range(3)]
    ids, spans = encode_with_spans(processor, ["one ", first, second, "two", third])
    features = compute_features(model, [span.item for span in spans])
    placed = PlacedFeatures.join(
        [(span.start, found) for span, found in zip(spans, features, strict=True)]
    )
    positions = torch.from_numpy(compute_position_ids(spans, 0, len(ids))).unsqueeze(1)
    states = run_body(model, torch.tensor([ids]), positions, placed)
    head: Any = model.get_output_embeddings()
    expected = plain_vision_logits(model, ids, spans)
    torch.testing.assert_close(head(states)[0], expected, atol=1e-5, rtol=1e-5)


def test_only_a_model_with_a_tower_has_vision():
    assert has_vision(make_vision_model("qwen3_vl").config)
    assert not has_vision(tiny_model().config)


@torch.no_grad()
def test_items_of_other_shapes_are_each_computed_alone():
    model, processor = make_vision_model(PLAIN_FAMILY), make_processor(PLAIN_FAMILY)
    items = [processor.process(load_picture(random_picture(seed))) for seed in range(3)]
    together = compute_features(model, items)
    for item, found in zip(items, together, strict=True):
        (alone,) = compute_features(model, [item])
        torch.testing.assert_close(found.embeds, alone.embeds, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", [*FAMILIES, PLAIN_FAMILY])
def test_a_model_that_agrees_passes_the_check(family: str):
    model = make_vision_model(family).train()
    check_vision(model, make_processor(family))
    assert model.training


def test_a_model_with_other_positions_is_refused():
    model: Any = make_vision_model("qwen2_5_vl")
    own = model.model.get_rope_index

    @wraps(own)
    def shifted(*args: Any, **kwargs: Any) -> Any:
        positions, deltas = own(*args, **kwargs)
        return positions + 1, deltas

    model.model.get_rope_index = shifted
    with pytest.raises(ConfigError, match="get_rope_index gives other positions") as caught:
        check_vision(model, make_processor("qwen2_5_vl"))
    assert caught.value.key == "model.path"


def test_a_model_with_other_logits_is_refused():
    model = make_vision_model("qwen3_vl")

    def add_the_last_token(_: object, __: object, output: Any) -> None:
        output.logits = output.logits + output.logits[:, -1:]

    model.register_forward_hook(add_the_last_token)
    with pytest.raises(ConfigError, match="logits differ from ours by"):
        check_vision(model, make_processor("qwen3_vl"))


def test_a_processor_of_another_model_is_refused():
    model = make_vision_model("qwen2_vl")
    with pytest.raises(ConfigError, match="cannot be used with pictures") as caught:
        check_vision(model, make_processor(PLAIN_FAMILY))
    assert caught.value.key == "model.path"
