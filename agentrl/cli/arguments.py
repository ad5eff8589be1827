"""Arguments that several commands take."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from agentrl.errors import ConfigError

RunFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="A YAML run file.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Keys of the file to replace: rollout.n=4 data.seed=1.",
        show_default=False,
    ),
]
OutDir = Annotated[
    Path, typer.Argument(metavar="FOLDER", help="Folder to write.", show_default=False)
]

_HYDRA_OPTIONS = ("--config-path", "--config-dir", "--config-name", "--cfg")


def refuse_hydra_options(arguments: Sequence[str]) -> None:
    """Refuse Hydra's options, by which verl's scripts name their run file.

    Raises:
        ConfigError: for such an option, with the command to use instead.
    """
    values: dict[str, str] = {}
    for place, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        if name in _HYDRA_OPTIONS:
            following = arguments[place + 1] if place + 1 < len(arguments) else ""
            values[name] = value if has_value else following
    if not values:
        return
    folder = values.get("--config-path") or values.get("--config-dir") or "."
    file = Path(folder) / Path(values.get("--config-name") or "FILE").with_suffix(".yaml")
    raise ConfigError(
        f"{', '.join(values)}: agentrl takes the path of the run file and composes no files",
        expected=f"agentrl {arguments[0]} {file} KEY=VALUE ...; an empty file if every key is on "
        "the command line",
    )
