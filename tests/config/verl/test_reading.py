"""verl's key tree becomes a run of ours, and the report says what became of each key."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from agentrl.config import RunConfig, find_dead_keys, load_config, parse_config, read_config
from agentrl.config.explain import convert_from_verl
from agentrl.config.problems import known_keys
from agentrl.config.verl import VerlReport, read_verl_tree
from agentrl.config.verl.mapping import UNSET, NoEffect, Rejected, Unsupported
from agentrl.config.verl.table import find_key, single_keys, table
from agentrl.errors import ConfigError

A, R, M = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
C = "algorithm.rollout_correction"
FILTER = {"algorithm.filter_groups.enable": True}
NORM = {f"{A}.loss_agg_mode": "seq-mean-token-sum-norm"}
BUFFER = {"enable": True, "len": 128, "penalty_factor": 0.5, "log": False}
GROUPS_OF_ONE = {
    **{name: f"{name}_verl" for name in (
        "grpo", "rloo", "opo", "gpg", "gdpo", "reinforce_plus_plus_baseline",
        "optimal_token_baseline", "tir_optimal_token_baseline")},
    "grpo_vectorized": "grpo_verl", "rloo_vectorized": "rloo_vectorized",
    "reinforce_plus_plus": "reinforce_plus_plus",
}  # fmt: skip
"""By verl's name: the estimator that does with groups of one what verl's does."""
LEAST: dict[str, Any] = {
    f"{M}.path": "policy",
    "data.train_files": "train.parquet",
    "algorithm.adv_estimator": "grpo",
    f"{R}.name": "sglang",
    f"{R}.n": 8,
}
"""What a user of verl has to say."""

FILE = """
hydra: {searchpath: ["file://verl/trainer/config"]}
defaults: [ppo_trainer, _self_]
data: {max_prompt_length: 1024, max_response_length: 1024, train_batch_size: 128}
actor_rollout_ref:
  hybrid_engine: true
  rollout:
    name: sglang
    multi_turn: {enable: true, max_assistant_turns: 5}
"""
LINE = [
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=False",
    "data.train_batch_size=64",
    "data.filter_overlong_prompts=True",
    "data.return_raw_chat=True",
    "data.train_files=rows/gsm8k/train.parquet",
    "data.val_files=rows/gsm8k/test.parquet",
    f"{M}.path=Qwen/Qwen2.5-3B-Instruct",
    f"{M}.use_remove_padding=True",
    f"{A}.optim.lr=2e-6",
    f"{A}.ppo_mini_batch_size=32",
    f"{A}.ppo_micro_batch_size_per_gpu=10",
    f"{A}.use_kl_loss=True",
    f"{A}.fsdp_config.param_offload=True",
    f"{R}.n=16",
    f"{R}.tensor_model_parallel_size=2",
    f"{R}.multi_turn.tool_config_path=tools/gsm8k.yaml",
    "trainer.logger=['console','wandb']",
    "trainer.experiment_name=first",
    "trainer.n_gpus_per_node=8",
    "trainer.test_freq=20",
    "trainer.total_epochs=15",
]


def tree(changes: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """A small tree of verl's, with changes (None in `LEAST` takes a key away)."""
    root = OmegaConf.create({})
    for key, value in {**LEAST, **(changes or {}), **more}.items():
        if not (value is None and key in LEAST):
            OmegaConf.update(root, key, value, force_add=True)
    return root


def read(changes: Mapping[str, Any] | None = None) -> RunConfig:
    return read_verl_tree(tree(changes)).config


def report_of(changes: Mapping[str, Any] | None = None) -> VerlReport:
    return read_verl_tree(tree(changes)).report


