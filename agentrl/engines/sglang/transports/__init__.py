"""The ways by which weights come to SGLang (`Transport`).

tensor       in memory, to processes of this machine
distributed  by a process group of this rank and all targets
disk         by a folder that all can read
"""

from agentrl.engines.sglang.transports.disk import DiskTransport
from agentrl.engines.sglang.transports.distributed import DistributedTransport
from agentrl.engines.sglang.transports.tensor import TensorTransport

__all__ = ["DiskTransport", "DistributedTransport", "TensorTransport"]
