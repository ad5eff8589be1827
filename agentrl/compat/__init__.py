"""Run plug-ins that were written for verl 0.6.1 without changes.

`agentrl.compat.verl` has verl's module names. `install_verl` makes it importable as `verl`. The
environment variable `AGENTRL_VERL=1` does the same in every process that imports agentrl.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

SWITCH = "AGENTRL_VERL"
"""The environment variable."""

_THEIRS = "verl"
_OURS = f"{__name__}."


def install_verl() -> None:
    """Make `import verl` find `agentrl.compat.verl`, in this process and its children.

    An installed verl takes precedence. A checkout of verl in the current folder does not. Calling
    this twice has no further effect.
    """
    os.environ[SWITCH] = "1"
    if not any(isinstance(finder, _VerlFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _VerlFinder())


class _VerlFinder(MetaPathFinder):
    """Finds `verl.x` as `agentrl.compat.verl.x`, unless the real verl is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module of verl's.

        Raises:
            ModuleNotFoundError: for a module that has no counterpart here.
        """
        if fullname.partition(".")[0] != _THEIRS or self._is_real(fullname):
            return None
        find_spec(_OURS + fullname)  # raises for a module that has no counterpart
        return ModuleSpec(fullname, _AliasLoader(), is_package=True)

    def _is_real(self, fullname: str) -> bool:
        """Whether a name belongs to an installed verl."""
        if fullname != _THEIRS:
            return sys.modules[_THEIRS].__name__ != _OURS + _THEIRS
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, None) for finder in others)
        return any(spec and spec.loader and not _is_in_current_folder(spec) for spec in specs)


def _is_in_current_folder(spec: ModuleSpec) -> bool:
    """Whether a package is a folder of the current one: a checkout, which is not installed."""
    return spec.origin is not None and Path(spec.origin).resolve().parents[1] == Path.cwd()


class _AliasLoader(Loader):
    """Gives a module a second name, so that each class exists once."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its own name."""
        module = importlib.import_module(_OURS + spec.name)
        self._own_spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own spec; the module was executed when it was imported."""
        module.__spec__ = self._own_spec
