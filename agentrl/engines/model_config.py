"""Attributes of a Hugging Face configuration, read in one place.

Families name and nest attributes differently, and some have values per layer. What cannot be read
is an error that names the model, not a traceback of transformers.
"""

from typing import Any

from agentrl.errors import ConfigError

PLAIN_LAYERS = {"full_attention", "sliding_attention"}
"""The `layer_types` of which a layer mixes tokens by plain attention only."""
_REQUIRED: Any = object()


def read_attribute(config: Any, name: str, default: Any = _REQUIRED) -> Any:
    """Return an attribute of the language part, the same for every layer.

    Args:
        config: A Hugging Face configuration.
        name: Its attribute.
        default: The value if it is absent or null; by default that is an error.

    Raises:
        ConfigError: if there is no value, or if layers have different ones.
    """
    values = read_per_layer(config, name, default)
    if any(value != values[0] for value in values):
        shown = " and ".join(map(str, dict.fromkeys(values)))
        raise _error(config, f"layers of different {name}: {shown}", "a model of equal layers")
    return values[0]


def read_per_layer(config: Any, name: str, default: Any = _REQUIRED) -> list[Any]:
    """Return an attribute of each layer; of a model of equal layers, one value.

    Raises:
        ConfigError: if there is no value.
    """
    text = config.get_text_config()
    is_mixed = getattr(text, "is_heterogeneous", False)
    found = [getattr(one, name, None) for one in (text.per_layer_config if is_mixed else (text,))]
    if default is _REQUIRED and None in found:
        raise _error(config, f"no {name!r}", "a model whose config.json has it")
    return [default if value is None else value for value in found]


def find_length_border(config: Any) -> int | None:
    """Return the longest sequence that has the same rotary factors in every batch.

    Some rotary embeddings choose their factors by the longest sequence of a batch: a shorter one
    changes if it is computed together with one that is longer than this. SGLang chooses for each
    batch too.

    Returns:
        None if no factor depends on a length.
    """
    given = read_attribute(config, "rope_parameters", {})
    parts = [one for one in given.values() if isinstance(one, dict)] or [given]
    kinds = [(one, one.get("rope_type") or "default") for one in parts]
    longest = read_attribute(config, "max_position_embeddings", 0)
    borders = [
        (kind == "longrope" and one.get("original_max_position_embeddings")) or longest
        for one, kind in kinds
        if kind == "longrope" or "dynamic" in kind
    ]
    return min(borders, default=None)


def check_lengths(config: Any, longest: int, *, key: str, lengths: str) -> None:
    """Refuse a model that computes a short sequence differently next to a long one.

    Args:
        config: A Hugging Face configuration.
        longest: Tokens of the longest sequence that may be computed.
        key: The key of the model.
        lengths: The keys that limit the length.

    Raises:
        ConfigError: if sequences may be on both sides of the border.
    """
    border = find_length_border(config)
    if border is not None and longest > border:
        raise ConfigError(
            f"the rotary factors of this {config.model_type} depend on the longest sequence of a "
            f"batch if one has more than {border} tokens, and the run allows {longest}: the same "
            "tokens would have other log-probabilities in another batch, with every engine",
            key=key,
            expected=f"{lengths} of at most {border} tokens, or rope_parameters of fixed factors "
            "(yarn) in model.override_config",
        )


def _error(config: Any, found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"a {config.model_type} configuration has {found}", key="model.path", expected=expected
    )
