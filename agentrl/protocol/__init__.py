"""`DataProto`: the batch of tensors and objects that the upper stages hand to each other."""

from agentrl.protocol.batch import (
    DataProto,
    DataProtoItem,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from agentrl.protocol.columns import object_array

__all__ = [
    "DataProto",
    "DataProtoItem",
    "object_array",
    "pad_dataproto_to_divisor",
    "unpad_dataproto",
]
