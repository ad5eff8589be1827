"""The configuration -> server arguments of SGLang, checked against the installed version."""

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import psutil
import torch
from transformers import AutoConfig, PretrainedConfig

from agentrl.errors import ConfigError, EngineError, MissingExtraError
from agentrl.plugins.environment import install_command

TESTED_VERSION = "0.5.23"
SPARE_TOKENS = 8
"""SGLang ends a sequence a few tokens before its context length; so much is added to ours."""
CPU_MEMORY_FRAC = 0.25
"""Share of the free memory that the KV cache takes at most on a machine without an accelerator."""

CPU_ARGUMENTS: Mapping[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
}
"""What works where there is no accelerator."""
CPU_ENVIRONMENT: Mapping[str, str] = {"SGLANG_PLATFORM": "agentrl_cpu"}
ENVIRONMENT: Mapping[str, str] = {
    # Our context length, and a few tokens that no sequence reaches.
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    "PYTHONWARNINGS": "ignore",
    "TQDM_DISABLE": "1",
}
"""Variables that SGLang and its processes see."""
SHARED_MEMORY_FRAC = 0.5
"""Share of the memory that is free at its start which an engine takes beside the trainer."""
UNSYNCED = ("dp_size", "pp_size", "nnodes")
"""Arguments under which SGLang takes no new weights."""
OURS = ("model_path", "tokenizer_path", "context_length", "weight_version", "skip_server_warmup")
"""Arguments that agentrl sets from other keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SGLangNeeds:
    """What a run needs of SGLang, whichever way it is started."""

    model_path: str
    max_model_len: int
    """Most tokens of a sequence, input and output together."""
    max_requests: int
    """Requests in flight at once."""
    tokenizer_path: str | None = None
    """None: beside the model."""
    dtype: str = "auto"
    """What is computed in, as torch names it."""
    first_device: int = 0
    """Index of the accelerator that it is on, or of the first of several."""
    gives_memory: bool = False
    """Whether it is to give an accelerator's memory back while the policy is trained."""
    seed: int = 0
    """Of the random stream that calls without a seed are sampled from."""
    trust_remote_code: bool = False
    override_config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keys of the Hugging Face configuration to replace."""
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """`rollout.engine.sglang`: further server arguments; they win."""


def server_arguments(needs: SGLangNeeds, *, on_cpu: bool) -> dict[str, Any]:
    """Choose the arguments that SGLang is started with.

    Raises:
        ConfigError: for a given argument that the installed SGLang does not know, or that other
            keys decide.
        MissingExtraError: where SGLang is not installed.
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
    return chosen | dict(needs.given)


def check_given(given: Mapping[str, Any]) -> None:
    """Refuse server arguments that the installed SGLang does not know, or that are not the user's.

    Raises:
        ConfigError: naming the key and what is near it.
        MissingExtraError: where SGLang is not installed.
    """
    require_sglang()
    for name in UNSYNCED:
        if given.get(name, 1) != 1:
            raise ConfigError(
                f"an SGLang of rollout.engine.sglang.{name} {given[name]} takes no new weights",
                key=f"rollout.engine.sglang.{name}",
                expected="tp_size, or several servers (`agentrl serve --num`)",
            )
    for name in given:
        if name in OURS:
            raise ConfigError(
                f"rollout.engine.sglang.{name} is decided by other keys of the run",
                key=f"rollout.engine.sglang.{name}",
                expected="rollout.max_model_len, model.path or model.tokenizer_path",
            )
    if given:
        _refuse_unknown(given)


def _refuse_unknown(given: Mapping[str, Any]) -> None:
    known = known_arguments()
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"the installed SGLang has no server argument {name!r}",
                key=f"rollout.engine.sglang.{name}",
                expected=f"such as {near[0]}" if near else "a field of its ServerArgs",
            )


def known_arguments() -> frozenset[str]:
    """Names of the installed SGLang's server arguments.

    Raises:
        MissingExtraError: where it is not installed.
    """
    require_sglang()
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

    return frozenset(_fields(ServerArgs))


def _fields(server_args: Any) -> Iterable[str]:
    return server_args.__struct_fields__


def require_sglang() -> None:
    """Refuse to go on where SGLang is not installed.

    Raises:
        MissingExtraError: saying how to install it.
    """
    if find_spec("sglang") is None:
        raise MissingExtraError("SGLang is not installed", install=install_command("sglang"))


def has_accelerator() -> bool:
    """Whether SGLang has a device of its own on this machine."""
    return torch.accelerator.is_available()


def describe_platform() -> str:
    """Say in words what SGLang runs on here."""
    if has_accelerator():
        return f"{torch.accelerator.current_accelerator()}"
    return "no accelerator: plain PyTorch on the CPU, by the platform plug-in agentrl_cpu"


def cpu_pool_tokens(needs: SGLangNeeds) -> int:
    """Tokens of the KV cache without an accelerator: what the run needs, or what memory allows.

    Raises:
        EngineError: where not even one sequence fits.
    """
    longest = needs.max_model_len + SPARE_TOKENS
    config = AutoConfig.from_pretrained(
        needs.model_path, trust_remote_code=needs.trust_remote_code, **needs.override_config
    )
    size = _bytes_per_token(config, getattr(torch, needs.dtype, torch.float32).itemsize)
    room = int(psutil.virtual_memory().available * CPU_MEMORY_FRAC) // size
    if room < longest:
        raise EngineError(
            f"the KV cache of one sequence of {longest} tokens takes {longest * size >> 20} MiB",
            expected=f"at most {room * size >> 20} MiB: a shorter rollout.max_model_len",
        )
    return min(room, needs.max_requests * longest)


def _bytes_per_token(config: PretrainedConfig, itemsize: int) -> int:
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * size * itemsize
