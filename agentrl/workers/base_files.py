"""The files of a policy's base, as other programs read them: names of tensors, keys of config.json.

Transformers reads older names of both, and writes its newest ones. An export keeps the names of its
base, and the tensors that the model's class has no module for.
"""

import json
import warnings
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from safetensors import safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from agentrl.workers.weight_files import list_files, loaded_names, weight_names

_NOT_KEPT = {"architectures", "dtype", "quantization_config", "torch_dtype", "transformers_version",
             "transformers_weights"}  # fmt: skip
"""Keys of config.json that describe the files, and not the model."""
_ROPE = {"rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"}
"""Older keys that `rope_parameters` replaces."""


@dataclass(frozen=True)
class BaseFiles:
    """What the folder of a model has, by the names in its files."""

    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Its config.json."""
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    """The file of each tensor."""
    weights: Mapping[str, str] = field(default_factory=dict[str, str])
    """The weight of the model that each tensor is read into; others have no place in the model."""

    @classmethod
    def read(cls, path: str, lm: PreTrainedModel) -> "BaseFiles":
        """Read the names in a model's folder.

        Args:
            path: A folder or a hub name.
            lm: The model that was loaded from it, without adapters.
        """
        files: dict[str, Path] = {}
        for file in map(Path, list_files(path)):
            with safe_open(file, "pt") as stored:
                files |= dict.fromkeys(stored.keys(), file)
        known, (loaded, _) = weight_names(lm), loaded_names(files, lm)
        weights = {name: weight for name, weight in loaded.items() if weight in known}
        return cls(PretrainedConfig.get_config_dict(path)[0], files, weights)

    @cached_property
    def _names(self) -> Mapping[str, str]:
        return {weight: name for name, weight in self.weights.items()}

    def name_of(self, name: str) -> str:
        """Return the name that the files have for a tensor that transformers would save."""
        return name if name in self.files else self._names.get(name, name)

    def other_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the tensors that the model has no place for (`mtp.*`)."""
        for name, file in self.files.items():
            if name not in self.weights:
                with safe_open(file, "pt") as stored:
                    yield name, stored.get_tensor(name)


def complete_config(
    saved: dict[str, Any], base: Mapping[str, Any], config: PretrainedConfig, *, is_tied: bool
) -> dict[str, Any]:
    """Add the keys to a config.json that older programs read.

    Each key of the base's file is restored with the value that the model has.

    Args:
        saved: What transformers saves.
        base: The file of the base, or a part of it; empty if there is none.
        config: The model's configuration, or the part of it.
        is_tied: Whether the head is the embedding.
    """
    parts: dict[str, Any] = {
        name: complete_config(saved[name], base.get(name) or {}, part, is_tied=is_tied)
        for name in config.sub_configs
        if name in saved and isinstance(part := getattr(config, name), PretrainedConfig)
    }
    done = saved | parts | _old_rope(saved, base, config) | {"tie_word_embeddings": is_tied}
    for old, new in {"torch_dtype": "dtype", **config.attribute_map}.items():
        if old in ("torch_dtype", "num_experts") and new in saved:
            done[old] = saved[new]
    text_config = config.get_text_config()
    [text] = [parts[one] for one in parts if getattr(config, one) is text_config] or [{}]
    for key in {one for one in base if one[0] != "_"} - done.keys() - _NOT_KEPT:
        value = getattr(config, key, getattr(text_config, key, base[key]))
        if key in _ROPE and key in text:  # an old file has the keys of its text part at the top
            value = text[key]
        done[key] = json.loads(json.dumps(value, default=lambda _, key=key: base[key]))
    return done


def _old_rope(
    saved: Mapping[str, Any], base: Mapping[str, Any], config: PretrainedConfig
) -> dict[str, Any]:
    """Return the older keys that have the same meaning as `rope_parameters`: the base's, or new.

    Without such keys, transformers 4 computes with its default of `rope_theta`, without a message.
    """
    wanted = _rope_of(config)
    if not wanted:
        return {}
    full: dict[str, Any] = wanted.get("full_attention") or wanted
    scaling = {k: v for k, v in full.items() if k not in ("rope_theta", "partial_rotary_factor")}
    has_scaling = scaling.keys() - {"rope_type"} or scaling.get("rope_type") != "default"
    scaling["type"] = "mrope" if "mrope_section" in scaling else scaling.get("rope_type")
    if config.model_type == "phi3":  # which refuses other fields
        scaling = {key: scaling.get(key) for key in ("type", "short_factor", "long_factor")}
    is_neox = config.model_type.startswith("gpt_neox")
    new: dict[str, Any] = {
        "rotary_emb_base" if is_neox else "rope_theta": full.get("rope_theta"),
        "rotary_pct" if is_neox else "partial_rotary_factor": full.get("partial_rotary_factor"),
        "rope_local_base_freq": (wanted.get("sliding_attention") or {}).get("rope_theta"),
    }
    new = {key: value for key, value in new.items() if value is not None}
    new["rope_scaling"] = scaling if has_scaling else None
    others = {key: value for key, value in config.to_dict().items() if key in saved}
    others.pop("rope_parameters", None)
    for old in ({key: base[key] for key in new if key in base}, new):
        try:
            with warnings.catch_warnings(action="ignore"):
                read = _rope_of(type(config).from_dict(deepcopy(others | old)))
        except (AttributeError, KeyError, TypeError, ValueError):  # a family without older keys
            continue
        if old and read == wanted:
            return old
    return {}


def _rope_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return `rope_parameters` without the older name of the type in it."""
    found = deepcopy(getattr(config, "rope_parameters", None)) or {}
    for one in (found, *found.values()):
        if isinstance(one, dict):
            cast("dict[str, Any]", one).pop("type", None)
    return found
