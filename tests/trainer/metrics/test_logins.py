"""A tracker without a login is refused before the run starts."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.trainer.metrics.logins import check_login

VARIABLES = (
    "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL", "NETRC",
    "WANDB_CONFIG_DIR", "SWANLAB_API_KEY", "SWANLAB_MODE", "SWANLAB_SAVE_DIR",
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("tracker", ["wandb", "swanlab"])
def test_no_login_is_refused_with_the_ways_to_log_in(tracker: str):
    with pytest.raises(ConfigError, match="no login") as refused:
        check_login(tracker)  # pyright: ignore[reportArgumentType]
    assert f"{tracker} login" in str(refused.value)
    assert f"{tracker.upper()}_MODE=offline" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("WANDB_API_KEY", "k"), ("WANDB_IDENTITY_TOKEN_FILE", "t"), ("WANDB_MODE", "offline"),
        ("WANDB_MODE", "disabled"), ("SWANLAB_API_KEY", "k"), ("SWANLAB_MODE", "local"),
    ],
)  # fmt: skip
def test_a_variable_is_a_login(name: str, value: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, value)
    check_login(name.partition("_")[0].lower())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("tracker", "file", "text", "is_login"),
    [
        ("wandb", ".netrc", "machine api.wandb.ai\n  login user\n  password k\n", True),
        ("wandb", ".netrc", "machine github.com\n  login user\n  password k\n", False),
        ("wandb", ".netrc", "machine own.example\n  login user\n  password k\n", False),
        ("wandb", ".config/wandb/settings", "[default]\nmode = offline\n", True),
        ("wandb", "wandb/settings", "[default]\nentity = us\n", False),
        ("swanlab", ".swanlab/.netrc", "machine api\n", True),
    ],
)
def test_a_file_of_the_login_command_is_a_login(
    tracker: str, file: str, text: str, is_login: bool, home: Path
):
    (home / file).parent.mkdir(parents=True, exist_ok=True)
    (home / file).write_text(text)
    with nullcontext() if is_login else pytest.raises(ConfigError, match="no login"):
        check_login(tracker)  # pyright: ignore[reportArgumentType]


def test_the_host_of_a_server_of_ones_own_counts(home: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WANDB_BASE_URL", "https://own.example:8080")
    (home / ".netrc").write_text("machine own.example\n  login user\n  password k\n")
    check_login("wandb")


@pytest.mark.parametrize("tracker", ["mlflow", "trackio"])
def test_a_tracker_that_writes_to_this_machine_needs_none(tracker: str):
    check_login(tracker)  # pyright: ignore[reportArgumentType]


def test_an_empty_variable_names_no_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NETRC", "")
    with pytest.raises(ConfigError, match="no login"):
        check_login("wandb")
