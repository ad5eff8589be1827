"""Write a run file that was made for verl as one of ours."""

from collections.abc import Sequence
from pathlib import Path

from agentrl.config.explain import comment, to_short_yaml
from agentrl.config.load import read_config
from agentrl.errors import ConfigError


def convert_from_verl(path: str | Path, overrides: Sequence[str] = ()) -> str:
    """Write the run of a file in verl's key tree in our keys, with the report above them.

    Args:
        path: The file; it may be empty where `overrides` say everything.
        overrides: As on verl's command line.

    Raises:
        ConfigError: see `load_config`, and for a file that is in our keys.
    """
    config, report = read_config(path, overrides)
    if report is None:
        raise ConfigError(
            "the file has our keys already",
            file=path,
            expected="verl's, such as actor_rollout_ref.model.path",
        )
    return comment(report) + to_short_yaml(config)