def refusal(changes: Mapping[str, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        read_verl_tree(tree(changes))
    return caught.value


BASE = read()


def ours(config: RunConfig, key: str) -> Any:
    found: Any = config
    for part in key.split("."):
        found = getattr(found, part)
    return found


def written(folder: Path, text: str) -> Path:
    file = folder / "verl.yaml"
    file.write_text(text, encoding="utf-8")
    return file


# A whole run.


def test_a_run_of_verls_is_read_from_its_file_and_its_command_line(tmp_path: Path):
    config, report = read_config(written(tmp_path, FILE), LINE)
    expected = {
        "data.train_batch_size": 64,
        "data.val_files": {"test": Path("rows/gsm8k/test.parquet")},
        "data.filter_overlong_prompts": True,
        "data.max_response_length": 1024,
        "model.path": "Qwen/Qwen2.5-3B-Instruct",
        "rollout.n": 16,
        "rollout.engine.name": "sglang",
        "rollout.multi_turn.max_assistant_turns": 5,
        "rollout.multi_turn.tool_config_path": Path("tools/gsm8k.yaml"),
        "actor.optim.lr": 2e-6,
        "actor.ppo_mini_batch_size": 32,
        "actor.ppo_max_token_len_per_gpu": 10 * 2048,
        "actor.use_kl_loss": True,
        "algorithm.adv_estimator": "grpo",
        "trainer.logger": ["console", "wandb", "jsonl"],
        "trainer.default_local_dir": Path("checkpoints/verl_examples/first"),
        "trainer.total_epochs": 15,
        "trainer.n_gpus_per_node": 8,
    }
    assert {key: ours(config, key) for key in expected} == expected
    assert report is not None
    assert {item.key for item in report.unsupported} >= {
        "hydra.searchpath",
        f"{M}.use_remove_padding",
    }


def test_every_key_may_be_on_the_command_line(tmp_path: Path):
    whole = [
        *("data.max_prompt_length=1024", "data.max_response_length=1024"),
        *(f"{R}.name=sglang", f"{R}.multi_turn.enable=True", f"+{R}.multi_turn.max_user_turns=2"),
        *(f"++{R}.multi_turn.max_assistant_turns=5", *LINE),
    ]
    empty = load_config(written(tmp_path, ""), whole)
    assert empty == load_config(
        written(tmp_path, FILE), [*LINE, f"{R}.multi_turn.max_user_turns=2"]
    )


def test_what_is_left_out_has_verls_default_not_ours():
    config = read({f"{R}.n": None})
    expected = {
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "data.filter_overlong_prompts": False,
        "rollout.n": 1,
        "actor.ppo_mini_batch_size": 256,
        "model.enable_gradient_checkpointing": True,
        "trainer.total_epochs": 30,
        "trainer.project_name": "verl_examples",
    }
    assert {key: ours(config, key) for key in expected} == expected
    keys = {item.key for item in report_of({f"{R}.n": None}).mapped if item.is_default}
    assert {"data.train_batch_size", f"{R}.n", "trainer.total_epochs"} <= keys


def test_a_default_of_verls_that_is_given_is_not_applied_over_it():
    assert read({"data.train_batch_size": 512}).data.train_batch_size == 512


CHOICES = {
    f"{R}.tensor_model_parallel_size": ("rollout.engine.sglang.tp_size", 2),
    f"{R}.gpu_memory_utilization": ("rollout.engine.sglang.mem_fraction_static", 0.5),
    f"{R}.multi_turn.max_parallel_calls": ("rollout.multi_turn.max_parallel_calls", 1),
    f"{A}.fsdp_config.dtype": ("model.dtype", "bfloat16"),
    "data.filter_overlong_prompts_workers": ("data.filter_num_workers", 1),
    "reward_model.launch_reward_fn_async": ("reward.launch_reward_fn_async", False),
    "trainer.device": ("trainer.device", "cuda"),
    "trainer.n_gpus_per_node": ("trainer.n_gpus_per_node", 8),
    "actor_rollout_ref.rollout.agent.num_workers": ("rollout.num_workers", 8),
    "actor_rollout_ref.nccl_timeout": ("trainer.collective_timeout_s", 600),
    "trainer.logger": ("trainer.logger", ["console", "wandb", "jsonl"]),
}
"""Keys whose default holds for verl's machines: left out, ours hold, and given, the value does."""
WRITTEN_OUT = {
    row.name: row.default
    for row in table()
    if row.default != UNSET
    and row.name not in (*LEAST, *CHOICES)
    and not (isinstance(row.default, str) and "${" in row.default)
}


@given(st.sets(st.sampled_from(sorted(WRITTEN_OUT))))
@settings(max_examples=15)
def test_defaults_that_are_written_out_mean_what_they_mean_left_out(names: set[str]):
    assert read({name: WRITTEN_OUT[name] for name in names}) == BASE


def test_a_whole_tree_that_verl_printed_means_what_its_overrides_mean():
    targets = {f"{section}._target_": "verl.some.Class" for section in (A, R, f"{A}.optim")}
    select = {f"{R}.prompt_length": "${oc.select:data.max_prompt_length,512}"}
    given = {name: row.default for name, row in single_keys().items() if name in CHOICES}
    assert read({**WRITTEN_OUT, **given, **targets, **select}) == BASE


def test_in_a_whole_tree_the_command_line_chooses_and_a_default_left_is_reported():
    given = {name: row.default for name, row in single_keys().items() if name in CHOICES}
    key = f"{R}.tensor_model_parallel_size"
    whole = tree({**WRITTEN_OUT, **given})
    [note] = [item.note for item in read_verl_tree(whole).report.mapped if item.key == key]
    assert "is not taken" in note
    config = read_verl_tree(whole, overridden=[key]).config
    assert config.rollout.engine.sglang.tp_size == 2
    assert config.model.dtype == "auto"


@pytest.mark.parametrize("key", CHOICES)
def test_a_default_that_is_written_counts_as_set(key: str):
    name, value = CHOICES[key]
    assert ours(BASE, name) != value
    used = {f"{R}.multi_turn.enable": True, f"{R}.multi_turn.tool_config_path": "t.yaml",
            "data.filter_overlong_prompts": True}  # fmt: skip
    assert ours(read({**used, key: single_keys()[key].default}), name) == value


def test_wandb_that_only_verls_default_names_is_no_logger():
    assert ours(BASE, "trainer.logger") == ["console", "jsonl"]


def test_a_default_of_verls_without_effect_is_no_dead_key_of_the_users():
    assert find_dead_keys(BASE) == []
    assert find_dead_keys(read(WRITTEN_OUT)) == []
    [dead] = find_dead_keys(read({f"{A}.kl_loss_coef": 0.1}))
    assert dead.key == "actor.kl_loss_coef"


# Every key, in one list.

VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats()
    | st.text("ax1{}$", max_size=4)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.sampled_from(["path", "x"]), st.integers(), max_size=2)
)
NAMES = [row.name.replace("*", "some.thing") for row in table()]


