"""Users' code: loaded, checked, and called so that a fault affects only its own request."""

from agentrl.plugins.loading import load_class, load_module, load_object
from agentrl.plugins.registry import Registry

__all__ = ["Registry", "load_class", "load_module", "load_object"]
