"""Export a policy as a Hugging Face folder, tensor by tensor."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
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
from transformers.utils.hub import cached_file

from agentrl.atomic_io import atomic_folder, naming_path
from agentrl.engines.vision import has_vision
from agentrl.errors import CheckpointError
from agentrl.workers.lora import ADAPTER_WEIGHTS, BASE_DIGEST, peft_name
from agentrl.workers.model import PolicyModel
from agentrl.workers.shards import full_tensor
from agentrl.workers.snapshot import on_main
from agentrl.workers.weight_files import base_name
from agentrl.workers.weight_sync import iter_full_weights

SHARD_BYTES = 5 * 10**9
"""Most bytes of one file of weights; the main rank holds so many."""
ABOUT = "agentrl.json"
"""Name of the file with the run and the step of an exported model."""

_MODEL_FILES = [
    "*.safetensors", "*.bin", "*.index.json", "config.json", "generation_config.json", "adapter_*",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt",
    "chat_template*", "*processor_config.json",
]  # fmt: skip
"""Files of a model: an export replaces all of them."""
_PROCESSOR_FILES = [
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
]  # fmt: skip
"""Files of the processor of a vision-language model: copied from its folder."""


def export_hf(
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write a Hugging Face folder that other programs can load, atomically. A collective.

    Adapters are merged into the weights. The processor of a vision-language model is that of its
    folder.
    The weights have the dtype that they were loaded in; saved buffers have their own. Each tensor
    is gathered and written in turn; only the main rank keeps those of the file that it writes next.
    All files of a model in the folder are replaced; its other files stay.

    Raises:
        CheckpointError: on every rank, if it cannot be written.
    """
    _export(policy, _iter_stored(policy), _write_model, tokenizer, folder, about)


def export_adapter(
    policy: PolicyModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    *,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write the adapters of a policy as a folder that peft loads, atomically. A collective.

    They are float32, and `agentrl.json` identifies their base. Files of a model in the folder are
    replaced as by `export_hf`.

    Raises:
        ValueError: if the policy has no adapters.
        CheckpointError: on every rank, if it cannot be written.
    """
    if policy.adapters is None:
        raise ValueError("the policy has no adapters")
    weights = (
        (peft_name(name), full_tensor(weight.detach())) for name, weight in policy.trained_weights()
    )
    about = {**(about or {}), BASE_DIGEST: policy.adapters.base_digest}
    _export(policy, weights, _write_adapter, tokenizer, folder, about)


def _export(
    policy: PolicyModel,
    weights: Iterator[tuple[str, Tensor]],
    write_model: Callable[[PolicyModel, Iterator[tuple[str, Tensor]], Path], None],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    about: Mapping[str, Any] | None,
) -> None:
    """Write a folder on the main rank; the other ranks take part in the gathers."""
    target = folder.resolve()

    def write() -> None:
        try:
            with naming_path(target), atomic_folder(target) as aside:
                write_model(policy, weights, aside)
                tokenizer.save_pretrained(aside)
                _link_other_files(target, aside)
                if about is not None:
                    text = json.dumps(about, indent=2) + "\n"
                    (aside / ABOUT).unlink(missing_ok=True)  # it may be a link to an earlier one
                    (aside / ABOUT).write_text(text, encoding="utf-8")
        # safetensors reports a full disk by an error of its own.
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot write the model: {error}", path=target) from error
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
            yield base_name(name), buffer


def exhaust(weights: Iterator[tuple[str, Tensor]]) -> None:
    """Drop the rest of the weights: the other ranks wait in collectives for them."""
    for _ in weights:
        pass


def _write_model(policy: PolicyModel, weights: Iterator[tuple[str, Tensor]], folder: Path) -> None:
    lm, dtype = policy.lm, policy.stored_dtype
    with _config_of_files(lm.config, dtype):
        whole: dict[str, Tensor] = {}
        if _is_converted(lm):  # then transformers needs all weights together
            whole = {name: weight.to("cpu", copy=True) for name, weight in weights}
        lm.save_pretrained(folder, state_dict=whole)
        if not whole:
            _write_weights(weights, folder)
        lm.config.dtype = dtype  # `save_pretrained` writes that of the module
        lm.config.save_pretrained(folder)
    if has_vision(lm.config) and lm.name_or_path:
        for name in _PROCESSOR_FILES:
            source = cached_file(lm.name_or_path, name, _raise_exceptions_for_missing_entries=False)
            if source is not None:
                shutil.copyfile(source, folder / name)


def _write_adapter(
    policy: PolicyModel, weights: Iterator[tuple[str, Tensor]], folder: Path
) -> None:
    assert policy.adapters is not None
    policy.adapters.config.save_pretrained(folder)
    tensors = {name: weight.cpu().contiguous() for name, weight in weights}
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})


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
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    # The parts after the whole: setting the attention of a whole sets that of its parts.
    own = [(part, part._attn_implementation) for part in parts if part is not None]
    own_dtype = config.dtype
    try:
        config._attn_implementation = "sdpa"
        config.dtype = dtype
        yield
    finally:
        config.dtype = own_dtype
        for part, attention in own:
            part._attn_implementation = attention


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
