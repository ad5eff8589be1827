"""The table's rows of the model, the update, the reference and the critic."""

from agentrl.config.verl import mapping as readers
from agentrl.config.verl import policy_readers as values
from agentrl.config.verl.mapping import UNSET, dead, left, part, refused, same, taken, under

_FSDP_WHERE = "the weights are sharded by FSDP2 over all ranks, in blocks of one layer"
_OFFLOAD = "actor.fsdp_config.offload_policy keeps shards in host memory"
_PACKED = "rows are always packed, without padding"
_MEMORY = "how the step is computed, which changes speed and memory alone"
_CHUNKED = "logits are always made in blocks (actor.logits_block_bytes)"
_ONE_LENGTH = "a sequence stays on one rank"
_PROFILER = "agentrl has no profiler"
_NEW_WORKER = "read by verl's new workers alone, which 0.6.1 does not choose by itself"
_SAME_BATCHES = "log-probabilities are computed in the packed micro-batches of the update"

_FSDP = [
    *left(_FSDP_WHERE, {"fsdp_size": -1, "wrap_policy.*": UNSET, "use_orig_params": False}),
    *left(_OFFLOAD, {"param_offload": False, "optimizer_offload": False}),
    *left(_MEMORY, {"forward_prefetch": False}),
    *left("master weights are float32", {"model_dtype": "fp32"}),
    *dead(_NEW_WORKER, {
        "ulysses_sequence_parallel_size": 1, "entropy_from_logits_with_chunking": False,
        "use_torch_compile": True, "entropy_checkpointing": False, "forward_only": False,
        "strategy": "fsdp", "entropy_from_logits_chunk_size": UNSET, "pad_to_length": UNSET,
        "pad_to_length_bucket": UNSET, "use_no_sync_for_gradient_accumulation": UNSET,
        "turbo_config.*": UNSET,
    }),
    *left("a run's seeds are trainer.seed, rollout.seed and data.seed", {"seed": UNSET}),
    *left("rollout.deterministic makes a run repeatable to the bit", {"full_determinism": UNSET}),
]  # fmt: skip
"""Below `fsdp_config`, of the actor as of the reference."""

_LORA = "there is no LoRA here: every weight is trained"
_NO_LORA = "model.lora_rank is 0"

MODEL = under("actor_rollout_ref.model", [
    taken("path", None, values.model_path, "model.path"),
    taken("tokenizer_path", None, readers.keep("model.tokenizer_path"), "model.tokenizer_path"),
    taken("trust_remote_code", False, values.trust_remote_code, "model.trust_remote_code"),
    taken("custom_chat_template", None, readers.keep("model.custom_chat_template"),
          "model.custom_chat_template"),
    taken("override_config", {}, values.override_config, "model.override_config"),
    same("enable_gradient_checkpointing", True, "model.enable_gradient_checkpointing"),
    refused("external_lib", None, why="no module is imported by name; a class path of a tool, an "
            "interaction or a scorer leads to code of your own"),
    refused("lora_rank", 0, why=_LORA),
    refused("lora_adapter_path", None, why=_LORA),
    refused("lora.rank", UNSET, 0, why=_LORA),
    refused("lora.adapter_path", UNSET, None, why=_LORA),
    refused("mtp.enable", UNSET, False, why="heads that predict several tokens are not trained"),
    refused("mtp.enable_train", UNSET, False, why="heads for several tokens are not trained"),
    *dead(_NO_LORA, {"lora_alpha": 16, "target_modules": "all-linear", "exclude_modules": None,
                     "lora.*": UNSET}),
    *dead("model.mtp.enable is false", {"mtp.*": UNSET}),
    *dead(_NEW_WORKER, {"hf_config_path": None}),
    *left(_PACKED, {"use_remove_padding": False}),
    *left(_MEMORY, {"enable_activation_offload": False, "use_liger": False,
                    "enable_activation_offloading": UNSET,
                    "use_fused_kernels": False, "fused_kernel_options.*": UNSET,
                    "tiled_mlp.*": UNSET}),
    *left("models are read from where they lie", {"use_shm": False}),
])  # fmt: skip

