"""The table's rows of generation: the engine, the conversation, validation."""

from agentrl.config.verl import mapping as readers
from agentrl.config.verl import rollout_readers as values
from agentrl.config.verl.mapping import UNSET, VerlKey, dead, left, refused, same, taken, under

_ENGINE = "a setting of the engine that verl runs; ours are rollout.engine.*"
_SAME_BATCHES = "log-probabilities are computed in the packed micro-batches of the update"
_RAY = "ranks are torchrun's: there are no separate rollout workers"
_EACH_RANK = "each rank generates for itself"
_OURS_TURNS = "rollout.multi_turn"

ENGINE = under("actor_rollout_ref.rollout", [
    taken("name", None, values.engine, "rollout.engine.name"),
    taken("mode", "sync", values.rollout_mode),
    same("n", 1, "rollout.n"),
    same("temperature", 1.0, "rollout.temperature"),
    taken("top_k", -1, values.top_k("rollout.top_k"), "rollout.top_k"),
    same("top_p", 1, "rollout.top_p"),
    taken("prompt_length", "${data.max_prompt_length}",
          readers.twin("actor_rollout_ref.rollout.prompt_length", "data.max_prompt_length")),
    taken("response_length", "${data.max_response_length}",
          readers.twin("actor_rollout_ref.rollout.response_length", "data.max_response_length")),
    taken("max_model_len", None, readers.keep("rollout.max_model_len"), "rollout.max_model_len"),
    refused("do_sample", True, why="training samples"),
    refused("ignore_eos", False, why="a turn ends where the policy ends it"),
    taken("over_sample_rate", 0, values.over_sample_rate),
    refused("skip_rollout", False, why="rollouts of an earlier run are not trained on"),
    *dead("skip_rollout is false", {"skip_dump_dir": "/tmp/rollout_dump"}),
    *left("the log-probabilities of sampling are always recorded", {"calculate_log_probs": False}),
    *left(_SAME_BATCHES, {"log_prob_micro_batch_size": None,
                          "log_prob_micro_batch_size_per_gpu": None,
                          "log_prob_use_dynamic_bsz": False,
                          "log_prob_max_token_len_per_gpu": 16384}),
    *left("tokens go in and out: text is never tokenised again", {"skip_tokenizer_init": True}),
    *left("rollout.max_concurrent_requests bounds the requests in flight", {"max_num_seqs": 1024}),
    *left("rollout.engine.transformers.max_batch_tokens bounds a forward pass",
          {"max_num_batched_tokens": 8192}),
    same("free_cache_engine", True, "rollout.free_cache_engine"),
    taken("update_weights_bucket_megabytes", 512, values.bucket_megabytes,
          "weight_sync.bucket_bytes"),
    taken("checkpoint_engine.update_weights_bucket_megabytes", UNSET, values.bucket_megabytes,
          "weight_sync.bucket_bytes"),
    *left("the engine wakes in steps, and takes its weights name by name, without being told", {
        "multi_stage_wake_up": False, "layered_summon": False, "load_format": "dummy",
        "checkpoint_engine.*": UNSET, "layer_name_map.*": UNSET,
    }),
    taken("gpu_memory_utilization", 0.5,
          values.of_sglang("gpu_memory_utilization", "mem_fraction_static",
                           "the embedded engine sizes its cache itself"),
          "rollout.engine.sglang.mem_fraction_static"),
    taken("tensor_model_parallel_size", 2,
          values.of_sglang("tensor_model_parallel_size", "tp_size", _EACH_RANK),
          "rollout.engine.sglang.tp_size"),
    *left("rollout.engine.name: sglang_server generates on servers", {
        "sglang_rollout_mode": UNSET,
    }),
    *left(_EACH_RANK, {
        "data_parallel_size": 1, "expert_parallel_size": 1,
        "pipeline_model_parallel_size": 1, "sglang_engine_mode": UNSET,
    }),
    *left(_ENGINE, {
        "dtype": "bfloat16", "enforce_eager": False, "cudagraph_capture_sizes": None,
        "enable_chunked_prefill": True, "enable_prefix_caching": True, "disable_log_stats": True,
        "engine_kwargs.*": UNSET, "limit_images": UNSET, "server.*": UNSET, "prometheus.*": UNSET,
        "scheduling_policy": UNSET, "logprobs_mode": UNSET, "disaggregation.*": UNSET,
        "router_config_path": UNSET, "enable_sleep_mode": UNSET,
        "moe_load_balance_metrics_interval": UNSET,
    }),
    refused("quantization", UNSET, None, why="the engine samples from the weights that are "
            "trained"),
    *dead("quantization is null", {"quantization_config_file": UNSET}),
    refused("enable_rollout_routing_replay", UNSET, False, why="experts are not replayed"),
    same("seed", UNSET, "rollout.seed"),
    *left("rollout.deterministic makes a run repeatable to the bit", {"full_determinism": UNSET}),
    *left("trainer.rollout_data_dir saves every trajectory, token by token", {"trace.*": UNSET}),
    *left("agentrl has no profiler", {"profiler.*": UNSET}),
    *left(_RAY, {"nnodes": UNSET, "n_gpus_per_node": UNSET}),
    *left("read by the rows of model and actor", {"mtp.*": UNSET, "qat.*": UNSET}),
    refused("agent.default_agent_loop", "single_turn_agent", "tool_agent",
            why="there are no agent loops of one's own here yet: a tool or an interaction is"),
    refused("agent.agent_loop_config_path", None, why="there are no agent loops of one's own here "
            "yet: a tool or an interaction is"),
    refused("agent.custom_async_server.path", None, why="engines are those of "
            "rollout.engine.name"),
    *left(_RAY, {"agent.num_workers": 8, "agent.agent_loop_manager_class": UNSET,
                 "agent.custom_async_server.name": None}),
])  # fmt: skip

