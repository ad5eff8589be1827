"""Vision-language models in training: the same numbers as plain transformers with pixels."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import CriticConfig, FsdpConfig
from agentrl.errors import CheckpointError, ConfigError, DataError
from agentrl.media.inputs import MultiModalInputs
from agentrl.workers import load as load_module
from agentrl.workers import vision_tower
from agentrl.workers.actor import Actor
from agentrl.workers.batches import read_padded_rows
from agentrl.workers.checkpoint import RunState, open_checkpoint
from agentrl.workers.critic import Critic
from agentrl.workers.demonstrations import Demonstration, pad_demonstrations
from agentrl.workers.distributed import World
from agentrl.workers.export import export_hf
from agentrl.workers.load import load_hf_config, load_policy, make_empty_lm
from agentrl.workers.lora import inject_adapters
from agentrl.workers.model import PolicyModel
from agentrl.workers.packing import RowPacker, pack_rows
from agentrl.workers.scoring import Reference
from agentrl.workers.sft import _micro_batch_losses
from agentrl.workers.snapshot import identify, load_run, save_run
from agentrl.workers.value_model import ValueModel, drop_head
from agentrl.workers.weight_files import WeightFiles
from tests.fakes.lora_ranks import take_weights
from tests.fakes.torchrun import ranks_of
from tests.fakes.training import Layout, fill_adapters, make_actor, weights
from tests.fakes.update_equality import Update
from tests.fakes.vision_models import (
    FAMILIES,
    PLAIN_FAMILY,
    make_hf_processor,
    make_processor,
    make_tokenizer,
    make_vision_config,
    make_vision_model,
)
from tests.fakes.vision_ranks import CASES as RANK_CASES
from tests.fakes.vision_ranks import FAMILIES as RANK_FAMILIES
from tests.fakes.vision_rows import (
    TEMPERATURE,
    PictureRow,
    build,
    expected_log_probs,
    make_rows,
    make_video_rows,
    naive_update,
    packed_update,
    picture_batch,
    plain_inputs,
)

EVERY_FAMILY = (*FAMILIES, PLAIN_FAMILY)
CPU = torch.device("cpu")

CASES: dict[str, dict[str, Any]] = {
    "one_micro_batch": {"budget": 4096},
    "many_micro_batches": {"budget": 60},
    "rows_alone": {"budget": 1},
    "prefixes_not_shared": {"share_prefixes": False},
    "checkpointed_activations": {"checkpointing": True},
    "checkpointed_activations_in_host": {"checkpointing": True, "activations_in_host": True},
    "offloaded_between_uses": {"offloads": True},
    "sharded": {"fsdp": FsdpConfig(offload_policy=True)},
    "frozen": {"is_frozen": True},
    "frozen_in_many_micro_batches": {"is_frozen": True, "budget": 60},
    "frozen_with_checkpointed_activations": {"is_frozen": True, "checkpointing": True},
}
LAYOUTS = {
    "plain": Layout(),
    "padded": Layout(pad_left=3, pad_right=2),
    "reordered": Layout(order=(6, 2, 0, 4, 5, 1, 3)),
}


def assert_equal(found: Update, naive: Update) -> None:
    assert math.isclose(found.loss, naive.loss, rel_tol=1e-5, abs_tol=1e-6)
    assert found.gradients.keys() == naive.gradients.keys()
    for name, gradient in naive.gradients.items():
        assert torch.allclose(found.gradients[name], gradient, rtol=1e-5, atol=1e-6), name


def assert_scores(
    actor: Actor, lm: PreTrainedModel, rows: tuple[PictureRow, ...], layout: Layout | None = None
) -> None:
    """The actor's log-probabilities are those of a plain model."""
    layout = layout or Layout()
    found = actor.compute_log_probs(picture_batch(rows, layout), temperature=TEMPERATURE).log_probs
    order = layout.order or range(len(rows))
    for place, expected in zip(order, found, strict=True):
        plain = expected_log_probs(lm, [rows[place]])[0]
        assert torch.allclose(expected[: len(plain)], plain, rtol=0, atol=1e-5)
        assert not expected[len(plain) :].any()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_layout_is_invisible_log_probs_are_those_of_the_plain_model(
    world: World, family: str, layout: Layout
):
    lm, rows = make_vision_model(family), make_rows(family)
    for budget in (4096, 60):
        for shares in (True, False):
            actor = build(world, family, budget=budget, share_prefixes=shares)
            assert_scores(actor, lm, rows, layout)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_layout_is_invisible_update_equals_the_plain_one(world: World, family: str, name: str):
    actor = build(world, family, **CASES[name])
    found = packed_update(actor, picture_batch(make_rows(family)))
    naive = naive_update(family, is_frozen="frozen" in name)
    assert_equal(found, naive)
    has_tower = any(".visual." in weight for weight in found.gradients)
    assert has_tower == ("frozen" not in name)


