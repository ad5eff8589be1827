"""`agentrl push`, to a hub on this machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

from agentrl import Trainer, load_config
from agentrl.commands.push import PushOptions, push
from agentrl.errors import StoreError
from tests.fakes.hub import FakeHub, running_hub
from tests.fakes.runs import run_agentrl, tiny_run, write_yaml

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # of the client


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the hub here takes LFS
        monkeypatch.setenv("HF_TOKEN", "hf_of_the_test")
        yield hub


@pytest.fixture(scope="module")
def run(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "run"
    content = tiny_run(tiny_home, folder, trainer__total_training_steps=1)
    file = write_yaml(folder.parent / "run.yaml", content)
    Trainer(load_config(str(file))).fit()
    return folder


def is_private(hub: FakeHub) -> bool:
    given = hub.repositories["me/small"]
    return given.get("visibility") == "private" or given.get("private") is True  # hub 2 or 1


def test_a_run_is_pushed_with_its_card(run: Path, hub: FakeHub, capsys: Any):
    output = run_agentrl(capsys, "push", run, "me/small", "--private", "--revision", "v1")
    assert output.code == 0, output
    assert output.out.splitlines()[-1] == f"pushed: {hub.url}/me/small/commit/{'a' * 40}"
    assert is_private(hub)
    assert hub.branches == ["v1"]
    assert hub.revision == "v1"
    assert hub.message == "Policy of run"
    assert hub.tokens == {"Bearer hf_of_the_test"}
    trained = {path.name: path.read_bytes() for path in (run / "trained").iterdir()}
    assert hub.files == trained
    assert "model.safetensors" in trained
    card = ModelCard(hub.files["README.md"].decode())
    card.validate()
    assert set(hub.validated) == {str(card)}
    assert card.data.library_name == "transformers"
    assert "tools: `calculator`" in card.content
    assert "mean training reward, step 1" in card.content


def test_the_folder_of_a_model_is_pushed_as_it_is(run: Path, hub: FakeHub, capsys: Any):
    output = run_agentrl(capsys, "push", run / "trained", "small", "--message", "as it is")
    assert output.code == 0, output
    assert hub.message == "as it is"
    assert hub.revision == "main"
    assert not hub.branches
    assert not is_private(hub)


def test_a_card_that_a_user_wrote_is_kept_and_a_missing_one_is_made(run: Path, hub: FakeHub):
    card = run / "trained/README.md"
    made = card.read_text()
    card.write_text("my own card")
    try:
        push(run, "me/small", PushOptions(), print)
        assert hub.files["README.md"] == b"my own card"
        card.unlink()
        push(run, "me/small", PushOptions(), print)
        assert hub.files["README.md"].decode() == made
    finally:
        card.write_text(made)


def test_without_a_token_it_says_how_to_get_one(
    run: Path, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    output = run_agentrl(capsys, "push", run, "me/small")
    assert output.code == 2
    assert "no token of the Hugging Face Hub" in output.err
    assert "hf auth login" in output.err
    assert not hub.tokens


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("checkpoints/global_step_1", "is a checkpoint"),
        ("checkpoints", "no exported model in"),
        ("nowhere", "no folder"),
    ],
)
def test_what_is_no_model_is_refused(run: Path, hub: FakeHub, capsys: Any, folder, message):
    output = run_agentrl(capsys, "push", run / folder, "me/small")
    assert output.code == 2
    assert message in output.err
    assert not hub.tokens


def test_a_wrong_name_of_a_repository_is_refused_before_the_token_is_read(
    run: Path, hub: FakeHub, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentrl.commands.push.get_token", lambda: None)
    output = run_agentrl(capsys, "push", run, "me/my/small")
    assert output.code == 2
    assert "owner/name" in output.err


def test_a_hub_that_refuses_is_an_error_that_names_it(run: Path, hub: FakeHub, capsys: Any):
    hub.refuses = True
    output = run_agentrl(capsys, "push", run, "me/small")
    assert output.code == 2
    assert "the model cannot be pushed" in output.err
    assert hub.url in output.err
    assert "hf_of_the_test" not in output.err


def test_a_hub_that_is_not_there_is_an_error_that_names_it(
    run: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(StoreError, match="cannot be pushed") as caught:
        push(run, "me/small", PushOptions(), print)
    assert caught.value.details["endpoint"] == "http://127.0.0.1:1"


@pytest.mark.slow
def test_the_endpoint_is_that_of_the_environment(run: Path, hub: FakeHub):
    command = [sys.executable, "-m", "agentrl", "push", str(run), "me/small"]
    settings = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    subprocess.run(command, env=os.environ | settings, check=True)
    assert "model.safetensors" in hub.files
