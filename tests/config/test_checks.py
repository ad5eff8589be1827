from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algorithms import kl_penalty
from agentrl.commands.run_file import find_ignored_by_torchrun
from agentrl.config import (
    Purpose,
    check_config,
    check_model_length,
    check_tools,
    describe,
    find_biases,
    find_conflicts,
    find_dead_keys,
    find_idle_ranks,
    find_idle_tools,
    parse_config,
)
from agentrl.config.dead_keys import (
    CONDITIONS,
    RULES,
    find_dead_keys_here,
    find_placement_keys,
    set_keys,
)
from agentrl.config.problems import known_keys
from agentrl.config.schema.run import RunConfig
from agentrl.config.schema.training import KlLossType
from agentrl.config.tables import load_table
from agentrl.errors import ConfigError

TINY = {"out_dir": "o", "corpus": "c"}


def config_of(**sections):
    base = {"data": {"train_files": ["train.parquet"]}, "model": {"path": "policy"}}
    return parse_config({name: base.get(name, {}) | sections.get(name, {}) for name in
                         {**base, **sections}})  # fmt: skip


def contradicted(purpose: Purpose = Purpose.TRAIN, **sections) -> set[str]:
    config = config_of(**sections)
    problems = find_conflicts(config, purpose=purpose)
    assert all(problem.expected for problem in problems)
    return {problem.key for problem in problems}


def dead(**sections) -> set[str]:
    return {note.key for note in find_dead_keys(config_of(**sections))}


def test_the_smallest_run_file_has_nothing_to_report():
    assert check_config(config_of()) == []


CONTRADICTIONS = [
    ("data.train_files", {"data": {"train_files": []}}),
    ("data.val_files", {"trainer": {"val_only": True}}),
    ("trainer.resume_from_path", {"trainer": {"resume_mode": "resume_path"}}),
    ("trainer.test_freq", {"trainer": {"test_freq": 0}}),
    ("trainer.save_freq", {"trainer": {"save_freq": 0}}),
    (
        "actor.ppo_mini_batch_size",
        {"data": {"train_batch_size": 30}, "actor": {"ppo_mini_batch_size": 16}},
    ),
    (
        "actor.ppo_mini_batch_size",
        {"data": {"train_batch_size": 16}, "actor": {"ppo_mini_batch_size": 32}},
    ),
    ("rollout.n", {"rollout": {"n": 1}}),
    ("reward.weights", {"reward": {"weights": {"trajectory": 0}}}),
    ("rollout.max_model_len", {"rollout": {"max_model_len": 5119}}),
    ("actor.ppo_max_token_len_per_gpu", {"actor": {"ppo_max_token_len_per_gpu": 5119}}),
    (
        "actor.ppo_max_token_len_per_gpu",
        {"actor": {"ppo_max_token_len_per_gpu": 1279, "ulysses_sequence_parallel_size": 4}},
    ),
    (
        "prepare.tiny_policy.max_position_embeddings",
        {"prepare": {"tiny_policy": TINY | {"max_position_embeddings": 5119}}},
    ),
    (
        "rollout.multi_turn.max_tokens_per_turn",
        {"rollout": {"multi_turn": {"max_tokens_per_turn": 4097}}},
    ),
    (
        "rollout.multi_turn.max_tool_response_length",
        {"rollout": {"multi_turn": {"max_tool_response_length": 4097}}},
    ),
    (
        "rollout.multi_turn.tool_timeout_s",
        {"rollout": {"request_timeout_s": 5, "multi_turn": {"tool_timeout_s": 6}}},
    ),
    ("rollout.engine.scripted.answers", {"rollout": {"engine": {"name": "scripted"}}}),
    ("rollout.top_k", {"rollout": {"top_k": 0}}),
    ("rollout.val_kwargs.top_k", {"rollout": {"val_kwargs": {"top_k": -2}}}),
]


@pytest.mark.parametrize(("key", "sections"), CONTRADICTIONS)
def test_a_contradiction_is_reported_with_its_key(key, sections):
    if key.startswith("prepare"):
        sections = sections | {"rollout": {"max_model_len": 5120}}
    assert contradicted(**sections) == {key}


ONLY_TRAINING = {
    "data": {"train_files": [], "train_batch_size": 30},
    "rollout": {"n": 1},
    "actor": {"ppo_mini_batch_size": 16, "ppo_max_token_len_per_gpu": 16},
    "reward": {"weights": {"trajectory": 0}},
    "trainer": {"save_freq": 0},
}


