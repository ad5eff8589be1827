"""What of the scoring's keys cannot be meant together, and what changes nothing."""

from typing import Any, get_args

import pytest
from omegaconf import OmegaConf

from agentrl.config import parse_config
from agentrl.config.conflicts import Purpose, find_conflicts
from agentrl.config.dead_keys import find_dead_keys
from agentrl.config.schema.reward import TAKEN_NAMES
from agentrl.config.schema.sandbox import SandboxConfig, SandboxProviderName
from agentrl.config.verl.reading import read_verl_tree
from agentrl.errors import ConfigError
from agentrl.rewards.combination import Source


def run(**reward: Any):
    return parse_config({"data": {"train_files": ["a"]}, "model": {"path": "m"}, "reward": reward})


def problems(purpose=Purpose.TRAIN, **reward: Any) -> list[str]:
    return [str(problem) for problem in find_conflicts(run(**reward), purpose=purpose)]


CUSTOM = {"path": "mine.py"}
SERVICE = {"provider": "sandbox_fusion", "url": "http://x"}


@pytest.mark.parametrize("purpose", [Purpose.TRAIN, Purpose.ROLLOUT])
@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"functions": [{"name": "math"}], "custom_reward_function": CUSTOM}, "is set together"),
        ({"functions": [{"name": "math"}, {"name": "math"}]}, "2 functions named 'math'"),
        ({"functions": [{"name": "maths"}]}, "did you mean 'math'"),
        ({"functions": [{"name": "math"}, {"name": "gms8k"}]}, "reward.functions[1].name"),
        ({"functions": [{"name": "math", "function": "mine"}]}, "there is no path to the module"),
        ({"functions": [{"name": "math", "weight": 0}]}, "only weights of 0"),
        ({"manager": "batch"}, "passes lists"),
        ({"manager": "batch", "functions": [{"name": "mine", "path": "mine.py"}]}, "passes lists"),
        *(
            ({"functions": [{"name": name, "path": "mine.py"}]}, f"{name!r} is the name of")
            for name in ("score", "length_penalty", "overlong_reward")
        ),
        ({"sandbox": {"provider": "subprocess"}}, "reward.sandbox.trusted: is false"),
        (
            {"functions": [{"name": "judge", "reward_kwargs": {"model": "m"}}]},
            "reward.functions[0].reward_kwargs.base_url: is missing",
        ),
    ],
)
def test_impossible_settings_are_reported(reward, message, purpose):
    [found] = problems(purpose, **reward)
    assert message in found


@pytest.mark.parametrize(
    "reward",
    [
        {}, {"manager": "batch", "custom_reward_function": CUSTOM}, {"manager": "prime"},
        {"functions": [{"name": "math"}, {"name": "mine", "path": "mine.py", "function": "f"}]},
        {"functions": [{"name": "data_source"},
                       {"name": "judge", "weight": 0.0,
                        "reward_kwargs": {"base_url": "http://x/v1", "model": "m"}}]},
        {"sandbox": {"provider": "subprocess", "trusted": True}},
        {"sandbox": {"provider": "subprocess"}, "custom_reward_function": CUSTOM},
    ],
)  # fmt: skip
def test_what_can_be_meant_is_not(reward):
    assert problems(**reward) == []


@pytest.mark.parametrize(
    ("reward", "dead"),
    [
        ({"num_workers": 2}, []),
        ({"num_workers": 2, "custom_reward_function": CUSTOM}, ["reward.num_workers"]),
        ({"num_workers": 2, "custom_reward_function": CUSTOM, "manager": "prime"}, []),
        ({"num_workers": 2, "functions": [{"name": "qa"}]}, ["reward.num_workers"]),
        ({"num_workers": 2, "functions": [{"name": "data_source"}]}, []),
        ({"sandbox": {"timeout_s": 3.0}}, []),
        ({"sandbox": {"timeout_s": 3.0}, "functions": [{"name": "code"}]}, []),
        ({"sandbox": {"timeout_s": 3.0}, "custom_reward_function": CUSTOM},
         ["reward.sandbox.timeout_s"]),
        ({"sandbox": {"timeout_s": 3.0},
          "custom_reward_function": {"path": "agentrl.rewards.code"}}, []),
        ({"max_concurrent_scores": 3, "manager": "batch", "custom_reward_function": CUSTOM}, []),
        ({"max_concurrent_scores": 3, "manager": "batch", "custom_reward_function": CUSTOM,
          "launch_reward_fn_async": False}, ["reward.max_concurrent_scores"]),
        ({"sandbox": {"trusted": True}}, ["reward.sandbox.trusted"]),
        ({"sandbox": {"trusted": True, "provider": "subprocess"}}, []),
        ({"sandbox": SERVICE | {"timeout_s": 3.0, "memory_bytes": 2**30}}, []),
        ({"sandbox": SERVICE | {"num_warm": 1, "site_packages": True, "trusted": True}},
         ["reward.sandbox.trusted", "reward.sandbox.site_packages", "reward.sandbox.num_warm"]),
    ],
)  # fmt: skip
def test_unused_keys_scoring_keys_without_effect_are_reported(reward, dead):
    assert [key.key for key in find_dead_keys(run(**reward))] == dead


