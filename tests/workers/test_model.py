import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2AudioConfig, Qwen2Tokenizer

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.engines.protocol import Engine, SyncFigures
from agentrl.errors import ConfigError
from agentrl.workers.batches import read_padded_rows
from agentrl.workers.distributed import World, resolve_device
from agentrl.workers.export import export_hf
from agentrl.workers.load import load_causal_lm, load_hf_config, load_policy, resolve_dtype
from agentrl.workers.model import PolicyModel, ScoringParams, make_mesh
from agentrl.workers.packing import pack_rows
from agentrl.workers.shards import full_tensor
from agentrl.workers.tokenizer import check_tokenizer, load_tokenizer
from agentrl.workers.weight_sync import sync_weights
from tests.fakes.engines import tiny_model
from tests.fakes.training import make_actor, make_batch, make_policy, random_rows, weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model(tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    letters = {chr(65 + n): n for n in range(26)}
    tokenizer = Qwen2Tokenizer(vocab=letters, merges=[])
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_loaded_policy_has_the_folders_weights_in_float32(world: World, folder: Path):
    policy = load_policy(ModelConfig(path=str(folder)), world, FsdpConfig())
    stored = load_file(folder / "model.safetensors")
    assert {n: w.dtype for n, w in policy.named_weights()} == dict.fromkeys(stored, torch.float32)
    assert all(torch.equal(w, stored[name]) for name, w in weights(policy).items())


def test_missing_folder_is_reported(tmp_path: Path):
    with pytest.raises(ConfigError, match="no model can be loaded") as caught:
        load_causal_lm(ModelConfig(path=str(tmp_path / "nowhere")))
    assert caught.value.details["key"] == "model.path"
    with pytest.raises(ConfigError, match="no tokenizer can be loaded"):
        load_tokenizer(ModelConfig(path=str(tmp_path / "nowhere")))


def test_incomplete_weights_are_refused_instead_of_left_random(folder: Path):
    stored = load_file(folder / "model.safetensors")
    del stored["model.layers.1.mlp.up_proj.weight"]
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"lacks weights.*layers\.1\.mlp\.up_proj"):
        load_causal_lm(ModelConfig(path=str(folder)))


def test_override_of_an_unknown_key_is_refused(folder: Path):
    config = ModelConfig(path=str(folder), override_config={"atention_dropout": 0.1})
    with pytest.raises(ConfigError, match="atention_dropout"):
        load_causal_lm(config)
    known = ModelConfig(path=str(folder), override_config={"attention_dropout": 0.1})
    assert load_causal_lm(known).config.attention_dropout == 0.1


def test_tokenizer_that_writes_more_ids_than_the_model_knows_is_refused(folder: Path):
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    config = load_causal_lm(ModelConfig(path=str(folder))).config
    check_tokenizer(tokenizer, config)
    tokenizer.add_tokens([f"<extra_{n}>" for n in range(100)])
    with pytest.raises(ConfigError, match="96 embeddings"):
        check_tokenizer(tokenizer, config)


def test_auto_dtype_is_by_device():
    auto = ModelConfig(path="x")
    assert resolve_dtype(auto, torch.device("cpu")) == torch.float32
    assert resolve_dtype(auto, torch.device("cuda")) == torch.bfloat16
    low = ModelConfig(path="x", dtype="bfloat16")
    assert resolve_dtype(low, torch.device("cpu")) == torch.bfloat16


def test_missing_device_is_reported():
    if torch.cuda.is_available():
        pytest.skip("this machine has the device")
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        resolve_device("cuda")


def test_bfloat16_layers_train_float32_weights(world: World):
    policy = PolicyModel(tiny_model(initializer_range=0.1), world, torch.bfloat16, FsdpConfig())
    actor = make_actor(policy)
    before, batch = weights(policy), make_batch(random_rows(6))
    exact = make_actor(make_policy(world)).compute_log_probs(batch, temperature=1.0).log_probs
    rough = actor.compute_log_probs(batch, temperature=1.0).log_probs
    assert rough.dtype == torch.float32
    assert 0 < (exact - rough).abs().max() < 0.1
    assert actor.update_policy(batch, temperature=1.0).metrics["actor/optimizer_steps"] == 1
    after = weights(policy)
    assert all(weight.dtype == torch.float32 for weight in after.values())
    assert any(not torch.equal(weight, before[name]) for name, weight in after.items())


