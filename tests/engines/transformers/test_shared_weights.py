"""The engine's module shares the trainer's tensors and never writes to them."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from agentrl.engines.transformers.shared_weights import SharedWeights
from agentrl.errors import EngineError
from tests.fakes.engines import plain_logits, random_ids, tiny_model

PROMPT, TAIL = random_ids(12, seed=0), random_ids(6, seed=1)


@pytest.fixture
def one_rank() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(str(Path(folder) / "store"), 1)  # pyright: ignore[reportPrivateImportUsage]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def pointers(module: nn.Module) -> dict[str, int]:
    return {name: parameter.data_ptr() for name, parameter in module.named_parameters()}


def randomized(model: nn.Module) -> dict[str, torch.Tensor]:
    """Other values for every parameter."""
    generator = torch.Generator().manual_seed(7)
    return {
        name: 0.1 * torch.randn(parameter.shape, generator=generator)
        for name, parameter in model.named_parameters()
    }


def same_function(module: nn.Module, other: nn.Module) -> bool:
    return torch.allclose(
        plain_logits(module, PROMPT, TAIL), plain_logits(other, PROMPT, TAIL), atol=1e-5
    )


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_the_same_memory_and_ties_stay(tied: bool):
    model = tiny_model(tie_word_embeddings=tied)
    shared = SharedWeights.of(model, attention="sdpa")
    assert pointers(shared.module) == pointers(model)
    embedding = shared.module.get_parameter("model.embed_tokens.weight")
    assert (shared.module.get_parameter("lm_head.weight") is embedding) == tied
    assert shared.is_complete


def test_module_computes_the_same_with_buffers_of_its_own():
    model = tiny_model(rope_parameters={"rope_theta": 500.0, "rope_type": "default"})
    shared = SharedWeights.of(model, attention="sdpa")
    assert same_function(shared.module, model.eval())
    ours = dict(shared.module.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(ours[name], buffer)
        assert ours[name].data_ptr() != buffer.data_ptr()


def test_module_is_for_inference_and_the_model_stays_in_training():
    model = tiny_model().train()
    shared = SharedWeights.of(model, attention="sdpa")
    assert not any(module.training for module in shared.module.modules())
    assert not any(parameter.requires_grad for parameter in shared.module.parameters())
    assert all(module.training for module in model.modules())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.config._attn_implementation == shared.module.config._attn_implementation == "sdpa"


def test_optimizer_step_is_seen_at_once():
    model = tiny_model().eval()
    shared = SharedWeights.of(model, attention="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimizer.step()
    assert same_function(shared.module, model)


def test_update_with_the_same_memory_changes_nothing():
    model = tiny_model()
    shared = SharedWeights.of(model, attention="sdpa")
    before = {name: p._version for name, p in model.named_parameters()}
    shared.update(model.named_parameters())
    assert pointers(shared.module) == pointers(model)
    assert before == {name: p._version for name, p in model.named_parameters()}


def test_other_values_never_reach_the_trainer():
    model = tiny_model()
    original = {name: p.detach().clone() for name, p in model.named_parameters()}
    shared = SharedWeights.of(model, attention="sdpa")
    values = randomized(model)
    shared.update(values.items())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, original[name])
        assert torch.equal(shared.module.get_parameter(name), values[name])
    owned = pointers(shared.module)
    shared.update(randomized(tiny_model(seed=3)).items())
    assert pointers(shared.module) == owned, "memory of its own is written in place"


def test_other_type_makes_a_copy_that_updates_fill():
    model = tiny_model().eval()
    shared = SharedWeights.of(model, attention="sdpa", dtype=torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in shared.module.parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    shared.update(model.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(shared.module.get_parameter(name), parameter.to(torch.bfloat16))


def test_state_dict_with_both_names_of_a_tie_is_accepted():
    model = tiny_model()
    shared = SharedWeights.of(model, attention="sdpa")
    assert "lm_head.weight" in model.state_dict()
    shared.update(model.state_dict().items())
    assert shared.is_complete


def test_wrapper_prefixes_in_names_are_accepted():
    model = tiny_model()
    shared = SharedWeights.of(model, attention="sdpa")
    shared.update((f"_orig_mod.{name}", p) for name, p in model.named_parameters())
    assert pointers(shared.module) == pointers(model)


def test_unknown_and_missing_names_are_named():
    model = tiny_model()
    shared = SharedWeights.of(model, attention="sdpa")
    given = dict(model.named_parameters())
    norm = given.pop("model.norm.weight")
    with pytest.raises(EngineError) as caught:
        shared.update([*given.items(), ("model.nrom.weight", norm)])
    assert caught.value.unknown == "model.nrom.weight"
    assert caught.value.missing == "model.norm.weight"
    assert not shared.is_complete
    shared.update(model.named_parameters())
    assert shared.is_complete


def test_wrong_shape_is_an_error():
    shared = SharedWeights.of(tiny_model(), attention="sdpa")
    with pytest.raises(EngineError, match="shape"):
        shared.update([("model.norm.weight", torch.ones(3))])


def test_what_is_no_language_model_is_refused():
    with pytest.raises(EngineError, match="Linear"):
        SharedWeights.of(nn.Linear(2, 2), attention="sdpa")


def test_sharded_module_on_one_rank_shares_its_local_tensors(one_rank: None):
    model = tiny_model().eval()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    shared = SharedWeights.of(model, attention="sdpa")
    assert shared.is_complete
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        assert shared.module.get_parameter(name).data_ptr() == parameter.to_local().data_ptr()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(input_ids=torch.tensor([PROMPT]), labels=torch.tensor([PROMPT])).loss.backward()
    optimizer.step()
    shared.update(model.named_parameters())
    assert same_function(shared.module, model)


def test_gathered_module_is_refused(one_rank: None):
    model = tiny_model()
    fully_shard(model).unshard()
    with pytest.raises(EngineError, match="reshard"):
        SharedWeights.of(model, attention="sdpa")


def test_shards_are_no_weights_until_full_tensors_come():
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        full = {name: p.detach().clone() for name, p in tiny_model().named_parameters()}
        model = tiny_model()
        fully_shard(model)
        shared = SharedWeights.of(model, attention="sdpa")
        assert not shared.is_complete
        with pytest.raises(EngineError, match="shard"):
            shared.update(model.named_parameters())
        shared.update(full.items())
    finally:
        dist.destroy_process_group()
    assert shared.is_complete
    assert same_function(shared.module, tiny_model().eval())
