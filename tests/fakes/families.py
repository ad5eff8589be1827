"""Small random models of every family of decoders that transformers has.

A row says what agentrl does with a family: it is trained and sampled by the embedded engine,
only trained (another engine must sample), or refused. Values are tiny; the structure (rotary
kinds, windows, experts, shared keys, head widths) is that of the released models.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB_SIZE = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
DEEPSEEK: dict[str, Any] = {
    **EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
WINDOW: dict[str, Any] = {
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4,
    "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": 64, "factor": 4.0,
}  # fmt: skip
GPT2: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.1, "rotary_dim": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A model type, its tiny configuration, and what is expected of it."""

    model_type: str
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    refused: str = ""
    """Words of the trainer's refusal; empty: it is trained."""
    not_sampled: str = ""
    """Words of the embedded engine's refusal; empty: it samples."""

    def config(self) -> Any:
        """Make the configuration."""
        given = {**SIZES, **self.given} if "n_embd" not in self.given else self.given
        config = AutoConfig.for_model(self.model_type, **given)
        config.vocab_size = VOCAB_SIZE
        return config

    def model(self) -> PreTrainedModel:
        """Make the model with random weights, in evaluation mode."""
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(self.config(), dtype=torch.float32).eval()


MIXES = "share a prefix|in one micro-batch|keep sequences apart|does not pass the attention plan"
STATE = "layers of the type"
OWN = "by code of their own"
LATENT_KEYS = "keys and values of .* do not fit"
FAMILIES: dict[str, Family] = {
    "qwen2": Family("qwen2"),
    "qwen2_window": Family("qwen2", {"use_sliding_window": True, **WINDOW}),
    "qwen2_yarn": Family("qwen2", {"rope_parameters": YARN}),
    "qwen3": Family("qwen3", {"head_dim": 16}),
    "qwen3_moe": Family("qwen3_moe", {**EXPERTS, "head_dim": 16}),
    "qwen2_moe": Family("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 24}),
    "mixtral": Family("mixtral", {**EXPERTS, "sliding_window": None}),
    "olmoe": Family("olmoe", EXPERTS),
    "phimoe": Family("phimoe", EXPERTS),
    "granitemoe": Family("granitemoe", EXPERTS),
    "granitemoeshared": Family("granitemoeshared", {**EXPERTS, "shared_intermediate_size": 24}),
    "granitemoehybrid_attention": Family(
        "granitemoehybrid",
        {
            **EXPERTS,
            "shared_intermediate_size": 24,
            "layer_types": ["attention"] * 2,
            "mamba_n_heads": 4,
        },
    ),
    "flex_olmo": Family("flex_olmo", EXPERTS),
    "lfm2_moe_attention": Family(
        "lfm2_moe", {**EXPERTS, "layer_types": ["full_attention"] * 2, "num_dense_layers": 1}
    ),
    "dots1": Family("dots1", DEEPSEEK),
    "glm": Family("glm", {"head_dim": 8}),
    "glm4": Family("glm4", {"head_dim": 8}),
    "glm4_moe": Family("glm4_moe", {**DEEPSEEK, "head_dim": 8}),
    "minimax_m2": Family("minimax_m2", {**EXPERTS, "head_dim": 8, "rotary_dim": 4}),
    "ernie4_5": Family("ernie4_5", {"head_dim": 8}),
    "ernie4_5_moe": Family("ernie4_5_moe", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    "hunyuan": Family("hunyuan_v1_dense", {"head_dim": 8}),
    "hunyuan_moe": Family("hunyuan_v1_moe", {**EXPERTS, "head_dim": 8, "moe_topk": 2}),
    "seed_oss": Family("seed_oss", {"head_dim": 8}),
    "llama3_tied": Family("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama_dynamic": Family(
        "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    ),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0]}),
    "arcee": Family("arcee"),
    "apertus": Family("apertus"),
    "bitnet": Family("bitnet"),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", WINDOW),
    "exaone4": Family("exaone4", WINDOW),
    "mistral_window": Family("mistral", {"sliding_window": 8, "head_dim": 8}),
    "ministral": Family("ministral", {**WINDOW, "head_dim": 8}),
    "ministral3": Family(
        "ministral3",
        {
            "head_dim": 8,
            "sliding_window": None,
            "rope_parameters": {
                **YARN,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "starcoder2": Family("starcoder2", {"sliding_window": 8}),
    "phi": Family("phi"),
    "phi3": Family("phi3"),
    "phi3_longrope": Family(
        "phi3", {"original_max_position_embeddings": 64, "rope_parameters": LONGROPE}
    ),
    "phimoe_longrope": Family(
        "phimoe",
        {**EXPERTS, "rope_parameters": LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.1}},
    ),
    "cohere": Family("cohere"),
    "cohere2": Family("cohere2", WINDOW),
    "granite": Family("granite"),
    "gemma": Family("gemma", {"head_dim": 8}),
    "gemma3_text": Family("gemma3_text", {**WINDOW, "head_dim": 8}),
    "gemma4_equal": Family(
        "gemma4_text",
        {
            **WINDOW,
            "head_dim": 8,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "gemma4_e2b": Family(
        "gemma4_text",
        {
            **WINDOW,
            "head_dim": 8,
            "global_head_dim": 8,
            "num_hidden_layers": 4,
            "layer_types": WINDOW["layer_types"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "gemma4_moe": Family(
        "gemma4_text",
        {
            **WINDOW,
            **EXPERTS,
            "head_dim": 8,
            "global_head_dim": 8,
            "enable_moe_block": True,
            "top_k_experts": 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
    ),
    "gemma4_released": Family(
        "gemma4_text",
        {
            **WINDOW,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCAB_SIZE,
        },
        not_sampled="keys and values of 1 x 16 and 2 x 8",
    ),
    "gemma3n_text": Family(
        "gemma3n_text",
        {
            **WINDOW,
            "head_dim": 8,
            "num_hidden_layers": 4,
            "layer_types": WINDOW["layer_types"] * 2,
            "intermediate_size": [48] * 4,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "gpt2": Family("gpt2", GPT2),
    "gptj": Family("gptj", GPT2),
    "gpt_neox": Family("gpt_neox", {"num_key_value_heads": 4}),
    "opt": Family("opt", {"ffn_dim": 48, "num_key_value_heads": 4, "word_embed_proj_dim": 32}),
    "deepseek_v2": Family(
        "deepseek_v2",
        {**DEEPSEEK, **LATENT, "topk_method": "greedy"},
        not_sampled=LATENT_KEYS,
    ),
    "deepseek_v3": Family("deepseek_v3", {**DEEPSEEK, **LATENT}, not_sampled=LATENT_KEYS),
    "glm4_moe_lite": Family("glm4_moe_lite", {**DEEPSEEK, **LATENT}, not_sampled=LATENT_KEYS),
    "youtu": Family("youtu", {**LATENT}, not_sampled=LATENT_KEYS),
    "gemma2": Family("gemma2", {**WINDOW, "head_dim": 8}, MIXES, "capped"),
    "vaultgemma": Family("vaultgemma", {**WINDOW, "head_dim": 8}, MIXES, "capped"),
    "gpt_oss": Family("gpt_oss", {**WINDOW, **EXPERTS, "head_dim": 8}, "sinks", "sinks"),
    "qwen3_next": Family(
        "qwen3_next",
        {
            **EXPERTS,
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "shared_expert_intermediate_size": 24,
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        MIXES,
        STATE,
    ),
    "qwen3_5": Family(
        "qwen3_5_text",
        {
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        MIXES,
        STATE,
    ),
    "falcon_h1": Family(
        "falcon_h1",
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_n_groups": 1,
        },
        MIXES,
        STATE,
    ),
    "lfm2": Family("lfm2", {"layer_types": ["conv", "full_attention"]}, MIXES, STATE),
    "jamba": Family(
        "jamba",
        {
            **EXPERTS,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
        MIXES,
        STATE,
    ),
    "nemotron_h": Family(
        "nemotron_h",
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 1,
            "head_dim": 8,
        },
        MIXES,
        STATE,
    ),
    "llama4": Family(
        "llama4_text",
        {
            **EXPERTS,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 8,
            "moe_layers": [1],
        },
        MIXES,
        "chunked_attention",
    ),
    "nemotron": Family("nemotron", {}, MIXES, OWN),
    "stablelm": Family("stablelm", {}, MIXES, OWN),
    "falcon": Family("falcon", {"new_decoder_architecture": False}, MIXES, OWN),
    "gpt_neo": Family(
        "gpt_neo",
        {
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "window_size": 8,
        },
        MIXES,
        OWN,
    ),
    "bloom": Family("bloom", {"n_layer": 2, "n_head": 4}, MIXES, OWN),
    "mpt": Family(
        "mpt", {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 99}, MIXES, OWN
    ),
    "rwkv": Family("rwkv", {"context_length": 99}, MIXES, OWN),
    "minicpm3": Family("minicpm3", {**LATENT}, not_sampled=LATENT_KEYS),
    "mla_of_equal_widths": Family(
        "deepseek_v3", {**DEEPSEEK, **LATENT, "v_head_dim": 16}, not_sampled=LATENT_KEYS
    ),
}
"""By name: the families that were tried, and how each ended."""
