"""Packages that only some plug-ins need."""

from importlib.util import find_spec

from agentrl.errors import MissingExtraError


def require_package(package: str, *, extra: str, what: str) -> None:
    """Check that an optional package is installed, without importing it.

    Args:
        package: As it is imported.
        extra: Of agentrl, which brings it.
        what: Needs it; for the error.

    Raises:
        MissingExtraError: saying how to install it.
    """
    if find_spec(package) is None:
        raise MissingExtraError(
            f"{what} needs the package {package!r}, which is not installed",
            install=f'pip install "agentrl[{extra}]"',
        )