def test_what_only_training_asks_for_is_not_asked_where_nothing_is_trained():
    assert len(contradicted(**ONLY_TRAINING)) == 6
    validating = {"data": ONLY_TRAINING["data"] | {"val_files": "val.parquet"},
                  "trainer": {"save_freq": 0, "val_only": True}}  # fmt: skip
    assert not contradicted(**(ONLY_TRAINING | validating))
    for purpose in (Purpose.ROLLOUT, Purpose.SFT):
        assert not contradicted(purpose=purpose, **ONLY_TRAINING)
        assert check_config(config_of(**ONLY_TRAINING), purpose=purpose) is not None


def test_what_generation_asks_for_is_asked_of_a_rollout_too():
    broken = {"rollout": {"max_model_len": 5119, "top_k": 0}}
    keys = {"rollout.max_model_len", "rollout.top_k"}
    assert contradicted(purpose=Purpose.ROLLOUT, **broken) == keys
    assert not contradicted(purpose=Purpose.SFT, **broken)


def test_budgets_that_just_fit_are_no_contradiction():
    assert not contradicted(
        rollout={"max_model_len": 5120, "multi_turn": {"max_tokens_per_turn": 4096}},
        actor={"ppo_max_token_len_per_gpu": 5120},
    )


def test_a_default_that_is_larger_than_the_response_is_no_contradiction():
    assert not contradicted(data={"max_response_length": 16})


def test_heads_that_do_not_divide_are_reported_before_the_model_is_made():
    heads = {"num_heads": 3, "num_kv_heads": 2, "max_position_embeddings": 9999}
    keys = contradicted(prepare={"tiny_policy": TINY | heads})
    assert keys == {"prepare.tiny_policy.num_heads", "prepare.tiny_policy.num_kv_heads"}


@given(st.integers(1, 64), st.none() | st.integers(1, 64))
def test_batches_pass_exactly_where_mini_batches_divide_them(batch, mini):
    keys = contradicted(data={"train_batch_size": batch}, actor={"ppo_mini_batch_size": mini})
    assert (batch % (mini or batch) == 0) == (not keys)


@pytest.mark.parametrize(
    ("world_size", "mini", "expected"),
    [
        (2, None, []),
        (3, 1, ["actor.ppo_mini_batch_size: its 2 samples leave 1 of 3 ranks without work"]),
        (16, None, ["data.train_batch_size: its 8 samples leave 8 of 16 ranks without work"]),
        (1, None, ["trainer.collective_timeout_s has no effect: a run on one rank waits for no "
                   "other"]),
    ],
)  # fmt: skip
def test_idle_ranks_are_reported(world_size, mini, expected):
    config = config_of(
        data={"train_batch_size": 4},
        rollout={"n": 2},
        actor={"ppo_mini_batch_size": mini},
        trainer={"collective_timeout_s": 60},
    )
    assert list(map(str, find_idle_ranks(config, world_size))) == expected


def test_all_contradictions_come_in_one_error_that_names_the_file():
    config = config_of(rollout={"n": 1}, trainer={"test_freq": 0})
    with pytest.raises(ConfigError) as caught:
        check_config(config, file="run.yaml")
    assert caught.value.file == "run.yaml"
    assert "rollout.n" in str(caught.value)
    assert "trainer.test_freq" in str(caught.value)


def test_the_model_s_own_length_is_held_against_the_budgets():
    config = config_of()
    check_model_length(config, 5120)
    with pytest.raises(ConfigError, match="5119") as caught:
        check_model_length(config, 5119, file="run.yaml")
    assert caught.value.file == "run.yaml"


def test_a_tool_that_only_the_data_names_is_reported_with_its_row():
    check_tools({"calculator": 0}, ["calculator", "search"])
    with pytest.raises(ConfigError, match=r"row 3 names the tool 'serch'") as caught:
        check_tools({"calculator": 0, "serch": 3}, ["calculator", "search"])
    assert "search" in str(caught.value)


def test_a_tool_that_the_data_names_and_no_tools_at_all():
    with pytest.raises(ConfigError, match="the run has none"):
        check_tools({"calculator": 0}, [])


