"""Export a policy as a Hugging Face folder, tensor by tensor."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from agentrl.atomic_io import atomic_folder, naming_path
from agentrl.errors import CheckpointError
from agentrl.workers.model import PolicyModel
from agentrl.workers.snapshot import on_main
from agentrl.workers.weight_sync import iter_full_weights

SHARD_BYTES = 5 * 10**9
"""Most bytes of one file of weights; the main rank holds so many."""
ABOUT = "agentrl.json"
"""Name of the file with the run and the step of an exported model."""

_MODEL_FILES = [
    "*.safetensors", "*.bin", "*.index.json", "config.json", "generation_config.json", "adapter_*",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*",
]  # fmt: skip
"""Files of a model: an export replaces all of them."""


def export_hf(
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a Hugging Face folder that other programs can load, atomically. A collective.

    The weights have the dtype that they were loaded in; saved buffers have their own. Each tensor
    is gathered and written in turn; only the main rank keeps those of the file that it writes next.
    All files of a model in the folder are replaced; its other files stay.

    Raises:
        CheckpointError: on every rank, if it cannot be written.
    """
    weights = _iter_stored(policy)

    def write() -> None:
        try:
            _write_model(policy, weights, tokenizer, folder.resolve(), about)
        finally:
            exhaust(weights)

    with policy.on_device():
        if not policy.world.is_main:
            exhaust(weights)
        on_main(policy.world, write)


def _iter_stored(policy: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights, then over the buffers of a model's files (a router's bias)."""
    yield from iter_full_weights(policy, dtype=policy.stored_dtype)
    for name, buffer in policy.lm.named_buffers():
        owner, _, leaf = name.rpartition(".")
        if leaf not in policy.lm.get_submodule(owner)._non_persistent_buffers_set:
            yield name, buffer


def exhaust(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Drop the rest of the weights: the other ranks wait in collectives for them."""
    for _ in weights:
        pass


def _write_model(
    policy: PolicyModel,
    weights: Iterator[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    about: Mapping[str, Any] | None,
) -> None:
    lm, dtype = policy.lm, policy.stored_dtype
    try:
        with naming_path(folder), atomic_folder(folder) as aside:
            with _config_of_files(lm.config, dtype):
                whole: dict[str, Tensor] = {}
                if _is_converted(lm):  # then transformers needs all weights together
                    whole = {name: weight.to("cpu", copy=True) for name, weight in weights}
                lm.save_pretrained(aside, state_dict=whole)
                if not whole:
                    _write_weights(weights, aside)
                lm.config.dtype = dtype  # `save_pretrained` writes that of the module
                lm.config.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            _link_other_files(folder, aside)
            if about is not None:
                text = json.dumps(about, indent=2) + "\n"
                (aside / ABOUT).unlink(missing_ok=True)  # it may be a link to an earlier one
                (aside / ABOUT).write_text(text, encoding="utf-8")
    # safetensors reports a full disk by an error of its own.
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write the model: {error}", path=folder) from error


def _is_converted(lm: PreTrainedModel) -> bool:
    """Return whether transformers stores other tensors than the model has."""
    conversions: Any = getattr(lm, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(lm, add_legacy=False)
    return bool(conversions)


def _write_weights(weights: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    """Write one file, or several and an index."""
    files: list[list[str]] = []
    total, pending = 0, dict[str, Tensor]()

    def flush() -> None:
        files.append(list(pending))
        save_file(pending, folder / f"model-{len(files):05}", metadata={"format": "pt"})
        pending.clear()

    for name, weight in weights:
        if pending and sum(w.nbytes for w in pending.values()) + weight.nbytes > SHARD_BYTES:
            flush()
        pending[name] = weight.cpu().contiguous()
        total += weight.nbytes
    flush()
    if len(files) == 1:
        (folder / "model-00001").rename(folder / SAFE_WEIGHTS_NAME)
        return
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / f"model-{number:05}").rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")


@contextmanager
def _config_of_files(config: PretrainedConfig, dtype: torch.dtype) -> Iterator[None]:
    """Give a configuration the dtype of the files, and no name of agentrl's attention."""
    own = config._attn_implementation, config.dtype
    try:
        config._attn_implementation = "sdpa"
        config.dtype = dtype
        yield
    finally:
        config._attn_implementation, config.dtype = own


def _link_other_files(old: Path, new: Path) -> None:
    """Link the other files of a folder into the folder that replaces it."""

    def model_files(folder: str, names: list[str]) -> list[str]:
        patterns = _MODEL_FILES if Path(folder) == old else []
        return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]

    if old.is_dir():
        shutil.copytree(
            old, new, ignore=model_files, copy_function=_link, symlinks=True, dirs_exist_ok=True
        )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)
