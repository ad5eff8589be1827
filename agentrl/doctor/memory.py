"""Arithmetic of a run's memory on each device, from configurations alone; no weights are read.

`docs/memory.md` has the formulas, and a table that `docs/make_memory.py` writes with this module.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, NamedTuple

import psutil
import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from agentrl.config.conflicts import longest_sequence
from agentrl.config.schema.engine import EngineName
from agentrl.config.schema.run import ModelConfig, RunConfig
from agentrl.config.schema.training import ActorConfig, FsdpConfig, UpdateConfig
from agentrl.doctor.report import Checked, SkipCheckError
from agentrl.engines.attention_shape import AttentionShape
from agentrl.engines.model_config import read_attribute, read_per_layer
from agentrl.engines.transformers.cache_size import CACHE_MEMORY_FRAC, CONTIGUOUS_SHARE
from agentrl.trainer.components import needs_critic
from agentrl.trainer.setup.engine_factory import choose_engine
from agentrl.workers.batches import CPU_MICRO_BATCH_TOKENS, DEVICE_MICRO_BATCH_TOKENS
from agentrl.workers.load import load_hf_config, model_class
from agentrl.workers.log_probs import CPU_BLOCK_BYTES, DEVICE_BLOCK_BYTES
from agentrl.workers.lora import inject_adapters
from agentrl.workers.reward_model import as_model_config
from agentrl.workers.value_model import choose_model
from agentrl.workers.vision_tower import freeze_tower, tower_modules, tower_weights

USABLE_FRAC = 0.9
"""Share of a device for what is counted; the rest is for kernels, their libraries and gaps."""
SGLANG_SHARE = 0.5
"""SGLang's share of the free memory if the trainer has the same device."""
MAX_DEVICES = 1024
FLOAT32 = 4


