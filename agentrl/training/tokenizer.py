"""The tokenizer of a policy, and whether the two belong together."""

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from agentrl.config.schema import ModelConfig
from agentrl.errors import ConfigError


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer beside the model, or the one of `tokenizer_path`.

    A tokenizer without a padding token pads with its end of sequence.

    Raises:
        ConfigError: where there is none.
    """
    path = config.tokenizer_path or config.path
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer can be loaded from {path!r}: {error}",
            key="model.tokenizer_path" if config.tokenizer_path else "model.path",
            expected="a Hugging Face folder with tokenizer.json, or a hub name",
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Refuse a tokenizer that can write ids which the model has no embedding for.

    Raises:
        ConfigError: with both sizes.
    """
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= config.vocab_size:
        raise ConfigError(
            f"the tokenizer writes ids up to {highest}, the model has {config.vocab_size} "
            "embeddings",
            key="model.tokenizer_path",
            expected="the tokenizer that the model was trained with",
        )
