"""The attention heads of a model, from its configuration."""

from typing import Any, NamedTuple


class AttentionShape(NamedTuple):
    """The heads of one layer."""

    num_heads: int
    """Of queries."""
    num_key_heads: int
    """Of keys, and of values; groups of query heads share one."""
    head_dim: int

    @classmethod
    def of(cls, config: Any) -> "AttentionShape":
        """Read a Hugging Face configuration; of a multimodal model, that of its language part.

        Raises:
            AttributeError: if the model has no attention.
        """
        text = config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            num_heads=heads,
            num_key_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        )

    @property
    def query_width(self) -> int:
        """Numbers in the queries of one token."""
        return self.num_heads * self.head_dim

    @property
    def key_width(self) -> int:
        """Numbers in the keys of one token, and in its values."""
        return self.num_key_heads * self.head_dim
