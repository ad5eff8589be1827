"""Class paths and imports that were written for verl."""

from collections.abc import Collection, Iterable

from agentrl.errors import PluginError

THEIRS = "verl"
_STAND_IN = "agentrl.compat."

SWITCH_HINT = (
    "; set AGENTRL_VERL=1 in the environment and agentrl stands in for verl, or change the import "
    "lines (docs/from_verl.md)"
)
"""Said of code that imports verl, which is not installed."""


def translate(path: str, known: Collection[str], *, base: str) -> str:
    """Return the path of the class that stands in for one of verl's; any other path as it is.

    Args:
        path: As the YAML has it.
        known: Class paths of verl's that have a stand-in.
        base: What a class of one's own derives from, such as `agentrl.tools.BaseTool`.

    Raises:
        PluginError: for a class of verl's that has none.
    """
    if path in known:
        return _STAND_IN + path
    if path.startswith(f"{THEIRS}."):
        raise PluginError(
            f"{path} is a path into verl, and agentrl has no counterpart of it",
            expected=f"one of {', '.join(known)}, or a class of your own that derives from {base}",
        )
    return path


def name_translated(paths: Iterable[str], known: Collection[str]) -> list[str]:
    """Say which class stands in for each class path that is verl's."""
    return [f"{path} -> {_STAND_IN}{path}" for path in dict.fromkeys(paths) if path in known]


def switch_hint(error: BaseException) -> str:
    """Say what helps if an import failed for lack of verl; an empty string otherwise."""
    name = error.name if isinstance(error, ModuleNotFoundError) else None
    lacks = name is not None and name.partition(".")[0] == THEIRS
    return SWITCH_HINT if lacks and "stand-in" not in str(error) else ""


def derives_from_verl(found: type) -> bool:
    """Whether a class derives from one of the real verl, which is installed then."""
    return any(base.__module__.partition(".")[0] == THEIRS for base in found.__mro__)