class TowerSize(NamedTuple):
    """The numbers of a vision tower that its memory depends on."""

    num_weights: int
    block_weights: int
    """Those of all its blocks."""
    num_blocks: int
    hidden: int
    linear_width: int
    """Inputs and outputs of all linear modules of one block."""
    patches_per_token: int
    """Patches that become one token of the language model."""
    num_features: int
    """Vectors of the language model's width for each token (Qwen3-VL has several)."""

    @classmethod
    def of(cls, model: Any) -> "TowerSize | None":
        """Measure the tower of a model that is built without memory; None: it has none."""
        inside = list(tower_modules(model).values())
        if not inside:
            return None
        kinds = set(model._no_split_modules or [])
        blocks = [module for module in inside if type(module).__name__ in kinds]
        linear = [one for one in blocks[-1].modules() if isinstance(one, torch.nn.Linear)]
        vision = model.config.vision_config
        return cls(
            num_weights=sum(weight.numel() for weight in tower_weights(model)),
            block_weights=sum(w.numel() for block in blocks for w in block.parameters()),
            num_blocks=len(blocks),
            hidden=linear[0].in_features,
            linear_width=sum(one.in_features + one.out_features for one in linear),
            patches_per_token=getattr(vision, "spatial_merge_size", 1) ** 2,
            num_features=1 + len(getattr(vision, "deepstack_visual_indexes", None) or ()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """The numbers of a model that its memory depends on."""

    num_weights: int
    trained_weights: int
    """Those with a gradient and moments; with LoRA the adapters."""
    adapted_weights: int
    """Those of the base that the engine gets with the adapters merged into them."""
    layer_weights: int
    """Weights of the largest decoder layer."""
    matrix_weights: int
    """Weights of the matrices that Muon updates, which have one moment."""
    num_layers: int
    hidden: int
    intermediate: int
    """Width of the MLP; with experts, of all that compute one token."""
    query_width: int
    key_width: int
    """Width of the keys of one token, and of its values."""
    tower: TowerSize | None = None
    """The vision tower; its weights are among those of the model."""

    @property
    def root_weights(self) -> int:
        """Weights outside of the layers and of a tower's blocks: embeddings, last norm, head."""
        blocks = 0 if self.tower is None else self.tower.block_weights
        return self.num_weights - self.num_layers * self.layer_weights - blocks

    @property
    def has_adapters(self) -> bool:
        """Whether only adapters are trained."""
        return self.adapted_weights > 0

    @property
    def trained_layer_weights(self) -> int:
        """Trained weights of one decoder layer, as a mean with LoRA."""
        return self.trained_weights // self.num_layers if self.has_adapters else self.layer_weights

    @property
    def trained_root_weights(self) -> int:
        """Trained weights outside of the decoder layers; they have no adapters."""
        return 0 if self.has_adapters else self.root_weights

    @classmethod
    def of(
        cls, config: PretrainedConfig, model: ModelConfig | None = None, *, kind: Any = None
    ) -> "ModelSize":
        """Measure a model that is built without memory for its weights.

        Args:
            config: The model.
            model: Its adapters, and whether its tower is frozen; None: every weight is trained.
            kind: The class of transformers that builds it; None: a language model with its head.

        Raises:
            ConfigError: if the adapters do not fit the model.
            MissingExtraError: for adapters without peft.
        """
        with torch.device("meta"):
            lm: Any = (kind or model_class(config)).from_config(config)
        if model is not None and model.freeze_vision_tower:
            freeze_tower(lm)
        if model is not None:
            inject_adapters(lm, model)
        kinds, inside = set(lm._no_split_modules or []), set(tower_modules(lm).values())
        layers = [module for module in lm.modules() if type(module).__name__ in kinds]
        decoder = [layer for layer in layers if layer not in inside]
        sizes = [sum(weight.numel() for weight in layer.parameters()) for layer in decoder]
        trained = [weight for weight in lm.parameters() if weight.requires_grad]
        matrices = {w for layer in layers for w in layer.parameters() if w.ndim > 1}
        hidden = read_attribute(config, "hidden_size")
        attention = AttentionShape.widest(config)
        experts = max(read_per_layer(config, "num_experts_per_tok", 1))
        width = max(read_per_layer(config, "moe_intermediate_size", 0))
        width = width or max(read_per_layer(config, "intermediate_size", 4 * hidden))
        return cls(
            num_weights=sum(weight.numel() for weight in lm.parameters()),
            trained_weights=sum(weight.numel() for weight in trained),
            adapted_weights=sum(
                w.numel() for name, w in lm.named_parameters() if ".base_layer." in name
            ),
            layer_weights=max(sizes),
            matrix_weights=sum(weight.numel() for weight in trained if weight in matrices),
            num_layers=len(decoder),
            hidden=hidden,
            intermediate=experts * width,
            query_width=attention.query_width,
            key_width=attention.key_width,
            tower=TowerSize.of(lm),
        )

    @classmethod
    def of_critic(cls, config: PretrainedConfig, model: ModelConfig | None = None) -> "ModelSize":
        """Measure a critic: the body of a causal LM with a scalar head.

        Args:
            config: The model.
            model: Whether its tower is frozen; None: every weight is trained.
        """
        body = cls.of(config, model, kind=AutoModel)
        head = body.hidden + 1
        return replace(
            body,
            num_weights=body.num_weights + head,
            trained_weights=body.trained_weights + head,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a run has."""

    num_devices: int
    device_bytes: int
    """Memory of one device; on a CPU, that of the machine."""
    host_bytes: int
    """Memory of the machine, which all ranks share."""
    is_cpu: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the memory of one rank."""

    name: str
    num_bytes: int
    in_update: bool = True
    in_rollout: bool = True


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory of one rank."""

    parts: tuple[Part, ...]
    """On the device."""
    host_bytes: int
    """In host memory: offloaded shards, and the copy from which a checkpoint is written."""
    engine_bytes: int
    """What the engine's weights and one sequence need of its part."""

    @property
    def update_bytes(self) -> int:
        """Peak of the update."""
        return sum(part.num_bytes for part in self.parts if part.in_update)

    @property
    def rollout_bytes(self) -> int:
        """Peak of the rollout."""
        return sum(part.num_bytes for part in self.parts if part.in_rollout)

    def fits(self, machine: Machine) -> bool:
        """Whether both peaks fit into the usable share of the device, the rest into the host."""
        peak = max(self.update_bytes, self.rollout_bytes)
        if machine.is_cpu:
            return peak + self.host_bytes <= USABLE_FRAC * machine.device_bytes
        share = sum(part.num_bytes for part in self.parts if part.name.startswith("engine"))
        return (
            peak <= USABLE_FRAC * machine.device_bytes
            and self.engine_bytes <= share
            and self.host_bytes * machine.num_devices <= USABLE_FRAC * machine.host_bytes
        )


def compute_bytes(config: RunConfig, machine: Machine) -> int:
    """Return the bytes of one number in the compute dtype."""
    dtype = config.model.dtype
    is_wide = dtype == "float32" or (dtype == "auto" and machine.is_cpu)
    return FLOAT32 if is_wide else 2


def activation_bytes_per_token(size: ModelSize, num_bytes: int, *, checkpointing: bool) -> int:
    """Count what the forward pass keeps for the backward pass, for each token.

    A norm keeps its input and its quotient in float32 or the compute dtype, and its output. An
    attention keeps queries, keys, values and output. A gated MLP keeps four vectors of its width.
    Checkpointing keeps the input of each layer, and all of one layer while it is computed again.
    """
    norm = size.hidden * (FLOAT32 + 2 * num_bytes)
    attention = num_bytes * 2 * (size.query_width + size.key_width)
    layer = 2 * norm + attention + num_bytes * 4 * size.intermediate
    if checkpointing:
        return size.num_layers * size.hidden * num_bytes + layer + norm
    return size.num_layers * layer + norm


def picture_bytes_per_token(size: ModelSize, num_bytes: int, *, checkpointing: bool) -> int:
    """Count what a token of a picture adds to the activations of a token of text.

    These are its features, and if the tower is trained the activations of its patches: inputs and
    outputs of the linear modules, and two norms. Checkpointing keeps the input of each block.
    """
    tower = size.tower
    if tower is None:
        return 0
    features = tower.num_features * size.hidden * num_bytes
    is_trained = not size.has_adapters and size.trained_weights == size.num_weights
    if not is_trained:
        return features
    block = 2 * tower.hidden * (FLOAT32 + 2 * num_bytes) + tower.linear_width * num_bytes
    kept = tower.num_blocks * block
    if checkpointing:
        kept = tower.num_blocks * tower.hidden * num_bytes + block
    return features + tower.patches_per_token * kept


def micro_batch_tokens(update: UpdateConfig, longest: int, machine: Machine) -> int:
    """Return the tokens of the largest micro-batch that one rank computes.

    Args:
        update: The update of one model.
        longest: Tokens of the longest row.
        machine: The devices.
    """
    default = DEVICE_MICRO_BATCH_TOKENS
    if machine.is_cpu:
        default = CPU_MICRO_BATCH_TOKENS * (2 if update.share_prefixes else 1)
    # A row that is longer than the limit is a micro-batch of its own.
    longest = -(-longest // update.ulysses_sequence_parallel_size)
    return max(update.ppo_max_token_len_per_gpu or default, longest)


class _Role(NamedTuple):
    """A model that the run trains."""

    size: ModelSize
    update: UpdateConfig
    checkpoints_activations: bool
    offloads_activations: bool
    has_reference: bool = False
    """Whether a frozen copy of it is loaded too."""
    prefix: str = ""
    """Of the names of its parts."""

    @property
    def num_moments(self) -> int:
        is_muon = self.update.optim.name == "muon"
        return 2 * self.size.trained_weights - (self.size.matrix_weights if is_muon else 0)

    def num_shards(self, machine: Machine) -> int:
        size = self.update.fsdp_config.fsdp_size
        return size if 0 < size < machine.num_devices else machine.num_devices


def find_roles(size: ModelSize, config: RunConfig, critic: ModelSize | None) -> list[_Role]:
    """Return the models that a run trains, one after the other."""
    # With LoRA the reference is the policy itself without its adapters.
    has_reference = (config.actor.use_kl_loss or config.algorithm.use_kl_in_reward) and (
        config.ref.path is not None or not config.model.has_lora
    )
    model, own = config.model, config.critic.model
    checkpointing, offloads = model.enable_gradient_checkpointing, model.enable_activation_offload
    roles = [_Role(size, config.actor, checkpointing, offloads, has_reference)]
    if critic is not None:
        checkpointing, offloads = own.enable_gradient_checkpointing, own.enable_activation_offload
        roles.append(_Role(critic, config.critic, checkpointing, offloads, prefix="critic: "))
    return roles


def plan_memory(
    size: ModelSize,
    config: RunConfig,
    machine: Machine,
    *,
    engine: EngineName,
    critic: ModelSize | None = None,
    reward_model: ModelSize | None = None,
) -> MemoryPlan:
    """Compute the memory of one rank of a run.

    Args:
        size: The policy.
        config: The run.
        machine: Its devices.
        engine: `rollout.engine.name`, resolved.
        critic: The critic, if the run has one.
        reward_model: The reward model, if it is on these devices.
    """
    width, longest = compute_bytes(config, machine), longest_sequence(config)
    state, host, updates = list[Part](), 0, list[tuple[list[Part], int]]()
    for role in find_roles(size, config, critic):
        kept, in_host = _state_parts(role, machine)
        state += [part for part in kept if part.in_rollout]
        host += in_host
        moved = [part for part in kept if not part.in_rollout]
        work, in_host = _work_parts(role, machine, width, longest)
        updates.append((moved + work, in_host))
    # The models are updated one after the other, each with what it keeps in the host otherwise.
    work = max((parts for parts, _ in updates), key=lambda parts: sum(p.num_bytes for p in parts))
    host += max(in_host for _, in_host in updates)
    if reward_model is not None:
        kept, batch, in_host = reward_model_parts(reward_model, config, machine)
        state, work, host = [*state, kept], [*work, batch], host + in_host
    resident = sum(part.num_bytes for part in state)
    is_sharded = _is_sharded(config.actor.fsdp_config, machine, width)
    engine_parts, needed = _engine_parts(size, config, machine, engine, resident, is_sharded)
    return MemoryPlan((*state, *work, *engine_parts), host, needed)


def _is_sharded(fsdp: FsdpConfig, machine: Machine, width: int) -> bool:
    return machine.num_devices > 1 or width < FLOAT32 or fsdp.offload_policy


def _state_parts(role: _Role, machine: Machine) -> tuple[list[Part], int]:
    """Return what stays between two updates, and the bytes in host memory."""
    fsdp, num_shards = role.update.fsdp_config, role.num_shards(machine)
    counts = role.size.num_weights, role.size.trained_weights, role.num_moments
    weights, trained, moments = (FLOAT32 * num // num_shards for num in counts)
    stays, keeps_moments = (
        machine.is_cpu or not key for key in (fsdp.param_offload, fsdp.optimizer_offload)
    )
    state = [
        Part(f"{role.prefix}weights", weights, in_rollout=stays),
        Part(f"{role.prefix}moments", moments, in_rollout=keeps_moments),
    ]
    state += [Part("reference", weights, in_rollout=stays)] if role.has_reference else []
    # Of slices that several ranks hold, each rank copies a part for a checkpoint.
    host = (trained + moments) * num_shards // machine.num_devices
    if fsdp.offload_policy:
        return [], host + sum(part.num_bytes for part in state)
    return state, host + sum(part.num_bytes for part in state if not part.in_rollout)


def _work_parts(role: _Role, machine: Machine, width: int, longest: int) -> tuple[list[Part], int]:
    """Return what an update adds, and the bytes in host memory."""
    size, update, fsdp = role.size, role.update, role.update.fsdp_config
    gradients = FLOAT32 * size.trained_weights // role.num_shards(machine)
    parts, host = [Part(f"{role.prefix}gradients", gradients, in_rollout=False)], 0
    if fsdp.offload_policy:
        parts, host = [], gradients
    if _is_sharded(fsdp, machine, width):
        # Two layers (one is gathered ahead) and the rest, and their gradients before they are
        # reduced: the rest's in the compute dtype, a layer's in float32 too.
        layers = 2 if fsdp.reshard_after_forward else size.num_layers
        gathered = (layers * size.layer_weights + size.root_weights) * width
        reduced = size.trained_root_weights * width
        reduced += size.trained_layer_weights * (width + FLOAT32)
        parts.append(Part(f"{role.prefix}gathered", gathered + reduced, in_rollout=False))
    tokens = micro_batch_tokens(update, longest, machine)
    per_token = activation_bytes_per_token(size, width, checkpointing=role.checkpoints_activations)
    if role.offloads_activations and not machine.is_cpu:
        # Those of one layer are on the device, as if it were the only one; the rest is in the host.
        one = replace(size, num_layers=1)
        kept = min(per_token, activation_bytes_per_token(one, width, checkpointing=False))
        host += tokens * (per_token - kept)
        per_token = kept
    # The gradients of the widest activations of a layer, while it is computed backward.
    backward = tokens * width * (3 * size.intermediate + 2 * size.hidden)
    parts.append(Part(f"{role.prefix}activations", tokens * per_token + backward, in_rollout=False))
    if size.tower is not None:
        # At most all tokens are of pictures.
        checkpointing = role.checkpoints_activations
        pictures = tokens * picture_bytes_per_token(size, width, checkpointing=checkpointing)
        parts.append(Part(f"{role.prefix}pictures", pictures, in_rollout=False))
    if isinstance(update, ActorConfig):
        default = CPU_BLOCK_BYTES if machine.is_cpu else DEVICE_BLOCK_BYTES
        block = update.logits_block_bytes or default
        parts.append(Part("logits", int(2.5 * block), in_rollout=False))
    return parts, host


def reward_model_parts(
    size: ModelSize, config: RunConfig, machine: Machine
) -> tuple[Part, Part, int]:
    """Return the weights of a reward model, what a batch of it needs, and bytes in host memory.

    A batch is scored after the rollout, while the engine is awake.
    """
    settings = config.reward.model
    assert settings is not None
    is_wide = settings.dtype == "float32" or (settings.dtype == "auto" and machine.is_cpu)
    width, fsdp = FLOAT32 if is_wide else 2, settings.fsdp_config
    num_shards = fsdp.fsdp_size if 0 < fsdp.fsdp_size < machine.num_devices else machine.num_devices
    weights = size.num_weights * width // num_shards
    is_kept = machine.is_cpu or not (fsdp.param_offload or fsdp.offload_policy)
    # Without `offload_policy`, all shards are back while a batch is scored.
    batch = 0 if is_kept or fsdp.offload_policy else weights
    if num_shards > 1 or fsdp.offload_policy:
        batch += (2 * size.layer_weights + size.root_weights) * width
    default = CPU_MICRO_BATCH_TOKENS if machine.is_cpu else DEVICE_MICRO_BATCH_TOKENS
    tokens = max(settings.max_token_len_per_gpu or default, longest_sequence(config))
    # Without a backward pass, only the widest activations of one layer exist at a time.
    batch += tokens * width * (3 * size.intermediate + 2 * size.hidden)
    kept = Part("reward model", weights if is_kept else 0)
    return kept, Part("reward model: batch", batch, in_update=False), 0 if is_kept else weights


def _engine_parts(
    size: ModelSize,
    config: RunConfig,
    machine: Machine,
    engine: EngineName,
    resident: int,
    is_sharded: bool,
) -> tuple[list[Part], int]:
    """Return the engine's parts, and the bytes without which it cannot answer."""
    width = compute_bytes(config, machine)
    in_update = machine.is_cpu or not config.rollout.free_cache_engine
    token = 2 * size.num_layers * size.key_width * width
    length = config.rollout.max_model_len or longest_sequence(config)
    free = max(machine.device_bytes - resident, 0)
    copy = size.num_weights * width
    if engine == "sglang":
        settings = config.rollout.engine.sglang
        share = int(free * (settings.mem_fraction_static or SGLANG_SHARE))
        parts = [Part("engine: SGLang", share, in_update=in_update)]
        return parts, (copy + length * token) // settings.tp_size
    if engine != "transformers":
        return [], 0
    copy = copy if is_sharded else size.adapted_weights * width
    token = int(token * (1 + CONTIGUOUS_SHARE)) if machine.is_cpu else token
    wanted = config.rollout.max_concurrent_requests * length * token
    cache = min(wanted, int(max(free - copy, 0) * CACHE_MEMORY_FRAC))
    parts = [Part("engine: weights", copy, in_update), Part("engine: cache", cache, in_update)]
    return parts, copy + length * token


def _checkpointed(config: RunConfig) -> RunConfig:
    return _changed(config, "model", enable_gradient_checkpointing=True)


def _sleeping(config: RunConfig) -> RunConfig:
    return _changed(config, "rollout", free_cache_engine=True)


def _offloaded(config: RunConfig) -> RunConfig:
    fsdp = config.actor.fsdp_config.model_copy(update={"offload_policy": True})
    return _changed(config, "actor", fsdp_config=fsdp)


def _critic_checkpointed(config: RunConfig) -> RunConfig:
    model = config.critic.model.model_copy(update={"enable_gradient_checkpointing": True})
    return _changed(config, "critic", model=model) if needs_critic(config) else config


def _critic_offloaded(config: RunConfig) -> RunConfig:
    fsdp = config.critic.fsdp_config.model_copy(update={"offload_policy": True})
    return _changed(config, "critic", fsdp_config=fsdp) if needs_critic(config) else config


def _served(config: RunConfig) -> RunConfig:
    engine = config.rollout.engine.model_copy(update={"name": "sglang_server"})
    return _changed(config, "rollout", engine=engine)


_REMEDIES: Mapping[str, Callable[[RunConfig], RunConfig]] = {
    "`model.enable_gradient_checkpointing: true`": _checkpointed,
    "`critic.model.enable_gradient_checkpointing: true`": _critic_checkpointed,
    "`rollout.free_cache_engine: true`": _sleeping,
    "`actor.fsdp_config.offload_policy: true`": _offloaded,
    "`critic.fsdp_config.offload_policy: true`": _critic_offloaded,
    "`rollout.engine.name: sglang_server` on other devices": _served,
}


def find_remedy(
    size: ModelSize,
    config: RunConfig,
    machine: Machine,
    *,
    engine: EngineName,
    critic: ModelSize | None = None,
    reward_model: ModelSize | None = None,
) -> str:
    """Return the fewest changes with which a run fits: keys first, then more devices."""
    useful = [text for text, change in _REMEDIES.items() if change(config) != config]
    while machine.num_devices <= MAX_DEVICES and not machine.is_cpu:
        for count in range(len(useful) + 1):
            for texts in combinations(useful, count):
                changed = _with_remedies(config, texts)
                is_served = changed.rollout.engine.name == "sglang_server"
                plan = plan_memory(
                    size, changed, machine, engine="sglang_server" if is_served else engine,
                    critic=critic, reward_model=reward_model,
                )  # fmt: skip
                if plan.fits(machine):
                    number = machine.num_devices
                    return ", ".join([*texts, f"{number} device{'s' * (number > 1)}"])
        # More devices are in more machines.
        machine = replace(
            machine, num_devices=2 * machine.num_devices, host_bytes=2 * machine.host_bytes
        )
    return "a smaller `actor.ppo_max_token_len_per_gpu`, or a smaller model"


def _with_remedies(config: RunConfig, texts: Iterable[str]) -> RunConfig:
    for text in texts:
        config = _REMEDIES[text](config)
    return config


def check_memory(config: RunConfig) -> Checked[None]:
    """Compute whether the run fits on this machine's devices, before anything is loaded.

    Raises:
        ConfigError: if the model's configuration cannot be read.
        SkipCheckError: if the configuration lacks the numbers of a transformer.
    """
    try:
        size = ModelSize.of(load_hf_config(config.model), config.model)
        critic, reward_model = critic_size(config), _reward_model_size(config)
    except (AttributeError, ValueError) as error:
        raise SkipCheckError(f"no arithmetic for this kind of model: {error!r}") from error
    machine = this_machine(config)
    engine = choose_engine(config)
    others = {"critic": critic, "reward_model": reward_model}
    plan = plan_memory(size, config, machine, engine=engine, **others)
    found = f"update {_gb(plan.update_bytes)}, rollout {_gb(plan.rollout_bytes)} "
    found += f"of {_gb(machine.device_bytes)} on each of {machine.num_devices} "
    found += f"{'CPU ranks' if machine.is_cpu else 'devices'}; {_gb(plan.host_bytes)} in the host"
    if plan.fits(machine):
        return Checked(None, found)
    parts = ", ".join(f"{part.name} {_gb(part.num_bytes)}" for part in plan.parts)
    remedy = find_remedy(size, config, machine, engine=engine, **others)
    fault = f"does not fit ({parts}): try {remedy}"
    return Checked(None, found, faults=(fault,))


def critic_size(config: RunConfig) -> ModelSize | None:
    """Measure the critic, if the run has one."""
    if not needs_critic(config):
        return None
    model = choose_model(config.critic.model, config.model)
    return ModelSize.of_critic(load_hf_config(model), model)


def _reward_model_size(config: RunConfig) -> ModelSize | None:
    """Measure the reward model, if the run has one on its own devices."""
    settings = config.reward.model
    if settings is None or settings.engine != "local":
        return None
    hf_config = load_hf_config(as_model_config(settings))
    return ModelSize.of(hf_config, kind=AutoModelForSequenceClassification)


def this_machine(config: RunConfig) -> Machine:
    """Return the devices that a run on this machine would have."""
    host_bytes = psutil.virtual_memory().available
    if config.trainer.device == "cpu" or not torch.accelerator.is_available():
        return Machine(num_devices=1, device_bytes=host_bytes, host_bytes=host_bytes, is_cpu=True)
    return Machine(
        num_devices=torch.accelerator.device_count(),
        device_bytes=torch.get_device_module().mem_get_info()[1],
        host_bytes=host_bytes,
    )


def _changed(config: RunConfig, section: str, **update: Any) -> RunConfig:
    changed = dict(config)[section].model_copy(update=update)
    return config.model_copy(update={section: changed})


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
