"""Load the Python object that a path in a configuration names, and check it.

A path is `package.module.Name`, `package.module:name`, or `path/to/file.py:name`. Loading imports a
module and does no more: the object is checked before any of it runs.
"""

import hashlib
import importlib
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from agentrl.errors import PluginError, describe_missing, did_you_mean
from agentrl.plugins.from_verl import derives_from_verl, switch_hint

T = TypeVar("T")

_WORD_STARTS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")

FILE_MODULE_PREFIX = "agentrl_plugin_"
"""Prefix of the module names of files loaded by path; other processes cannot import these names."""


def load_class(path: str, base: type[T], *, file: str | Path | None = None) -> type[T]:
    """Load a class and check that it derives from `base`, without building anything.

    Raises:
        PluginError: with the path, the YAML `file` that named it, and what was expected.
    """
    found = _find(path, file, base)
    if not isinstance(found, type) or not issubclass(found, base):
        what = f"the class {found.__name__}" if isinstance(found, type) else repr(found)
        if isinstance(found, type) and derives_from_verl(found):
            what += " that derives from the installed verl, which is found before agentrl.compat"
        raise PluginError(
            f"{path!r} leads to {what}, which is not a {base.__name__}",
            file=file,
            expected=_a_subclass_of(base),
        )
    return found


def load_object(path: str, *, file: str | Path | None = None) -> Any:
    """Load the object at `path`, of any type.

    Raises:
        PluginError: if the module cannot be imported or has no such name.
    """
    return _find(path, file, None)


def _find(path: str, file: str | Path | None, base: type | None) -> Any:
    module_path, _, name = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module_path or not name or (":" not in path and path.endswith(".py")):
        raise PluginError(
            f"{path!r} is no path to a Python object",
            file=file,
            expected="package.module.Name, package.module:name or path/to/file.py:name",
        )
    found: Any = _import(module_path, path, file)
    for part in name.split("."):
        if not hasattr(found, part):
            names = _names(found, base)
            guess = _guess_submodule(found, part) or did_you_mean(part, names)
            one_of = f"one of {', '.join(names)}" if names else None
            raise PluginError(
                f"{path!r}: {_shown(found, module_path)} has no {name!r}{guess}",
                file=file,
                expected=one_of or (_a_subclass_of(base) if base else None),
            )
        found = getattr(found, part)
    return found


def _shown(found: Any, module_path: str) -> str:
    """Name a module with its file; another module of the same name may be first on the path."""
    file = getattr(found, "__file__", None) if isinstance(found, ModuleType) else None
    is_named = file is None or module_path.endswith(".py")
    return module_path if is_named else f"{module_path} ({file})"


def _guess_submodule(holder: Any, name: str) -> str:
    """Suggest a submodule that seems to be named after a class, without importing it.

    `HTTPTool` is looked for in `http_tool`.
    """
    if not isinstance(holder, ModuleType) or not hasattr(holder, "__path__") or name.islower():
        return ""
    module = f"{holder.__name__}.{_WORD_STARTS.sub('_', name).lower()}"
    try:
        is_there = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a guess must not raise another error
        return ""
    return f"; did you mean {f'{module}.{name}'!r}?" if is_there else ""


def _names(holder: Any, base: type | None) -> list[str]:
    """List public names of a module or class; with `base`, only those of its subclasses."""
    held = getattr(holder, "__dict__", {}).items()
    there = {name: value for name, value in held if not name.startswith("_")}
    if base is None:
        return sorted(n for n, value in there.items() if not isinstance(value, ModuleType))[:20]
    classes = {name: value for name, value in there.items() if isinstance(value, type)}
    found = {n: c for n, c in classes.items() if issubclass(c, base) and c is not base}
    module = getattr(holder, "__name__", "")
    own = [name for name, value in found.items() if value.__module__ == module]
    return sorted(own or found)  # without the bases that the module imports


def _a_subclass_of(base: type) -> str:
    return f"a subclass of {base.__module__}.{base.__qualname__}"


def load_module(path: str, *, file: str | Path | None = None) -> ModuleType:
    """Load a module, given as `package.module` or `path/to/file.py`.

    Raises:
        PluginError: if it cannot be imported.
    """
    return _import(path, path, file)


def _import(module_path: str, path: str, file: str | Path | None) -> ModuleType:
    source = Path(module_path).expanduser().resolve() if module_path.endswith(".py") else None
    if source is not None and not source.is_file():
        message = f"{path!r}: {describe_missing(source)}"
        raise PluginError(message, file=file, expected="an existing Python file")
    try:
        return importlib.import_module(module_path) if source is None else _load_file(source)
    except Exception as error:
        kind, expected = type(error).__name__, None
        is_missing = isinstance(error, ModuleNotFoundError)
        if is_missing and f"{module_path}.".startswith(f"{error.name}."):
            expected = f"a module that is installed, or that {Path.cwd()} has: it is searched too"
        raise PluginError(
            f"{path!r}: importing {module_path} raised {kind}: {error}{switch_hint(error)}",
            file=file,
            expected=expected,
        ) from error


def _load_file(source: Path) -> ModuleType:
    main = sys.modules.get("__main__")
    if main is not None and source == Path(getattr(main, "__file__", None) or "").resolve():
        return main  # the running script; a second copy of it would register everything twice
    digest = hashlib.sha256(str(source).encode()).hexdigest()[:12]
    name = f"{FILE_MODULE_PREFIX}{source.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, source)
    if spec is None or spec.loader is None:
        raise ImportError(f"{source} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