@given(st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=4))
@settings(max_examples=20)
def test_any_value_of_any_key_is_refused_or_listed_once(changes):
    try:
        root = tree(changes)
    except (OmegaConfBaseException, AttributeError):
        return  # OmegaConf has no such tree
    try:
        report = read_verl_tree(root).report
    except ConfigError:
        return
    keys = [item.key for item in (*report.mapped, *report.dropped)]
    assert len(keys) == len(set(keys))
    given_keys = [key for key in changes if find_key(key) and changes[key] not in (None, {})]
    assert all(any(t == key or t.startswith(f"{key}.") for t in keys) for key in given_keys)


def with_value(kind: type) -> dict[str, Any]:
    """Every key of one outcome, with a value that is no default."""
    return {row.name.replace("*", "x"): 7 for row in table() if isinstance(row.outcome, kind)}


def test_keys_without_counterpart_are_reported_and_change_nothing():
    changes = with_value(Unsupported)
    gae = {"algorithm.adv_estimator": "gae"}
    config, report = read_verl_tree(tree(changes | gae))
    assert {item.key: item.value for item in report.unsupported} == changes
    assert all(item.why and not item.is_default for item in report.unsupported)
    assert config == read(gae)


def test_keys_of_the_critic_are_dead_if_the_estimator_reads_no_values():
    names = [row.name for row in table() if row.name.startswith("critic.") and "*" not in row.name]
    changes = dict.fromkeys([name for name in names if name != "critic.enable"], "anything")
    config, report = read_verl_tree(tree(changes))
    assert {item.key: item.value for item in report.no_effect} == changes
    assert config == BASE


def test_keys_that_are_dead_in_verl_are_reported_as_dead_and_change_nothing():
    changes = with_value(NoEffect)
    config, report = read_verl_tree(tree(changes))
    assert {item.key: item.value for item in report.no_effect} == changes
    assert config == BASE


REJECTED = {row.name: row.outcome for row in table() if isinstance(row.outcome, Rejected)}


def test_what_would_change_the_training_is_refused_with_what_is_missing():
    gae = {"algorithm.adv_estimator": "gae"}
    lines = str(refusal(dict.fromkeys(REJECTED, "something_else") | gae)).splitlines()
    for name, outcome in REJECTED.items():
        assert any(line.startswith(f"- {name}: ") and outcome.why in line for line in lines), name


def test_what_would_change_the_training_may_be_said_to_be_off():
    for number in range(max(len(outcome.allowed) for outcome in REJECTED.values())):
        changes = {
            name: outcome.allowed[number % len(outcome.allowed)]
            for name, outcome in REJECTED.items()
        }
        assert read(changes) == BASE


def test_the_table_names_keys_that_there_are():
    names = [row.name for row in table()]
    assert len(names) == len(set(names))
    for row in table():
        if row.outcome is None:
            assert set(row.ours) <= set(known_keys()), row.name


def test_each_row_is_found_by_its_name():
    for row in table():
        assert find_key(row.name.replace("*", "x.y")) is row, row.name


LEAVES = sorted(single_keys())


@given(st.sampled_from(LEAVES), st.data())
@settings(max_examples=20)
def test_unused_keys_an_unknown_key_is_refused_with_the_nearest_known_one(key: str, data):
    section, _, leaf = key.rpartition(".")
    place = data.draw(st.integers(0, len(leaf)))
    wrong = f"{section}.{leaf[:place]}q{leaf[place:]}".removeprefix(".")
    if (row := find_key(wrong)) is not None:
        assert row.name.endswith(".*")
        return
    with pytest.raises(ConfigError) as caught:
        read_verl_tree(tree({wrong: 1}))
    matches = [line for line in str(caught.value).splitlines() if f"{wrong}: unknown key" in line]
    assert len(matches) == 1
    if len(leaf) > 2:
        assert "did you mean" in matches[0]


