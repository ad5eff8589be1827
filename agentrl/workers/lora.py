"""LoRA: small trained matrices next to frozen ones, through peft.

A linear module of the base computes `W x`; with an adapter it computes `W x + s B A x`, and only A
and B are trained. peft replaces these modules inside the Hugging Face model, whose class, body and
head stay as they are. Engines and exports get `W + s B A` under the base's names.
"""

import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils.hub import cached_file

from agentrl.config.schema.run import ModelConfig
from agentrl.errors import ConfigError, MissingExtraError
from agentrl.plugins.environment import install_command
from agentrl.workers.distributed import World
from agentrl.workers.optim import is_matrix
from agentrl.workers.shards import full_tensor, local_slice
from agentrl.workers.vision_tower import tower_modules
from agentrl.workers.weight_files import allocate, digest_weights, is_adapter

logger = logging.getLogger(__name__)

TRAINED, AT_START = "default", "start"
"""peft's names of two adapters: the one that is trained, and the frozen copy of a loaded one."""
ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""peft's files."""
BASE_DIGEST = "base_digest"
"""Key of an exported adapter's `agentrl.json`."""
_PEFT_PREFIX = "base_model.model."


class Adapters:
    """The adapters of a model: their values at the start, their merge, and the base under them.

    Args:
        lm: The model with peft's modules.
        config: peft's `LoraConfig`.
        seed: Seed of the matrices A of a new adapter; its matrices B are 0.
        loaded: The weights of an adapter that is continued, by peft's names; None: a new one.
        loaded_base: The digest of its base; None: it was not recorded.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        config: Any,
        *,
        seed: int,
        loaded: Mapping[str, Tensor] | None = None,
        loaded_base: str | None = None,
    ) -> None:
        self.config = config
        self.seed = seed
        self._world: World
        self.base_digest = ""
        """Identifies the values of the base's weights, in any layout."""
        self._layers: dict[str, Any] = {
            name: module for name, module in lm.named_modules() if hasattr(module, "lora_A")
        }
        self._loaded = loaded
        self._loaded_base = loaded_base

    @property
    def scales(self) -> dict[str, float]:
        """The factor s of each adapted module, by its name."""
        return {name: float(layer.scaling[TRAINED]) for name, layer in self._layers.items()}

    @torch.no_grad()
    def fill(self, lm: PreTrainedModel, world: World) -> None:
        """Give each adapter its first values, the same on any number of ranks. A collective.

        Raises:
            ConfigError: if the loaded adapter was trained on another base.
        """
        self._world = world
        for name, weight in lm.named_parameters():
            if is_adapter(name):
                slice_ = local_slice(weight, world)
                bounds = zip(slice_.offset, slice_.local.shape, strict=True)
                index = tuple(slice(start, start + size) for start, size in bounds)
                slice_.local.copy_(self._first_value(name, weight)[index])
        base = ((name, w) for name, w in lm.named_parameters() if not is_adapter(name))
        self.base_digest = digest_weights(base, world)
        if self._loaded_base not in (None, self.base_digest):
            raise ConfigError(
                "the adapter was trained on other weights than those of model.path",
                key="model.lora_adapter_path",
                expected="the base of the run that exported the adapter",
            )
        self._loaded = None

    def merge(self, name: str, weight: Tensor) -> Tensor:
        """Return `W + s B A` in W's layout if the weight is adapted, else the weight.

        A collective: every rank must call it for the same weights in the same order.

        Args:
            name: The base's name of the weight.
            weight: W; a shard stays a shard.
        """
        module, _, leaf = name.rpartition(".")
        layer = self._layers.get(module)
        if layer is None or leaf != "weight":
            return weight
        a, b = (full_tensor(one[TRAINED].weight.detach()) for one in (layer.lora_A, layer.lora_B))
        left, right = (a.T, b.T) if layer.fan_in_fan_out else (b, a)
        merged = weight.detach().clone()
        slice_ = local_slice(merged, self._world)
        first, local = slice_.offset[0], slice_.local
        rows = left[first : first + len(local)].to(local)
        local.addmm_(rows, right.to(local), alpha=layer.scaling[TRAINED])
        return merged

    @contextmanager
    def as_at_start(self) -> Iterator[None]:
        """Compute with the policy at the start of the run while the block runs.

        A new adapter is switched off; of one that was loaded, the frozen copy is used. The flags of
        peft's modules are set directly: its methods also change `requires_grad`, which FSDP2 reads
        only once.
        """
        layers = list(self._layers.values())
        before = [(layer._disable_adapters, layer._active_adapter) for layer in layers]
        for layer in layers:
            layer._disable_adapters = AT_START not in layer.lora_A
            layer._active_adapter = [AT_START]
        try:
            yield
        finally:
            for layer, (is_off, active) in zip(layers, before, strict=True):
                layer._disable_adapters, layer._active_adapter = is_off, active

    def _first_value(self, name: str, weight: Tensor) -> Tensor:
        if self._loaded is not None:
            return self._loaded[peft_name(name)]
        first = torch.zeros(weight.shape)
        if ".lora_A." in name:  # as peft initializes A
            digest = hashlib.sha256(f"{self.seed}/{peft_name(name)}".encode()).digest()
            draws = torch.Generator().manual_seed(int.from_bytes(digest[:7]))
            bound = weight.shape[1] ** -0.5
            first.uniform_(-bound, bound, generator=draws)
        return first


