"""SGLang's platform plug-in for a machine without an accelerator.

SGLang finds it by the entry point `agentrl_cpu` of the group `sglang.srt.platforms`, and takes it
where the environment says `SGLANG_PLATFORM=agentrl_cpu`. Otherwise it stays out of the way.
"""
# pyright: reportMissingImports=false

import os

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

PLATFORM = "agentrl_cpu"


def activate() -> str | None:
    """Name the platform's class where it was asked for; None: another platform is meant."""
    if os.environ.get("SGLANG_PLATFORM") != PLATFORM:
        return None
    return f"{__name__}.{PlainCpuPlatform.__name__}"


class PlainCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU on which every layer takes its plain PyTorch path: no kernel package is needed."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        """Attention by PyTorch's own function, one sequence after the other."""
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        """Layers use their plain forward."""
        return "native"
