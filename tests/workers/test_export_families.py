"""Exports of families whose weights or keys transformers stores under other names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.workers.distributed import World
from agentrl.workers.export import export_hf
from agentrl.workers.load import load_policy
from tests.fakes.plugins import tiny_tokenizer

SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
       "v_head_dim": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
       "first_k_dense_replace": 1, "head_dim": 8}  # fmt: skip
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
    "phi": SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    "phi3": SIZES | {"original_max_position_embeddings": 32, "rope_parameters": {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        "rope_theta": 50000.0, "original_max_position_embeddings": 32}},
    "gpt_neox": SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    "gemma3_text": SIZES | {"sliding_window": 8, "layer_types": LAYERS, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}},
    "gemma3n_text": SIZES | {"layer_types": LAYERS, "num_kv_shared_layers": 0, "laurel_rank": 4,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320,
        "activation_sparsity_pattern": [0.0, 0.0], "intermediate_size": [32, 32], "altup_num_inputs": 2},
    "gemma4_text": SIZES | {"layer_types": LAYERS, "global_head_dim": 16,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320},
    "apertus": SIZES,
    "glm4": SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}},
    "mixtral": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 1},
    "phimoe": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 1},
    "olmoe": SIZES | EXPERTS | {"num_experts": 4},
    "flex_olmo": SIZES | {"num_experts": 4, "num_experts_per_tok": 1},
    "qwen2_moe": SIZES | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": SIZES | EXPERTS | {"num_experts": 4},
    "glm4_moe": SIZES | EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "granitemoe": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 1},
    "dots1": SIZES | EXPERTS | {"n_shared_experts": 1, "n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "minimax_m2": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 1},
    "ernie4_5_moe": SIZES | {"moe_num_experts": 4, "moe_k": 1, "moe_intermediate_size": 16, "moe_layer_start_index": 1},
    "hunyuan_v1_moe": SIZES | {"num_experts": 4, "moe_topk": 1},
    "deepseek_v2": SIZES | EXPERTS | MLA,
    "deepseek_v3": SIZES | EXPERTS | MLA,
}  # fmt: skip


def make_base(family: str, folder: Path) -> PreTrainedModel:
    config = AutoConfig.for_model(family.split()[0], **FAMILIES[family])
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_config(config)
    lm.save_pretrained(folder)
    return lm


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_export_has_the_files_of_its_base(family: str, world: World, tmp_path: Path):
    make_base(family, tmp_path / "base")
    policy = load_policy(ModelConfig(path=str(tmp_path / "base")), world, FsdpConfig())
    export_hf(policy, tiny_tokenizer(), tmp_path / "out")
    before, after = stored(tmp_path / "base"), stored(tmp_path / "out")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
