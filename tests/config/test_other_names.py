"""Names of other libraries and of earlier layouts are read, refused, or lead to the right key."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentrl.algorithms  # noqa: F401 - registers the names
from agentrl.algorithms.advantages.registry import adv_estimator_names, get_adv_estimator_fn
from agentrl.algorithms.losses.registry import get_policy_loss_fn, policy_loss_names
from agentrl.config import parse_config, read_config
from agentrl.config.other_names import table
from agentrl.config.problems import known_keys, nearest_key, unknown_key
from agentrl.errors import ConfigError

READ = table()["read"]
VALUES = {
    "generation.temperature": 0.5, "generation.top_p": 0.9, "generation.max_new_tokens": 7,
    "generation.stop_tokens": ["END"], "trainer.ppo_epochs": 3, "trainer.mini_batch_size": 8,
    "trainer.cliprange": 0.3, "trainer.gamma": 0.9, "trainer.lam": 0.8,
    "actor.loss_mode": "clip_cov", "actor.clip_cov_ratio": 0.1, "actor.clip_cov_lb": 0.5,
    "actor.clip_cov_ub": 4.0, "actor.kl_cov_ratio": 0.1, "actor.ppo_kl_coef": 0.2,
    "trainer.profile_steps": [1, 2],
}  # fmt: skip
OURS = "data: {train_files: [a], train_batch_size: 8}\nmodel: {path: p}\n"
VERLS = (
    "data: {train_files: [a], train_batch_size: 8}\nactor_rollout_ref: {model: {path: p}}\n"
    "algorithm: {adv_estimator: grpo}\n"
)
SECTION = {"actor": "actor_rollout_ref.actor"}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Any]:
    def run(text: str, *overrides: str) -> Any:
        (tmp_path / "run.yaml").write_text(text)
        return read_config(tmp_path / "run.yaml", overrides).config

    return run


def value_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def targets(name: str) -> list[str]:
    return [READ[name]] if isinstance(READ[name], str) else READ[name]


def test_each_name_is_tried():
    assert VALUES.keys() == READ.keys()


@pytest.mark.parametrize("text", [OURS, VERLS], ids=["agentrl", "verl"])
@pytest.mark.parametrize("name", READ)
def test_another_name_is_read_in_both_trees_with_a_note(name: str, text: str, read, caplog):
    with caplog.at_level(logging.WARNING):
        config = read(text, f"{name}={VALUES[name]}")
    assert [value_of(config, key) for key in targets(name)] == [VALUES[name]] * len(targets(name))
    assert f"note: {name} is read as" in caplog.text


@pytest.mark.parametrize("name", [name for name in READ if name.startswith("actor.")])
def test_an_earlier_layout_of_verls_actor_is_read(name: str, read):
    config = read(VERLS, f"actor_rollout_ref.{name}={VALUES[name]}")
    assert value_of(config, targets(name)[0]) == VALUES[name]


def test_two_names_with_one_value_are_one_key_and_with_two_an_error(read):
    same = read(OURS, "trainer.gamma=0.5", "algorithm.gamma=0.5")
    assert same.algorithm.gamma == 0.5
    with pytest.raises(ConfigError, match=r"trainer\.gamma is another name of algorithm\.gamma"):
        read(OURS, "trainer.gamma=0.5", "algorithm.gamma=0.6")


def test_a_dict_is_read_like_a_file():
    raw = {"data": {"train_files": ["a"]}, "model": {"path": "p"}, "generation": {"top_p": 0.5}}
    assert parse_config(raw).rollout.top_p == 0.5


def test_a_wrong_value_is_reported_with_the_command_line(read):
    with pytest.raises(ConfigError, match="given on the command line") as caught:
        read(OURS, "trainer.ppo_epochs=none")
    assert caught.value.key == "actor.ppo_epochs"


# Refusals and hints.


@pytest.mark.parametrize("text", [OURS, VERLS], ids=["agentrl", "verl"])
@pytest.mark.parametrize("end", table()["refused"])
def test_a_refused_name_says_why_wherever_it_is_written(end: str, text: str, read):
    why = table()["refused"][end]
    spelled = (end, f"trainer.{end}", f"rollout.multi_turn.{end}")
    for key in spelled[end == "reward_model.type" and text == OURS :]:
        with pytest.raises(ConfigError) as caught:
            read(text, f"+{key}=1")
        assert why in str(caught.value), key


def test_keys_that_the_tables_name_exist_and_names_are_no_keys():
    keys = set(known_keys())
    leaves = {key.rpartition(".")[2] for key in keys}
    assert {key for name in READ for key in targets(name)} <= keys
    assert set(table()["meant"].values()) <= keys
    names = {*READ, *table()["meant"], *table()["refused"]}
    # Keys of special sections, which are not meant outside of them.
    special = {"batch_size", "loss_type", "model_name", "model_path", "steps"}
    assert names & (keys | leaves) == special


@pytest.mark.parametrize("name", table()["meant"])
def test_a_well_known_name_leads_to_its_key(name: str):
    for key in (name, f"trainer.{name}", f"algorithm.{name}"):
        assert nearest_key(key) == table()["meant"][name]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trainer.ppo_epochs", "actor.ppo_epochs"),
        ("trainer.lr", "actor.optim.lr"),
        ("critic.lr", "critic.optim.lr"),
        ("critic.cliprange", "critic.cliprange_value"),
        ("actor.batch_size", "actor.ppo_mini_batch_size"),
        ("optim.weight_decay", "actor.optim.weight_decay"),
    ],
)
def test_a_name_of_several_sections_means_the_policys_unless_it_says_so(key: str, meant: str):
    assert nearest_key(key) == meant
    assert meant in unknown_key(key)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("reward_model.token_reward.weight", "reward.tool_call_bonus"),
        ("reward_manager.name", "reward.manager"),
        ("data.train_file", "data.train_files"),
        ("rollout.max_new_token", "rollout.multi_turn.max_tokens_per_turn"),
    ],
)
def test_a_name_means_no_key_of_a_preparation_and_an_unknown_section_counts(key: str, meant: str):
    assert nearest_key(key) == meant


def test_a_well_known_name_in_an_unknown_section_is_found(read):
    with pytest.raises(ConfigError) as caught:
        read(OURS + "agent_loop: {name: mine, custom_param: 3}\n")
    assert "did you mean 'rollout.agent.default_agent_loop'" in str(caught.value)
    assert "agent_loop.custom_param: unknown key: arguments of an agent loop" in str(caught.value)


@pytest.mark.parametrize(
    ("find", "names", "key"),
    [
        (get_adv_estimator_fn, adv_estimator_names, "algorithm.adv_estimator"),
        (get_policy_loss_fn, policy_loss_names, "actor.policy_loss"),
    ],
)
def test_a_well_known_method_leads_to_its_name(find: Any, names: Any, key: str):
    for name, meant in table()["values"][key].items():
        assert meant.split("'")[1] in names()
        with pytest.raises(ConfigError, match="did you mean") as caught:
            find(name)
        assert meant in str(caught.value)


@pytest.mark.parametrize("blank", ["", " ", "  ", "\t", "\n"])
def test_a_blank_is_no_override_and_the_message_says_how_it_came(blank: str, read):
    with pytest.raises(ConfigError, match="is a blank") as caught:
        read(OURS, blank)
    assert "backslash" in str(caught.value.expected)


@pytest.mark.parametrize("name", ["continue_final_message", "add_generation_prompt", "tokenize"])
def test_an_argument_of_transformers_is_no_variable_of_a_template(name: str, read):
    with pytest.raises(ConfigError, match=name):
        read(OURS, f"data.apply_chat_template_kwargs.{name}=true")
