"""Multi-turn agentic reinforcement learning, with every trained token accounted for.

The public API: `Trainer`, `load_config`, `parse_config`, `DataProto`, the packages `agentrl.tools`,
`agentrl.interactions`, `agentrl.rollout`, `agentrl.engines`, `agentrl.rewards`,
`agentrl.algorithms`. Names load on first use: importing this package loads neither torch nor any
engine.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.config import RunConfig, load_config, parse_config
    from agentrl.protocol import DataProto
    from agentrl.trainer.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["DataProto", "RunConfig", "Trainer", "__version__", "load_config", "parse_config"]

_HOMES = {
    "DataProto": "agentrl.protocol",
    "RunConfig": "agentrl.config",
    "Trainer": "agentrl.trainer.trainer",
    "load_config": "agentrl.config",
    "parse_config": "agentrl.config",
}


if os.environ.get("AGENTRL_VERL") == "1":  # docs/from_verl.md
    import_module("agentrl.compat").install_verl()


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentrl' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