def test_problems_are_reported_together_with_verls_names(tmp_path: Path):
    line = [f"{R}.nn=4", "algorithm.use_pf_ppo=True", f"{R}.skip_rollout=True"]
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, FILE), [*LINE, *line])
    message = str(caught.value)
    assert "3 problems" in message
    assert all(key.partition("=")[0] in message for key in line)
    assert message.count("(given on the command line)") == 3
    assert "verl.yaml" not in message


def test_a_problem_of_the_command_line_is_not_laid_on_the_file(tmp_path: Path):
    for line in (f"{R}.nn=4", f"{R}.n=many", f"{R}.n=${{nowhere}}"):
        with pytest.raises(ConfigError) as caught:
            load_config(written(tmp_path, FILE), [*LINE, line])
        assert "(given on the command line)" in str(caught.value)
        assert "verl.yaml" not in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, f"{FILE}\ndta: 1\n"), [*LINE, f"{R}.nn=4"])
    assert f"file: {tmp_path}/verl.yaml" in str(caught.value)


def test_a_wrong_value_is_reported_with_verls_name():
    error = refusal({f"{A}.optim.lr": "fast"})
    assert error.key == f"{A}.optim.lr"
    assert "actor.optim.lr" in str(error)
    assert error.expected == "a number"


def test_a_section_that_holds_a_value_is_refused():
    assert "has a section" in str(refusal({f"{R}.val_kwargs": 3}))


# What is meant differently.


def test_the_estimator_of_verls_default_trains_a_critic_with_verls_defaults():
    config = read({"algorithm.adv_estimator": None, f"{A}.ppo_epochs": 2})
    assert config.algorithm.adv_estimator == "gae"
    assert config.critic.optim.lr == 1e-5
    assert config.critic.model.enable_gradient_checkpointing
    assert config.critic.ppo_epochs == 2, "verl takes the actor's, if the critic has none"
    assert config.critic.ppo_mini_batch_size == config.actor.ppo_mini_batch_size


def test_keys_of_the_critic_are_read_if_the_estimator_reads_values():
    keys = {
        "critic.optim.lr": 3e-5, "critic.optim.lr_warmup_steps": 2, "critic.cliprange_value": 0.2,
        "critic.ppo_mini_batch_size": 64, "critic.ppo_epochs": 3, "critic.grad_clip": 0.5,
        "critic.loss_agg_mode": "seq-mean-token-mean", "critic.model.path": "critics/own",
        "critic.model.fsdp_config.param_offload": True, "critic.use_dynamic_bsz": True,
        "critic.ppo_max_token_len_per_gpu": 9999, "trainer.critic_warmup": 5,
        "data.train_batch_size": 128,
    }  # fmt: skip
    config = read({"algorithm.adv_estimator": "gae", **keys})
    critic = config.critic
    assert (critic.optim.lr, critic.cliprange_value, critic.grad_clip) == (3e-5, 0.2, 0.5)
    assert (critic.ppo_mini_batch_size, critic.ppo_epochs) == (64, 3)
    assert critic.optim.lr_warmup_steps == 2 * 2 * 3, "optimizer steps of two training steps"
    assert (critic.loss_agg_mode, critic.model.path) == ("seq-mean-token-mean", "critics/own")
    assert critic.fsdp_config.param_offload
    assert critic.ppo_max_token_len_per_gpu == 9999
    assert config.trainer.critic_warmup == 4, "verl trains the policy in step critic_warmup, too"


@pytest.mark.parametrize(("estimator", "enable"), [("grpo", True), ("gae", False)])
def test_a_critic_is_trained_exactly_if_the_estimator_reads_values(estimator: str, enable: bool):
    error = refusal({"algorithm.adv_estimator": estimator, "critic.enable": enable})
    assert error.key == "critic.enable"


@pytest.mark.parametrize("key", [f"{M}.path", "data.train_files"])
def test_a_path_of_verls_authors_is_no_default(key: str):
    assert refusal({key: None}).key == key


