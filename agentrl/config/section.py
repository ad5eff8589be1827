"""What every section of a run file is."""

from pydantic import BaseModel, ConfigDict

Seed = int


class Section(BaseModel):
    """A section of the run file: unknown keys are errors, numbers are finite, values stay."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
