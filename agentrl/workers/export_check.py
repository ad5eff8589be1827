"""Read an exported model back, and compare it with what it was made from."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME
from transformers.utils.hub import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE

_SAMPLES, _SAMPLE_BYTES = 16, 4096
_OF_THE_FILES = {"_name_or_path", "architectures", "dtype", "tie_word_embeddings", "torch_dtype",
                 "transformers_version", "type"}  # fmt: skip
"""Keys that an export may change. `type` is an older name of `rope_type`."""


class WrittenTensor(NamedTuple):
    """What a tensor in a file must be."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    sample: str
    """Hash of blocks of its bytes, from the first one to the last one; all, if it is small."""

    @classmethod
    def of(cls, tensor: Tensor) -> "WrittenTensor":
        """Describe a tensor; only the sampled bytes are read."""
        data = tensor.detach().reshape(-1).view(torch.uint8)
        last = max(0, len(data) - _SAMPLE_BYTES)
        starts = sorted({last * n // (_SAMPLES - 1) for n in range(_SAMPLES)})
        digest = hashlib.blake2b(digest_size=16)
        for start in starts:
            digest.update(data[start : start + _SAMPLE_BYTES].cpu().numpy().data)
        return cls(tuple(tensor.shape), tensor.dtype, digest.hexdigest())


def find_damage(
    folder: Path, written: Mapping[str, WrittenTensor], tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Find what is wrong with the weights and the chat template in a folder.

    The files are read by safetensors; only the sampled values of a tensor are read.

    Args:
        folder: Has all the files of the model, and no other safetensors files.
        written: The tensors that it must have.
        tokenizer: Its tokenizer, with the chat template of the run.

    Yields:
        A message that names the file, and the tensor.
    """
    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as stored:
                for name in stored.keys():  # noqa: SIM118 - it is not a mapping
                    found[name] = file.name
                    one = WrittenTensor.of(stored.get_tensor(name))
                    if (wanted := written.get(name)) is None:
                        yield f"{file.name}: {name} is not a tensor of the policy"
                    elif one[:2] != wanted[:2]:
                        yield f"{file.name}: {name} is {one[:2]}, not {wanted[:2]}"
                    elif one != wanted:
                        yield f"{file.name}: {name} has other values than the policy"
        except (OSError, SafetensorError) as error:
            yield f"{file.name}: cannot be read: {error}"
    for name in sorted(written.keys() - found.keys()):
        yield f"{name} is missing in {', '.join(sorted({*found.values()})) or 'all files'}"
    index, files = folder / SAFE_WEIGHTS_INDEX_NAME, {*found.values()}
    stated = json.loads(index.read_text("utf-8"))["weight_map"] if index.is_file() else None
    if stated != (found if len(files) > 1 else None):
        yield f"{index.name}: does not list the tensors of {', '.join(sorted(files))}"
    yield from _compare_templates(folder, tokenizer.chat_template)


def find_config_damage(folder: Path, config: PretrainedConfig, *, is_tied: bool) -> Iterator[str]:
    """Find keys of an exported config.json that do not describe the model.

    Args:
        folder: The folder of the model.
        config: The configuration that the model computes with.
        is_tied: Whether the head of the model is its embedding.
    """
    found = type(config).from_pretrained(folder)
    for part in {id(one): one for one in (found, found.get_text_config())}.values():
        if getattr(part, "tie_word_embeddings", is_tied) != is_tied:
            yield f"config.json: tie_word_embeddings is {not is_tied}, the weights {is_tied}"
    for key in _differing(config.to_dict(), found.to_dict()):
        yield f"config.json: {key} is not that of the model"


def _compare_templates(folder: Path, template: Any) -> Iterator[str]:
    wanted = cast(
        "dict[str, str]", template if isinstance(template, dict) else {"default": template}
    )
    paths = {name: f"{CHAT_TEMPLATE_DIR}/{name}.jinja" for name in wanted}
    paths["default"] = CHAT_TEMPLATE_FILE
    for name, path in paths.items():
        found = (folder / path).read_text(encoding="utf-8") if (folder / path).is_file() else None
        if found != wanted.get(name):
            yield f"{path}: is not the chat template of the run"


def _differing(ours: Any, theirs: Any, key: str = "") -> Iterator[str]:
    """Find the keys of a configuration whose values another one does not have."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name, value in cast("dict[str, Any]", ours).items():
            if name not in _OF_THE_FILES:
                other = cast("dict[str, Any]", theirs).get(name)
                yield from _differing(value, other, f"{key}.{name}".lstrip("."))
    elif ours != theirs and not (ours is None and key.startswith("_")):
        yield key
