"""The table's rows of the data, the rewards, the credit and the loop."""

from typing import Any

from agentrl.config.verl import mapping as readers
from agentrl.config.verl import run_readers as correction
from agentrl.config.verl import run_readers as values
from agentrl.config.verl.mapping import (
    UNSET,
    VerlKey,
    dead,
    left,
    part,
    refused,
    same,
    taken,
    under,
)

_ROWS = "rows are read, and prompts rendered, by agentrl's own loader"
_MEDIA = "agentrl trains on text alone: a row with images or videos is refused"

DATA = under("data", [
    taken("train_files", None, values.train_files, "data.train_files", "data.strict_rows"),
    same("image_key", "images", "data.image_key"),
    same("video_key", "videos", "data.video_key"),
    taken("val_files", None, values.val_files, "data.val_files"),
    taken("train_batch_size", 1024, values.train_batch_size, "data.train_batch_size"),
    same("max_prompt_length", 512, "data.max_prompt_length"),
    same("max_response_length", 512, "data.max_response_length"),
    same("prompt_key", "prompt", "data.prompt_key"),
    same("reward_fn_key", "data_source", "data.reward_fn_key"),
    same("filter_overlong_prompts", False, "data.filter_overlong_prompts"),
    taken("filter_overlong_prompts_workers", 1,
          readers.if_given("data.filter_overlong_prompts_workers", "data.filter_num_workers"),
          "data.filter_num_workers"),
    taken("truncation", "error", values.truncation, "data.truncation"),
    same("shuffle", True, "data.shuffle"),
    taken("seed", None, readers.keep("data.seed", note="another order than verl's of the same "
          "seed"), "data.seed"),
    taken("train_max_samples", -1, values.max_samples("data.train_max_samples"),
          "data.train_max_samples"),
    taken("val_max_samples", -1, values.max_samples("data.val_max_samples"),
          "data.val_max_samples"),
    taken("custom_cls.path", None, values.custom_class, "data.custom_cls"),
    part("custom_cls.name", None, "data.custom_cls.path"),
    same("apply_chat_template_kwargs", {}, "data.apply_chat_template_kwargs"),
    part("trust_remote_code", False, "actor_rollout_ref.model.trust_remote_code"),
    taken("val_batch_size", None, readers.keep("data.val_batch_size"), "data.val_batch_size"),
    taken("gen_batch_size", UNSET, values.gen_batch_size, "data.gen_batch_size",
          "data.train_batch_size"),
    refused("sampler.class_path", None, why="the order of the rows is data.shuffle's and "
            "data.seed's alone: there are no samplers"),
    refused("datagen.path", None, why="rows are not made while a run goes on; data.custom_cls "
            "makes them before it"),
    *dead("sampler.class_path is null", {"sampler.class_name": None, "sampler.*": UNSET}),
    *dead("datagen.path is null", {"datagen.name": None, "datagen.*": UNSET}),
    *dead("nothing in 0.6.1 reads it", {"return_raw_input_ids": False, "tokenizer": None}),
    *left(_ROWS, {"return_raw_chat": False, "return_full_prompt": False,
                  "dataloader_num_workers": 8, "use_shm": False}),
    *left("a validation's figures do not depend on its order", {"validation_shuffle": False}),
    *left(_MEDIA, {"audio_key": UNSET, "image_patch_size": 14, "return_multi_modal_inputs": True,
                   "mm_processor_kwargs": UNSET}),
    *left("tools are those of multi_turn", {
        "tool_config_path": "${actor_rollout_ref.rollout.multi_turn.tool_config_path}",
        "function_tool_path": UNSET,
    }),
])  # fmt: skip

_NO_MODEL = "no reward model is here yet; a function scores (custom_reward_function.path)"
_OVERLONG = {name: f"reward.overlong_buffer.{name}" for name in ("enable", "len", "penalty_factor")}
_LAUNCH = "reward.launch_reward_fn_async"
_FUSION = ("reward.sandbox.provider", "reward.sandbox.url")