DEAD = [
    ("data.seed", {"data": {"seed": 1, "shuffle": False}}),
    ("data.truncation", {"data": {"truncation": "left"}}),
    ("data.cache_dir", {"data": {"cache_dir": "c", "filter_overlong_prompts": False}}),
    ("trainer.test_freq", {"trainer": {"test_freq": 5}}),
    ("rollout.val_kwargs.n", {"rollout": {"val_kwargs": {"n": 4, "temperature": 1.0}}}),
    ("rollout.multi_turn.tool_timeout_s", {"rollout": {"multi_turn": {"tool_timeout_s": 3}}}),
    ("rollout.multi_turn.interaction_prob", {"rollout": {"multi_turn": {"interaction_prob": 1}}}),
    (
        "rollout.multi_turn.tokenization_sanity_check_frac",
        {"rollout": {"multi_turn": {"tokenization_sanity_check_mode": "disable",
                                    "tokenization_sanity_check_frac": 0.5}}},
    ),
    ("rollout.multi_turn.on_tool_failure",
     {"rollout": {"multi_turn": {"on_tool_failure": "fail"}}}),
    (
        "rollout.multi_turn.on_tool_failure",
        {"rollout": {"multi_turn": {"tool_config_path": "t", "max_tool_calls": 0,
                                    "on_tool_failure": "fail"}}},
    ),
    (
        "rollout.multi_turn.max_parallel_calls",
        {"rollout": {"multi_turn": {"tool_config_path": "t", "max_assistant_turns": 1,
                                    "max_parallel_calls": 2}}},
    ),
    (
        "rollout.engine.scripted.answers",
        {"rollout": {"engine": {"name": "transformers", "scripted": {"answers": ["a"]}}}},
    ),
    (
        "rollout.engine.transformers.page_size",
        {"rollout": {"engine": {"name": "scripted", "transformers": {"page_size": 16},
                                "scripted": {"answers": ["a"]}}}},
    ),
    ("rollout.failure.max_retries", {"rollout": {"failure": {"max_retries": 3}}}),
    (
        "rollout.failure.max_failed_frac",
        {"rollout": {"failure": {"policy": "raise", "max_failed_frac": 0.1}}},
    ),
    *((f"reward.{key}", {"reward": {key: 1}})
      for key in ("tool_call_bonus", "max_bonus_calls", "interaction_bonus")),
    *((f"reward.weights.{source}", {"reward": {"weights": {source: 1}}})
      for source in ("interaction", "tool_call", "tool")),
    ("reward.tool_call_bonus",
     {"reward": {"tool_call_bonus": 1},
      "rollout": {"multi_turn": {"tool_config_path": "t", "max_tool_calls": 0}}}),
    ("reward.max_bonus_calls",
     {"reward": {"max_bonus_calls": 2}, "rollout": {"multi_turn": {"tool_config_path": "t"}}}),
    ("reward.placement",
     {"reward": {"placement": "tool_call_tokens"}, "algorithm": {"adv_estimator": "turn_rloo"}}),
    ("trainer.plot", {"trainer": {"plot": True, "logger": ["console"]}}),
    ("actor.kl_loss_coef", {"actor": {"kl_loss_coef": 0.1}}),
    ("ref.path", {"ref": {"path": "p"}}),
    (
        "actor.clip_ratio",
        {"actor": {"clip_ratio": 0.1, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3}},
    ),
    ("actor.optim.muon_lr", {"actor": {"optim": {"muon_lr": 0.1}}}),
    (
        "prepare.sft.optim.muon_lr",
        {"prepare": {"sft": {"model_path": "m", "train_file": "t", "out_dir": "o",
                             "optim": {"muon_lr": 0.1}}}},
    ),
    ("actor.optim.min_lr_ratio", {"actor": {"optim": {"min_lr_ratio": 0.1}}}),
    ("algorithm.lam", {"algorithm": {"lam": 0.9}}),
    ("algorithm.gamma", {"algorithm": {"adv_estimator": "grpo_verl", "gamma": 0.9}}),
    (
        "trainer.total_epochs",
        {"trainer": {"total_epochs": 2, "total_training_steps": 3}},
    ),
    ("trainer.max_ckpt_to_keep", {"trainer": {"max_ckpt_to_keep": 2}}),
    ("trainer.resume_from_path", {"trainer": {"resume_from_path": "p"}}),
    ("trainer.max_restarts", {"trainer": {"max_restarts": 2}}),
    ("rollout.num_workers", {"rollout": {"num_workers": 1}}),
    ("rollout.worker_timeout_s", {"rollout": {"worker_timeout_s": 9}}),
    ("cluster.heartbeat_s", {"cluster": {"heartbeat_s": 9}}),
    ("cluster.runtime_env.env_vars", {"cluster": {"runtime_env": {"env_vars": ["A"]}}}),
]  # fmt: skip
POOLS = [{"name": "a", "roles": ["train", "rollout"]}]


