"""Exports of families whose weights or keys transformers stores under other names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl.config.schema.run import ModelConfig, RunConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.engines.transformers.shared_weights import SharedWeights
from agentrl.errors import ConfigError
from agentrl.trainer.setup.engine_factory import build_engine
from agentrl.workers.distributed import World
from agentrl.workers.export import export_hf
from agentrl.workers.load import load_policy
from agentrl.workers.model import PolicyModel
from tests.fakes.plugins import tiny_tokenizer
from tests.fakes.training import weights

SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
       "v_head_dim": 16, "head_dim": 8}  # fmt: skip
DENSE_FIRST = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
PARTIAL = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
LAYERS = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": SIZES,
    "qwen2 tied": SIZES | {"tie_word_embeddings": True},
    "qwen3": SIZES,
    "llama": SIZES | {"rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "rope_theta": 50000.0,
    }},
    "gpt2": GPT2,
    "phi": SIZES | {"rope_parameters": PARTIAL},
    "phi3": SIZES | {"original_max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        "rope_theta": 50000.0, "original_max_position_embeddings": 32}},
    "gpt_neox": SIZES | {"rope_parameters": PARTIAL},
    "gemma3_text": SIZES | {"sliding_window": 8, "layer_types": LAYERS, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}},
    "gemma3n_text": SIZES | {"layer_types": LAYERS, "num_kv_shared_layers": 0, "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320,
        "activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [32, 32],
        "altup_num_inputs": 2},
    "gemma4_text": SIZES | {"layer_types": LAYERS, "global_head_dim": 16,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320},
    "apertus": SIZES,
    "glm4": SIZES | {"rope_parameters": PARTIAL},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 1},
    "phimoe": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 1},
    "olmoe": SIZES | EXPERTS | {"num_experts": 4},
    "flex_olmo": SIZES | {"num_experts": 4, "num_experts_per_tok": 1},
    "qwen2_moe": SIZES | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4},
    "glm4_moe": SIZES | EXPERTS | DENSE_FIRST,
    "granitemoe": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 1},
    "dots1": SIZES | EXPERTS | DENSE_FIRST | {"n_shared_experts": 1},
    "minimax_m2": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 1},
    "ernie4_5_moe": SIZES | {"moe_num_experts": 4, "moe_k": 1, "moe_intermediate_size": 16,
                             "moe_layer_start_index": 1},
    "hunyuan_v1_moe": SIZES | {"num_experts": 4, "moe_topk": 1},
    "deepseek_v2": SIZES | EXPERTS | DENSE_FIRST | MLA,
    "deepseek_v3": SIZES | EXPERTS | DENSE_FIRST | MLA,
}  # fmt: skip


OLD_KEYS: dict[str, dict[str, Any]] = {
    "qwen2": {"rope_theta": 10000.0, "rope_scaling": None},
    "llama": {"rope_theta": 50000.0, "rope_scaling": {
        "type": "llama3", "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
    }},
    "phi": {"rope_theta": 1e6, "rope_scaling": None, "partial_rotary_factor": 0.5},
    "phi3": {"rope_theta": 5e4, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    }},
    "gpt_neox": {"rotary_emb_base": 1e6, "rotary_pct": 0.5},
    "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 5000.0,
                    "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 4.0}},
    "qwen3_moe": {"num_experts": 4, "num_local_experts": 4, "rope_theta": 10000.0},
    "gpt2": {"tie_word_embeddings": True},
}  # fmt: skip
"""Keys that transformers 4.57 reads, and the values with which it computes the same logits."""


def make_base(family: str, folder: Path) -> PreTrainedModel:
    config = AutoConfig.for_model(family.split()[0], **FAMILIES[family])
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    lm.save_pretrained(folder)
    return lm


def load(world: World, folder: Path, **keys: Any) -> PolicyModel:
    return load_policy(ModelConfig(path=str(folder), **keys), world, FsdpConfig())


def export(policy: PolicyModel, folder: Path) -> dict[str, Any]:
    export_hf(policy, tiny_tokenizer(), folder)
    return read_config(folder)


def read_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def change_config(folder: Path, without: str = "", **changes: Any) -> None:
    config = read_config(folder) | changes
    config.pop(without, None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


def add_tensors(folder: Path, **tensors: torch.Tensor) -> None:
    save_file(stored(folder) | tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("family", FAMILIES)
def test_export_has_the_tensors_and_keys_of_its_base(family: str, world: World, tmp_path: Path):
    make_base(family, tmp_path / "base")
    add_tensors(tmp_path / "base", **{"mtp.fc.weight": torch.randn(3, 4)})
    policy = load(world, tmp_path / "base")
    config = export(policy, tmp_path / "out")
    before, after = stored(tmp_path / "base"), stored(tmp_path / "out")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    base = read_config(tmp_path / "base")
    assert {key: config[key] for key in base} == base
    again = load(world, tmp_path / "out")
    assert all(torch.equal(w, weights(again)[name]) for name, w in weights(policy).items())


@pytest.mark.parametrize("family", OLD_KEYS)
def test_config_has_the_keys_of_transformers_4(family: str, world: World, tmp_path: Path):
    make_base(family, tmp_path / "base")
    old = OLD_KEYS[family] | {"torch_dtype": "float32"}
    new = export(load(world, tmp_path / "base"), tmp_path / "new")
    assert {key: new.get(key) for key in old} == old
    # The same from a base that has the older keys only, and one that transformers does not know.
    change_config(tmp_path / "base", "rope_parameters", **old, of_their_own=[1])
    restored = export(load(world, tmp_path / "base"), tmp_path / "old")
    assert {key: restored.get(key) for key in old} == old
    assert restored["of_their_own"] == [1]


def test_older_keys_have_the_values_of_the_run(world: World, tmp_path: Path):
    make_base("qwen2", tmp_path / "base")
    change_config(tmp_path / "base", "rope_parameters", rope_theta=5e5, rope_scaling=None)
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 4e5}
    keys = {"rope_parameters": rope, "max_position_embeddings": 128}
    config = export(load(world, tmp_path / "base", override_config=keys), tmp_path / "out")
    assert (config["rope_theta"], config["max_position_embeddings"]) == (4e5, 128)
    assert config["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 2.0}


@pytest.mark.parametrize("family", ["qwen2 tied", "gpt2", "gemma3_text"])
def test_two_heads_stay_two_in_trainer_engine_and_export(
    family: str, world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    lm, folder = make_base(family, tmp_path / "base"), tmp_path / "base"
    head = torch.randn(320, lm.config.hidden_size)
    add_tensors(folder, **{"lm_head.weight": head})
    policy = load(world, folder)
    assert "two different matrices" in caplog.text
    config = export(policy, tmp_path / "out")
    assert config["tie_word_embeddings"] is False
    assert torch.equal(stored(tmp_path / "out")["lm_head.weight"], head)
    ids = torch.arange(3, 20)[None]
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    engine = SharedWeights.of(policy.lm, attention="sdpa").module
    assert torch.equal(plain.lm_head.weight, head)
    torch.testing.assert_close(engine(ids).logits, plain(ids).logits)
    keys = {"model": {"path": str(folder)}, "data": {"train_files": ["a"]}}
    run = RunConfig.model_validate(keys | {"rollout": {"engine": {"name": "sglang"}}})
    with pytest.raises(ConfigError, match="of which SGLang would use one"):
        build_engine(run, policy.lm, tiny_tokenizer(), device=torch.device("cpu"))


def test_equal_matrices_are_one(world: World, tmp_path: Path):
    folder = tmp_path / "base"
    make_base("qwen2 tied", folder)
    add_tensors(folder, **{"lm_head.weight": stored(folder)["model.embed_tokens.weight"].clone()})
    config = export(load(world, folder), tmp_path / "out")
    assert config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in stored(tmp_path / "out")


def test_names_without_the_prefix_of_the_model_are_kept(world: World, tmp_path: Path):
    make_base("gpt2", tmp_path / "base")
    plain = {k.removeprefix("transformer."): v for k, v in stored(tmp_path / "base").items()}
    plain["h.0.attn.bias"] = torch.ones(1, 1, 4, 4, dtype=torch.bool)  # the files of GPT-2 have it
    save_file(plain, tmp_path / "base/model.safetensors", metadata={"format": "pt"})
    export(load(world, tmp_path / "base"), tmp_path / "out")
    assert stored(tmp_path / "out").keys() == plain.keys()