def _sandbox(section: str, default: Any) -> list[VerlKey]:
    """Make the rows of a code execution service; verl has had it in three places."""
    url, room, memory = (
        f"{section}sandbox_fusion.{name}" for name in ("url", "max_concurrent", "memory_limit_mb")
    )
    return [
        taken("sandbox_fusion.url", default, values.sandbox_url, *_FUSION),
        taken("sandbox_fusion.max_concurrent", UNSET, values.of_sandbox(
            url, room, "reward.max_concurrent_scores"), "reward.max_concurrent_scores"),
        taken("sandbox_fusion.memory_limit_mb", UNSET, values.of_sandbox(
            url, memory, "reward.sandbox.memory_bytes", times=1024**2),
            "reward.sandbox.memory_bytes"),
    ]  # fmt: skip


_MODEL = (
    "enable_resource_pool", "n_gpus_per_node", "nnodes", "strategy", "model.*", "micro_batch_size",
    "micro_batch_size_per_gpu", "mini_batch_size", "max_length", "use_dynamic_bsz", "profiler.*",
    "forward_max_token_len_per_gpu", "ulysses_sequence_parallel_size", "megatron.*", "rollout.*",
    "data_processor_config.*", "param_offload", "load_weight",
)  # fmt: skip
"""verl's keys of a reward model, below `reward_model`."""
_SHAPING = [
    same(f"{section}.{name}", UNSET, f"reward.{name}")
    for section, names in {
        "token_reward": ("tool_call_bonus", "interaction_bonus"),
        "trajectory_reward": ("length_penalty",),
    }.items()
    for name in names
]
"""Bonuses and penalty of multi-turn rewards, which verl 0.6.1 itself does not have."""

REWARD = [
    taken("custom_reward_function.path", None, values.custom_reward("custom_reward_function"),
          "reward.custom_reward_function"),
    part("custom_reward_function.name", "compute_score", "custom_reward_function.path"),
    part("custom_reward_function.reward_kwargs", {}, "custom_reward_function.path"),
    taken("reward_model.reward_manager", "naive", readers.keep("reward.manager"), "reward.manager"),
    taken("reward_model.reward_kwargs", {}, values.reward_kwargs, *_OVERLONG.values()),
    *(taken(f"reward_model.overlong_buffer.{name}", UNSET, readers.keep(ours), ours)
      for name, ours in _OVERLONG.items()),
    *left("reward_extra_info always has it", {"reward_model.overlong_buffer.log": UNSET}),
    refused("reward_model.enable", False, None, why=_NO_MODEL),
    *under("reward_model", _sandbox("reward_model.", None)),
    taken("reward_model.launch_reward_fn_async", False,
          values.launch_async("reward_model.launch_reward_fn_async"), _LAUNCH),
    *left("trainer.rollout_data_dir saves what was scored, token by token",
          {"reward_model.num_examine": UNSET, "reward.num_examine": UNSET}),
    *dead("reward_model.enable is false", {f"reward_model.{name}": UNSET for name in _MODEL}),
    *under("reward_model", _SHAPING),
    # As verl 0.9.1 writes them.
    taken("reward.custom_reward_function.path", UNSET,
          values.custom_reward("reward.custom_reward_function"), "reward.custom_reward_function"),
    part("reward.custom_reward_function.name", UNSET, "reward.custom_reward_function.path"),
    part("reward.custom_reward_function.reward_kwargs", UNSET,
         "reward.custom_reward_function.path"),
    taken("reward.reward_kwargs", UNSET, values.reward_kwargs, *_OVERLONG.values()),
    same("reward.reward_manager.name", UNSET, "reward.manager"),
    refused("reward.reward_manager.source", UNSET, "register", why="a reward manager is chosen by "
            "its registered name"),
    *dead("reward.reward_manager.source is register", {"reward.reward_manager.module.*": UNSET}),
    refused("reward.reward_model.enable", UNSET, False, why=_NO_MODEL),
    *dead("reward.reward_model.enable is false", {"reward.reward_model.*": UNSET}),
    *under("reward", _sandbox("reward.", UNSET)),
    taken("reward.launch_reward_fn_async", UNSET,
          values.launch_async("reward.launch_reward_fn_async"), _LAUNCH),
    taken("reward.num_workers", UNSET, readers.keep("reward.num_workers", note="processes of "
          "scorers that compute: the manager prime's, and the bundled math"), "reward.num_workers"),
    *_sandbox("", UNSET),
]  # fmt: skip