@pytest.mark.parametrize(("key", "sections"), DEAD)
def test_unused_keys_a_key_without_effect_is_reported(key, sections):
    assert key in dead(**sections)


def test_unused_keys_of_a_run_on_ray():
    worker = {"worker_timeout_s": 9}
    assert dead(cluster={"pools": POOLS}, trainer={"nnodes": 2, "n_gpus_per_node": 4}) == {
        "trainer.nnodes", "trainer.n_gpus_per_node",
    }  # fmt: skip
    assert dead(cluster={"address": "auto"}, rollout=worker) == {"rollout.worker_timeout_s"}
    assert not dead(cluster={"heartbeat_s": 9}, rollout=worker | {"num_workers": 2})
    assert not dead(cluster={"address": "auto"}, rollout=worker | {"num_workers": 1})
    elsewhere = {"address": "head:6379", "object_store_bytes": 10**8}
    assert dead(cluster=elsewhere) == {"cluster.object_store_bytes"}
    assert not dead(cluster=elsewhere | {"address": "local"})
    assert dead(cluster={"address": "auto", "runtime_env": {"excludes": ["*.bin"]}}) == {
        "cluster.runtime_env.excludes"
    }


def test_unused_keys_of_a_run_on_ray_in_a_process_that_starts_none():
    config = config_of(
        cluster={"address": "auto", "object_store_bytes": 10**8},
        trainer={"n_gpus_per_node": 4},
        rollout={"num_workers": 2},
    )
    found = {dead.key: dead.reason for dead in find_placement_keys(config, "because")}
    assert found == dict.fromkeys(
        ["rollout.num_workers", "trainer.n_gpus_per_node", "cluster.address"], "because"
    )
    assert not find_placement_keys(config_of(trainer={"n_gpus_per_node": 1}), "because")


@pytest.mark.parametrize(
    ("launched", "keys"),
    [
        (None, set()),
        ("2", {"trainer.n_gpus_per_node", "rollout.num_workers"}),
        ("4", {"rollout.num_workers"}),
    ],
)
def test_unused_keys_under_torchrun(
    monkeypatch: pytest.MonkeyPatch, launched: str | None, keys: set[str]
):
    if launched is not None:
        monkeypatch.setenv("WORLD_SIZE", launched)
    config = config_of(trainer={"n_gpus_per_node": 4}, rollout={"num_workers": 2})
    assert {dead.key for dead in find_ignored_by_torchrun(config)} == keys


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"cluster": {"pools": [{"name": "a", "roles": ["rollout"]}]},
             "rollout": {"num_workers": 2}},
            "cluster.pools: no pool has the role train",
        ),
        (
            {"cluster": {"pools": [{"name": "a", "roles": ["train"]}]},
             "rollout": {"num_workers": 2}},
            "rollout.num_workers: is 2, and no pool of cluster.pools has the role rollout",
        ),
        (
            {"cluster": {"pools": [*POOLS, {"name": "b", "roles": ["rollout"]}]}},
            "cluster.pools[1].roles: nothing runs in the pool b: rollout.num_workers is null",
        ),
        (
            {"cluster": {"pools": [*POOLS, {"name": "b", "roles": ["engine"]}]},
             "rollout": {"engine": {"name": "transformers"}}},
            "nothing runs in the pool b: rollout.engine.name is transformers",
        ),
        (
            {"cluster": {"pools": [*POOLS, {"name": "b", "roles": ["engine"]}]},
             "rollout": {"engine": {"name": "sglang_server",
                                    "sglang_server": {"addresses": ["http://a:1"]}}}},
            "nothing runs in the pool b: rollout.engine.sglang_server.addresses has servers",
        ),
        (
            {"cluster": {"pools": [{"name": "a", "devices_per_node": 0, "roles": ["train"]}]}},
            "cluster.pools[0].devices_per_node: is 0, and the pool a trains",
        ),
    ],
)  # fmt: skip
def test_pools_that_do_not_fit_the_run_are_refused(sections: dict, message: str):
    [problem] = find_conflicts(config_of(**sections))
    assert message in str(problem)


def test_pools_with_work_are_accepted():
    pools = [
        {"name": "learn", "roles": ["train"]},
        {"name": "serve", "roles": ["engine"]},
        {"name": "tools", "devices_per_node": 0, "roles": ["rollout"]},
    ]
    rollout = {"num_workers": 2, "engine": {"name": "sglang_server"}}
    assert not find_conflicts(config_of(cluster={"pools": pools}, rollout=rollout))


