"""What a user should know of single keys: the records, and the rules that find them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentrl.config.schema.run import RunConfig, Section


@dataclass(frozen=True)
class KeyNote:
    """Something a user should know of a key before the run starts."""

    key: str
    """Dotted."""
    reason: str
    """A sentence."""

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


class DeadKey(KeyNote):
    """A key that was set and has no effect."""

    def __str__(self) -> str:
        return f"{self.key} has no effect: {self.reason}"


@dataclass(frozen=True)
class DeadKeyRule:
    """When some keys have no effect, and why."""

    keys: tuple[str, ...]
    """Dotted; a trailing `.*` stands for every key of a section."""
    applies: Callable[[RunConfig], bool]
    reason: str

    def covers(self, key: str) -> bool:
        """Whether `key` is one of the rule's."""
        return any(key == k or (k.endswith(".*") and key.startswith(k[:-1])) for k in self.keys)


def set_keys(section: Section, prefix: str = "") -> Iterator[str]:
    """List the leaf keys that were given (not defaulted), dotted, in the schema's order."""
    for name in type(section).model_fields:
        if name not in section.model_fields_set:
            continue
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from set_keys(value, f"{prefix}{name}.")
        else:
            yield prefix + name