def test_update_of_a_model_with_plain_positions_equals_the_plain_one(world: World):
    found = packed_update(build(world, PLAIN_FAMILY), picture_batch(make_rows(PLAIN_FAMILY)))
    naive = naive_update(PLAIN_FAMILY)
    # Its last tower layers have no gradient, and the trap reports those as zeros.
    unused = found.gradients.keys() - naive.gradients.keys()
    assert not any(found.gradients[name].any() for name in unused)
    used = {name: grad for name, grad in found.gradients.items() if name not in unused}
    assert_equal(found._replace(gradients=used), naive)


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    """What each of two ranks computed, of which the second owns no pictures."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    with ranks_of("tests.fakes.vision_ranks", str(folder)) as ranks:
        ended = [rank.wait() for rank in ranks]
    assert not any(rank.code for rank in ended), "\n".join(rank.err for rank in ended)
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("family", RANK_FAMILIES)
def test_layout_is_invisible_update_of_two_ranks_equals_the_plain_one(
    of_ranks: list[dict[tuple[str, str], Any]], family: str
):
    names = [*RANK_CASES, *(f"{name}_without_exchange" for name in RANK_CASES)]
    for name in [*names, "ulysses_sharded", "ulysses_frozen"]:
        naive = naive_update(family, is_frozen="frozen" in name)
        for found in of_ranks:
            assert_equal(Update(**found[family, name]), naive)


@pytest.mark.slow
@pytest.mark.parametrize("family", RANK_FAMILIES)
def test_log_probs_of_two_ranks_are_those_of_the_plain_model(
    of_ranks: list[dict[tuple[str, str], Any]], family: str
):
    for name in ("log_probs", "log_probs_without_exchange"):
        assert max(found[family, name] for found in of_ranks) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_after_videos_are_those_of_the_plain_model(world: World, family: str):
    pytest.importorskip("torchvision", reason="the processors of videos need it")
    lm, rows = make_vision_model(family), make_video_rows(family)
    assert {len(row.spans) for row in rows} == ({3, 4} if family == "qwen3_vl" else {1, 2})
    for budget in (4096, 60):
        assert_scores(build(world, family, budget=budget), lm, rows)
    found = packed_update(build(world, family), picture_batch(rows))
    assert_equal(found, naive_update(family, rows=rows))


# Packing.


def packed_sizes(rows: list[PictureRow]) -> tuple[int, int]:
    """Tokens of the rows in one micro-batch, with shared prefixes and without."""
    padded = read_padded_rows(picture_batch(rows))
    both = [
        pack_rows(padded, range(len(rows)), CPU, max_sharing_length=length) for length in (999, 0)
    ]
    return both[0].input_ids.shape[1], both[1].input_ids.shape[1]


def test_a_prefix_is_shared_only_if_its_pictures_are_equal():
    same, _, other = make_rows("qwen3_vl")[:3]
    assert same.ids == other.ids
    shared, whole = packed_sizes([same, same])
    assert shared == whole // 2
    start = same.spans[0].start
    shared, whole = packed_sizes([same, other])
    assert shared == whole - start


def test_a_picture_of_several_rows_is_placed_once_if_they_share_it():
    first, second, *_ = make_rows("qwen3_vl")
    padded = read_padded_rows(picture_batch([first, second]))
    shared = pack_rows(padded, range(2), CPU, max_sharing_length=999)
    assert [len({one.item.key for one in shared.media}), len(shared.media)] == [2, 2]
    apart = pack_rows(padded, range(2), CPU)
    assert [len({one.item.key for one in apart.media}), len(apart.media)] == [2, 3]
    for packed in (shared, apart):
        assert packed.position_ids.shape == (3, *packed.input_ids.shape)
        for one in packed.media:
            ids = packed.input_ids[0, one.start : one.start + one.last - one.first]
            assert len(set(ids.tolist())) == 1


def test_a_picture_after_the_last_trained_token_is_not_packed():
    row = make_rows("qwen3_vl")[5]
    assert [span.end > len(row.prompt) for span in row.spans] == [False, False, True]
    packed = pack_rows(read_padded_rows(picture_batch([row])), [0], CPU)
    assert len(packed.media) == 2


def test_rows_of_text_have_plain_positions():
    rows = make_rows("qwen3_vl")[3:5]
    packed = pack_rows(read_padded_rows(picture_batch(rows)), range(2), CPU)
    assert packed.position_ids.shape == packed.input_ids.shape
    assert not packed.media


def test_order_of_rows_with_pictures_does_not_depend_on_the_process():
    rows = list(make_rows("qwen3_vl"))
    first, second = (
        RowPacker(read_padded_rows(picture_batch(rows)), range(7), max_sharing_length=99)
        for _ in range(2)
    )
    assert first.cut(60) == second.cut(60)


def test_column_of_another_kind_is_refused():
    batch = picture_batch(make_rows("qwen3_vl")[:1])
    batch.non_tensor_batch["multi_modal_inputs"] = np.array([{}], dtype=object)
    with pytest.raises(DataError, match="'multi_modal_inputs' has a dict"):
        read_padded_rows(batch)


def test_inputs_of_a_row_are_a_mapping_of_tensors():
    row = make_rows("qwen3_vl")[1]
    inputs = MultiModalInputs(row.spans)
    assert sorted(inputs) == ["image_grid_thw", "pixel_values"]
    assert inputs["image_grid_thw"].shape == (2, 3)
    patches = inputs["image_grid_thw"].prod(1).sum()
    assert inputs["pixel_values"].shape[0] == int(patches)
    with pytest.raises(KeyError):
        inputs["pixel_values_videos"]
    assert not dict(MultiModalInputs())
    assert "image" in repr(inputs)


# The tower.


class Calls:
    """Counts the pictures that a model's tower computes."""

    def __init__(self, actor: Actor) -> None:
        self.num_pictures = 0
        body: Any = actor.policy.lm.base_model
        self._run = body.get_image_features
        body.get_image_features = self._count

    def _count(
        self, pixel_values: torch.Tensor, image_grid_thw: torch.Tensor, **kwargs: Any
    ) -> Any:
        self.num_pictures += len(image_grid_thw)
        return self._run(pixel_values, image_grid_thw, **kwargs)


