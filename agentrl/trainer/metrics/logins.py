"""Find the logins of tracking services, before a run starts."""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

from agentrl.config.schema.run import TrackerName
from agentrl.errors import ConfigError

_LOCAL_MODES = frozenset({"offline", "disabled", "dryrun", "local"})


class _Service(NamedTuple):
    """What a tracker reads to find its login."""

    keys: tuple[str, ...]
    """Environment variables with a key."""
    mode: str
    """The environment variable that keeps the metrics on this machine."""
    files: Mapping[str, tuple[str, ...]]
    """Files of its login command, and words of which one is in a file with a login or a mode."""


_SERVICES: Mapping[str, _Service] = {
    "wandb": _Service(
        keys=("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"),
        mode="WANDB_MODE",
        files={
            **dict.fromkeys(("$NETRC", "~/.netrc", "~/_netrc"), ("wandb", "$WANDB_BASE_URL")),
            **dict.fromkeys(
                ("$WANDB_CONFIG_DIR/settings", "~/.config/wandb/settings", "wandb/settings"),
                ("api_key", "offline", "disabled"),
            ),
        },
    ),
    "swanlab": _Service(
        keys=("SWANLAB_API_KEY",),
        mode="SWANLAB_MODE",
        files=dict.fromkeys(("$SWANLAB_SAVE_DIR/*", "~/.swanlab/*", ".swanlab/*"), ("",)),
    ),
}


def check_login(tracker: TrackerName) -> None:
    """Check that a tracker has a login, or keeps the metrics on this machine.

    Raises:
        ConfigError: If it has none: it would fail after the run has started.
    """
    service = _SERVICES.get(tracker)
    if service is None or any(os.environ.get(key) for key in service.keys):
        return
    if os.environ.get(service.mode) in _LOCAL_MODES or any(_logins(service)):
        return
    raise ConfigError(
        f"{tracker} has no login on this machine",
        key="trainer.logger",
        expected=f"`{tracker} login`, {service.keys[0]}, {service.mode}=offline, or no {tracker} "
        "in the list",
    )


def _logins(service: _Service) -> Iterator[Path]:
    for name, words in service.files.items():
        if name[0] == "$" and not os.environ.get(name[1:].partition("/")[0]):
            continue
        place = Path(os.path.expandvars(name)).expanduser()
        for path in filter(Path.is_file, place.parent.glob(place.name)):
            with suppress(OSError):
                text = path.read_text(encoding="utf-8", errors="replace")
                if any(word in text for word in map(_host, words)):
                    yield path


def _host(word: str) -> str:
    """Return a word, or the host of an address that an environment variable has."""
    given = os.path.expandvars(word)
    return urlsplit(given).hostname or given