@pytest.mark.parametrize(
    ("changes", "key", "value"),
    [
        *(({f"{R}.n": 1, "algorithm.adv_estimator": name}, "algorithm.adv_estimator", meant)
          for name, meant in GROUPS_OF_ONE.items()),
        ({"algorithm.adv_estimator": "rloo"}, "algorithm.adv_estimator", "rloo"),
        ({f"{A}.policy_loss.loss_mode": "sapo"}, "actor.policy_loss.loss_mode", "sapo_verl"),
        ({f"{A}.policy_loss.loss_mode": "geo_mean"}, "actor.policy_loss.loss_mode",
         "geo_mean_verl"),
        ({"algorithm.adv_estimator": "grpo_vectorized"}, "algorithm.adv_estimator", "grpo"),
        ({f"{A}.ppo_micro_batch_size_per_gpu": 4}, "actor.ppo_max_token_len_per_gpu", 4096),
        (
            {f"{A}.use_dynamic_bsz": True, f"{A}.ppo_max_token_len_per_gpu": 3000},
            "actor.ppo_max_token_len_per_gpu",
            3000,
        ),
        (
            {f"{A}.ppo_micro_batch_size_per_gpu": 4, f"{A}.ulysses_sequence_parallel_size": 2},
            "actor.ppo_max_token_len_per_gpu",
            2048,
        ),
        ({f"{A}.use_prefix_grouper": False}, "actor.share_prefixes", False),
        ({f"{A}.optim.lr_warmup_steps": 10}, "actor.optim.lr_warmup_steps", 40),
        (
            {f"{A}.optim.lr_warmup_steps_ratio": 0.1, "trainer.total_training_steps": 100},
            "actor.optim.lr_warmup_steps",
            40,
        ),
        (
            {f"{A}.optim.lr_warmup_steps_ratio": 0.1, f"{A}.optim.lr_warmup_steps": 2},
            "actor.optim.lr_warmup_steps",
            8,
        ),
        (
            {f"{A}.optim.lr_warmup_steps": 3, f"{A}.ppo_epochs": 2},
            "actor.optim.lr_warmup_steps",
            24,
        ),
        ({f"{A}.optim.warmup_style": "cosine"}, "actor.optim.lr_scheduler", "cosine"),
        ({f"{A}.clip_ratio_high": 0.28}, "actor.clip_ratio_high", 0.28),
        ({f"{A}.clip_ratio_high": 0.28}, "actor.clip_ratio_low", 0.2),
        ({f"{A}.policy_loss.loss_mode": "gspo"}, "actor.policy_loss.loss_mode", "gspo"),
        ({f"{A}.policy_loss.loss_mode": "dro", f"{A}.policy_loss.dro_beta": 0.5},
         "actor.policy_loss.dro_beta", 0.5),
        ({f"{A}.policy_loss.loss_mode": "clip_cov", f"{A}.policy_loss.clip_cov_ratio": 0.01},
         "actor.policy_loss.clip_cov_ratio", 0.01),
        ({f"{A}.policy_loss.loss_mode": "sapo", f"{A}.tau_neg": 2.0}, "actor.tau_neg", 2.0),
        ({"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.5},
         "algorithm.kl_ctrl.kl_coef", 0.5),
        ({"algorithm.use_kl_in_reward": True}, "algorithm.kl_penalty", "kl"),
        ({"algorithm.adv_estimator": "gdpo", "algorithm.gdpo_reward_keys": ["format", "score"]},
         "algorithm.gdpo_reward_keys", ("format", "score")),
        ({f"{C}.rollout_is": "token", f"{C}.rollout_is_threshold": "0.5_5.0"},
         f"{C}.rollout_is_threshold", "0.5_5.0"),
        ({f"{C}.rollout_rs": "seq_mean_k3", f"{C}.rollout_rs_threshold": 0.01},
         f"{C}.rollout_rs_threshold", 0.01),
        ({f"{C}.bypass_mode": True, f"{C}.loss_type": "reinforce"}, f"{C}.loss_type", "reinforce"),
        ({**FILTER, "algorithm.filter_groups.metric": "acc"}, "algorithm.filter_groups.metric",
         "acc"),
        ({**FILTER, "algorithm.filter_groups.max_num_gen_batches": -1},
         "algorithm.filter_groups.max_num_gen_batches", 0),
        ({**FILTER, "algorithm.filter_groups.metric": None}, "algorithm.filter_groups.enable",
         True),
        ({"reward_model.overlong_buffer": BUFFER}, "reward.overlong_buffer.len", 128),
        ({"reward_model.reward_kwargs": {"overlong_buffer_cfg": BUFFER, "max_resp_len": 512}},
         "reward.overlong_buffer.penalty_factor", 0.5),
        ({"reward.reward_kwargs": {"overlong_buffer_cfg": BUFFER, "max_resp_len": 512}},
         "reward.overlong_buffer.enable", True),
        ({f"{A}.fsdp_config.dtype": "float32"}, "model.dtype", "float32"),
        ({f"{R}.name": "hf"}, "rollout.engine.name", "transformers"),
        ({f"{R}.val_kwargs.temperature": 0.7}, "rollout.val_kwargs.temperature", 0.0),
        (
            {f"{R}.val_kwargs.temperature": 0.7, f"{R}.val_kwargs.do_sample": True},
            "rollout.val_kwargs.temperature",
            0.7,
        ),
        ({"data.train_max_samples": -1}, "data.train_max_samples", None),
        ({"data.train_max_samples": 64}, "data.train_max_samples", 64),
        ({"data.trust_remote_code": True}, "model.trust_remote_code", True),
        ({"trainer.logger": "tensorboard"}, "trainer.logger", ["tensorboard", "jsonl"]),
        ({"trainer.logger": ["swanlab", "mlflow", "trackio", "clearml"]}, "trainer.logger",
         ["swanlab", "mlflow", "trackio", "jsonl"]),
        ({"trainer.log_val_generations": 10}, "trainer.log_val_generations", 10),
        ({"trainer.save_freq": 0}, "trainer.save_freq", -1),
        ({"trainer.max_actor_ckpt_to_keep": 5}, "trainer.max_ckpt_to_keep", 5),
        ({f"{M}.override_config.model_config.rope_theta": 1e6}, "model.override_config",
         {"rope_theta": 1e6}),
        ({f"{M}.override_config.attn_implementation": "eager"}, "model.override_config", {}),
        ({"reward_model.reward_manager": "dapo"}, "reward.manager", "dapo"),
        ({"reward.reward_manager.name": "dapo"}, "reward.manager", "dapo"),
        ({"actor_rollout_ref.ref.model.path": "reference", f"{A}.use_kl_loss": True},
         "ref.path", "reference"),
        ({f"{R}.multi_turn.function_tool_path": "t.py"},
         "rollout.multi_turn.function_tool_path", "t.py"),
        (
            {"data.val_files": ["gsm8k/test.parquet", "math/test.parquet", "aime.parquet"]},
            "data.val_files",
            {"gsm8k_test": Path("gsm8k/test.parquet"), "math_test": Path("math/test.parquet"),
             "aime": Path("aime.parquet")},
        ),
    ],
)  # fmt: skip
def test_a_value_means_here_what_it_means_there(changes: dict[str, Any], key: str, value: Any):
    assert ours(read(changes), key) == value


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({f"{A}.clip_ratio": 0.3}, f"{A}.clip_ratio"),
        ({f"{A}.ppo_max_token_len_per_gpu": 4000}, f"{A}.ppo_max_token_len_per_gpu"),
        (
            {f"{A}.ppo_micro_batch_size_per_gpu": 2, f"{A}.use_dynamic_bsz": True},
            f"{A}.ppo_micro_batch_size_per_gpu",
        ),
        (
            {f"{A}.optim.lr_warmup_steps_ratio": 0.1, f"{A}.optim.lr_warmup_steps": 2},
            f"{A}.optim.lr_warmup_steps_ratio",
        ),
        ({f"{A}.loss_scale_factor": 99}, f"{A}.loss_scale_factor"),
        ({f"{R}.val_kwargs.temperature": 0.7}, f"{R}.val_kwargs.temperature"),
        ({f"{R}.multi_turn.format": "qwen"}, f"{R}.multi_turn.format"),
        ({"custom_reward_function.name": "score"}, "custom_reward_function.name"),
    ],
)
def test_what_another_key_puts_out_of_use_there_is_dead(changes: dict[str, Any], key: str):
    assert key in [item.key for item in report_of(changes).no_effect]


