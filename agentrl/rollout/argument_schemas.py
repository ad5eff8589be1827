"""Check the arguments of a call by the tool's JSON Schema, in bounded time.

The check runs on the event loop. The policy chooses the texts, and the author of the tool chooses
the patterns. Python's `re` needs seconds to match `^(a+)+$` against 28 characters. The package
`regex` supports a time-out, so it matches the patterns.
"""

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any, cast

import regex
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.protocols import Validator
from jsonschema.validators import extend
from referencing import Registry

from agentrl.messages import schema_validator, without_nulls

MAX_PATTERN_S = 0.1
"""Seconds that all patterns of one call may take."""
_MAX_REASON_CHARS = 500
_MAX_VALIDATORS = 256


def find_argument_error(arguments: Mapping[str, Any], schema: dict[str, Any]) -> str | None:
    """Describe what is wrong with the arguments of a call; None if nothing is.

    Example:
        >>> schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
        >>> find_argument_error({"n": "x"}, schema)
        "arguments['n']: 'x' is not of type 'integer'"
    """
    try:
        validator = _get_validator(schema)
        _CLOCK.due = time.monotonic() + MAX_PATTERN_S
        error = cast("ValidationError | None", best_match(validator.iter_errors(arguments)))
    except TimeoutError:
        return f"its arguments cannot be checked: a pattern takes more than {MAX_PATTERN_S:g} s"
    except Exception as broken:  # noqa: BLE001 - the schema cannot be applied to these arguments
        return f"its arguments cannot be checked: {type(broken).__name__}: {broken}"
    if error is None:
        return None
    keys = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"arguments{keys}: {error.message[:_MAX_REASON_CHARS]}"


_ALL_TYPES = frozenset({"string", "integer", "number", "boolean", "array", "object", "null"})
_MAX_REFERENCES = 32


def property_types(schema: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Return the JSON types that each property of a tool's schema allows; empty: any.

    Types are read from `type`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and local `$ref`.

    Example:
        >>> defs = {"Year": {"enum": ["2024", "2025"]}}
        >>> schema = {"$defs": defs, "properties": {"y": {"$ref": "#/$defs/Year"}, "z": {}}}
        >>> property_types(schema)
        {'y': frozenset({'string'}), 'z': frozenset()}
    """
    properties = cast("Mapping[str, Any]", schema.get("properties", {}))
    types = {name: _types_of(inner, schema, _MAX_REFERENCES) for name, inner in properties.items()}
    return {name: frozenset() if found == _ALL_TYPES else found for name, found in types.items()}


def _types_of(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return _ALL_TYPES
    fields = cast("Mapping[str, Any]", schema)
    found = _ALL_TYPES
    if isinstance(named := fields.get("type"), str | list):
        allowed = frozenset([named] if isinstance(named, str) else cast("list[str]", named))
        found &= allowed | ({"integer"} if "number" in allowed else set[str]())
    if "const" in fields:
        found &= {_type_of(fields["const"])}
    if isinstance(values := fields.get("enum"), list):
        found &= frozenset(map(_type_of, cast("list[Any]", values)))
    for key in ("anyOf", "oneOf"):
        if isinstance(options := fields.get(key), list):
            of_options = (_types_of(option, root, depth - 1) for option in cast("Any", options))
            found &= frozenset[str]().union(*of_options)
    for part in cast("list[Any]", fields.get("allOf", [])):
        found &= _types_of(part, root, depth - 1)
    if isinstance(reference := fields.get("$ref"), str):
        found &= _types_of(_resolve(reference, root), root, depth - 1)
    return found or _ALL_TYPES


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the part of a schema that a local reference names; None for others."""
    found: Any = root
    for part in reference.removeprefix("#").split("/")[1:] if reference[:1] == "#" else ["", ""]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = cast("Any", found).get(key) if isinstance(found, Mapping) else None
    return found


class _Clock:
    """The deadline of the current check. Checks do not run concurrently."""

    due = 0.0

    def search(self, pattern: str, text: str) -> bool:
        """Search like `re.search`.

        Raises:
            TimeoutError: If no time is left.
        """
        left_s = self.due - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        return regex.search(pattern, text, timeout=left_s) is not None


_CLOCK = _Clock()


def _pattern(
    validator: Any, pattern: str, instance: Any, _: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if validator.is_type(instance, "string") and not _CLOCK.search(pattern, instance):
        yield ValidationError(f"{instance!r} does not match {pattern!r}")


def _pattern_properties(
    validator: Any, patterns: Mapping[str, Any], instance: Any, _: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    for pattern, subschema in patterns.items():
        for key, value in instance.items():
            if _CLOCK.search(pattern, key):
                yield from validator.descend(value, subschema, path=key, schema_path=pattern)


def _additional_properties(
    validator: Any, allowed: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not validator.is_type(instance, "object"):
        return
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    extras = [
        key
        for key in instance
        if key not in named and not any(_CLOCK.search(each, key) for each in patterns)
    ]
    if validator.is_type(allowed, "object"):
        for extra in extras:
            yield from validator.descend(instance[extra], allowed, path=extra)
    elif not allowed and extras:
        names = ", ".join(map(repr, sorted(extras)))
        are = "was" if len(extras) == 1 else "were"
        yield ValidationError(f"Additional properties are not allowed ({names} {are} unexpected)")


def _unique_items(
    validator: Any, is_required: Any, instance: Any, _: Mapping[str, Any]
) -> Iterator[ValidationError]:
    """Compare the JSON of the items: comparing all pairs takes quadratic time."""
    if is_required and validator.is_type(instance, "array"):
        texts = {json.dumps(_plain(item), sort_keys=True) for item in instance}
        if len(texts) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _plain(value: Any) -> Any:
    """Convert whole floats to integers, so that equal numbers have equal JSON."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _plain(held) for key, held in cast("dict[str, Any]", value).items()}
    return value


_BOUNDED = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}


_validators: dict[int, tuple[dict[str, Any], Validator]] = {}
"""The validator of each schema, by the schema's id: a run checks many calls of few tools."""


def _get_validator(schema: dict[str, Any]) -> Validator:
    cached = _validators.get(id(schema))
    if cached is not None and cached[0] is schema:
        return cached[1]
    read = without_nulls(schema)
    keywords: dict[str, Any] = dict(_BOUNDED)
    if "patternProperties" in json.dumps(read, default=str):
        # Not checked: jsonschema uses `re` for it.
        keywords["unevaluatedProperties"] = lambda *_: iter(())
    kind = extend(schema_validator(read), keywords)
    # An empty registry: a `$ref` to the network is never followed.
    validator: Validator = kind(read, registry=Registry())
    if len(_validators) >= _MAX_VALIDATORS:
        _validators.clear()
    _validators[id(schema)] = schema, validator
    return validator
