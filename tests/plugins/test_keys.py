"""The reader of a plug-in's keys: every mistake has its place, what was expected, and no secret."""

from typing import Any, Literal, Self

import pytest
from pydantic import ConfigDict, Field, SecretStr, model_validator

from agentrl.config.schema.section import Section
from agentrl.errors import ConfigError
from agentrl.plugins.keys import read_keys

SECRET = "hunter2"


class Door(Section):
    width_m: float = Field(default=1.0, gt=0)
    """Metres. Measured inside."""
    side: Literal["left", "right"] = "left"
    """left: it opens there."""


class House(Section):
    doors: list[Door] = Field(default_factory=list[Door])
    """Of the house."""
    front: Door | None = None
    """The one to the street."""
    key: SecretStr | None = None
    """Of the door."""
    codes: dict[str, int] = Field(default_factory=dict, repr=False)
    """By floor."""
    num_floors: int = Field(ge=1)
    """Floors, at least 1."""

    @model_validator(mode="after")
    def _door_for_a_key(self) -> Self:
        if self.key is not None and self.front is None:
            raise ValueError("a key needs front")
        return self


def refused(values: Any, **place: Any) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        read_keys(House, values, **{"key": "config", **place})
    assert SECRET not in str(error.value)
    return error.value


@pytest.mark.parametrize(
    ("values", "key", "message", "expected"),
    [
        (
            {},
            "config.num_floors",
            "num_floors is missing (found a mapping with nothing)",
            "Floors, at least 1",
        ),
        (
            {"num_floors": 0},
            "config.num_floors",
            "num_floors is 0",
            "a number of at least 1 (Floors, at least 1)",
        ),
        (
            {"num_floors": 1, "front": {"width_m": -1}},
            "config.front.width_m",
            "front.width_m is -1",
            "a number greater than 0.0 (Metres)",
        ),
        (
            {"num_floors": 1, "doors": [{}, {"side": "up"}]},
            "config.doors[1].side",
            "doors[1].side is 'up'",
            "one of 'left', 'right' (left: it opens there)",
        ),
        (
            {"num_floors": 1, "doors": [{"sid": "left"}]},
            "config.doors[0].sid",
            "unknown key 'sid'; did you mean 'side'?",
            "one of width_m, side",
        ),
        (
            {"num_floors": 1, "front": 3},
            "config.front",
            "front is 3",
            "a mapping with width_m, side (The one to the street)",
        ),
        (
            3,
            "config",
            "config is 3",
            "a mapping with doors, front, key, codes, num_floors",
        ),
        (
            {"num_floors": 1, "key": SECRET},
            "config",
            "a key needs front",
            "a mapping with doors, front, key, codes, num_floors",
        ),
        (
            {"num_floors": 1, "key": [SECRET]},
            "config.key",
            "key has a value that is not allowed",
            "a text (Of the door)",
        ),
        (
            {"num_floors": 1, "codes": {"attic": SECRET}},
            "config.codes.attic",
            "codes.attic has a value that is not allowed",
            "an integer (By floor)",
        ),
        (
            {"num_floors": {"of": SECRET}},
            "config.num_floors",
            "num_floors is a mapping with of",
            "an integer (Floors, at least 1)",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_key_and_the_expected_value(
    values: Any, key: str, message: str, expected: str
):
    error = refused(values, file="tools.yaml")
    assert error.args[0] == message
    assert error.details == {"file": "tools.yaml", "key": key, "expected": expected}


def test_unused_keys_a_key_that_is_misspelt_tells_more_than_one_that_is_missing():
    assert "did you mean 'num_floors'?" in str(refused({"num_flors": 1}))


def test_what_is_read_elsewhere_is_passed_over_and_known():
    read = read_keys(House, {"num_floors": 1, "timeout_s": 3}, key="", also_known=["timeout_s"])
    assert read == House(num_floors=1)
    error = refused({"num_floors": 1, "timeot_s": 3}, key="", also_known=["timeout_s"])
    assert error.details["key"] == "timeot_s"
    assert "did you mean 'timeout_s'?" in str(error)
    inner = refused({"num_floors": 1, "front": {"timeout_s": 3}}, also_known=["timeout_s"])
    assert inner.details["expected"] == "one of width_m, side"


def test_a_key_of_the_models_own_is_read_whoever_else_reads_it():
    assert read_keys(House, {"num_floors": 2}, key="", also_known=["num_floors"]).num_floors == 2


def test_a_section_that_hides_its_input_shows_nothing_of_it():
    class Closed(Section):
        model_config = ConfigDict(hide_input_in_errors=True)

        address: int
        """Where it is."""

    with pytest.raises(ConfigError) as error:
        read_keys(Closed, {"address": SECRET}, key="chat")
    assert SECRET not in str(error.value)
    assert error.value.details["key"] == "chat.address"