_OURS = "algorithm.rollout_correction"
_CORRECTION = [
    taken("rollout_is", None, correction.importance_sampling, f"{_OURS}.rollout_is"),
    same("rollout_is_threshold", 2.0, f"{_OURS}.rollout_is_threshold"),
    same("rollout_is_batch_normalize", False, f"{_OURS}.rollout_is_batch_normalize"),
    taken("rollout_rs", None, correction.rejection, f"{_OURS}.rollout_rs",
          f"{_OURS}.rollout_rs_threshold"),
    part("rollout_rs_threshold", None, f"{_OURS}.rollout_rs"),
    part("rollout_rs_threshold_lower", None, f"{_OURS}.rollout_rs"),
    taken("rollout_token_veto_threshold", None, correction.veto),
    same("bypass_mode", False, f"{_OURS}.bypass_mode"),
    taken("use_policy_gradient", False, correction.policy_gradient, f"{_OURS}.loss_type"),
    same("loss_type", UNSET, f"{_OURS}.loss_type"),
]  # fmt: skip

ALGORITHM = under("algorithm", [
    taken("adv_estimator", "gae", values.adv_estimator, "algorithm.adv_estimator"),
    same("gamma", 1.0, "algorithm.gamma"),
    same("lam", 1.0, "algorithm.lam"),
    same("norm_adv_by_std_in_grpo", True, "algorithm.norm_adv_by_std_in_grpo"),
    taken("use_kl_in_reward", False, values.kl_in_reward, "algorithm.use_kl_in_reward"),
    same("kl_penalty", "kl", "algorithm.kl_penalty"),
    same("kl_ctrl.type", "fixed", "algorithm.kl_ctrl.type"),
    same("kl_ctrl.kl_coef", 0.001, "algorithm.kl_ctrl.kl_coef"),
    same("kl_ctrl.horizon", 10000, "algorithm.kl_ctrl.horizon"),
    same("kl_ctrl.target_kl", 0.1, "algorithm.kl_ctrl.target_kl"),
    refused("use_pf_ppo", False, why="rows are not drawn by their scores"),
    *dead("algorithm.use_pf_ppo is false", {"pf_ppo.*": UNSET}),
    taken("filter_groups.enable", UNSET, values.filter_groups, "algorithm.filter_groups.enable"),
    taken("filter_groups.metric", UNSET, values.filter_metric, "algorithm.filter_groups.metric"),
    taken("filter_groups.max_num_gen_batches", UNSET, values.max_num_gen_batches,
          "algorithm.filter_groups.max_num_gen_batches"),
    *left("the batches of one step follow each other", {
        "filter_groups.max_inflight_gen_batches": UNSET}),
    *under("rollout_correction", _CORRECTION),
    taken("gdpo_reward_keys", UNSET, readers.keep("algorithm.gdpo_reward_keys"),
          "algorithm.gdpo_reward_keys"),
    taken("gdpo_reward_weights", UNSET, readers.keep("algorithm.gdpo_reward_weights"),
          "algorithm.gdpo_reward_weights"),
])  # fmt: skip

_NOT_AT_ALL = "verl writes no checkpoint then; agentrl writes one, at the end"
_NO_TEST = "verl does not validate after the start then; agentrl does once, at the end"
_TORCHRUN = "torchrun decides how many ranks there are"
_OWN_FORMAT = "checkpoints are agentrl's own, on local disk"