def test_unused_keys_the_keys_that_an_external_agent_does_not_read_are_dead():
    turns = {"tool_config_path": "t", "max_user_turns": 2, "on_malformed_call": "stop"}
    read = {"max_tool_calls": 3, "max_assistant_turns": 5, "check_tool_arguments": False}
    agent = {"command": ["a"], "isolation": "process", "gateway": {"max_calls": 3}}
    found = dead(rollout={"multi_turn": turns | read, "agent": agent})
    assert found == {f"rollout.multi_turn.{key}" for key in turns} | {"rollout.agent.isolation"}
    masked = {"on_malformed_call": "mask", "format": "hermes"}
    assert not dead(
        rollout={"multi_turn": masked, "agent": {"python": "a:b", "timeout_s": 3}},
        reward={"tool_call_bonus": 0.1},
    )


def test_tools_are_read_by_the_warm_up_of_a_run_with_an_external_agent():
    rollout = {"multi_turn": {"tool_config_path": "t"}, "agent": {"python": "a:b"}}
    assert dead(rollout=rollout) == {"rollout.multi_turn.tool_config_path"}
    assert not dead(rollout=rollout, prepare={"tiny_policy": TINY})


def test_unused_keys_of_external_agents_are_dead_without_one():
    agent = {"timeout_s": 3, "on_failure": "score", "gateway": {"discarded": "train"}}
    keys = {"timeout_s", "on_failure", "gateway.discarded"}
    assert dead(rollout={"agent": agent}) == {f"rollout.agent.{key}" for key in keys}


def test_greedy_validation_makes_its_sampling_keys_dead():
    val = {"data": {"val_files": "val.parquet"}}
    assert dead(**val, rollout={"val_kwargs": {"top_p": 0.9}}) == {"rollout.val_kwargs.top_p"}
    assert not dead(**val, rollout={"val_kwargs": {"top_p": 0.9, "temperature": 0.7}})


def test_keys_with_an_effect_are_not_reported():
    assert not dead(
        data={"val_files": "val.parquet", "truncation": "left", "filter_overlong_prompts": False},
        rollout={"multi_turn": {"tool_config_path": "t.yaml", "tool_timeout_s": 3,
                                "on_tool_failure": "fail",
                                "interaction_config_path": "i.yaml", "interaction_interval": 2}},
        actor={"use_kl_loss": True, "kl_loss_coef": 0.1, "ppo_mini_batch_size": 8, "shuffle": True},
        ref={"path": "base"},
        reward={"tool_call_bonus": 0.1, "max_bonus_calls": 2, "interaction_bonus": 0.1,
                "length_penalty": 0.1, "weights": {"interaction": 1, "tool_call": 1, "tool": 1}},
        trainer={"save_freq": 5, "max_ckpt_to_keep": 2, "test_freq": 5},
    )  # fmt: skip


def test_a_reward_of_bonuses_alone_is_a_reward():
    weights = {"trajectory": 0}
    assert contradicted(reward={"weights": weights}) == {"reward.weights"}
    assert not contradicted(reward={"weights": weights, "length_penalty": 0.1})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"placement": "last"}, r"reward.placement: 'last' is now named 'last_token'"),
        ({"placement": "spread"}, r"reward.placement: 'spread' is now named 'uniform'"),
        ({"placement": "tool_tokens"}, r"expected: one of 'last_token', .*'tool_call_tokens'"),
        ({"weights": {"turn": 1}}, r"reward.weights: `turn` .* `interaction` and `tool_call`"),
        ({"tool_call_bonus": -1}, r"reward.tool_call_bonus: -1 is not allowed here"),
    ],
)
def test_an_old_reward_name_is_reported_with_the_new_one(given, message):
    with pytest.raises(ConfigError, match=message):
        config_of(reward=given)


def biased(placement: str, estimator: str, **reward) -> set[str]:
    reward |= {"placement": placement}
    config = config_of(reward=reward, algorithm={"adv_estimator": estimator})
    return {note.key for note in find_biases(config)}


def test_a_reward_before_the_tokens_that_earned_it_is_reported_as_a_bias():
    for estimator in ("turn_rloo", "gigpo", "reinforce_plus_plus"):
        assert biased("uniform", estimator) == {"reward.placement"}
        assert not biased("last_token", estimator)
    for estimator in ("grpo", "gdpo_verl", "my_own"):
        assert not biased("uniform", estimator)
    of_turns = {"weights": {"trajectory": 0, "tool_call": 1}}
    assert not biased("uniform", "turn_rloo", **of_turns)  # a turn's reward stays on its turn
    assert biased("uniform", "reinforce_plus_plus", **of_turns) == {"reward.placement"}