def test_no_function_may_be_called_what_another_part_of_the_reward_is():
    others = {"score", "model", "agent_reward"}
    assert {*TAKEN_NAMES} == others | {source.value for source in Source}


@pytest.mark.parametrize(
    "keys", [{"provider": "sandbox_fusion"}, {"url": "http://x"}, SERVICE | {"provider": "auto"}]
)
def test_a_sandbox_is_where_its_address_says(keys):
    with pytest.raises(ConfigError, match=r"reward\.sandbox: .*sandbox_fusion"):
        run(sandbox=keys)


def test_unused_keys_a_sandbox_names_the_keys_that_it_does_not_read():
    every = {name: field.default for name, field in SandboxConfig.model_fields.items()}
    given = SandboxConfig.model_validate(every | SERVICE)
    read = {"provider", "url", "timeout_s", "memory_bytes", "max_output_bytes"}
    assert given.find_unread().keys() == every.keys() - read
    assert SandboxConfig.model_validate(SERVICE).find_unread() == {}


LIMITS = {
    "timeout_s": 3.0, "cpu_s": 3.0, "memory_bytes": 2**30, "max_processes": 3,
    "max_open_files": 33, "max_output_bytes": 333, "disk_bytes": 2**21,
}  # fmt: skip
NOT_KEPT = {
    "subprocess": {"max_processes"},
    "sandbox_fusion": {"cpu_s", "max_processes", "max_open_files", "disk_bytes"},
}


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("provider", get_args(SandboxProviderName))
def test_a_limit_that_the_provider_cannot_keep_is_refused(provider, limit):
    keys = SERVICE if provider == "sandbox_fusion" else {"provider": provider, "trusted": True}
    keys = keys | {limit: LIMITS[limit]}
    if limit in NOT_KEPT.get(provider, ()):
        with pytest.raises(ConfigError, match=f"provider {provider} cannot keep this limit"):
            run(sandbox=keys)
    else:
        run(sandbox=keys)


def test_every_limit_of_a_sandbox_is_either_kept_or_refused():
    others = {"provider", "trusted", "url", "site_packages", "num_warm"}
    assert SandboxConfig.model_fields.keys() - others == LIMITS.keys()


def verl(**changes: Any):
    """Read a run file of verl's with these keys; gives our section of rewards."""
    tree = OmegaConf.create(
        {"data": {"train_files": "a"}, "actor_rollout_ref": {"model": {"path": "m"}},
         "algorithm": {"adv_estimator": "grpo"}}
    )  # fmt: skip
    for key, value in changes.items():
        OmegaConf.update(tree, key.replace("__", "."), value)
    return read_verl_tree(tree, file=None)[0].reward


def test_verls_launch_key_is_used_if_it_is_set():
    assert verl().launch_reward_fn_async
    assert verl(reward_model__launch_reward_fn_async=True).launch_reward_fn_async
    batch = verl(reward_model__reward_manager="batch", custom_reward_function__path="mine.py")
    assert not batch.launch_reward_fn_async


@pytest.mark.parametrize("section", ["sandbox_fusion", "reward_model__sandbox_fusion",
                                     "reward__sandbox_fusion"])  # fmt: skip
def test_verls_code_service_is_a_sandbox(section):
    found = verl(
        **{f"{section}__url": "http://localhost:8080/run_code",
           f"{section}__max_concurrent": 16, f"{section}__memory_limit_mb": 1024}
    )  # fmt: skip
    assert found.sandbox.provider == "sandbox_fusion"
    assert found.sandbox.url == "http://localhost:8080/run_code"
    assert found.max_concurrent_scores == 16
    assert found.sandbox.memory_bytes == 1024**3


def test_limits_of_a_service_that_is_not_there_change_nothing():
    found = verl(reward_model__sandbox_fusion__memory_limit_mb=1024)
    assert found.sandbox.provider == "auto"