def test_features_of_a_frozen_tower_are_computed_once_for_all_passes(world: World):
    batch = picture_batch(make_rows("qwen3_vl"))
    keys = {span.item.key for row in make_rows("qwen3_vl")[:6] for span in row.spans}
    actor = build(world, "qwen3_vl", is_frozen=True)
    calls = Calls(actor)
    for _ in range(2):
        actor.compute_log_probs(batch, temperature=TEMPERATURE)
        actor.update_policy(batch, temperature=TEMPERATURE)
    assert calls.num_pictures == len(keys) == 3


def test_features_that_are_too_large_are_not_kept(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vision_tower, "MAX_FEATURE_BYTES", 100)
    actor = build(world, "qwen3_vl", is_frozen=True)
    assert_scores(actor, make_vision_model("qwen3_vl"), make_rows("qwen3_vl"))
    assert_scores(actor, make_vision_model("qwen3_vl"), make_rows("qwen3_vl"))


def test_features_of_a_trained_tower_follow_its_weights(world: World):
    actor, rows = build(world, "qwen3_vl"), make_rows("qwen3_vl")
    before = weights(actor.policy)
    actor.update_policy(picture_batch(rows), temperature=TEMPERATURE)
    after = weights(actor.policy)
    assert any(".visual." in name and not torch.equal(before[name], after[name]) for name in after)
    lm = make_vision_model("qwen3_vl", seed=1)
    lm.load_state_dict(after, strict=False)
    assert_scores(actor, lm, rows)


def test_a_frozen_tower_is_not_trained_and_not_in_a_checkpoint(world: World, tmp_path: Path):
    rows = make_rows("qwen3_vl")
    actor = build(world, "qwen3_vl", is_frozen=True)
    before = weights(actor.policy)
    actor.update_policy(picture_batch(rows), temperature=TEMPERATURE)
    after = weights(actor.policy)
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed
    assert not any(".visual." in name for name in changed)
    state = RunState(1, identify(actor.policy))
    checkpoint = open_checkpoint(save_run(tmp_path, actor, state))
    assert not any(".visual." in name for name in checkpoint.manifest.tensors)
    resumed = build(world, "qwen3_vl", is_frozen=True)
    load_run(checkpoint, resumed)
    found = weights(resumed.policy)
    assert all(torch.equal(found[name], after[name]) for name in after)
    actor.update_policy(picture_batch(rows), temperature=TEMPERATURE)
    resumed.update_policy(picture_batch(rows), temperature=TEMPERATURE)
    found, after = weights(resumed.policy), weights(actor.policy)
    assert all(torch.equal(found[name], after[name]) for name in after)


