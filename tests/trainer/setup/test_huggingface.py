"""Names of the hub: which can be some, and whether anything answers to them."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import logging as hub_logging

from agentrl.trainer.setup import huggingface as hub
from agentrl.trainer.setup.huggingface import is_hub_name, is_within_reach, quiet_libraries


@pytest.mark.parametrize("name", ["policy", "Qwen/Qwen3-0.6B"])
def test_a_word_or_two_can_be_a_model_of_the_hub(name: str):
    assert is_hub_name(name)


@pytest.mark.parametrize("name", ["/policy", "./policy", "../policy", "~/policy", "a/b/c", "a/"])
def test_a_path_is_no_name_of_the_hub(name: str):
    assert not is_hub_name(name)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def answer_with(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def ask(*_: object, **__: object) -> Any:
        raise error

    monkeypatch.setattr(hub, "get_hf_file_metadata", ask)


def test_a_hub_that_does_not_answer_is_out_of_reach(monkeypatch: pytest.MonkeyPatch):
    answer_with(monkeypatch, ConnectionError("no route to host"))
    assert not is_within_reach("org/policy")


def test_a_model_that_was_downloaded_is_within_reach_of_no_hub(
    monkeypatch: pytest.MonkeyPatch, cache: Path
):
    answer_with(monkeypatch, ConnectionError("no route to host"))
    (cache / "models--org--policy/snapshots").mkdir(parents=True)
    assert is_within_reach("org/policy")


def test_what_the_hub_says_of_a_model_is_for_the_loading_to_tell(monkeypatch: pytest.MonkeyPatch):
    response: Any = SimpleNamespace(headers={}, request=None)
    answer_with(monkeypatch, HfHubHTTPError("no such model", response=response))
    assert is_within_reach("org/policy")


def test_retries_of_the_hubs_client_are_not_logged(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HF_HUB_VERBOSITY", raising=False)
    hub_logging.set_verbosity_warning()
    quiet_libraries()
    assert not logging.getLogger("huggingface_hub.utils._http").isEnabledFor(logging.WARNING)