def inject_adapters(lm: PreTrainedModel, config: ModelConfig, *, seed: int = 0) -> Adapters | None:
    """Freeze a model and insert the adapters of a configuration. Their values come later (`fill`).

    Args:
        lm: The model, on any device. A weight on the meta device stays there.
        config: The keys of LoRA.
        seed: Seed of a new adapter.

    Returns:
        None if the configuration has no LoRA.

    Raises:
        MissingExtraError: without peft.
        ConfigError: if modules do not exist or cannot have an adapter, or if the loaded adapter is
            not plain LoRA for this model.
    """
    if not config.has_lora:
        return None
    path = config.lora_adapter_path
    key = "model.lora_rank" if path is None else "model.lora_adapter_path"
    if find_spec("peft") is None:
        raise MissingExtraError(
            f"{key}: LoRA needs peft, which is not installed",
            key=key,
            install=install_command("lora"),
        )
    if path is None:
        return Adapters(lm, _insert(lm, _make_config(lm, config), key), seed=seed)
    loaded_config, loaded, loaded_base = _load(path, config.path)
    _insert(lm, loaded_config, key, with_copy=True)
    _check_names(lm, loaded, path)
    return Adapters(lm, loaded_config, seed=seed, loaded=loaded, loaded_base=loaded_base)


def peft_name(name: str) -> str:
    """Return the name of an adapter's weight in peft's files.

    Example:
        >>> peft_name("model.layers.0.mlp.up_proj.lora_A.default.weight")
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    return _PEFT_PREFIX + re.sub(rf"\.({TRAINED}|{AT_START})\.weight$", ".weight", name)


def _make_config(lm: PreTrainedModel, config: ModelConfig) -> Any:
    """Make peft's configuration of a new adapter."""
    from peft import LoraConfig, TaskType

    names = _choose_modules(lm, config)
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=_shorten(names, [name for name, _ in lm.named_modules()]),
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=config.path,
    )


def _choose_modules(lm: PreTrainedModel, config: ModelConfig) -> list[str]:
    """Return the names of the modules that get an adapter.

    Raises:
        ConfigError: if a name matches nothing, or if it matches the head or another module that
            cannot have an adapter.
    """
    linear, head, tower = _linear_names(lm), _head_name(lm), tower_modules(lm)
    linear = [name for name in linear if name not in tower]
    every = [name for name, _ in lm.named_modules() if name and name not in tower]
    if config.target_modules == "all-linear":
        chosen = {name for name in linear if name != head}
    else:
        chosen = _match(lm, every, config.target_modules, "model.target_modules")
    for name in sorted(chosen):
        if name == head or name not in linear:
            kind = "the head" if name == head else f"a {type(lm.get_submodule(name)).__name__}"
            raise ConfigError(
                f"{name} is {kind}, which cannot have an adapter",
                key="model.target_modules",
                expected=f"linear modules of the decoder: {_short_names(lm)}",
            )
    if config.exclude_modules is not None:
        chosen -= _match(lm, every, config.exclude_modules, "model.exclude_modules")
    if not chosen:
        raise ConfigError(
            "no module is left to adapt",
            key="model.exclude_modules",
            expected=f"fewer than all of {_short_names(lm)}",
        )
    return sorted(chosen)


def _match(
    lm: PreTrainedModel, every: Sequence[str], wanted: str | Sequence[str], key: str
) -> set[str]:
    """Find modules as peft does: by the end of their names, or by a regular expression."""
    found = set[str]()
    for one in [wanted] if isinstance(wanted, str) else wanted:
        if isinstance(wanted, str):
            matches = {name for name in every if re.fullmatch(one, name)}
        else:
            matches = {name for name in every if name == one or name.endswith(f".{one}")}
        if not matches:
            raise ConfigError(
                f"no module of {type(lm).__name__} is named {one!r}",
                key=key,
                expected=f"some of {_short_names(lm)}; a list of names, or one regular expression "
                "that matches whole names",
            )
        found |= matches
    return found


def _shorten(names: Sequence[str], every: Sequence[str]) -> list[str] | str:
    """Return the last parts of names if they select the same modules: some engines need these.

    peft compares with the end of the name of every module. If whole names are the end of others
    too, they become a regular expression, which peft compares with whole names.
    """

    def selected(ends: Collection[str]) -> set[str]:
        return {one for one in every for end in ends if f".{one}".endswith(f".{end}")}

    for ends in (sorted({name.rpartition(".")[2] for name in names}), list(names)):
        if selected(ends) == set(names):
            return ends
    return "|".join(map(re.escape, names))


