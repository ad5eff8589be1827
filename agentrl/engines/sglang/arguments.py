"""Choose SGLang's server arguments, and check the given ones against the installed version."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import psutil
import torch
from transformers import AutoConfig

from agentrl.engines.attention_shape import AttentionShape
from agentrl.errors import ConfigError, EngineError, MissingExtraError, did_you_mean
from agentrl.plugins.environment import install_command

TESTED_VERSION = "0.5.23"
SPARE_TOKENS = 8
"""SGLang ends a sequence a few tokens before its context length: ours is larger by this."""
CPU_MEMORY_FRAC = 0.25
"""Largest share of the free memory for the KV cache, on a machine without an accelerator."""

CPU_ARGUMENTS: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
}
"""What works without an accelerator."""
CPU_ENVIRONMENT: Mapping[str, str] = {
    "SGLANG_PLATFORM": "agentrl_cpu",
    # The rotary embedding of the vision towers is compiled otherwise, which takes minutes here.
    "TORCH_COMPILE_DISABLE": "1",
}
PROCESSOR_PACKAGE = "agentrl.engines.sglang.processors"
"""SGLang imports it, and uses its processors of images and videos."""
ENVIRONMENT: Mapping[str, str] = {
    # Our context length has a few tokens more than the model, which no sequence reaches.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
    "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE": PROCESSOR_PACKAGE,
    # SGLang would keep the features of a running call's pictures over an update of the tower. The
    # prefix cache has the keys and values of pictures, so few features are computed twice.
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
}
"""Environment variables for SGLang and its processes."""
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"
SHARED_MEMORY_FRAC = 0.5
"""Share of the free memory that an engine takes on the trainer's device."""
UNSYNCED = ("dp_size", "pp_size", "nnodes")
"""Arguments with which SGLang cannot take new weights."""
OURS = (
    "model_path",
    "tokenizer_path",
    "context_length",
    "weight_version",
    "skip_server_warmup",
    "api_key",
)
"""Arguments that agentrl sets from other keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangNeeds:
    """What a run needs from SGLang."""

    model_path: str
    max_model_len: int
    """Most tokens of a sequence, input and output together."""
    max_requests: int
    """Requests in flight at once."""
    tokenizer_path: str | None = None
    """None: in the model's folder."""
    dtype: str = "auto"
    """The type of computation, as torch names it."""
    first_device: int = 0
    """Index of its accelerator, or of the first of several."""
    has_tower: bool = False
    """Whether the model has a vision tower."""
    gives_memory: bool = False
    """Whether it releases the accelerator's memory while the policy is trained."""
    seed: int = 0
    """For calls without a seed of their own."""
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys of the Hugging Face configuration to replace."""
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`rollout.engine.sglang`: further server arguments; they win."""
    api_key: str | None = field(default=None, repr=False)
    """Of servers: clients must send it. None: they take requests of everybody."""


def server_arguments(needs: SGLangNeeds, *, on_cpu: bool) -> dict[str, Any]:
    """Choose the arguments that SGLang is started with.

    Raises:
        ConfigError: The installed SGLang does not know a given argument, or another key of the run
            sets it.
        MissingExtraError: SGLang is not installed.
    """
    check_given(needs.given)
    chosen: dict[str, Any] = {
        "model_path": needs.model_path,
        "tokenizer_path": needs.tokenizer_path or needs.model_path,
        "context_length": needs.max_model_len + SPARE_TOKENS,
        "dtype": needs.dtype,
        "random_seed": needs.seed,
        "trust_remote_code": needs.trust_remote_code,
        "weight_version": "0",
        "sleep_on_idle": True,
        "log_level": "error",
        "skip_server_warmup": True,
    }
    if needs.override_config:
        chosen["json_model_override_args"] = json.dumps(dict(needs.override_config))
    if needs.first_device:
        chosen["base_gpu_id"] = needs.first_device
    if on_cpu:
        chosen |= CPU_ARGUMENTS
        chosen["max_total_tokens"] = cpu_pool_tokens(needs)
    elif needs.gives_memory:
        chosen |= {"enable_memory_saver": True, "mem_fraction_static": SHARED_MEMORY_FRAC}
        if needs.has_tower:
            # An update after sleep may have the weights of the language model only.
            chosen["enable_weights_cpu_backup"] = True
    return chosen | dict(needs.given)


def check_given(given: Mapping[str, Any]) -> None:
    """Refuse server arguments that the installed SGLang does not know, or that other keys set.

    Raises:
        ConfigError: With the key and the nearest known one.
        MissingExtraError: SGLang is not installed.
    """
    require_sglang()
    for name in UNSYNCED:
        if given.get(name, 1) != 1:
            raise ConfigError(
                f"SGLang takes no new weights with rollout.engine.sglang.{name} {given[name]}",
                key=f"rollout.engine.sglang.{name}",
                expected="tp_size, or several servers (`agentrl serve --num`)",
            )
    for name in given:
        if name in OURS:
            raise ConfigError(
                f"rollout.engine.sglang.{name} is set by other keys of the run",
                key=f"rollout.engine.sglang.{name}",
                expected="rollout.max_model_len, model.path, model.tokenizer_path or "
                "rollout.engine.sglang_server.api_key",
            )
    known = known_arguments() if given else frozenset()
    for name in given:
        if name not in known:
            raise ConfigError(
                f"the installed SGLang has no server argument {name!r}{did_you_mean(name, known)}",
                key=f"rollout.engine.sglang.{name}",
                expected="a field of its ServerArgs",
            )


def known_arguments() -> frozenset[str]:
    """Return the names of the installed SGLang's server arguments.

    Raises:
        MissingExtraError: SGLang is not installed.
    """
    require_sglang()
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

    server_args: Any = ServerArgs
    return frozenset(server_args.__struct_fields__)


def require_sglang() -> None:
    """Raise if SGLang is not installed.

    Raises:
        MissingExtraError: With the command that installs it.
    """
    if find_spec("sglang") is None:
        raise MissingExtraError("SGLang is not installed", install=install_command("sglang"))


def has_accelerator() -> bool:
    """Return whether this machine has an accelerator for SGLang."""
    return torch.accelerator.is_available()


def describe_platform() -> str:
    """Return a description of the device that SGLang runs on."""
    if has_accelerator():
        return f"{torch.accelerator.current_accelerator()}"
    return "no accelerator: plain PyTorch on the CPU, by the platform plug-in agentrl_cpu"


def cpu_pool_tokens(needs: SGLangNeeds) -> int:
    """Return the KV cache's tokens without an accelerator: as needed, or as memory allows.

    Raises:
        EngineError: There is no memory for one sequence.
    """
    longest = needs.max_model_len + SPARE_TOKENS
    config = AutoConfig.from_pretrained(
        needs.model_path, trust_remote_code=needs.trust_remote_code, **needs.override_config
    )
    itemsize = getattr(torch, needs.dtype, torch.float32).itemsize
    width = sum(shape.key_width for shape in AttentionShape.of_layers(config))
    size = 2 * width * itemsize  # bytes of one token
    capacity = int(psutil.virtual_memory().available * CPU_MEMORY_FRAC) // size
    if capacity < longest:
        raise EngineError(
            f"the KV cache of one sequence of {longest} tokens takes {longest * size >> 20} MiB",
            expected=f"at most {capacity * size >> 20} MiB: a shorter rollout.max_model_len",
        )
    return min(capacity, needs.max_requests * longest)
