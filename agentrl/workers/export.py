"""Export a policy as a Hugging Face folder, tensor by tensor."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from agentrl.atomic_io import atomic_folder, naming_path
from agentrl.engines.tied_head import is_tied
from agentrl.engines.vision import has_vision
from agentrl.errors import CheckpointError
from agentrl.messages import dump_json
from agentrl.workers.base_files import BaseFiles, complete_config
from agentrl.workers.export_check import WrittenTensor, find_config_damage, find_damage
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
    "chat_template*", "additional_chat_templates", "*processor_config.json",
]  # fmt: skip
"""Files of a model: an export replaces all of them."""
_PROCESSOR_FILES = [
    "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
]  # fmt: skip
"""Files of the processor of a vision-language model: copied from its folder."""
_LAYER = re.compile(r".*?\.\d+\.|")
"""Start of the name of a weight in a layer."""


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
    Tensors of the base that the model's class has no place for are copied, and keys of its
    config.json that transformers replaced by others are kept. All files of a model in the folder
    are replaced; its other files stay. What was written is read back and compared with the policy.

    Raises:
        CheckpointError: on every rank, if it cannot be written, or what was written is not the
            policy. Then the folder is as it was before.
    """

    def write(aside: Path) -> dict[str, WrittenTensor]:
        written = write_lm(policy.lm, weights, aside, policy.stored_dtype, policy.base)
        _copy_processor(policy.lm, aside)
        return written

    weights = _iter_stored(policy)
    _export(policy, weights, write, tokenizer, folder, about)


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
        CheckpointError: as by `export_hf`.
    """
    if policy.adapters is None:
        raise ValueError("the policy has no adapters")
    peft_config = policy.adapters.config

    def write(aside: Path) -> dict[str, WrittenTensor]:
        peft_config.save_pretrained(aside)
        tensors = {name: weight.cpu().contiguous() for name, weight in weights}
        save_file(tensors, aside / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        return {name: WrittenTensor.of(tensor) for name, tensor in tensors.items()}

    weights = (
        (peft_name(name), full_tensor(weight.detach())) for name, weight in policy.trained_weights()
    )
    about = {**(about or {}), BASE_DIGEST: policy.adapters.base_digest}
    _export(policy, weights, write, tokenizer, folder, about)


def _export(
    policy: PolicyModel,
    weights: Iterator[tuple[str, Tensor]],
    write_model: Callable[[Path], Mapping[str, WrittenTensor]],
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    about: Mapping[str, Any] | None,
) -> None:
    """Write a folder on the main rank; the other ranks take part in the gathers."""
    target = folder.resolve()

    def write() -> None:
        try:
            with naming_path(target), atomic_folder(target) as aside:
                written = write_model(aside)
                tokenizer.save_pretrained(aside)
                refuse_damage(find_damage(aside, written, tokenizer), target)
                _link_other_files(target, aside)
                if about is not None:
                    text = dump_json(about, indent=2, for_file=True) + "\n"
                    (aside / ABOUT).unlink(missing_ok=True)  # it may be a link to an earlier one
                    (aside / ABOUT).write_text(text, encoding="utf-8")
        except CheckpointError as error:
            error.details["path"] = target
            raise
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


def write_lm(
    lm: PreTrainedModel,
    weights: Iterator[tuple[str, Tensor]],
    folder: Path,
    dtype: torch.dtype,
    base: BaseFiles,
) -> dict[str, WrittenTensor]:
    """Write configuration and weights of a model, and check the configuration.

    Args:
        lm: The model.
        weights: Its weights, whole, by its own names.
        folder: Gets the files.
        dtype: The dtype that the configuration names.
        base: The files that the model was loaded from.

    Returns:
        The tensors that the files must have.
    """
    with _config_of_files(lm.config, dtype):
        lm.save_pretrained(folder, state_dict={})
        named = chain(_in_names_of_files(lm, weights, base), base.other_tensors())
        written = _write_weights(named, folder)
        lm.config.dtype = dtype  # `save_pretrained` writes that of the module
        lm.config.save_pretrained(folder)
    file, tied = folder / CONFIG_NAME, is_tied(lm)
    saved = json.loads(file.read_text(encoding="utf-8"))
    saved = complete_config(saved, base.config, lm.config, is_tied=tied)
    file.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    refuse_damage(find_config_damage(folder, lm.config, is_tied=tied), folder)
    return written


def refuse_damage(damage: Iterator[str], folder: Path) -> None:
    """Refuse an exported model that is not what it was made from.

    Raises:
        CheckpointError: with the first damage.
    """
    if (first := next(damage, None)) is not None:
        raise CheckpointError(
            f"the exported model is damaged: {first}",
            path=folder,
            expected="files that other programs read as the policy; the checkpoints are complete",
        )


def _in_names_of_files(
    lm: PreTrainedModel, weights: Iterator[tuple[str, Tensor]], base: BaseFiles
) -> Iterator[tuple[str, Tensor]]:
    """Convert weights to the tensors and names of the base's files, one layer at a time."""
    for _, group in groupby(weights, key=lambda one: _LAYER.findall(one[0])[0]):
        own = dict(group)
        size = sum(weight.numel() for weight in own.values())
        stored = revert_weight_conversion(lm, dict(own))
        if sum(tensor.numel() for tensor in stored.values()) < size:
            raise CheckpointError(f"transformers loses values of {', '.join(own)}")
        for name, tensor in stored.items():
            yield base.name_of(name), tensor


def _copy_processor(lm: PreTrainedModel, folder: Path) -> None:
    if has_vision(lm.config) and lm.name_or_path:
        for name in _PROCESSOR_FILES:
            source = cached_file(lm.name_or_path, name, _raise_exceptions_for_missing_entries=False)
            if source is not None:
                shutil.copyfile(source, folder / name)


def _write_weights(weights: Iterator[tuple[str, Tensor]], folder: Path) -> dict[str, WrittenTensor]:
    """Write one file, or several and an index; return what they must have."""
    files: list[list[str]] = []
    written: dict[str, WrittenTensor] = {}
    total, pending = 0, dict[str, Tensor]()

    def flush() -> None:
        files.append(list(pending))
        save_file(pending, folder / f"model-{len(files):05}", metadata={"format": "pt"})
        pending.clear()

    for name, weight in weights:
        if pending and sum(w.nbytes for w in pending.values()) + weight.nbytes > SHARD_BYTES:
            flush()
        if name in written:
            raise CheckpointError(f"two tensors have the name {name}")
        pending[name] = weight.cpu().contiguous()
        written[name] = WrittenTensor.of(pending[name])
        total += weight.nbytes
    flush()
    if len(files) == 1:
        (folder / "model-00001").rename(folder / SAFE_WEIGHTS_NAME)
        return written
    places: dict[str, str] = {}
    for number, names in enumerate(files, start=1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / f"model-{number:05}").rename(folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2), encoding="utf-8")
    return written


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
