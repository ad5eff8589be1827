"""What each method reads, and which of its keys have no effect or conflict."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
import yaml

import agentrl.algorithms
from agentrl.algorithms import adv_estimator_names, get_adv_estimator_fn, get_policy_loss_fn
from agentrl.algorithms.losses.registry import (
    TrainedTokens,
    effective_loss_agg_mode,
    policy_loss_names,
    with_summary,
)
from agentrl.config import find_conflicts, find_dead_keys, parse_config, to_yaml
from agentrl.config.schema.training import ActorConfig, AlgorithmConfig
from agentrl.config.tables import method_facts


def config_of(**sections: Any) -> Any:
    base = {"data": {"train_files": ["train.parquet"]}, "model": {"path": "policy"}}
    return parse_config(base | sections)


def dead(**sections: Any) -> set[str]:
    return {note.key for note in find_dead_keys(config_of(**sections))}


def contradicted(**sections: Any) -> set[str]:
    problems = find_conflicts(config_of(**sections))
    assert all(problem.expected for problem in problems)
    return {problem.key for problem in problems}


def corrected(**keys: Any) -> dict[str, Any]:
    return {"algorithm": {"rollout_correction": keys}}


def gdpo(**sections: Any) -> dict[str, Any]:
    chosen = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["format"]}
    return sections | {"algorithm": chosen | sections.get("algorithm", {})}


class Spied:
    """A section that tells which of its keys are read."""

    def __init__(self, section: Any, read: set[str], prefix: str) -> None:
        self.__dict__.update(_section=section, _read=read, _prefix=prefix)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._section, name)
        if name == "policy_loss":
            return Spied(value, self._read, f"{self._prefix}policy_loss.")
        self._read.add(self._prefix + name)
        return value


def bundled(names: Any, find: Any) -> list[str]:
    """Those of the package itself: other tests register estimators and losses of their own."""
    root = agentrl.algorithms.__name__
    return [name for name in names if find(name).__module__.startswith(root)]


LOSSES = bundled(policy_loss_names(), get_policy_loss_fn)
ESTIMATORS = bundled(adv_estimator_names(), get_adv_estimator_fn)
FACTS = method_facts()
LOSS_KEYS = {f"actor.{key}" for facts in FACTS.losses.values() for key in facts.reads}
ESTIMATOR_KEYS = {f"algorithm.{key}" for facts in FACTS.estimators.values() for key in facts.reads}


def estimators_that(**values: Any) -> list[str]:
    """List the estimators whose facts have these values, sorted."""
    return sorted(
        name for name, facts in FACTS.estimators.items() if values.items() <= dict(facts).items()
    )


def keys_read_by_loss(name: str) -> set[str]:
    read: set[str] = set()
    config = ActorConfig.model_validate(
        {"policy_loss": {"loss_mode": name, "dro_beta": 0.5}, "clip_ratio_low": 0.1}
    )
    spied: Any = Spied(config, read, "actor.")
    generator = torch.Generator().manual_seed(0)
    old, new, advantages = (torch.randn(3, 5, generator=generator) for _ in range(3))
    mask = torch.ones(3, 5)
    scale = agentrl.algorithms.LossScale.of(mask, loss_scale_factor=8.0)
    scale = with_summary(scale, [TrainedTokens(old.flatten(), advantages.flatten())], spied)
    get_policy_loss_fn(name)(old, new, advantages, mask, "token-mean", spied, scale=scale)
    return read & LOSS_KEYS


@pytest.mark.parametrize("name", LOSSES)
def test_unused_keys_the_table_of_a_loss_is_what_it_reads(name: str):
    assert keys_read_by_loss(name) == {f"actor.{key}" for key in FACTS.losses[name].reads}


@pytest.mark.parametrize("name", LOSSES)
def test_unused_keys_the_table_knows_which_losses_fix_their_aggregation(name: str):
    given = {"loss_mode": name, "dro_beta": 0.5}
    for mode in ("token-sum", "token-mean"):
        config = ActorConfig.model_validate({"policy_loss": given, "loss_agg_mode": mode})
        assert effective_loss_agg_mode(config) == (FACTS.losses[name].aggregation or mode)


def keys_read_by_estimator(name: str) -> set[str]:
    """Keys that are parameters of an estimator, or that it reads of `config` on some batch."""
    read: set[str] = set()
    function = get_adv_estimator_fn(name)
    mask = torch.ones(4, 6)
    batch: dict[str, Any] = {
        "token_level_rewards": torch.arange(24.0).view(4, 6),
        "token_level_scores": torch.arange(24.0).view(4, 6),
        "response_mask": mask,
        "index": np.array(["a", "a", "b", "b"]),
        "values": mask,
        "old_log_probs": -mask,
        "sum_pi_squared": mask / 2,
        "reward_baselines": torch.zeros(4),
        "turn_ids": torch.zeros(4, 6, dtype=torch.long),
        "state_ids": torch.zeros(4, 6, dtype=torch.long),
        "batch": {},
        "non_tensor_batch": {"format": np.arange(4.0)},
        "reward_extra_info": np.array([{"format": float(n)} for n in range(4)], dtype=object),
    }
    config = AlgorithmConfig(adv_estimator=name, gdpo_reward_keys=("format",))
    parameters = inspect.signature(function).parameters
    given = {key: value for key, value in batch.items() if key in parameters}
    settings = {key: getattr(config, key) for key in parameters if key in type(config).model_fields}
    if "config" in parameters:
        given["config"] = Spied(config, read, "algorithm.")
    function(**given, **settings)
    return (read | {f"algorithm.{key}" for key in settings}) & ESTIMATOR_KEYS


@pytest.mark.parametrize("name", ESTIMATORS)
def test_unused_keys_the_table_of_an_estimator_is_what_it_reads(name: str):
    declared = {f"algorithm.{key}" for key in FACTS.estimators[name].reads}
    assert keys_read_by_estimator(name) == declared


def test_the_tables_name_nothing_that_is_not_there():
    assert set(FACTS.losses) == set(LOSSES)
    assert set(FACTS.estimators) == set(ESTIMATORS)


DEAD: list[tuple[str, dict[str, Any]]] = [
    ("actor.clip_ratio_c", {"actor": {"policy_loss": "gspo", "clip_ratio_c": 4.0}}),
    ("actor.clip_ratio_high", {"actor": {"policy_loss": "gpg", "clip_ratio_high": 0.3}}),
    ("actor.tau_pos", {"actor": {"tau_pos": 2.0}}),
    ("actor.policy_loss.clip_cov_ratio", {"actor": {"policy_loss": {"clip_cov_ratio": 0.1}}}),
    ("actor.policy_loss.dro_beta", {"actor": {"policy_loss": {"dro_beta": 0.1}}}),
    ("actor.loss_agg_mode", {"actor": {"policy_loss": "bnpo", "loss_agg_mode": "token-sum"}}),
    ("algorithm.lam", {"algorithm": {"adv_estimator": "reinforce_plus_plus", "lam": 0.9}}),
    ("algorithm.gamma", {"algorithm": {"adv_estimator": "rloo", "gamma": 0.9}}),
    ("algorithm.norm_adv_by_std_in_grpo",
     {"algorithm": {"adv_estimator": "rloo", "norm_adv_by_std_in_grpo": False}}),
    ("algorithm.gdpo_reward_keys", {"algorithm": {"gdpo_reward_keys": ["format"]}}),
    ("algorithm.step_advantage_w", {"algorithm": {"step_advantage_w": 0.5}}),
    ("algorithm.kl_penalty", {"algorithm": {"kl_penalty": "k3"}}),
    ("algorithm.kl_ctrl.kl_coef", {"algorithm": {"kl_ctrl": {"kl_coef": 0.1}}}),
    ("algorithm.kl_ctrl.horizon",
     {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"horizon": 100}}}),
    ("algorithm.filter_groups.metric", {"algorithm": {"filter_groups": {"metric": "acc"}}}),
    ("reward.overlong_buffer.len", {"reward": {"overlong_buffer": {"len": 8}}}),
    ("reward.overlong_buffer.penalty_factor",
     {"reward": {"overlong_buffer": {"penalty_factor": 0.5}}}),
    ("reward.overlong_buffer.enable",
     {"reward": {"overlong_buffer": {"enable": True}, "weights": {"trajectory": 0, "tool_call": 1}},
      "rollout": {"multi_turn": {"function_tool_path": "tools.py"}}}),
    *((key, gdpo(**sections)) for key, sections in {
        "algorithm.use_kl_in_reward": {"algorithm": {"use_kl_in_reward": True}},
        "reward.placement": {"reward": {"placement": "uniform"}},
        "reward.length_penalty": {"reward": {"length_penalty": 0.5}},
        "reward.weights.trajectory": {"reward": {"weights": {"trajectory": 0.5}}},
        "reward.overlong_buffer.enable": {"reward": {"overlong_buffer": {"enable": True}}},
    }.items()),
    *(("reward.placement",
       {"reward": {"placement": "uniform"}, "algorithm": {"adv_estimator": name}})
      for name in estimators_that(rewards="sum")),
    ("reward.placement_decay",
     {"reward": {"placement_decay": 0.9}, "algorithm": {"adv_estimator": "turn_rloo"}}),
    ("algorithm.rollout_correction.rollout_is_threshold", corrected(rollout_is_threshold=3.0)),
    ("algorithm.rollout_correction.rollout_is_mode", corrected(rollout_is_mode="mask")),
    ("algorithm.rollout_correction.rollout_is_mode",
     corrected(rollout_is="token", rollout_is_threshold="0.5_2", rollout_is_mode="mask")),
    ("algorithm.rollout_correction.rollout_rs_threshold", corrected(rollout_rs_threshold=1.5)),
    ("algorithm.rollout_correction.advantages", corrected(advantages="kept")),
    ("algorithm.rollout_correction.advantages",
     corrected(preset="bypass_ppo_clip_k3_rs", advantages="kept")),
    ("algorithm.rollout_correction.loss_type", corrected(loss_type="reinforce")),
    ("algorithm.rollout_correction.rollout_is", corrected(bypass_mode=True, rollout_is="token")),
    ("algorithm.rollout_correction.rollout_is_threshold",
     corrected(preset="decoupled_geo_rs", rollout_is_threshold=3.0)),
    ("actor.clip_ratio",
     {"actor": {"clip_ratio": 0.1}, **corrected(preset="bypass_pg_is")}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "sections"), DEAD)
def test_unused_keys_a_method_s_key_without_effect_is_reported(key: str, sections: dict[str, Any]):
    assert dead(**sections) == {key}


def test_keys_of_methods_that_are_read_are_not_called_dead():
    for sections in (
        {"algorithm": {"use_kl_in_reward": True, "kl_penalty": "k3", "kl_ctrl": {"kl_coef": 0.1}},
         "ref": {"path": "base"}},
        {"algorithm": {"use_kl_in_reward": True,
                       "kl_ctrl": {"type": "adaptive", "target_kl": 0.1, "horizon": 20000}}},
        {"actor": {"policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.1}}},
        {"actor": {"policy_loss": "my_own", "tau_pos": 2.0, "clip_ratio_c": 4.0}},
        {"algorithm": {"adv_estimator": "my_own", "gamma": 0.9, "step_advantage_w": 2.0}},
        corrected(rollout_is="token", rollout_is_threshold=3.0, rollout_is_mode="mask"),
        corrected(preset="decoupled_geo_rs", rollout_rs_threshold="0.99_1.01"),
        corrected(bypass_mode=True, loss_type="reinforce", rollout_is="token"),
        corrected(preset="decoupled_k3_rs", advantages="kept"),
        {"algorithm": {"filter_groups": {"enable": True, "metric": "acc",
                                         "max_num_gen_batches": 3}}},
        {"reward": {"overlong_buffer": {"enable": True, "len": 8, "penalty_factor": 0.5}}},
        gdpo(algorithm={"gdpo_reward_keys": ["overlong_reward"]},
             reward={"overlong_buffer": {"enable": True, "len": 8}}),
        gdpo(algorithm={"filter_groups": {"enable": True}},
             reward={"weights": {"trajectory": 0.5}}),
        gdpo(actor={"use_kl_loss": True}, ref={"path": "base"}),
        gdpo(algorithm={"gdpo_reward_keys": ["format", "length_penalty"]},
             reward={"length_penalty": 0.5}),
        {"reward": {"placement": "exponential_decay", "placement_decay": 0.9},
         "algorithm": {"adv_estimator": "reinforce_plus_plus"}},
        {"reward": {"placement": "uniform"}, "algorithm": {"adv_estimator": "my_own"}},
    ):  # fmt: skip
        assert not dead(**sections)


CONTRADICTIONS: list[tuple[str, dict[str, Any]]] = [
    *(("rollout.n", {"rollout": {"n": 1}, "algorithm": {"adv_estimator": name}})
      for name in estimators_that(compares_groups=True) if name != "gdpo"),
    ("algorithm.gdpo_reward_keys", {"algorithm": {"adv_estimator": "gdpo"}}),
    *(("algorithm.adv_estimator",
       {"algorithm": {"adv_estimator": name, "rollout_correction": {"bypass_mode": True}}})
      for name in estimators_that(needs_squares=True)),
    ("rollout.n", {"rollout": {"n": 1}, "algorithm": {"adv_estimator": "remax",
                                                      "filter_groups": {"enable": True}}}),
    ("reward.overlong_buffer.len", {"reward": {"overlong_buffer": {"enable": True}}}),
    ("reward.overlong_buffer.len",
     {"reward": {"overlong_buffer": {"enable": True, "len": 65}},
      "data": {"train_files": ["train.parquet"], "max_response_length": 64}}),
    ("algorithm.gdpo_reward_weights",
     {"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b"],
                    "gdpo_reward_weights": [1.0]}}),
    ("algorithm.gdpo_reward_keys",
     {"algorithm": {"adv_estimator": "gdpo", "gdpo_reward_keys": ["a", "b", "a"]}}),
    ("algorithm.kl_ctrl.horizon",
     {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "horizon": 10}}}),
    ("algorithm.kl_ctrl.kl_coef",
     {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "kl_coef": 0}}}),
    ("algorithm.use_kl_in_reward",
     {"algorithm": {"adv_estimator": "maxrl", "use_kl_in_reward": True}}),
    ("reward.overlong_buffer.enable",
     {"algorithm": {"adv_estimator": "maxrl"},
      "reward": {"overlong_buffer": {"enable": True, "len": 8}}}),
    ("reward.length_penalty",
     {"algorithm": {"adv_estimator": "maxrl"}, "reward": {"length_penalty": 0.5}}),
    ("algorithm.rollout_correction.rollout_is",
     corrected(preset="decoupled_token_is", rollout_is="sequence")),
    ("actor.policy_loss.rollout_correction",
     {"actor": {"policy_loss": {"rollout_correction": {"rollout_is": "token"}}}}),
    ("algorithm.rollout_correction.bypass_mode",
     corrected(preset="decoupled_token_is", bypass_mode=True)),
    ("algorithm.rollout_correction.rollout_is_threshold",
     corrected(rollout_is="token", rollout_is_threshold="2_0.5")),
    ("algorithm.rollout_correction.rollout_is_threshold",
     corrected(rollout_is="token", rollout_is_threshold=-1.0)),
    ("algorithm.rollout_correction.rollout_is_threshold",
     corrected(rollout_is="token", rollout_is_threshold=0.55)),
    ("algorithm.rollout_correction.rollout_rs", corrected(rollout_rs="seq_min_k1",
                                                          rollout_rs_threshold=2.0)),
    ("algorithm.rollout_correction.rollout_rs_threshold", corrected(rollout_rs="token_k3")),
    ("algorithm.rollout_correction.rollout_rs_threshold",
     corrected(rollout_rs="token_k3", rollout_rs_threshold="0.1_0.2")),
    ("algorithm.rollout_correction.rollout_rs_threshold",
     corrected(rollout_rs="token_k1,seq_mean_k3", rollout_rs_threshold="2,1,3")),
    ("algorithm.rollout_correction.rollout_is_batch_normalize",
     corrected(preset="bypass_pg_is", rollout_is_batch_normalize=True)),
    ("algorithm.rollout_correction.rollout_is",
     corrected(bypass_mode=True, loss_type="reinforce", rollout_is="turn")),
    ("actor.policy_loss.loss_mode",
     {"actor": {"policy_loss": "gspo"}, **corrected(bypass_mode=True)}),
    ("actor.policy_loss.loss_mode", {"actor": {"policy_loss": "bypass_mode"}}),
    ("algorithm.rollout_correction",
     {"rollout": {"engine": {"name": "scripted", "scripted": {"answers": ["a"]}}},
      **corrected(rollout_is="token")}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "sections"), CONTRADICTIONS)
def test_a_method_that_cannot_work_is_refused_by_name(key: str, sections: dict[str, Any]):
    assert contradicted(**sections) == {key}


def test_methods_that_can_work_are_not_refused():
    for sections in (
        corrected(preset="decoupled_token_is", rollout_is="token", rollout_is_threshold=5.0),
        corrected(preset="bypass_pg_geo_rs_seq_tis"),
        corrected(rollout_rs="token_k1, turn_sum_k2", rollout_rs_threshold="0.5_2.0, 3"),
        {"actor": {"policy_loss": "bypass_mode"}, **corrected(bypass_mode=True)},
        {"rollout": {"n": 1}, "algorithm": {"adv_estimator": "grpo_verl"}},
        {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive"}}},
        {"algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0}}},
        {"algorithm": {"adv_estimator": "maxrl"}, "actor": {"use_kl_loss": True}},
        {"algorithm": {"adv_estimator": "maxrl"},
         "reward": {"overlong_buffer": {"enable": True, "len": 8, "penalty_factor": 0}}},
        corrected(rollout_is="token", rollout_is_threshold=1.0),
    ):  # fmt: skip
        assert not contradicted(**sections)


@pytest.mark.parametrize("keys", [{"bypass_mode": True}, {"preset": "bypass_pg_geo_rs_seq_tis"}])
def test_what_a_run_is_written_down_as_has_no_key_that_it_refuses(keys: dict[str, Any]):
    config = config_of(**corrected(**keys))
    again = parse_config(yaml.safe_load(to_yaml(config)))
    old, new = (one.algorithm.rollout_correction.effective for one in (config, again))
    assert "rollout_correction" not in config.model_dump()["actor"]["policy_loss"]
    assert not find_conflicts(again)
    assert old == new