CONVERSATION = under("actor_rollout_ref.rollout.multi_turn", [
    taken("enable", False, values.multi_turn_enabled),
    taken("tool_config_path", None, readers.keep(f"{_OURS_TURNS}.tool_config_path"),
          f"{_OURS_TURNS}.tool_config_path"),
    taken("function_tool_path", UNSET, readers.keep(f"{_OURS_TURNS}.function_tool_path"),
          f"{_OURS_TURNS}.function_tool_path"),
    taken("interaction_config_path", None, readers.keep(f"{_OURS_TURNS}.interaction_config_path"),
          f"{_OURS_TURNS}.interaction_config_path"),
    # Without a limit verl allows a third of the model's length in turns, which is never reached.
    taken("max_assistant_turns", None, values.max_assistant_turns,
          f"{_OURS_TURNS}.max_assistant_turns"),
    taken("max_user_turns", None, values.max_user_turns, f"{_OURS_TURNS}.max_user_turns"),
    taken("max_parallel_calls", 1, values.parallel_calls, f"{_OURS_TURNS}.max_parallel_calls"),
    taken("max_tool_response_length", 256, values.observation_budget,
          f"{_OURS_TURNS}.max_tool_response_length"),
    same("tool_response_truncate_side", "middle", f"{_OURS_TURNS}.tool_response_truncate_side"),
    taken("format", "hermes", values.tool_format, f"{_OURS_TURNS}.format"),
    taken("tokenization_sanity_check_mode", "strict", values.token_check,
          f"{_OURS_TURNS}.tokenization_sanity_check_mode"),
    *left("tokens are only ever added to; a template that rewrites older turns is refused at the "
          "start, or kept by model.on_rewritten_history", {"use_inference_chat_template": False}),
    *dead("nothing in 0.6.1 reads it", {"num_repeat_rollouts": None}),
])  # fmt: skip

VALIDATION = under("actor_rollout_ref.rollout.val_kwargs", [
    taken("temperature", 0, values.val_temperature, "rollout.val_kwargs.temperature"),
    taken("do_sample", False, values.do_sample),
    taken("top_k", -1, values.top_k("rollout.val_kwargs.top_k"), "rollout.val_kwargs.top_k"),
    same("top_p", 1.0, "rollout.val_kwargs.top_p"),
    same("n", 1, "rollout.val_kwargs.n"),
])  # fmt: skip

ROLLOUT: list[VerlKey] = [*CONVERSATION, *VALIDATION, *ENGINE]
