"""The base class of the sections of a run file, and the types of their paths."""

import logging
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, cast, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationInfo,
    field_validator,
)

logger = logging.getLogger(__name__)

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/")
_FULL_URL = re.compile(r"[a-z][a-z0-9+.-]+://[^/].*")


def _expand_home(path: Path) -> Path:
    if (url := _URL.match(str(path))) is not None:
        raise ValueError(
            f"{url[1]}:// is not supported here: this key is the path of a file or folder. "
            "Checkpoints and the exported policy can go to a URL, trainer.default_remote_dir"
        )
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{path}: {error}") from error


def _expand_home_in_name(name: str) -> str:
    return str(_expand_home(Path(name))) if name.startswith("~") else name


def _check_url(url: str) -> str:
    if "::" in url or not _FULL_URL.fullmatch(url):
        raise ValueError(f"is {url!r}; expected a URL such as s3://bucket/runs/a or hdfs://host/a")
    return url.rstrip("/")


def _check_location(place: object) -> object:
    if isinstance(place, str) and _URL.match(place):
        return _check_url(place)
    return _expand_home(Path(place)) if isinstance(place, str | Path) else place


def _refuse_colon(path: str) -> str:
    module, colon, name = path.rpartition(":")
    if colon and module:
        raise ValueError(
            f"is {path!r}; write {name!r} under the key of its own, and path: {module}"
        )
    return path


def _with_sign(sign: int) -> AfterValidator:
    def read(value: float, info: ValidationInfo) -> float:
        if value * sign >= 0:
            return value
        note = "%s is %g: a penalty lowers the reward with either sign, so it is read as %g"
        logger.warning(note, info.field_name, value, -value)
        return -value

    return AfterValidator(read)


Penalty = Annotated[float, _with_sign(1)]
"""The amount that is subtracted from a reward. Other programs write it as a negative number."""
PenaltyAsReward = Annotated[float, _with_sign(-1)]
"""A reward that is a penalty: it is not positive. Others write its amount."""
Seed = int
ModulePath = Annotated[str, AfterValidator(_refuse_colon)]
"""`package.module` or `path/to/file.py`, without the name of an object in it."""
UserPath = Annotated[Path, AfterValidator(_expand_home)]
"""A path as a user writes it; `~` becomes the home folder when the file is read."""
Url = Annotated[str, AfterValidator(_check_url)]
"""A folder in a store that fsspec knows, such as `s3://bucket/runs/a`."""
PathOrUrl = Annotated[Path | str, BeforeValidator(_check_location)]
"""A path as a user writes it, or a URL."""
FolderOrHubName = Annotated[str, AfterValidator(_expand_home_in_name)]
"""A folder as a user writes it, or a name on the Hugging Face hub."""


class Section(BaseModel):
    """A section of the run file: unknown keys are errors, numbers are finite, values are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_words(cls, given: object, info: ValidationInfo) -> object:
        """Refuse `on`, which YAML reads as a truth value, as a number; pydantic reads it as 1."""
        values = cast("list[object]", given) if isinstance(given, list | tuple) else [given]
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        is_number = bool(kinds & {int, float}) and not kinds & {bool, Any, object}
        if is_number and any(value is True or value is False for value in values):
            raise ValueError("YAML reads yes, no, on, off, true and false as truth values")
        return cast("object", given)


@cache
def _kinds(annotation: Any) -> set[Any]:
    inner = get_args(annotation)
    return set[Any]().union(*map(_kinds, inner)) if inner else {annotation}