_OPTIM = [
    taken("optimizer", "AdamW", values.optimizer, "actor.optim.name"),
    refused("optimizer_impl", "torch.optim", why="only torch's own optimizers are here"),
    refused("override_optimizer_config", None, {}, why="the optimizer's keys are lr, betas and "
            "weight_decay"),
    same("lr", 1e-6, "actor.optim.lr"),
    same("betas", [0.9, 0.999], "actor.optim.betas"),
    same("weight_decay", 0.01, "actor.optim.weight_decay", note="of matrices; norms and biases are "
         "not decayed"),
    taken("lr_warmup_steps", -1, values.warmup_steps, "actor.optim.lr_warmup_steps"),
    taken("lr_warmup_steps_ratio", 0.0, values.warmup_ratio, "actor.optim.lr_warmup_steps",
          "actor.optim.lr_warmup_steps_ratio"),
    taken("lr_scheduler_type", "constant", values.scheduler, "actor.optim.lr_scheduler"),
    taken("warmup_style", None, values.warmup_style, "actor.optim.lr_scheduler"),
    taken("min_lr_ratio", 0.0, readers.keep("actor.optim.min_lr_ratio"),
          "actor.optim.min_lr_ratio"),
    refused("num_cycles", 0.5, why="a cosine falls once, over half a cycle"),
    *dead("verl sets it itself, by trainer.total_training_steps or the data",
          {"total_training_steps": -1}),
    *dead(_NEW_WORKER + "; actor.grad_clip is read", {"clip_grad": 1.0, "grad_clip": UNSET}),
    *left("the first step of a warm-up has a rate above 0", {"zero_indexed_step": UNSET}),
]  # fmt: skip

