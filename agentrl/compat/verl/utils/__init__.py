"""`verl.utils`: tokenizers."""

from typing import Any


def hf_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Load a tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **kwargs)


def hf_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Return None, as verl does for a model without a processor: images are not supported yet."""
    return None
