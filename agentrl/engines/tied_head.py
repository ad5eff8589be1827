"""Whether the head of a language model is its embedding, by the weights and by the configuration.

Some folders say `tie_word_embeddings: true` and have two different matrices. Then transformers
keeps both and leaves the configuration as it is, and every other reader of it uses one.
"""

from typing import Any

from transformers import PretrainedConfig, PreTrainedModel


def is_tied(lm: PreTrainedModel) -> bool:
    """Return whether the head of a model is its embedding."""
    head, embedding = lm.get_output_embeddings(), lm.get_input_embeddings()
    return getattr(head, "weight", None) is embedding.weight


def untied_keys(config: PretrainedConfig) -> dict[str, Any]:
    """Return the keys of a configuration that say that its model has two matrices."""
    no, text = {"tie_word_embeddings": False}, config.get_text_config()
    return no | {name: dict(no) for name in config.sub_configs if getattr(config, name) is text}


def untie(config: PretrainedConfig) -> None:
    """Let a configuration say that its model has two matrices."""
    config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
