"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

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