def test_a_clip_that_verl_does_not_read_does_not_clip():
    config = read({f"{A}.clip_ratio": 0.3})
    assert (config.actor.clip_ratio_low, config.actor.clip_ratio_high) == (0.2, 0.2)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({f"{A}.optim.lr_warmup_steps_ratio": "some"}, f"{A}.optim.lr_warmup_steps_ratio"),
        ({f"{A}.optim.optimizer": "SGD"}, f"{A}.optim.optimizer"),
        ({f"{A}.fsdp_config.dtype": "float16"}, f"{A}.fsdp_config.dtype"),
        ({**NORM, f"{A}.loss_scale_factor": 99}, f"{A}.loss_scale_factor"),
        ({f"{R}.name": "trtllm"}, f"{R}.name"),
        ({f"{R}.mode": "server"}, f"{R}.mode"),
        ({f"{R}.response_length": 99}, f"{R}.response_length"),
        ({f"{R}.multi_turn.tool_config_path": "t.yaml"}, f"{R}.multi_turn.enable"),
        ({"reward_model.reward_kwargs": {"overlong_buffer_cfg": 3}}, "reward_model.reward_kwargs"),
        ({"reward.reward_kwargs": {"overlong_buffer_cfg": BUFFER, "max_resp_len": 400}},
         "reward.reward_kwargs"),
        ({"defaults": ["ppo_trainer", "mine", "_self_"]}, "defaults"),
        ({"trainer.device": "npu"}, "trainer.device"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_here_is_refused(changes: dict[str, Any], key: str):
    error = refusal(changes)
    assert error.key == key
    assert error.expected


@pytest.mark.parametrize("value", [None, 640, 640.0])
def test_the_divisor_of_summed_losses_may_be_the_response_budget(value: Any):
    given = {**NORM, "data.max_response_length": 640, f"{A}.loss_scale_factor": value}
    assert read(given).actor.loss_agg_mode == "seq-mean-token-sum-norm"


@pytest.mark.parametrize(
    ("key", "name", "word"),
    [
        (f"{A}.policy_loss.loss_mode", "sapo", "loss_agg_mode"),
        (f"{A}.policy_loss.loss_mode", "geo_mean", "micro-batch"),
        (f"{A}.policy_loss.loss_mode", "clip_cov", "clip_cov_verl"),
        (f"{A}.policy_loss.loss_mode", "kl_cov", "kl_cov_verl"),
        ("algorithm.adv_estimator", "optimal_token_baseline", "optimal_token_baseline_verl"),
    ],
)
def test_the_report_says_how_a_method_differs(key: str, name: str, word: str):
    [found] = [item for item in report_of({key: name}).mapped if item.key == key]
    assert word in found.note


def test_agent_loops_have_tools_without_being_enabled_and_read_keys_of_their_own():
    loops = {f"{R}.mode": "async", f"{R}.multi_turn.tool_config_path": "t.yaml"}
    turns = read(loops).rollout.multi_turn
    assert turns.tool_config_path == Path("t.yaml")
    assert (turns.max_tool_response_length, turns.format) == (256, None)
    assert read({**loops, f"{R}.multi_turn.format": "json"}).rollout.multi_turn.format == "json"


def test_agent_loops_of_the_user_are_taken_under_async_alone():
    keys = {
        f"{R}.agent.agent_loop_config_path": "loops.yaml",
        f"{R}.agent.default_agent_loop": "mine",
    }
    agent = read({f"{R}.mode": "async", **keys}).rollout.agent
    assert (agent.default_agent_loop, agent.agent_loop_config_path) == ("mine", Path("loops.yaml"))
    assert read({f"{R}.mode": "async"}).rollout.agent.default_agent_loop == "tool_agent"
    assert read(keys).rollout.agent.agent_loop_config_path is None
    dropped = [item.key for item in report_of(keys).dropped]
    assert sorted(dropped) == sorted(keys)


def test_where_verl_cuts_no_observation_the_response_is_the_limit():
    changes = {f"{R}.multi_turn.enable": True, f"{R}.multi_turn.tool_config_path": "t.yaml"}
    assert read(changes).rollout.multi_turn.max_tool_response_length == 512
    longer = {**changes, f"{R}.multi_turn.max_tool_response_length": 4000}
    assert read(longer).rollout.multi_turn.max_tool_response_length == 512
    [item] = [i for i in report_of(longer).mapped if i.key.endswith("max_tool_response_length")]
    assert "characters in verl" in item.note


@pytest.mark.parametrize("section", ["custom_reward_function", "reward.custom_reward_function"])
def test_a_scorer_is_taken_with_its_name_and_arguments(section: str):
    place = {f"{section}.path": "score.py", f"{section}.name": "f"}
    scorer = read({**place, f"{section}.reward_kwargs": {"bonus": 1}}).reward.custom_reward_function
    assert scorer is not None
    assert (scorer.path, scorer.name, scorer.reward_kwargs) == ("score.py", "f", {"bonus": 1})
    assert report_of(place).dropped == ()


def test_a_scorer_without_a_path_is_none():
    changes = {"custom_reward_function": {"path": None, "name": "compute_score"}}
    assert read(changes).reward.custom_reward_function is None


def test_validating_alone_needs_no_training_rows():
    changes = {"data.train_files": None, "trainer.val_only": True, "data.val_files": "v.parquet"}
    assert read(changes).data.train_files == []


# Interpolation.


def test_interpolations_lead_to_verls_keys_and_to_its_defaults(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ROWS", "rows")
    config = read(
        {
            "data.train_files": "${oc.env:ROWS}/train.parquet",
            "trainer.experiment_name": "n${actor_rollout_ref.rollout.n}",
            f"{A}.ppo_mini_batch_size": "${data.train_batch_size}",
            f"{R}.temperature": "${oc.select:nowhere.at_all,0.5}",
        }
    )
    assert config.data.train_files == [Path("rows/train.parquet")]
    assert config.trainer.default_local_dir == Path("checkpoints/verl_examples/n8")
    assert config.actor.ppo_mini_batch_size == 1024
    assert config.rollout.temperature == 0.5


def test_a_section_may_be_an_interpolation():
    changes = {
        f"{A}.fsdp_config.offload_policy": True,
        "actor_rollout_ref.ref.fsdp_config": f"${{{A}.fsdp_config}}",
    }
    report = report_of(changes)
    assert "actor_rollout_ref.ref.fsdp_config.offload_policy" in [i.key for i in report.unsupported]


def test_an_interpolation_without_a_target_is_reported_with_its_key():
    assert refusal({f"{A}.optim.lr": "${nowhere}"}).key == f"{A}.optim.lr"


def test_an_interpolation_that_nothing_reads_may_lead_nowhere():
    report = report_of({f"{R}.enforce_eager": "${nowhere}"})
    assert report.unsupported[0].value == "${nowhere}"


def test_memory_and_devices_of_an_engine_are_sglangs_where_it_is_the_engine():
    given = {f"{R}.gpu_memory_utilization": 0.7, f"{R}.tensor_model_parallel_size": 4}
    of_sglang = read({**given, f"{R}.name": "sglang"}).rollout.engine.sglang
    assert (of_sglang.mem_fraction_static, of_sglang.tp_size) == (0.7, 4)
    for other in ({f"{R}.name": "hf"}, {f"{R}.name": "vllm", "rollout.engine.name": "scripted"}):
        assert {item.key for item in report_of({**given, **other}).unsupported} >= set(given)


def test_verls_defaults_of_memory_and_devices_are_not_taken():
    assert read({f"{R}.name": "sglang"}).rollout.engine.sglang.server_arguments == {}


def test_a_value_that_must_be_given_is_asked_for():
    assert refusal({f"{A}.optim.lr": "???"}).key == f"{A}.optim.lr"


# Both trees.


def test_agentrl_keys_may_be_mixed_with_verls():
    config = read(
        {
            "rollout.multi_turn.tool_timeout_s": 5,
            f"{R}.multi_turn.max_tokens_per_turn": 99,
            "data.cache_dir": "cache",
            "reward.weights.tool_call": 0.5,
            f"{M}.dtype": "float32",
        }
    )
    turns = config.rollout.multi_turn
    assert (turns.tool_timeout_s, turns.max_tokens_per_turn) == (5, 99)
    assert config.data.cache_dir == Path("cache")
    assert config.reward.weights.tool_call == 0.5
    assert config.model.dtype == "float32"


def test_a_key_of_ours_outvotes_verls_default():
    assert read({f"{R}.n": None, "rollout.n": 4}).rollout.n == 4


def test_one_setting_in_both_names_is_refused_where_they_differ():
    error = refusal({"rollout.n": 4})
    assert f"{R}.n" in str(error)
    assert read({"rollout.n": 8}).rollout.n == 8


def test_half_a_tree_of_each_is_refused():
    with pytest.raises(ConfigError, match=r"section of verl's tree.*one of agentrl's"):
        parse_config({"model": {"path": "p"}, "custom_reward_function": {"path": "f.py"}})


def test_a_run_file_of_ours_is_not_taken_for_verls(tmp_path: Path):
    file = written(tmp_path, "data: {train_files: [a]}\nmodel: {path: p}\n")
    assert read_config(file).report is None
    assert read_config(file).config.data.train_batch_size == 256


# What is told.


def test_the_report_in_short_groups_by_reason_and_leaves_defaults_out():
    changes = {
        f"{M}.use_liger": True,
        f"{M}.use_fused_kernels": True,
        f"{M}.enable_activation_offload": False,
        f"{A}.profiler.ranks": [0],
        f"{A}.profiler.all_ranks": True,
        "critic.optim.lr": 3e-5,
        "critic.strategy": "fsdp2",
        "trainer.logger": ["clearml"],
    }
    summary = report_of(changes).summarize()
    lines = summary.splitlines()
    assert f"    {M}.use_liger, {M}.use_fused_kernels: it changes only speed and memory" in summary
    assert f"    {A}.profiler.*: " in summary
    assert "    critic.optim.lr, critic.strategy: " in summary
    assert "enable_activation_offload" not in summary
    assert any("no clearml" in line for line in lines)
    assert any("data.train_batch_size=1024" in line for line in lines)


def test_a_single_key_is_one_key():
    assert ", 1 key without counterpart, " in report_of({f"{M}.use_liger": True}).summarize()


def test_the_whole_report_has_three_lists():
    description = report_of({f"{M}.use_liger": True, "critic.strategy": "fsdp"}).describe()
    assert f"{R}.n=8 -> rollout.n=8" in description
    assert "no counterpart (1):" in description
    assert "no effect in verl too (1):" in description


def test_load_config_logs_the_translation_of_the_keys(tmp_path: Path, caplog):
    with caplog.at_level(logging.WARNING):
        load_config(written(tmp_path, FILE), LINE)
    assert "no counterpart" in caplog.text


def test_parse_config_reads_verls_tree_as_well():
    raw = OmegaConf.to_container(tree())
    assert parse_config(raw) == BASE  # pyright: ignore


def test_a_converted_file_is_the_same_run(tmp_path: Path):
    text = convert_from_verl(written(tmp_path, FILE), LINE)
    ours_file = tmp_path / "ours.yaml"
    ours_file.write_text(text)
    again = read_config(ours_file)
    assert again.report is None
    assert again.config == load_config(tmp_path / "verl.yaml", LINE)
    assert "\ntrainer:" in text
    assert "clip_ratio_c" not in text, "defaults of ours are not written out"
    assert text.startswith("# Read from the key tree of verl 0.6.1.")


def test_a_file_of_ours_is_not_converted(tmp_path: Path):
    with pytest.raises(ConfigError, match="agentrl's keys already"):
        convert_from_verl(written(tmp_path, "data: {train_files: [a]}\nmodel: {path: p}\n"))
