"""The tokenizer of a policy, and checks that it fits the model."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils.import_utils import is_torchvision_available

from agentrl.config.schema.run import ModelConfig
from agentrl.errors import ConfigError
from agentrl.media.processor import MediaProcessor

_EXPECTED = "the tokenizer that the model was trained with"
_TOKENIZER_FILES = ("*token*", "vocab*", "*.model", "*.tiktoken", "tekken.json", "*.py")
"""Patterns of the files of tokenizers, including a model's own code."""
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def load_tokenizer(config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `tokenizer_path`, by default that in the model's folder.

    A tokenizer without a padding token pads with its end of sequence.

    Raises:
        ConfigError: if there is none, or it differs from the tokenizer in the model's folder.
    """
    path = config.tokenizer_path or config.path
    key = "model.tokenizer_path" if config.tokenizer_path else "model.path"
    files = [file for pattern in _TOKENIZER_FILES for file in Path(path).glob(pattern)]
    if Path(path).is_dir() and not files:
        # transformers would create an empty tokenizer.
        raise ConfigError(
            f"{path} has no tokenizer",
            key=key,
            expected="tokenizer.json in it, or model.tokenizer_path",
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no tokenizer can be loaded from {path!r}: {error}",
            key=key,
            expected="a Hugging Face folder with tokenizer.json, or a hub name",
        ) from error
    if config.tokenizer_path is not None:
        _check_against_model(tokenizer, config)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig) -> None:
    """Refuse a tokenizer with ids for which the model has no embedding.

    Raises:
        ConfigError: with both sizes.
    """
    highest = max(tokenizer.get_vocab().values(), default=-1)
    num_embeddings = config.get_text_config().vocab_size
    if highest >= num_embeddings:
        raise ConfigError(
            f"the tokenizer has ids up to {highest}, the model has {num_embeddings} embeddings",
            key="model.tokenizer_path",
            expected=_EXPECTED,
        )


def find_disagreements(
    tokenizer: PreTrainedTokenizerBase, config: PretrainedConfig, path: str
) -> Iterator[str]:
    """Find differences between a model's special tokens and the tokenizer's.

    A turn ends at the end of turn of the chat template, at the tokenizer's end of sequence, and at
    the model's own ends (`find_model_stops`). A model with other ends was trained with another
    tokenizer.

    Args:
        tokenizer: The run's tokenizer.
        config: The model's configuration.
        path: The model's folder, for its `generation_config.json`.
    """
    named = {name: _ids(config.get_text_config(), name) for name in _SPECIAL_IDS}
    generation = _generation_config(path)
    if generation is not None:
        named = {name: ids | _ids(generation, name) for name, ids in named.items()}
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    for name, ids in named.items():
        for number in sorted(ids - special):
            token = tokenizer.convert_ids_to_tokens(number) if number < len(tokenizer) else None
            what = "no token" if token is None else f"the plain token {token!r}"
            yield f"the model's {name} is {number}, which is {what} of the tokenizer"
    ends = named["eos_token_id"]
    if ends and tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        yield (
            f"the tokenizer's end of sequence is {tokenizer.eos_token!r} "
            f"({tokenizer.eos_token_id}), the model's {sorted(ends)}"
        )


def find_model_stops(tokenizer: PreTrainedTokenizerBase, path: str) -> tuple[int, ...]:
    """Find the tokens at which the model's `generation_config.json` ends a generation.

    An id that is not a control token of the run's tokenizer is ignored: it belongs to another
    tokenizer, and would end a turn at an ordinary word. `find_disagreements` reports it.

    Args:
        tokenizer: The run's tokenizer.
        path: The model's folder.
    """
    generation = _generation_config(path)
    if generation is None:
        return ()
    control = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    return tuple(sorted(_ids(generation, "eos_token_id") & control))


def _check_against_model(tokenizer: PreTrainedTokenizerBase, config: ModelConfig) -> None:
    """Check a tokenizer against the one in the model's folder, if there is one.

    Control tokens may have other names, and there may be more of them; a plain token may not.
    """
    if not (Path(config.path) / "tokenizer_config.json").is_file():
        return
    own = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    ours, theirs = tokenizer.get_vocab(), own.get_vocab()
    by_id = {number: token for token, number in ours.items()}
    control = own.added_tokens_decoder
    plain = {number: token for token, number in theirs.items() if number not in control}
    for number in sorted(plain):
        if by_id.get(number) != plain[number]:
            raise ConfigError(
                f"id {number} is {by_id.get(number)!r} to the tokenizer of {config.tokenizer_path}"
                f" and {plain[number]!r} to the one in the model's folder",
                key="model.tokenizer_path",
                expected=_EXPECTED,
            )


def _generation_config(path: str) -> GenerationConfig | None:
    try:
        return GenerationConfig.from_pretrained(path)
    except OSError:
        return None


def _ids(config: PretrainedConfig | GenerationConfig, name: str) -> set[int]:
    found = getattr(config, name, None)
    if found is None:
        return set()
    return set(found) if isinstance(found, list) else {found}


def load_processor(
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kwargs: Mapping[str, Any] | None = None,
) -> MediaProcessor | None:
    """Load the processor of a model that reads images or videos; None for a model of text.

    Without torchvision, transformers has no processors of videos: then only images are read.

    Args:
        config: The model.
        tokenizer: Its tokenizer.
        kwargs: Further arguments of each call of the processor (`data.mm_processor_kwargs`).

    Raises:
        ConfigError: if a model that sees has no usable processor, or the tokenizer lacks its
            placeholders.
    """
    path, trust = config.path, config.trust_remote_code
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=trust)
    except (OSError, ValueError):
        return None  # a folder with a tokenizer alone serves scripted answers
    if getattr(hf_config, "vision_config", None) is None:
        return None
    try:
        processor = _load_hf_processor(config, hf_config, tokenizer)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"no processor of images can be loaded from {path!r}: {error}",
            key="model.path",
            expected="preprocessor_config.json next to the model's config.json",
        ) from error
    found = MediaProcessor(processor, hf_config, kwargs=kwargs)
    known = tokenizer.get_vocab()
    if lacking := [token for token in found.placeholders.values() if token not in known]:
        raise ConfigError(
            f"the tokenizer has no token {', '.join(lacking)}, which stands for images or videos",
            key="model.tokenizer_path" if config.tokenizer_path else "model.path",
            expected=_EXPECTED,
        )
    return found


def _load_hf_processor(
    config: ModelConfig, hf_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Any:
    path, trust = config.path, config.trust_remote_code
    if is_torchvision_available():
        processor = AutoProcessor.from_pretrained(path, trust_remote_code=trust)
        processor.tokenizer = tokenizer
        return processor
    processor_class: Any = PROCESSOR_MAPPING[type(hf_config)]

    class ImagesAlone(processor_class):
        """Takes no processor of videos: the class that transformers expects does not exist."""

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            """Accept that it is missing."""
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    images = AutoImageProcessor.from_pretrained(path, trust_remote_code=trust)
    settings = processor_class.get_processor_dict(path)[0]
    taken = set(processor_class.get_attributes()) | {"processor_class", "auto_map"}
    more = {key: value for key, value in settings.items() if key not in taken}
    parameters = inspect.signature(processor_class.__init__).parameters
    more = {key: value for key, value in more.items() if key in parameters}
    processor = ImagesAlone(image_processor=images, tokenizer=tokenizer, **more)
    processor.__class__ = processor_class
    return processor