def test_one_rank_computes_on_the_weights_themselves_if_no_other_dtype_needs_a_copy(world: World):
    def names_of_used_weights(dtype: torch.dtype) -> set[str]:
        policy = PolicyModel(tiny_model(), world, dtype, FsdpConfig())
        stored = {full_tensor(w.detach()).data_ptr(): n for n, w in policy.named_weights()}
        used = set[str]()

        def note(module: torch.nn.Module, *_: object) -> None:
            places = {weight.data_ptr() for weight in module.parameters(recurse=False)}
            used.update(stored[place] for place in places & stored.keys())

        for module in policy.lm.modules():
            module.register_forward_hook(note)
        make_actor(policy).update_policy(make_batch(random_rows(4)), temperature=1.0)
        return used

    every = {name for name, _ in tiny_model().named_parameters()}
    assert names_of_used_weights(torch.float32) == every
    assert not names_of_used_weights(torch.bfloat16)


@pytest.mark.parametrize("tied", [True, False])
def test_exported_folder_is_a_plain_model_with_the_trained_weights(
    world: World, folder: Path, tmp_path: Path, tied: bool
):
    policy = make_policy(world, tie_word_embeddings=tied)
    actor = make_actor(policy)
    rows = random_rows(4)
    actor.update_policy(make_batch(rows), temperature=1.0)
    out = tmp_path / "exported"
    export_hf(policy, load_tokenizer(ModelConfig(path=str(folder))), out)
    plain = AutoModelForCausalLM.from_pretrained(out)
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, weights(policy)[name])
    assert (out / "tokenizer.json").is_file()
    assert "agentrl" not in json.dumps(json.loads((out / "config.json").read_text()))
    again = load_policy(ModelConfig(path=str(out)), world, FsdpConfig())
    mine = actor.compute_log_probs(make_batch(rows), temperature=1.0)
    theirs = make_actor(again).compute_log_probs(make_batch(rows), temperature=1.0)
    assert torch.equal(mine.log_probs, theirs.log_probs)


class WeightTaker:
    """An engine that only takes weights."""

    is_shared = False

    def __init__(self, error: Exception | None = None) -> None:
        self.taken: dict[str, torch.Tensor] = {}
        self.version = -1
        self.error = error

    async def update_weights(self, named_tensors, *, version: int) -> SyncFigures:
        for name, tensor in named_tensors:
            self.taken[name] = tensor
            if self.error:
                raise self.error
        self.version = version
        return SyncFigures()


async def test_synced_weights_are_the_trainers_own_memory_each_once(world: World):
    policy = make_policy(world)
    taker = WeightTaker()
    engine: Engine = taker  # pyright: ignore[reportAssignmentType]
    await sync_weights(policy, engine, version=3)
    assert taker.version == 3
    assert "lm_head.weight" not in taker.taken
    for name, weight in policy.named_weights():
        assert taker.taken[name].data_ptr() == full_tensor(weight).data_ptr()


async def test_engine_that_fails_to_take_weights_raises_here(world: World):
    engine: Engine = WeightTaker(RuntimeError("full"))  # pyright: ignore[reportAssignmentType]
    with pytest.raises(RuntimeError, match="full"):
        await sync_weights(make_policy(world), engine, version=1)


def test_experts_without_a_token_have_a_zero_gradient(world: World):
    lm = tiny_model(initializer_range=0.1)
    lm.model.layers[0].experts = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    policy = PolicyModel(lm, world, torch.bfloat16, FsdpConfig())
    rows = read_padded_rows(make_batch(random_rows(2)))
    packed = pack_rows(rows, range(2), world.device)
    policy(packed, ScoringParams(temperature=1.0)).log_probs.sum().backward()
    policy.release_gathered()
    (expert,) = [w for name, w in policy.named_weights() if name.endswith("experts.0.weight")]
    assert expert.grad is not None
    assert not full_tensor(expert.grad).any()


def test_a_model_that_reads_audio_is_refused_with_a_message(tmp_path: Path):
    Qwen2AudioConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="a qwen2_audio, which reads audio") as caught:
        load_hf_config(ModelConfig(path=str(tmp_path)))
    assert caught.value.key == "model.path"


def test_weights_that_cannot_be_unpickled_are_named(tmp_path: Path):
    config = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1,
    )  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(print, protocol=2))
    with pytest.raises(ConfigError, match="no model can be loaded"):
        load_causal_lm(ModelConfig(path=str(tmp_path)))


def test_ranks_that_cannot_be_divided_into_copies_are_reported(world: World):
    with pytest.raises(ConfigError, match="4 ranks cannot be divided into groups of 3") as caught:
        make_mesh(replace(world, size=4), fsdp_size=3)
    assert caught.value.key == "actor.fsdp_config.fsdp_size"
    assert make_mesh(world, fsdp_size=8) is world.mesh
