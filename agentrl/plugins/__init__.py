"""Users' code: found, checked, called so that it can harm nothing but its own request."""

from agentrl.plugins.loading import load_class, load_module, load_object
from agentrl.plugins.registry import Registry

__all__ = ["Registry", "load_class", "load_module", "load_object"]