def frozen_experts_share(lm: PreTrainedModel) -> float:
    """Return the share of the weights in stacks of experts, which no adapter is for."""
    sizes = [(weight.numel(), is_matrix(n, weight) and weight.ndim == 3)
             for n, weight in lm.named_parameters() if not is_adapter(n)]  # fmt: skip
    return sum(size for size, is_stack in sizes if is_stack) / sum(size for size, _ in sizes)


def _linear_names(lm: PreTrainedModel) -> list[str]:
    return [name for name, one in lm.named_modules() if isinstance(one, nn.Linear | Conv1D)]


def _head_name(lm: PreTrainedModel) -> str | None:
    head = lm.get_output_embeddings()
    return next((name for name, module in lm.named_modules() if module is head), None)


def _short_names(lm: PreTrainedModel) -> str:
    others = {_head_name(lm), *tower_modules(lm)}
    ends = {name.rpartition(".")[2] for name in _linear_names(lm) if name not in others}
    return ", ".join(sorted(ends))


def _insert(lm: PreTrainedModel, config: Any, key: str, *, with_copy: bool = False) -> Any:
    """Insert peft's modules; return the configuration.

    Args:
        lm: The model; all its weights are frozen.
        config: peft's `LoraConfig`.
        key: The key that errors name.
        with_copy: Whether to insert a frozen second adapter, for the values at the start.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.lora import Linear

    # peft takes `gate_proj` of these families for the name that experts had before transformers 5.
    own_config, lm.config = lm.config, PretrainedConfig()
    try:
        for adapter in (AT_START, TRAINED) if with_copy else (TRAINED,):  # the last is active
            inject_adapter_in_model(config, lm, adapter_name=adapter, low_cpu_mem_usage=True)
            del lm.peft_config  # nothing reads it, and peft warns if the model has one
    except ValueError as error:
        raise ConfigError(f"peft cannot insert the adapter: {error}", key=key) from error
    finally:
        lm.config = own_config
    tower = tower_modules(lm)
    for name, module in lm.named_modules():
        if not hasattr(module, "lora_A"):
            continue
        if type(module) is not Linear or module.lora_variant:
            raise ConfigError(
                f"{name} would get an adapter that is not plain LoRA",
                key=key,
                expected="plain LoRA of linear modules",
            )
        if name in tower:
            raise ConfigError(
                f"{name} would get an adapter, and is in the vision tower",
                key=key,
                expected="adapters of the language part only",
            )
    for name, weight in lm.named_parameters():
        weight.requires_grad_(is_adapter(name) and name.endswith(f".{TRAINED}.weight"))
    if lm.device.type != "meta":
        allocate(lm, lm.device)
    return config


def _load(path: str, base: str) -> tuple[Any, dict[str, Tensor], str | None]:
    """Read a saved adapter: peft's configuration, its weights, and the digest of its base."""
    from peft import LoraConfig, PeftConfig

    key = "model.lora_adapter_path"
    try:
        config = PeftConfig.from_pretrained(path)
        file = cached_file(path, ADAPTER_WEIGHTS)
        if file is None:
            raise OSError(f"no {ADAPTER_WEIGHTS}")
        weights = load_file(file)
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ConfigError(
            f"no adapter can be loaded from {path!r}: {error}",
            key=key,
            expected=f"a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, or a hub name",
        ) from error
    if not isinstance(config, LoraConfig) or isinstance(config.init_lora_weights, str):
        kind = config.peft_type
        if isinstance(config, LoraConfig):
            kind = f"initialized by {config.init_lora_weights}, which may change the base"
        raise ConfigError(f"the adapter at {path} is {kind}", key=key, expected="plain LoRA")
    made_for = config.base_model_name_or_path
    if made_for and Path(made_for).name != Path(base).name:
        logger.warning("the adapter at %s was made for %s, and model.path is %s", path, made_for,
                       base)  # fmt: skip
    # Dropout would make the log-probabilities of the update differ from those before it.
    config.lora_dropout, config.inference_mode = 0.0, False
    config.base_model_name_or_path = base
    try:
        about = json.loads((Path(file).parent / "agentrl.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        about = {}
    return config, weights, about.get(BASE_DIGEST)


def _check_names(lm: PreTrainedModel, loaded: Mapping[str, Tensor], path: str) -> None:
    """Refuse an adapter whose weights are not exactly those that the model needs."""
    shapes = {peft_name(n): tuple(w.shape) for n, w in lm.named_parameters() if is_adapter(n)}
    for name in sorted(shapes.keys() | loaded.keys()):
        theirs = tuple(loaded[name].shape) if name in loaded else None
        if theirs != shapes.get(name):
            raise ConfigError(
                f"the adapter at {path} does not fit {type(lm).__name__}: {name} is "
                f"{theirs or 'absent'}, not {shapes.get(name) or 'absent'}",
                key="model.lora_adapter_path",
                expected="a plain LoRA adapter of the model at model.path",
            )