def test_unused_keys_where_nothing_is_trained_the_keys_of_training_are_dead():
    validating = {"val_only": True, "total_training_steps": 3, "save_freq": 5, "total_epochs": 2}
    found = dead(
        data={"val_files": "val.parquet", "train_batch_size": 8, "val_batch_size": 4},
        rollout={"n": 4, "val_kwargs": {"n": 1, "temperature": 0.5}},
        actor={"clip_ratio": 0.1, "optim": {"lr": 1.0}, "fsdp_config": {"offload_policy": True}},
        critic={"grad_clip": 2.0},
        algorithm={"adv_estimator": "gae"},
        trainer=validating,
    )
    assert found == {
        "data.train_files", "data.train_batch_size", "rollout.n", "actor.clip_ratio",
        "critic.grad_clip",
        "actor.optim.lr", "algorithm.adv_estimator", "trainer.total_training_steps",
        "trainer.save_freq", "trainer.total_epochs",
    }  # fmt: skip


def test_ranks_that_compute_a_sequence_together_hold_it_together():
    actor = {"ppo_max_token_len_per_gpu": 1280, "ulysses_sequence_parallel_size": 4}
    assert not contradicted(actor=actor)
    assert "A packed micro-batch of 5120 tokens holds at least 1 sequence." in describe(
        config_of(actor=actor)
    )


OFFLOAD_KEYS = {
    "actor.fsdp_config.param_offload", "actor.fsdp_config.optimizer_offload",
    "model.enable_activation_offload",
}  # fmt: skip


def offloading(device: str, **fsdp) -> RunConfig:
    fsdp = {"param_offload": True, "optimizer_offload": True} | fsdp
    return config_of(
        actor={"fsdp_config": fsdp}, trainer={"device": device},
        model={"enable_activation_offload": True},
    )  # fmt: skip


def test_offload_has_no_effect_on_a_cpu():
    found = {note.key: note.reason for note in find_dead_keys(offloading("cpu"))}
    assert found == dict.fromkeys(OFFLOAD_KEYS, "on a CPU all memory is host memory")
    assert not find_dead_keys(offloading("cuda"))


def test_offload_between_uses_has_no_effect_if_the_shards_are_always_in_the_host():
    found = find_dead_keys(offloading("cuda", offload_policy=True))
    assert {note.key for note in found} == OFFLOAD_KEYS - {"model.enable_activation_offload"}


def test_keys_without_effect_on_the_device_and_engine_of_this_machine_are_found():
    config = offloading("auto")
    assert not find_dead_keys(config)
    found = find_dead_keys_here(config, device="cpu", engine="transformers")
    assert {note.key for note in found} == OFFLOAD_KEYS
    assert not find_dead_keys_here(config, device="cuda", engine="transformers")
    assert not find_dead_keys_here(offloading("cpu"), device="cpu", engine="transformers")
    settings = {"sglang": {"mem_fraction_static": 0.3}}
    config = config_of(rollout={"engine": settings})
    found = find_dead_keys_here(config, device="cuda", engine="transformers")
    assert {note.key for note in found} == {"rollout.engine.sglang.mem_fraction_static"}


def test_copies_of_more_ranks_than_there_are_have_no_effect():
    config = config_of(actor={"fsdp_config": {"fsdp_size": 3}})
    for world_size, is_dead in ((2, True), (1, True), (3, False)):
        found = {note.key for note in find_idle_ranks(config, world_size)}
        assert ("actor.fsdp_config.fsdp_size" in found) is is_dead


@pytest.mark.parametrize(
    ("actor", "world_size", "key"),
    [
        ({"fsdp_config": {"fsdp_size": 3}}, 2, None),
        ({"fsdp_config": {"fsdp_size": 2}}, 4, None),
        ({"fsdp_config": {"fsdp_size": 3}}, 4, "actor.fsdp_config.fsdp_size"),
        ({"ulysses_sequence_parallel_size": 2}, 4, None),
        ({"ulysses_sequence_parallel_size": 2}, None, None),
        ({"ulysses_sequence_parallel_size": 2}, 1, "actor.ulysses_sequence_parallel_size"),
        ({"ulysses_sequence_parallel_size": 4}, 6, "actor.ulysses_sequence_parallel_size"),
    ],
)
def test_groups_into_which_the_ranks_cannot_be_divided_are_refused(actor, world_size, key):
    gae = {"adv_estimator": "gae"}
    for section, algorithm in (("actor", {}), ("actor", gae), ("critic", gae)):
        config = config_of(algorithm=algorithm, **{section: actor})
        if key is None:
            check_config(config, world_size=world_size)
            continue
        with pytest.raises(ConfigError, match="cannot be divided into such groups") as caught:
            check_config(config, world_size=world_size)
        assert caught.value.key == key.replace("actor", section)
    check_config(config_of(critic=actor), world_size=world_size)


