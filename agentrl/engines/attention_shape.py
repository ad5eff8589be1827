"""The attention heads of a model, from its configuration."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from agentrl.engines.model_config import read_attribute, read_per_layer


class AttentionShape(NamedTuple):
    """The heads of one layer."""

    num_heads: int
    """Of queries."""
    num_key_heads: int
    """Of keys, and of values; groups of query heads share one."""
    head_dim: int

    @classmethod
    def of_layers(cls, config: Any) -> "Sequence[AttentionShape]":
        """Read a Hugging Face configuration; of a multimodal model, that of its language part.

        Returns:
            The shape of each layer.

        Raises:
            ConfigError: if the model has no attention.
        """
        count = read_attribute(config, "num_hidden_layers")
        heads = read_per_layer(config, "num_attention_heads")
        key_heads = read_per_layer(config, "num_key_value_heads", 0)
        widths = read_per_layer(config, "head_dim", 0)
        found = zip(heads, key_heads, widths, strict=True)
        shapes = [
            cls(own, keys or own, width or read_attribute(config, "hidden_size") // own)
            for own, keys, width in found
        ]
        return shapes if len(shapes) == count else shapes * count

    @classmethod
    def widest(cls, config: Any) -> "AttentionShape":
        """Return the shape of the layer with the widest queries."""
        return max(cls.of_layers(config), key=lambda shape: shape.query_width)

    @property
    def query_width(self) -> int:
        """Numbers in the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers in the keys of one token, and in its values."""
        return self.num_key_heads * self.head_dim
