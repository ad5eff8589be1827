"""Inference engines with one protocol.

Names load on first use: importing this package loads neither torch nor sglang.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentrl.engines.protocol import (
        Completion,
        Engine,
        EngineCall,
        FinishReason,
        SamplingParams,
        VersionSpan,
    )
    from agentrl.engines.scripted import ScriptedAnswer, ScriptedEngine
    from agentrl.engines.sglang.inprocess.engine import SGLangEngine
    from agentrl.engines.sglang.servers.engine import SGLangServerEngine
    from agentrl.engines.transformers.cache_size import TransformersEngineSettings
    from agentrl.engines.transformers.engine import TransformersEngine

__all__ = [
    "Completion",
    "Engine",
    "EngineCall",
    "FinishReason",
    "SGLangEngine",
    "SGLangServerEngine",
    "SamplingParams",
    "ScriptedAnswer",
    "ScriptedEngine",
    "TransformersEngine",
    "TransformersEngineSettings",
    "VersionSpan",
]

_HOMES = {
    "Completion": "agentrl.engines.protocol",
    "Engine": "agentrl.engines.protocol",
    "EngineCall": "agentrl.engines.protocol",
    "FinishReason": "agentrl.engines.protocol",
    "SGLangEngine": "agentrl.engines.sglang.inprocess.engine",
    "SGLangServerEngine": "agentrl.engines.sglang.servers.engine",
    "SamplingParams": "agentrl.engines.protocol",
    "ScriptedAnswer": "agentrl.engines.scripted",
    "ScriptedEngine": "agentrl.engines.scripted",
    "TransformersEngine": "agentrl.engines.transformers.engine",
    "TransformersEngineSettings": "agentrl.engines.transformers.cache_size",
    "VersionSpan": "agentrl.engines.protocol",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'agentrl.engines' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
