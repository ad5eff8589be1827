"""Whether the head of a language model is its embedding.

Some folders say `tie_word_embeddings: true` and have two different matrices. Then transformers
keeps both and leaves the configuration as it is, and other readers of it use one.
"""

from transformers import PreTrainedModel


def is_tied(lm: PreTrainedModel) -> bool:
    """Return whether the head of a model is its embedding."""
    head, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
    return getattr(head, "weight", None) is embedding.weight
