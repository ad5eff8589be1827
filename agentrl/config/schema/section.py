"""The base class of the sections of a run file, and the types of their paths."""

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/")


def _expand_home(path: Path) -> Path:
    if (url := _URL.match(str(path))) is not None:
        raise ValueError(
            f"{url[1]}:// is not supported: agentrl reads and writes files. Mount the storage, and "
            "give the path of its folder"
        )
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from error


def _expand_home_in_name(name: str) -> str:
    return str(_expand_home(Path(name))) if name.startswith("~") else name


def _refuse_colon(path: str) -> str:
    module, colon, name = path.rpartition(":")
    if colon and module:
        raise ValueError(
            f"is {path!r}; write {name!r} under the key of its own, and path: {module}"
        )
    return path


Seed = int
ModulePath = Annotated[str, AfterValidator(_refuse_colon)]
"""`package.module` or `path/to/file.py`, without the name of an object in it."""
UserPath = Annotated[Path, AfterValidator(_expand_home)]
"""A path as a user writes it; `~` becomes the home folder when the file is read."""
FolderOrHubName = Annotated[str, AfterValidator(_expand_home_in_name)]
"""A folder as a user writes it, or a name on the Hugging Face hub."""


class Section(BaseModel):
    """A section of the run file: unknown keys are errors, numbers are finite, values are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
