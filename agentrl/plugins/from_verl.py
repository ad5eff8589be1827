"""Class paths that were written for verl: those of bundled classes, and users' own subclasses."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.errors import PluginError

_THEIRS = "verl."


@dataclass(frozen=True)
class OwnClass:
    """A class of ours that stands for one of verl's."""

    path: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What makes it behave as the other one does, where the YAML says nothing else."""

    def in_words(self) -> str:
        """Name it, with its settings."""
        settings = f" with {json.dumps(dict(self.config))}" if self.config else ""
        return self.path + settings


def translate(path: str, own: Mapping[str, OwnClass], *, base: str) -> OwnClass:
    """Find the class of ours that stands for a class path; any other path stands for itself.

    Args:
        path: As the YAML has it.
        own: Class paths of verl's, and ours.
        base: What a class of one's own derives from, such as `agentrl.tools.BaseTool`.

    Raises:
        PluginError: for a class of verl's that has no counterpart.
    """
    if path in own:
        return own[path]
    if path.startswith(_THEIRS):
        raise PluginError(
            f"{path} is bundled with verl, and has no counterpart here yet",
            expected=f"one of {', '.join(own)}, or a class of your own that derives from {base}",
        )
    return OwnClass(path)


def name_translated(paths: Iterable[str], own: Mapping[str, OwnClass]) -> list[str]:
    """Say which class of ours stands for each class path that is verl's."""
    return [f"{path} -> {own[path].in_words()}" for path in dict.fromkeys(paths) if path in own]


def explain_import(error: PluginError, *, base: str) -> PluginError:
    """Say what to change in a class that was written for verl, where that is what is wrong."""
    package, _, name = base.rpartition(".")
    told = str(error.args[0])
    if "No module named 'verl" not in told:
        return error
    told += f"; {name}, and what verl has beside it, stands in {package}: import it from there"
    details = error.details | {"expected": f"a subclass of {base}, without verl"}
    return PluginError(told, **details)