def test_idle_ranks_of_the_critics_update_are_reported():
    critic = {"ppo_mini_batch_size": 1, "fsdp_config": {"fsdp_size": 4}}
    data, rollout = {"train_batch_size": 4}, {"n": 2}
    config = config_of(
        data=data, rollout=rollout, critic=critic, algorithm={"adv_estimator": "gae"}
    )
    assert list(map(str, find_idle_ranks(config, 3))) == [
        "critic.fsdp_config.fsdp_size has no effect: it is 4, and all ranks (3) share one copy of "
        "the weights",
        "critic.ppo_mini_batch_size: its 2 samples leave 1 of 3 ranks without work",
    ]
    assert len(find_idle_ranks(config, 16)) == 2, "the whole batch leaves ranks idle too"
    assert not find_idle_ranks(config_of(data=data, rollout=rollout, critic=critic), 3)


def test_a_key_that_may_have_an_effect_is_not_called_dead():
    tools = {"tool_config_path": "t.yaml"}
    both = {"clip_ratio": 0.1, "clip_ratio_low": 0.2, "clip_ratio_high": 0.3}
    for sections in (
        {"data": {"truncation": "left"}, "rollout": {"multi_turn": tools}},
        {"actor": both | {"policy_loss": "my_own"}},
        {"algorithm": {"adv_estimator": "my_own", "gamma": 0.9, "norm_adv_by_std_in_grpo": False}},
        {"rollout": {"multi_turn": {"interaction_config_path": "i", "max_user_turns": 0}}},
        {"rollout": {"multi_turn": tools | {"max_tool_calls": 0}}},
    ):
        assert not dead(**sections)


@pytest.mark.parametrize("budget", [{"max_tool_calls": 0}, {"max_assistant_turns": 1}])
def test_tools_that_are_shown_and_never_called_are_reported(budget):
    config = config_of(rollout={"multi_turn": {"function_tool_path": "t.py"} | budget})
    assert [note.key for note in find_idle_tools(config)] == [
        "rollout.multi_turn.function_tool_path"
    ]
    assert "never called" in str(check_config(config)[-1])
    assert not find_idle_tools(config_of(rollout={"multi_turn": budget}))


@pytest.mark.parametrize(
    ("key", "section"),
    [
        ("rollout.request_timeout_s", {"rollout": {"request_timeout_s": 60}}),
        ("trainer.device", {"trainer": {"device": "cuda"}}),
    ],
)
def test_settings_that_break_determinism_are_reported_if_it_is_requested(key, section):
    asked = {"rollout": {"deterministic": True} | section.get("rollout", {})}
    notes = check_config(config_of(**section | asked))
    assert [note.key for note in notes] == [key]
    assert "rollout.deterministic" in str(notes[0])
    assert check_config(config_of(**section)) == []
    assert check_config(config_of(rollout={"deterministic": True})) == []


def test_unused_keys_a_default_is_never_reported():
    assert find_dead_keys(config_of()) == []


def test_every_rule_is_about_keys_that_exist():
    rules = load_table(RULES)
    for rule in rules:
        named = [*rule["keys"], *rule.get("except", ()), *rule.get("when", ())]
        assert {key.removesuffix(".*") for key in named} <= set(known_keys())
        assert rule.keys() <= {"keys", "except", "when", "if", "reason"}
        assert "when" in rule or "if" in rule
    assert {rule["if"] for rule in rules if "if" in rule} == set(CONDITIONS)


@given(st.data())
def test_unused_keys_what_is_reported_was_set_and_each_key_once(data):
    chosen = data.draw(st.lists(st.sampled_from(DEAD), max_size=6))
    merged: dict = {}
    for _, sections in chosen:
        for name, values in sections.items():
            merged[name] = merged.get(name, {}) | values
    config = config_of(**merged)
    notes = [note.key for note in find_dead_keys(config)]
    assert len(notes) == len(set(notes))
    assert set(notes) <= set(set_keys(config))


def test_cut_distributions_are_reported_as_a_bias():
    config = config_of(rollout={"top_p": 0.9, "top_k": 20})
    assert {bias.key for bias in find_biases(config)} == {"rollout.top_p", "rollout.top_k"}
    assert "biases the training" in str(check_config(config)[0])


