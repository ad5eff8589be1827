"""Arguments are checked by their schema, in bounded time whatever the schema and the texts are."""

import time
from typing import Any

import jsonschema
import pytest

from agentrl.rollout.argument_schemas import find_argument_error
from tests.fakes.waiting import assert_linear

SLOW = "^(a|a)*$"
TEXT = "a" * 40 + "b"


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        ({"x": TEXT}, of(x={"type": "string", "pattern": SLOW})),
        ({"x": [TEXT] * 1000}, of(x={"items": {"pattern": SLOW}})),
        ({TEXT: 1}, {"patternProperties": {SLOW: {"type": "integer"}}}),
        ({TEXT: 1}, {"patternProperties": {SLOW: {}}, "additionalProperties": False}),
        ({TEXT: 1}, {"patternProperties": {SLOW: {}}, "unevaluatedProperties": False}),
        ({"x": TEXT}, {"$schema": "http://json-schema.org/draft-07/schema#",
                       "properties": {"x": {"pattern": SLOW}}}),
    ],
)  # fmt: skip
def test_a_pattern_is_stopped_in_time(arguments: Any, schema: Any):
    started = time.monotonic()
    objection = find_argument_error(arguments, schema)
    assert time.monotonic() - started < 60  # without a limit: years
    assert objection is not None
    assert "cannot be checked: a pattern takes more than 0.1 s" in objection


def test_many_items_are_compared_in_linear_time():
    schema = of(x={"type": "array", "uniqueItems": True})

    def check(size: int) -> None:
        assert find_argument_error({"x": [{"a": i} for i in range(size)]}, schema) is None

    assert_linear(check, 1000)


@pytest.mark.parametrize(
    ("value", "schema"),
    [
        ("ab", {"pattern": "^a"}),
        ("ba", {"pattern": "^a"}),
        (3, {"pattern": "^a"}),
        ("ä1", {"pattern": r"^\w\d$"}),
        ({"a1": 1, "b": "x"}, {"patternProperties": {"^a": {"type": "integer"}}}),
        ({"a1": "x"}, {"patternProperties": {"^a": {"type": "integer"}}}),
        ({"a": 1, "b": 2}, {"properties": {"a": {}}, "additionalProperties": False}),
        ({"a": 1, "b": 2}, {"properties": {"a": {}}, "additionalProperties": {"type": "string"}}),
        ({"a": 1, "b2": 2}, {"properties": {"a": {}}, "patternProperties": {"^b": {}},
                             "additionalProperties": False}),
        ([1, 1.0], {"uniqueItems": True}),
        ([1, True, "1", [1], {"a": 1}], {"uniqueItems": True}),
        ([{"a": 1, "b": 2}, {"b": 2, "a": 1}], {"uniqueItems": True}),
        ([1, 1], {"uniqueItems": False}),
    ],
)  # fmt: skip
def test_the_bounded_keywords_say_what_the_library_says(value: Any, schema: Any):
    whole = of(x=schema)
    is_valid = jsonschema.Draft202012Validator(whole).is_valid({"x": value})
    assert (find_argument_error({"x": value}, whole) is None) == is_valid
