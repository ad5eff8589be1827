"""The names of verl 0.6.1 that plug-ins import, as aliases of agentrl's own.

A module has the path that it has in verl. If the policy sees verl's behavior (texts of tools and
interactions), a small subclass has it; everything else is agentrl's. `docs/from_verl.md` lists the
modules and every difference.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.protocol import DataProto

__version__ = "0.6.1"
__all__ = ["DataProto", "__version__"]


def __getattr__(name: str) -> object:
    if name == "DataProto":  # imports torch
        from agentrl.protocol import DataProto

        return DataProto
    raise AttributeError(f"agentrl's stand-in for verl has no {name!r}")