TRAINER = under("trainer", [
    same("project_name", "verl_examples", "trainer.project_name"),
    same("experiment_name", "gsm8k", "trainer.experiment_name"),
    same("default_local_dir", "checkpoints/${trainer.project_name}/${trainer.experiment_name}",
         "trainer.default_local_dir"),
    same("total_epochs", 30, "trainer.total_epochs"),
    taken("total_training_steps", None, readers.keep("trainer.total_training_steps"),
          "trainer.total_training_steps"),
    taken("logger", ["console", "wandb"], values.loggers, "trainer.logger"),
    taken("test_freq", -1, values.interval("trainer.test_freq", note=_NO_TEST),
          "trainer.test_freq"),
    taken("save_freq", -1, values.interval("trainer.save_freq", note=_NOT_AT_ALL),
          "trainer.save_freq"),
    same("max_actor_ckpt_to_keep", None, "trainer.max_ckpt_to_keep"),
    same("val_before_train", True, "trainer.val_before_train"),
    same("val_only", False, "trainer.val_only"),
    same("resume_mode", "auto", "trainer.resume_mode"),
    taken("resume_from_path", None, values.resume_path, "trainer.resume_from_path"),
    taken("rollout_data_dir", None, readers.keep("trainer.rollout_data_dir"),
          "trainer.rollout_data_dir"),
    taken("validation_data_dir", None, readers.keep("trainer.validation_data_dir"),
          "trainer.validation_data_dir"),
    taken("device", "cuda", values.device, "trainer.device"),
    refused("critic_warmup", 0, 1, why="the policy is trained from the first step"),
    refused("checkpoint_callback_class", UNSET, None, why="nothing is called at a checkpoint"),
    refused("v1.trainer_mode", UNSET, "sync", why="generation and update take turns: there is no "
            "asynchronous trainer here yet"),
    refused("v1.sampler.custom_sampler.path", UNSET, None, why="there are no samplers"),
    *dead("v1.trainer_mode is sync", {"v1.*": UNSET}),
    *left("the loop is one", {"use_v1": UNSET, "use_legacy_worker_impl": "auto"}),
    *left(_TORCHRUN, {"nnodes": 1, "n_gpus_per_node": 8}),
    *left("micro-batches are balanced by length", {"balance_batch": True}),
    *left("trainer.validation_data_dir saves every validation", {"log_val_generations": 0}),
    *left(_OWN_FORMAT, {"default_hdfs_dir": None, "del_local_ckpt_after_load": False,
                        "esi_redundant_time": 0}),
    *left("there is no critic", {"max_critic_ckpt_to_keep": None}),
    *left("nothing runs on Ray yet", {
        "ray_wait_register_center_timeout": 300, "num_global_batch": UNSET,
        "num_data_storage_units": UNSET, "num_data_controllers": UNSET,
    }),
])  # fmt: skip

_RAY = "nothing runs on Ray yet"

OTHERS = [
    *left("generation and training share the ranks", {"actor_rollout_ref.hybrid_engine": True}),
    # Ours also bounds how long the ranks' rollouts may differ, so that verl's default is too short.
    taken("actor_rollout_ref.nccl_timeout", 600,
          readers.if_given("actor_rollout_ref.nccl_timeout", "trainer.collective_timeout_s"),
          "trainer.collective_timeout_s"),
    *left(_RAY, {"ray_kwargs.*": UNSET, "ray_init.*": UNSET, "transfer_queue.*": UNSET}),
    *left("agentrl has no profiler", {"global_profiler.*": UNSET}),
    *left("Hydra's own settings: agentrl composes no files", {"hydra.*": UNSET}),
    taken("defaults", UNSET, values.defaults),
    refused("skip.rollout.enable", UNSET, False, why="rollouts of another run are not trained on"),
    *dead("skip.rollout.enable is false", {"skip.*": UNSET}),
    refused("distillation.enabled", UNSET, False, why="there is no distillation here yet"),
    *dead("distillation.enabled is false", {"distillation.*": UNSET}),
    *dead("verl's trainer does not read it", {"model_engine": UNSET}),
]  # fmt: skip

RUN: list[VerlKey] = [*DATA, *REWARD, *ALGORITHM, *TRAINER, *OTHERS]