ACTOR = under("actor_rollout_ref.actor", [
    refused("strategy", "fsdp", "fsdp2", why="only the tree of verl's FSDP trainer is "
            "read; its Megatron trainer has other keys and defaults"),
    same("ppo_mini_batch_size", 256, "actor.ppo_mini_batch_size"),
    taken("ppo_micro_batch_size_per_gpu", None, values.micro_batch,
          "actor.ppo_max_token_len_per_gpu"),
    taken("ppo_max_token_len_per_gpu", 16384, values.token_budget,
          "actor.ppo_max_token_len_per_gpu"),
    part("use_dynamic_bsz", False, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"),
    *left("deprecated there; ppo_micro_batch_size_per_gpu is read", {"ppo_micro_batch_size": None}),
    taken("clip_ratio", 0.2, values.symmetric_clip, "actor.clip_ratio"),
    taken("clip_ratio_low", 0.2, values.clip_side("low"), "actor.clip_ratio_low"),
    taken("clip_ratio_high", 0.2, values.clip_side("high"), "actor.clip_ratio_high"),
    same("clip_ratio_c", 3.0, "actor.clip_ratio_c"),
    taken("policy_loss.loss_mode", "vanilla", values.loss_mode, "actor.policy_loss.loss_mode"),
    same("policy_loss.clip_cov_ratio", 0.0002, "actor.policy_loss.clip_cov_ratio"),
    same("policy_loss.clip_cov_lb", 1.0, "actor.policy_loss.clip_cov_lb"),
    same("policy_loss.clip_cov_ub", 5.0, "actor.policy_loss.clip_cov_ub"),
    same("policy_loss.kl_cov_ratio", 0.0002, "actor.policy_loss.kl_cov_ratio"),
    same("policy_loss.ppo_kl_coef", 0.1, "actor.policy_loss.ppo_kl_coef"),
    taken("policy_loss.dro_beta", UNSET, readers.keep("actor.policy_loss.dro_beta"),
          "actor.policy_loss.dro_beta"),
    same("tau_pos", UNSET, "actor.tau_pos"),
    same("tau_neg", UNSET, "actor.tau_neg"),
    taken("loss_agg_mode", "token-mean", values.loss_agg_mode, "actor.loss_agg_mode"),
    taken("loss_scale_factor", UNSET, values.loss_scale_factor),
    same("entropy_coeff", 0, "actor.entropy_coeff"),
    same("use_kl_loss", False, "actor.use_kl_loss"),
    same("kl_loss_coef", 0.001, "actor.kl_loss_coef"),
    same("kl_loss_type", "low_var_kl", "actor.kl_loss_type"),
    same("ppo_epochs", 1, "actor.ppo_epochs"),
    same("shuffle", False, "actor.shuffle"),
    same("grad_clip", 1.0, "actor.grad_clip"),
    *under("optim", _OPTIM),
    same("fsdp_config.reshard_after_forward", True, "actor.fsdp_config.reshard_after_forward"),
    same("fsdp_config.offload_policy", False, "actor.fsdp_config.offload_policy"),
    taken("fsdp_config.dtype", "bfloat16", values.compute_dtype, "model.dtype"),
    *left("computing is in model.dtype", {"fsdp_config.mixed_precision.*": UNSET}),
    refused("fsdp_config.qat.enable", UNSET, False, why="weights are not quantised in training"),
    refused("qat.enable", UNSET, False, why="weights are not quantised in training"),
    *dead("qat.enable is false", {"fsdp_config.qat.*": UNSET, "qat.*": UNSET}),
    *under("fsdp_config", _FSDP),
    refused("freeze_vision_tower", False, why="there are no vision models here yet"),
    *left("a checkpoint always holds everything that a run needs to go on",
          {"checkpoint.save_contents": ["model", "optimizer", "extra"],
           "checkpoint.load_contents": ["model", "optimizer", "extra"],
           "checkpoint.strict": UNSET}),
    *dead("nothing in 0.6.1's FSDP trainer reads it", {"checkpoint.async_save": False}),
    *left(_MEMORY, {"use_torch_compile": True, "use_fused_kernels": False,
                    "entropy_checkpointing": False, "use_prefix_grouper": UNSET,
                    "pad_to_length": UNSET}),
    *left(_CHUNKED, {"entropy_from_logits_with_chunking": False,
                     "entropy_from_logits_chunk_size": UNSET}),
    *left(_PACKED, {"use_remove_padding": False}),
    *left(_ONE_LENGTH, {"ulysses_sequence_parallel_size": 1}),
    *left("entropy is always logged", {"calculate_entropy": UNSET}),
    *left("sum_pi_squared is made where the estimator reads it",
          {"calculate_sum_pi_squared": UNSET}),
    *left("a run's seeds are trainer.seed, rollout.seed and data.seed",
          {"data_loader_seed": UNSET}),
    *left("rollout.n is read", {"rollout_n": UNSET}),
    *left(_PROFILER, {"profiler.*": UNSET}),
    *left("Megatron's own", {"megatron.*": UNSET, "load_weight": UNSET}),
])  # fmt: skip

REFERENCE = under("actor_rollout_ref.ref", [
    taken("model.path", UNSET, values.reference_model, "ref.path"),
    *left(_SAME_BATCHES, {"log_prob_micro_batch_size": None,
                          "log_prob_micro_batch_size_per_gpu": None,
                          "log_prob_use_dynamic_bsz": False,
                          "log_prob_max_token_len_per_gpu": 16384}),
    *left("the reference is computed as the actor is", {
        "strategy": "fsdp", "use_torch_compile": True, "ulysses_sequence_parallel_size": 1,
        "entropy_from_logits_with_chunking": False, "entropy_checkpointing": False,
        "entropy_from_logits_chunk_size": UNSET, "pad_to_length": UNSET, "rollout_n": UNSET,
        "fsdp_config.reshard_after_forward": True, "fsdp_config.offload_policy": False,
        "fsdp_config.dtype": "bfloat16", "fsdp_config.mixed_precision.*": UNSET,
        "fsdp_config.qat.*": UNSET,
    }),
    *under("fsdp_config", _FSDP),
    *left(_PROFILER, {"profiler.*": UNSET}),
    *left("Megatron's own", {"megatron.*": UNSET, "load_weight": UNSET}),
])  # fmt: skip

CRITIC = [
    refused("critic.enable", None, False, why="there is no critic yet; grpo needs none"),
    *dead(
        "no critic is trained: an estimator that needs one is refused",
        {f"critic.{name}": UNSET for name in (
            "rollout_n", "strategy", "optim.*", "model.*", "ppo_mini_batch_size",
            "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz",
            "ppo_max_token_len_per_gpu", "forward_max_token_len_per_gpu", "ppo_epochs", "shuffle",
            "cliprange_value", "loss_agg_mode", "checkpoint.*", "profiler.*", "grad_clip",
            "forward_micro_batch_size", "forward_micro_batch_size_per_gpu", "nccl_timeout",
            "ulysses_sequence_parallel_size", "megatron.*", "load_weight", "engine.*", "fsdp.*",
            "data_loader_seed", "use_remove_padding",
        )},
    ),
]  # fmt: skip