def test_no_sampling_biases_a_run_that_trains_nothing():
    validating = {"data": {"val_files": "val.parquet"}, "trainer": {"val_only": True}}
    assert not find_biases(config_of(**validating, rollout={"top_p": 0.9}))


@pytest.mark.parametrize("name", ["k1", "kl"])
def test_a_kl_loss_with_a_gradient_that_is_no_kl_is_a_bias(name):
    used = {"use_kl_loss": True, "kl_loss_type": name}
    assert [bias.key for bias in find_biases(config_of(actor=used))] == ["actor.kl_loss_type"]
    assert not find_biases(config_of(actor=used | {"kl_loss_type": f"{name}+"}))
    assert not find_biases(config_of(actor={"kl_loss_type": name}))


def test_every_estimate_of_the_kl_can_be_configured_and_no_other():
    with pytest.raises(ConfigError) as unknown:
        kl_penalty(torch.zeros(1), torch.zeros(1), "none")
    named = unknown.value.expected.removeprefix("one of ").partition(", each")[0].split(", ")
    assert set(get_args(KlLossType)) == {f"{name}{plus}" for name in named for plus in ("", "+")}
    for name in get_args(KlLossType):
        assert kl_penalty(torch.zeros(1), torch.zeros(1), name).item() == 0
    with pytest.raises(ConfigError, match="kl_loss_type"):
        config_of(actor={"kl_loss_type": "k4+"})


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_every_number_is_finite(number):
    with pytest.raises(ConfigError, match="expected: a finite number") as caught:
        config_of(actor={"optim": {"lr": number}})
    assert caught.value.key == "actor.optim.lr"


def test_the_batch_arithmetic_is_described():
    config = config_of(
        data={"train_batch_size": 32, "max_prompt_length": 200, "max_response_length": 300},
        rollout={"n": 8},
        actor={"ppo_mini_batch_size": 16, "ppo_epochs": 2, "ppo_max_token_len_per_gpu": 4096},
        trainer={"total_training_steps": 30},
    )
    text = describe(config, world_size=2, num_rows=100)
    for words in (
        "32 prompts x 8 samples = 256 rows, 128 rows on each of 2 ranks",
        "2 mini-batches of 16 prompts (128 rows)",
        "4 optimizer steps for each training step",
        "200 + 300 = 500 tokens",
        "at least 8 sequences",
        "30 training steps",
        "3 training steps; 4 rows do not fill a batch",
    ):
        assert words in text


def test_a_key_that_has_no_effect_biases_nothing():
    keys = {"reward": {"placement": "tool_call_tokens"}, "algorithm": {"adv_estimator": "remax"}}
    config = config_of(**keys)
    assert {bias.key for bias in find_biases(config)} == {"reward.placement"}
    notes = [str(note) for note in check_config(config) if note.key == "reward.placement"]
    assert notes == [
        "reward.placement has no effect: no tool is ever called, so tool_call_tokens "
        "means last_token"
    ]


def test_a_frozen_tower_has_no_effect_with_lora_unless_there_is_a_critic():
    key, tower = "model.freeze_vision_tower", {"path": "m", "freeze_vision_tower": False}
    assert key not in dead(model=tower)
    for lora in ({"lora_rank": 4}, {"lora_adapter_path": "adapter"}):
        assert key in dead(model=tower | lora)
        assert key not in dead(model=tower | lora, algorithm={"adv_estimator": "gae"})


def test_lora_reports_keys_without_effect_and_refuses_muon():
    keys = {"lora_alpha": 8, "target_modules": ["q_proj"], "exclude_modules": ["k_proj"]}
    own = {f"model.{name}" for name in keys}
    off = {"model": {"path": "m", **keys}, "trainer": {"export": "adapter"}}
    assert dead(**off) == own | {"trainer.export"}
    assert dead(model={"path": "m", "lora_rank": 4, **keys}) == set()
    loaded = {"path": "m", "lora_rank": 4, **keys, "lora_adapter_path": "adapter"}
    assert dead(model=loaded) == own | {"model.lora_rank"}
    muon = {"actor": {"optim": {"name": "muon"}}}
    assert "actor.optim.name" in contradicted(model={"path": "m", "lora_rank": 4}, **muon)
    assert "actor.optim.name" not in contradicted(**muon)
    with pytest.raises(ConfigError, match="lora_rank"):
        config_of(model={"path": "m", "lora_rank": -1})