def test_checkpoint_of_another_frozen_tower_is_refused(world: World, tmp_path: Path):
    actor = build(world, "qwen3_vl", is_frozen=True)
    saved = save_run(tmp_path, actor, RunState(1, identify(actor.policy)))
    lm = make_vision_model("qwen3_vl")
    vision_tower.freeze_tower(lm)
    with torch.no_grad():
        vision_tower.tower_weights(lm)[0].mul_(2)
    other = make_actor(PolicyModel(lm, world, torch.float32, FsdpConfig()))
    with pytest.raises(CheckpointError, match="next to other frozen weights"):
        load_run(open_checkpoint(saved), other)
    with pytest.raises(CheckpointError, match=r"visual.*absent"):
        load_run(open_checkpoint(saved), build(world, "qwen3_vl"))


def test_tower_is_all_of_the_body_but_the_language_model():
    for family in EVERY_FAMILY:
        lm = make_vision_model(family)
        names = {id(weight): name for name, weight in lm.named_parameters()}
        found = {names[id(weight)] for weight in vision_tower.tower_weights(lm)}
        language = {n for n in names.values() if "language_model" in n or n.startswith("lm_head")}
        assert found == set(names.values()) - language
        assert found


# Loading.


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_read_in_slices_from_files_of_older_names(
    world: World, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
):
    lm = make_vision_model(family)
    lm.save_pretrained(tmp_path)
    monkeypatch.setattr(load_module, "load_causal_lm", None)  # not used
    config = ModelConfig(path=str(tmp_path))
    policy = load_policy(config, world, FsdpConfig())
    assert type(policy.lm) is type(lm)
    assert all(torch.equal(weight, lm.get_parameter(n)) for n, weight in weights(policy).items())
    trained = {name for name, _ in policy.trained_weights()}
    assert trained == {n for n, _ in policy.named_weights() if ".visual." not in n}
    assert_scores(make_actor(policy), lm, make_rows(family))
    whole = config.model_copy(update={"freeze_vision_tower": False})
    assert len(list(load_policy(whole, world, FsdpConfig()).trained_weights())) > len(trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_pictures_are_compared_with_the_models_own_code_when_it_is_loaded(
    world: World, tmp_path: Path, family: str
):
    make_vision_model(family).save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    policy = load_policy(config, world, FsdpConfig(), processor=make_processor(family))
    assert not any(weight.is_meta for weight in policy.parameters())
    processor = make_processor(family)
    processor.has_mrope = False
    with pytest.raises(ConfigError, match="get_rope_index gives other positions"):
        load_policy(config, world, FsdpConfig(), processor=processor)


def test_weights_with_another_shape_are_left_to_transformers(tmp_path: Path):
    make_vision_model("qwen2_vl").save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path))
    assert WeightFiles.find(str(tmp_path), make_empty_lm(config, CPU)) is not None
    other = config.model_copy(update={"override_config": {"intermediate_size": 48}})
    assert WeightFiles.find(str(tmp_path), make_empty_lm(other, CPU)) is None


def test_keys_of_parts_can_be_overridden(tmp_path: Path):
    make_vision_config("qwen2_5_vl").save_pretrained(tmp_path)
    overrides = {"max_position_embeddings": 64, "vision_config": {"depth": 1}}
    config = ModelConfig(path=str(tmp_path), override_config=overrides)
    found: Any = load_hf_config(config)
    assert found.text_config.max_position_embeddings == 64
    assert (found.vision_config.depth, found.vision_config.num_heads) == (1, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"no_such_key": 1}, "has no 'no_such_key'"),
        ({"vision_config": {"no_such_key": 1}}, "has no 'no_such_key'"),
        ({"vision_config": 3}, "'vision_config' is a part"),
    ],
)
def test_an_override_that_does_not_fit_is_refused(
    tmp_path: Path, overrides: dict[str, Any], message: str
):
    make_vision_config("qwen2_5_vl").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_hf_config(ModelConfig(path=str(tmp_path), override_config=overrides))


# Adapters, the other models, export.


LORA = ModelConfig(path="tiny", lora_rank=4, lora_alpha=8)


@pytest.mark.parametrize("family", EVERY_FAMILY)
def test_adapters_are_in_the_language_part_and_get_its_gradient(world: World, family: str):
    lm, rows = make_vision_model(family), make_rows(family)
    adapters = inject_adapters(lm, LORA)
    policy = PolicyModel(lm, world, torch.float32, FsdpConfig(), adapters=adapters)
    fill_adapters(policy.trained_weights(), world)
    names = {name for name, _ in policy.trained_weights()}
    assert names
    assert all("language_model" in name and ".lora_" in name for name in names)
    merged = make_vision_model(family, seed=1)
    merged.load_state_dict(take_weights(policy), strict=False)
    actor = make_actor(policy)
    assert_scores(actor, merged, rows)
    reference = Reference(policy, budget=None)
    found = reference.compute_ref_log_prob(picture_batch(rows), temperature=TEMPERATURE)
    for row, expected in zip(
        found, expected_log_probs(make_vision_model(family), rows), strict=True
    ):
        assert torch.allclose(row[: len(expected)], expected, rtol=0, atol=1e-5)
    gradients = packed_update(actor, picture_batch(rows)).gradients
    assert all(gradient.any() for gradient in gradients.values())


