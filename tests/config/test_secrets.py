"""Secrets are in nothing that is printed or saved of a configuration."""

from pathlib import Path

import pytest
import yaml

from agentrl.config import load_config
from agentrl.config.explain import describe, to_short_yaml, to_yaml
from agentrl.config.secrets import REDACTED, is_secret_name, without_secrets

SECRET = "sk-0123456789"


@pytest.mark.parametrize(
    "name",
    ["api_key", "apikey", "API_KEY", "X-Api-Key", "JUDGE_API_KEY", "token", "hf_token", "password",
     "db_password", "Authorization", "client_secret", "AWS_SECRET_ACCESS_KEY", "credentials"],
)  # fmt: skip
def test_names_of_secrets_are_known(name: str):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    ["api_key_env", "prompt_key", "max_tokens", "pad_token", "eos_token", "key", "tokenizer_path",
     "max_total_tokens", "gdpo_reward_keys", "secretary"],
)  # fmt: skip
def test_other_names_are_none(name: str):
    assert not is_secret_name(name)


def test_values_of_secret_variables_are_secret_under_any_key(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_API_KEY", SECRET)
    tree = {"headers": ["Bearer " + SECRET], "deep": {"password": "x", "api_key": None, "n": 3}}
    assert without_secrets(tree) == {
        "headers": [f"Bearer {REDACTED}"],
        "deep": {"password": REDACTED, "api_key": None, "n": 3},
    }


def test_what_is_written_of_a_run_file_holds_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_TOKEN", SECRET)
    monkeypatch.setenv("OTHER_API_KEY", SECRET + "-other")
    kwargs = {"api_key": SECRET, "base": "${oc.env:OTHER_API_KEY}", "token": "${oc.env:MY_TOKEN}"}
    file = tmp_path / "run.yaml"
    run = {
        "data": {"train_files": ["a.parquet"]},
        "model": {"path": "m"},
        "reward": {"custom_reward_function": {"path": "s.py", "reward_kwargs": kwargs}},
        "rollout": {"engine": {"sglang": {"api_key": SECRET}}},
    }
    file.write_text(yaml.safe_dump(run))
    config = load_config(file)
    assert config.reward.custom_reward_function is not None
    assert config.reward.custom_reward_function.reward_kwargs["api_key"] == SECRET
    for text in (to_yaml(config), to_short_yaml(config), describe(config)):
        assert SECRET not in text
        assert text.count(REDACTED) >= 4
