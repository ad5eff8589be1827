"""Check the arguments of a call by its tool's JSON Schema, in bounded time.

The check runs on the event loop. The policy chooses the texts, and the author of the tool chooses
the patterns: `^(a+)+$` takes Python's `re` seconds for 28 characters. So patterns are matched by
the package `regex`, which can be stopped.
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
_LONGEST_REASON = 500
_MOST_VALIDATORS = 256


def find_argument_error(arguments: Mapping[str, Any], schema: dict[str, Any]) -> str | None:
    """Say what is wrong with the arguments of a call; None if nothing is.

    Example:
        >>> find_argument_error({"n": "x"}, {"type": "object", "properties": {"n": {"type": "integer"}}})
        "arguments['n']: 'x' is not of type 'integer'"
    """
    try:
        validator = _VALIDATORS.of(schema)
        _CLOCK.start()
        error = cast("ValidationError | None", best_match(validator.iter_errors(arguments)))
    except TimeoutError:
        return f"its arguments cannot be checked: a pattern takes more than {MAX_PATTERN_S:g} s"
    except Exception as broken:  # noqa: BLE001 - a schema that cannot be applied to these arguments
        return f"its arguments cannot be checked: {type(broken).__name__}: {broken}"
    if error is None:
        return None
    place = "".join(f"[{part!r}]" for part in error.absolute_path)
    return f"arguments{place}: {error.message[:_LONGEST_REASON]}"


class _Clock:
    """Time that patterns have left in the check that runs; checks never run side by side."""

    def __init__(self) -> None:
        self._due = 0.0

    def start(self) -> None:
        self._due = time.monotonic() + MAX_PATTERN_S

    def search(self, pattern: str, text: str) -> bool:
        """Search, as `re` does.

        Raises:
            TimeoutError: if no time is left.
        """
        left_s = self._due - time.monotonic()
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
    extras = [key for key in instance if key not in named]
    extras = [key for key in extras if not any(_CLOCK.search(each, key) for each in patterns)]
    if validator.is_type(allowed, "object"):
        for extra in extras:
            yield from validator.descend(instance[extra], allowed, path=extra)
    elif not allowed and extras:
        names = ", ".join(map(repr, sorted(extras)))
        are = "was" if len(extras) == 1 else "were"
        yield ValidationError(f"Additional properties are not allowed ({names} {are} unexpected)")


def _unique_items(
    validator: Any, is_asked: Any, instance: Any, _: Mapping[str, Any]
) -> Iterator[ValidationError]:
    """Compare by texts: comparing each item with each takes quadratic time."""
    if is_asked and validator.is_type(instance, "array"):
        texts = {json.dumps(_plain(item), sort_keys=True) for item in instance}
        if len(texts) < len(instance):
            yield ValidationError(f"{instance!r} has non-unique elements")


def _plain(value: Any) -> Any:
    """Write numbers of one value in one way."""
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


def _unchecked(*_: Any) -> Iterator[ValidationError]:
    return iter(())


class _Validators:
    """The validator of each schema, made once: a run checks many calls of few tools."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[dict[str, Any], Validator]] = {}

    def of(self, schema: dict[str, Any]) -> Validator:
        made = self._made.get(id(schema))
        if made is not None and made[0] is schema:
            return made[1]
        read = without_nulls(schema)
        keywords: dict[str, Any] = dict(_BOUNDED)
        if "patternProperties" in json.dumps(read, default=str):
            keywords["unevaluatedProperties"] = _unchecked  # jsonschema matches with `re` for it
        kind = extend(schema_validator(read), keywords)
        # An empty registry: a `$ref` to somewhere on the network is never followed.
        validator: Validator = kind(read, registry=Registry())
        if len(self._made) >= _MOST_VALIDATORS:
            self._made.clear()
        self._made[id(schema)] = schema, validator
        return validator


_VALIDATORS = _Validators()