def test_adapter_of_the_tower_is_refused():
    with pytest.raises(ConfigError, match=r"no module of .* is named 'qkv'"):
        inject_adapters(
            make_vision_model("qwen3_vl"), LORA.model_copy(update={"target_modules": ["qkv"]})
        )


def test_a_reference_has_features_of_its_own(world: World):
    rows = make_rows("qwen2_5_vl")
    lm = make_vision_model("qwen2_5_vl", seed=3)
    policy = PolicyModel(
        make_vision_model("qwen2_5_vl", seed=3), world, torch.float32, FsdpConfig()
    )
    reference = Reference(policy, budget=60)
    found = reference.compute_ref_log_prob(picture_batch(rows), temperature=TEMPERATURE)
    for row, expected in zip(found, expected_log_probs(lm, rows), strict=True):
        assert torch.allclose(row[: len(expected)], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_critic_reads_pictures(world: World, family: str):
    rows = make_rows(family)
    model = ValueModel(drop_head(make_vision_model(family)), world, torch.float32, FsdpConfig())
    with torch.no_grad():
        model.score.weight.copy_(torch.randn(1, 32, generator=torch.Generator().manual_seed(5)))
    critic = Critic(model, CriticConfig(), total_steps=10, response_budget=16)
    found = critic.compute_values(picture_batch(rows))
    plain: Any = make_vision_model(family).base_model
    for row, values in zip(rows, found, strict=True):
        with torch.no_grad():
            states = plain(**plain_inputs(plain, row), use_cache=False).last_hidden_state[0]
            expected = model.score(states[len(row.prompt) - 1 : -1]).squeeze(1)
        masked = expected * torch.tensor(row.mask)
        assert torch.allclose(values[: len(masked)], masked, rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_the_processor_and_loads_with_transformers(
    world: World, tmp_path: Path, family: str
):
    source, target = tmp_path / "model", tmp_path / "export"
    make_vision_model(family).save_pretrained(source)
    make_hf_processor(family).image_processor.save_pretrained(source)
    policy = load_policy(ModelConfig(path=str(source)), world, FsdpConfig())
    actor = make_actor(policy)
    actor.update_policy(picture_batch(make_rows(family)), temperature=TEMPERATURE)
    export_hf(policy, make_tokenizer(), target)
    of_processor = {file.name for file in source.glob("*processor_config.json")}
    assert of_processor
    for name in of_processor:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    assert "agentrl" not in (target / "config.json").read_text()
    assert policy.text_config._attn_implementation == "agentrl_packed"
    assert policy.config.vision_config._attn_implementation == "sdpa"
    lm = AutoModelForImageTextToText.from_pretrained(target, dtype=torch.float32)
    assert all(torch.equal(weight, lm.get_parameter(n)) for n, weight in weights(policy).items())
    assert_scores(actor, lm, make_rows(family))
    text = json.loads((target / "config.json").read_text())["text_config"]
    assert text["rope_parameters"]["mrope_section"]


# The warm-up.


def test_warm_up_learns_from_conversations_with_pictures(world: World):
    rows = make_rows("qwen3_vl")
    batch = [
        Demonstration(
            row.ids, [0.0] * len(row.prompt) + [float(one) for one in row.mask], row.spans
        )
        for row in rows
    ]
    padded, loss_weights = pad_demonstrations(batch)
    policy = build(world, "qwen3_vl").policy
    total = float(loss_weights.sum())
    losses = _micro_batch_losses(policy, padded, loss_weights, total, range(len(rows)))
    loss = sum(float(loss.detach()) for loss in losses)
    lm, plain = make_vision_model("qwen3_vl"), 0.0
    for row in rows:
        with torch.no_grad():
            logits = lm(**plain_inputs(lm, row), use_cache=False).logits[0]
        log_probs = logits[len(row.prompt) - 1 : -1].log_softmax(-1)
        own = log_probs.gather(1, torch.tensor(row.response)[:, None]).squeeze(1)
        plain -= float((own * torch.tensor(row.mask)).sum()) / total
    assert math.isclose(loss, plain, rel_tol=1e-5)
