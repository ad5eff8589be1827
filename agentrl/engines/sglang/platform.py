"""SGLang's platform plug-in for a machine without an accelerator.

SGLang finds it through the entry point `agentrl_cpu` of the group `sglang.srt.platforms`, and uses
it if the environment has `SGLANG_PLATFORM=agentrl_cpu`.
"""
# pyright: reportMissingImports=false

import os

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

PLATFORM = "agentrl_cpu"


def activate() -> str | None:
    """Return the platform's class path if the environment asks for it, else None."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return None
    return f"{__name__}.{PlainCpuPlatform.__name__}"


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU on which every layer runs plain PyTorch, so that no kernel package is needed."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        """Return the name of PyTorch's own attention, one sequence after the other."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Return the name of the layers' plain forward pass."""
        return "native"
