"""`DataProto`: a batch of tensors and objects, passed from stage to stage."""

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
