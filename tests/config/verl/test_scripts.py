"""What verl 0.6.1's own scripts set: read as verl means it, or refused for one true reason.

The settings are those of its scripts; the scripts themselves are not here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import agentrl.config.verl
from agentrl.config import RunConfig, check_config, read_config
from agentrl.config.verl import VerlReport, read_verl_tree
from agentrl.config.verl.table import table
from agentrl.errors import ConfigError

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
C = "algorithm.rollout_correction"
TOOLS = {f"{R}.multi_turn.enable": True, f"{R}.multi_turn.tool_config_path": "tools.yaml"}
ASYNC = {f"{R}.mode": "async"}
FUSION = "reward_model.sandbox_fusion.url"
FILTER = {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.metric": "acc"}


def tree(changes: Mapping[str, Any]) -> Any:
    root = OmegaConf.create({})
    least = {f"{M}.path": "policy", "data.train_files": "train.parquet", f"{R}.n": 8}
    for key, value in {**least, "algorithm.adv_estimator": "grpo", **changes}.items():
        OmegaConf.update(root, key, value, force_add=True)
    return root


def read(changes: Mapping[str, Any]) -> RunConfig:
    return read_verl_tree(tree(changes)).config


def report_of(changes: Mapping[str, Any]) -> VerlReport:
    return read_verl_tree(tree(changes)).report


def refusal(changes: Mapping[str, Any], file: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read_verl_tree(tree(changes), file=file)
    return str(caught.value)


def note_of(changes: Mapping[str, Any], key: str) -> str:
    [found] = [item.note for item in report_of(changes).mapped if item.key == key]
    return found


# Keys of the scripts.


def test_over_sampling_is_read_as_none_and_reported():
    assert read({f"{R}.over_sample_rate": 0.1}) == read({})
    note = note_of({f"{R}.over_sample_rate": 0.1}, f"{R}.over_sample_rate")
    assert "every request is finished" in note


def test_a_share_of_warm_up_waits_for_the_data():
    optim = read({f"{A}.optim.lr_warmup_steps_ratio": 0.285}).actor.optim
    assert (optim.lr_warmup_steps, optim.lr_warmup_steps_ratio) == (0, 0.285)


@pytest.mark.parametrize(
    ("changes", "step", "sampled", "updates"),
    [
        ({**FILTER, "data.gen_batch_size": 1536}, 512, 1536, 16),
        ({"data.gen_batch_size": 1536}, 1536, 1536, 48),
        ({**FILTER, "data.gen_batch_size": "${data.train_batch_size}"}, 512, 512, 16),
    ],
    ids=["dynamic sampling", "without it verl trains all that it samples", "DAPO's default"],
)
def test_generation_batches_are_those_of_dapo(
    changes: dict[str, Any], step: int, sampled: int, updates: int
):
    given = {"data.train_batch_size": 512, f"{A}.ppo_mini_batch_size": 32, **changes}
    config = read({**given, f"{A}.optim.lr_warmup_steps": 1})
    assert (config.data.train_batch_size, config.prompts_per_rollout) == (step, sampled)
    assert config.actor.optim.lr_warmup_steps == updates
    check_config(config)


@pytest.mark.parametrize(
    "key",
    [f"{A}.use_kl_loss", "algorithm.use_kl_in_reward", "algorithm.filter_groups.enable",
     "algorithm.use_pf_ppo", f"{M}.lora_rank", f"{R}.multi_turn.enable"],
)  # fmt: skip
def test_null_switches_off(key: str):
    assert read({key: None}) == read({})


def test_keys_of_lora_are_read():
    keys = {"lora_rank": 32, "lora_alpha": 64, "target_modules": ["q_proj"],
            "exclude_modules": ["k_proj"], "lora_adapter_path": "adapter"}  # fmt: skip
    model = read({f"{M}.{name}": value for name, value in keys.items()}).model
    assert {name: getattr(model, name) for name in keys} == keys


def test_empty_sections_say_nothing():
    assert read({"rollout": {}, "actor_rollout_ref.ref": {}, "reward": None}) == read({})


def test_verls_own_file_of_defaults_is_taken():
    groups = [{"actor@actor_rollout_ref.actor": "dp_actor"}, {"critic@critic": "dp_critic"}]
    assert read({"defaults": [*groups, "_self_"]}) == read({})
    assert "my_actor" in refusal({"defaults": [{"actor@actor_rollout_ref.actor": "my_actor"}]})


@pytest.mark.parametrize("sign", [1, -1])
def test_bonuses_and_penalty_of_the_reward_model_section_are_read(sign: int):
    keys = {"token_reward.tool_call_bonus": 0.1, "token_reward.interaction_bonus": 0.2,
            "trajectory_reward.length_penalty": sign * 0.3}  # fmt: skip
    reward = read({f"reward_model.{key}": value for key, value in keys.items()}).reward
    assert (reward.tool_call_bonus, reward.interaction_bonus) == (0.1, 0.2)
    assert reward.length_penalty == 0.3


@pytest.mark.parametrize(
    "key",
    ["reward_model.type", "reward_model.token_reward.tool_bonus", "reward_model.reward_manger",
     "critic.cliprange", "critic.lr"],
)  # fmt: skip
def test_unknown_keys_of_reward_model_and_critic_are_refused(key: str):
    assert f"{key}: unknown key" in refusal({key: 1})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("reward_model.model.pth", "reward_model.model.path"),
     ("reward_model.model.fsdp_config.param_ofload",
      "reward_model.model.fsdp_config.param_offload"),
     ("reward_model.max_len", "reward_model.max_length"),
     ("critic.optim.betass", "critic.optim.betas"), ("critic.model.pathh", "critic.model.path"),
     ("critic.model.fsdp_config.fsdp_sise", "critic.model.fsdp_config.fsdp_size"),
     ("critic.checkpoint.contents", "critic.checkpoint.")],
)  # fmt: skip
def test_an_unknown_key_deep_in_these_sections_names_the_nearest(key: str, nearest: str):
    error = refusal({key: 1})
    assert f"{key}: unknown key" in error
    assert f"did you mean '{nearest}" in error


def test_no_entry_takes_any_key_below_reward_model_or_critic():
    """A wildcard is allowed only for sections that no key of ours replaces."""
    known = {"profiler.tool_config.*", "rollout.*", "data_processor_config.*"}
    for row in table():
        section, _, leaf = row.name.partition(".")
        if section in ("reward_model", "critic") and leaf.endswith("*"):
            assert leaf in known


REWARD_MODEL = {"reward_model.enable": True, "reward_model.model.path": "my/rm"}


def test_a_reward_model_replaces_the_scorer_as_in_verl():
    reward = read(REWARD_MODEL).reward
    assert reward.model is not None
    assert (reward.model.path, reward.model.weight, reward.model.truncation) == (
        "my/rm",
        1,
        "right",
    )
    assert reward.weights.trajectory == 0
    kept = read(REWARD_MODEL | {"reward.weights.trajectory": 0.5}).reward
    assert kept.weights.trajectory == 0.5


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"max_length": 512}, "max_length", 512),
        ({"model.trust_remote_code": True}, "trust_remote_code", True),
        ({"model.fsdp_config.param_offload": True}, "fsdp_config.param_offload", True),
        ({"model.fsdp_config.fsdp_size": 2}, "fsdp_config.fsdp_size", 2),
        ({"micro_batch_size_per_gpu": 4, "max_length": 100}, "max_token_len_per_gpu", 400),
        ({"use_dynamic_bsz": True, "forward_max_token_len_per_gpu": 999},
         "max_token_len_per_gpu", 999),
        ({"forward_max_token_len_per_gpu": 999}, "max_token_len_per_gpu", None),
        ({"model.input_tokenizer": "policy"}, "tokenizer_path", None),
    ],
)  # fmt: skip
def test_keys_of_the_reward_model_are_read(changes: dict[str, Any], key: str, value: Any):
    found: Any = read(REWARD_MODEL | {f"reward_model.{k}": v for k, v in changes.items()})
    found = found.reward.model
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strategy": "megatron"}, "FSDP2 alone"),
        ({"model.type": "generative"}, "`judge`"),
        ({"rollout.name": "sglang"}, "reward.model.addresses"),
        ({"data_processor_config.path": "p.py"}, "reward model's own template"),
    ],
)
def test_what_a_reward_model_cannot_have_here_is_refused(changes: dict[str, Any], message: str):
    given = {f"reward_model.{key}": value for key, value in changes.items()}
    assert message in refusal(REWARD_MODEL | given)
    assert read(given) == read({})


# The correction of the rollout, in 0.6.1's names.


@pytest.mark.parametrize(
    ("given", "tests", "thresholds"),
    [
        ({"rollout_rs": "token", "rollout_rs_threshold": 2.0}, "token_k1", 2.0),
        ({"rollout_rs": "sequence", "rollout_rs_threshold": 2.0}, "seq_sum_k1", 2.0),
        ({"rollout_rs": "geometric", "rollout_rs_threshold": 1.25,
          "rollout_rs_threshold_lower": 0.5}, "seq_mean_k1", "0.8_2.0"),
        ({"rollout_token_veto_threshold": 1e-4}, "seq_max_k1", 10000.0),
        ({"rollout_rs": "token", "rollout_rs_threshold": 4, "rollout_token_veto_threshold": 0.5},
         "token_k1,seq_max_k1", "4,2.0"),
    ],
)  # fmt: skip
def test_rejection_is_that_of_verl(given: dict[str, Any], tests: str, thresholds: Any):
    config = read({f"{C}.{key}": value for key, value in given.items()})
    found = config.algorithm.rollout_correction
    assert (found.rollout_rs, found.rollout_rs_threshold) == (tests, thresholds)


def test_the_loss_without_a_clip_is_chosen_under_bypass_alone():
    both = {f"{C}.use_policy_gradient": True, f"{C}.bypass_mode": True}
    assert read(both).algorithm.rollout_correction.loss_type == "reinforce"
    alone = report_of({f"{C}.use_policy_gradient": True})
    assert [item.key for item in alone.no_effect] == [f"{C}.use_policy_gradient"]


# Rows, calls and validation, as verl's two rollouts have them.


def test_sync_shows_a_row_its_own_tools_and_ends_at_a_malformed_call():
    turns = read(TOOLS).rollout.multi_turn
    assert (turns.tools_per_row, turns.on_malformed_call) == ("tools_kwargs", "stop")
    turns = read({**TOOLS, **ASYNC}).rollout.multi_turn
    assert (turns.tools_per_row, turns.on_malformed_call) == ("all", "stop_unreadable")
    assert "tools_kwargs" in note_of(TOOLS, f"{R}.mode")


@pytest.mark.parametrize(
    ("changes", "key", "word"),
    [
        ({**TOOLS, **ASYNC}, f"{R}.mode", "max_parallel_calls"),
        ({**TOOLS, "data.truncation": "left"}, "data.truncation", "several turns cut none"),
        ({FUSION: "http://sandbox"}, FUSION, "share of the first ten"),
        ({"trainer.test_freq": -1, "data.val_files": "v.jsonl"}, "trainer.test_freq",
         "once, at the end"),
        ({f"{A}.loss_agg_mode": "seq-mean-token-sum-norm"}, f"{A}.loss_agg_mode", "grad_clip"),
    ],
)  # fmt: skip
def test_what_a_run_does_differently_is_reported(changes: dict[str, Any], key: str, word: str):
    assert word in note_of(changes, key)


GAE = {"algorithm.adv_estimator": "gae"}
KL = {"algorithm.use_kl_in_reward": True}
VETO = {f"{C}.rollout_rs": "token", f"{C}.rollout_rs_threshold": 2.0,
        f"{R}.calculate_log_probs": True}  # fmt: skip
NO_ORDER = {"data.shuffle": False}
SCORER = {"custom_reward_function.path": "score.py"}
PENALTY = {"enable": True, "len": 4}


@pytest.mark.parametrize(
    ("key", "with_note", "without"),
    [
        ("algorithm.use_kl_in_reward", KL, [{**KL, **GAE}, {**KL, f"{R}.n": 1}]),
        (f"{C}.rollout_rs", VETO, [{**VETO, **GAE}]),
        ("data.seed", {"data.seed": 1}, [{"data.seed": 1, **NO_ORDER}]),
        ("data.train_max_samples", {"data.train_max_samples": 9},
         [{"data.train_max_samples": 9, **NO_ORDER}]),
        ("custom_reward_function.path", {**SCORER, **TOOLS}, [SCORER]),
        (f"{A}.optim.weight_decay", {f"{A}.optim.weight_decay": 0.1},
         [{f"{A}.optim.weight_decay": 0.0}]),
        ("trainer.test_freq", {"trainer.test_freq": -1, "data.val_files": "v"},
         [{"trainer.test_freq": -1}, {"trainer.test_freq": 5, "data.val_files": "v"}]),
        ("algorithm.filter_groups.metric", {**FILTER, "algorithm.filter_groups.metric": "score"},
         [{"algorithm.filter_groups.metric": "score"}, FILTER]),
        ("reward_model.reward_kwargs",
         {"reward_model.reward_kwargs": {"overlong_buffer_cfg": PENALTY, "max_resp_len": 512}},
         [{"reward_model.reward_kwargs": {"overlong_buffer_cfg": {"enable": False}}}]),
        (f"{R}.multi_turn.max_tool_response_length",
         {**TOOLS, f"{R}.multi_turn.max_tool_response_length": 9},
         [{f"{R}.multi_turn.max_tool_response_length": 9}]),
    ],
)  # fmt: skip
def test_a_note_is_printed_only_under_its_condition(key: str, with_note: Any, without: Any):
    assert note_of(with_note, key)
    for changes in without:
        assert not note_of(changes, key), changes


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        ({"global_profiler.steps": [2]}, "trainer.profiler.steps", [2]),
        ({"trainer.profile_steps": [2]}, "trainer.profiler.steps", [2]),
        ({"global_profiler.steps": [2], f"{A}.profiler.ranks": [1]}, "trainer.profiler.ranks", [1]),
        ({f"{M}.external_lib": "my_lib"}, "plugins", ["my_lib"]),
        ({f"{M}.enable_activation_offloading": True}, "model.enable_activation_offload", True),
        ({"reward_model.reward_manager": "mine", "reward_model.reward_kwargs": {"a": 1}},
         "reward.manager_kwargs", {"a": 1}),
        ({"reward_model.reward_manager": "mine"}, "reward.launch_reward_fn_async", False),
        ({"reward_model.reward_kwargs": {"a": 1}}, "reward.manager_kwargs", {"a": 1}),
        ({"data.sampler.class_path": "pkg://a/b.c", "data.sampler.class_name": "X"},
         "data.sampler.path", "a.b.c"),
        ({"data.sampler.class_path": "a/b.py", "data.sampler.class_name": "X"},
         "data.sampler.path", "a/b.py"),
        ({"reward_model.trajectory_reward.enable": False}, "reward.weights.trajectory", 0.0),
        ({"reward_model.trajectory_reward.enable": True}, "reward.weights.trajectory", 1.0),
        ({"reward_model.token_reward.enable": False,
          "reward_model.token_reward.tool_call_bonus": 0.5}, "reward.tool_call_bonus", 0.0),
        ({"reward_model.token_reward.enable": True,
          "reward_model.token_reward.tool_call_bonus": 0.5}, "reward.tool_call_bonus", 0.5),
    ],
)  # fmt: skip
def test_keys_of_verls_users_are_read(changes: dict[str, Any], key: str, value: Any):
    found: Any = read(changes)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


def test_no_sentence_says_that_there_is_no_profiler_or_sampler():
    text = (Path(agentrl.config.verl.__file__).parent / "keys.yaml").read_text()
    for stale in ("no profiler", "no samplers", "no module is imported"):
        assert stale not in text


def test_servers_that_run_score_for_a_reward_model():
    servers = {"reward_model.rollout.name": "sglang", "reward_model.rollout.dtype": "bfloat16",
               "reward.model.addresses": ["http://a:1"]}  # fmt: skip
    model = read(REWARD_MODEL | servers).reward.model
    assert model is not None
    assert (model.engine, model.addresses) == ("sglang", ["http://a:1"])
    assert read({"reward_model.rollout.name": "???"}) == read({})


def test_a_cut_that_verl_makes_too_is_no_difference():
    assert not note_of({"data.truncation": "left"}, "data.truncation")


@pytest.mark.parametrize("value", [None, ""])
def test_an_unset_variable_of_a_script_is_named_as_the_likely_cause(value: str | None):
    assert "unset shell variable" in refusal({"data.train_files": value})


def test_turns_of_agent_loops_are_limited_by_what_follows_them_too():
    turns = {f"{R}.multi_turn.max_assistant_turns": 8, f"{R}.multi_turn.max_user_turns": 3}
    found = read({**TOOLS, **turns}).rollout.multi_turn
    assert (found.max_assistant_turns, found.max_user_turns) == (8, 3)
    found = read({**TOOLS, **ASYNC, **turns}).rollout.multi_turn
    assert (found.max_assistant_turns, found.max_user_turns) == (4, None)
    found = read({**TOOLS, **ASYNC, f"{R}.multi_turn.max_assistant_turns": 8}).rollout.multi_turn
    assert found.max_assistant_turns == 8


def test_our_own_keys_go_before_what_verl_does():
    own = {"rollout.multi_turn.tools_per_row": "all", "data.strict_rows": True}
    config = read({**TOOLS, f"{R}.mode": "sync", **own})
    assert config.rollout.multi_turn.tools_per_row == "all"
    assert config.data.strict_rows
    assert not read({}).data.strict_rows


def test_agent_loops_sample_validation_by_its_temperature():
    val = {f"{R}.val_kwargs.temperature": 0.6, f"{R}.val_kwargs.n": 30, f"{R}.top_k": 20,
           f"{R}.val_kwargs.top_k": 10}  # fmt: skip
    assert read(val).rollout.val_kwargs.temperature == 0
    loops = read({**val, **ASYNC}).rollout
    assert (loops.val_kwargs.temperature, loops.val_kwargs.n) == (0.6, 30)
    assert (loops.top_k, loops.val_kwargs.top_k) == (-1, -1)
    dead = {item.key for item in report_of({**val, **ASYNC}).no_effect}
    assert dead == {f"{R}.top_k", f"{R}.val_kwargs.top_k"}


def test_columns_of_images_keep_their_names():
    assert read({"data.image_key": "shots"}).data.image_key == "shots"


# Trainers that are not here.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"defaults": ["ppo_megatron_trainer", "_self_"]}, "Megatron trainer"),
        ({"defaults": [{"actor@actor_rollout_ref.actor": "megatron_actor"}]}, "Megatron trainer"),
        ({f"{A}.strategy": "megatron", f"{A}.megatron.seed": 1, f"{A}.odd": 1}, "Megatron trainer"),
        ({"async_training.partial_rollout": True, "rollout.nnodes": 1}, "fully asynchronous"),
        ({"rollout.nnodes": 1, "rollout.n_gpus_per_node": 2}, "one-step-off trainer"),
        ({"algorithm.reward_dpo_coef": 5, "reward_model.enable": True}, "PRIME trainer"),
        ({f"{A}.dpo_beta": 0.1}, "SPIN trainer"),
        ({"algorithm.sppo_eta": 1.0}, "SPPO trainer"),
    ],
)
def test_a_trainer_that_is_not_here_is_named_in_one_sentence(changes: dict[str, Any], message: str):
    error = refusal(changes)
    assert message in error
    assert "expected" in error
    assert "unknown key" not in error
    assert "problems" not in error


def test_a_trainer_is_known_by_its_file_if_no_key_says_so():
    assert "FlowRL trainer" in refusal({}, file="configs/flowrl_trainer.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trainer.device": "npu"}, "has no NPU backend"),
        ({f"{M}.lora.rank": 32}, "Megatron's LoRA"),
        ({"reward_model.enable": True}, "reward_model.model.path is missing"),
        ({"reward.reward_model.enable": True}, "such as reward.model.path"),
    ],
)
def test_what_is_not_here_is_refused_in_one_sentence(changes: dict[str, Any], message: str):
    error = refusal(changes)
    assert message in error
    assert "problems" not in error


def test_a_command_line_of_verl_needs_no_file(tmp_path: Path):
    file = tmp_path / "empty.yaml"
    file.write_text("{}\n")
    line = [f"{M}.path=policy", "data.train_files=train.parquet", "algorithm.adv_estimator=rloo"]
    config, report = read_config(file, line)
    assert report is not None
    assert config.algorithm.adv_estimator == "rloo_verl"
