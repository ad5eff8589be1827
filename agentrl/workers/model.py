"""Modules that compute packed batches: a Hugging Face causal LM, sharded by FSDP2.

Master weights are float32; the layers compute in FSDP2's mixed precision. All uses of a sharded
weight are in a module's `forward`, so that FSDP2 gathers it first.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import MoeModelOutputWithPast

from agentrl.config.schema.training import FsdpConfig
from agentrl.engines.vision import PlacedFeatures, VisionFeatures, run_body
from agentrl.errors import ConfigError
from agentrl.media.positions import has_mrope
from agentrl.workers.attention import PACKED_ATTENTION, check_packable, max_sharing_length
from agentrl.workers.attention_kernels import SdpaKernel, choose_kernel
from agentrl.workers.base_files import BaseFiles
from agentrl.workers.distributed import World
from agentrl.workers.log_probs import HeadTransform, TokenScores, read_head_transform, score_tokens
from agentrl.workers.lora import Adapters
from agentrl.workers.offload import OffloadedMemory, offload_activations
from agentrl.workers.packing import PackedBatch
from agentrl.workers.packing_probe import find_probe_length, measure_crossing
from agentrl.workers.sequence_parallel import SequenceShard
from agentrl.workers.shards import local_tensor
from agentrl.workers.vision_tower import VisionTower, tower_weights
from agentrl.workers.weight_files import (
    WeightFiles,
    allocate,
    base_name,
    digest_weights,
    is_adapter,
    stand_in_weights,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringParams:
    """How tokens are scored."""

    temperature: float
    """The rollout's; the logits are divided by it."""
    logits_block_bytes: int | None = None
    """Bytes of one block of logits; None: a default for the device."""
    with_sum_pi_squared: bool = False
    """Whether to sum the squared probabilities of the vocabulary too."""
    share_prefixes: bool = True
    """Whether a prefix that rows share is computed once."""


Score = Callable[[Tensor, Tensor], Sequence[Tensor | None]]
"""Computes numbers of the trained tokens, `[n]` each, from the states before them, `[n, H]`, and
their ids, `[n]`."""


class PackedModel(nn.Module):
    """A Hugging Face causal LM, sharded, of which the body runs on packed batches.

    Subclasses compute something from the last hidden states. Their constructors check the model
    with stand-in weights, and then call `place`.

    Args:
        lm: The Hugging Face model, float32.
        world: The ranks that shard it.
        compute_dtype: The dtype of its layers.
        stored_dtype: The dtype of an export; None: that of `lm`.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        world: World,
        compute_dtype: torch.dtype,
        *,
        stored_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        tower_weights(lm)  # refuses a model of other parts
        check_packable(lm.config.get_text_config())
        self.lm = lm
        self.tower = VisionTower(lm, world)
        self.world = world
        self.adapters: Adapters | None = None
        self.base = BaseFiles()
        """The files of its folder, of which an export keeps names and keys."""
        self.tower_digest = ""
        """Identifies the values of a frozen vision tower, if all other weights are trained."""
        self.compute_dtype = compute_dtype
        self.kernel = choose_kernel(lm.config, world.device, compute_dtype)
        self.stored_dtype = stored_dtype or lm.dtype
        self.offload: OffloadedMemory | None = None
        self.offloads_activations = False
        self.noise: Sequence[str] = ()
        """The keys by which the run asks for dropout and the like in the update."""

    def place(
        self, fsdp: FsdpConfig, files: WeightFiles | None, adapters: Adapters | None = None
    ) -> None:
        """Shard the weights, and read those of a model that is on the meta device. A collective.

        Args:
            fsdp: Settings of the sharding.
            files: The weights; each rank reads its slices. None: `lm` has them.
            adapters: The adapters that were inserted into `lm`; None: every weight is trained.
        """
        _shard(self, fsdp)
        if files is not None:
            with self.world.raise_on_all_ranks():
                on_host = torch.device("cpu") if fsdp.offload_policy else self.world.device
                allocate(self, on_host)
                files.fill(self.lm)
        if adapters is not None:
            self.adapters = adapters
            adapters.fill(self.lm, self.world)
        elif frozen := [(n, w) for n, w in self.lm.named_parameters() if not w.requires_grad]:
            self.tower_digest = digest_weights(frozen, self.world)
        if fsdp.param_offload and not fsdp.offload_policy and self.world.device.type != "cpu":
            self.offload = OffloadedMemory(
                lambda: [local_tensor(weight.detach()) for _, weight in self.named_weights()]
            )

    def run(self, packed: PackedBatch, score: Score) -> Sequence[Tensor | None]:
        """Compute numbers of the trained tokens of a micro-batch, `[N]` each."""
        shard = self.world.sequence_shard(packed.input_ids.shape[1])
        with offload_activations() if self.offloads_activations else nullcontext():
            hidden = self._run_body(packed, shard)
        if shard is None:
            return score(hidden[0, packed.head_positions], packed.targets)
        index, columns = shard.find_own(packed.head_positions)
        own = score(hidden[0, columns], packed.targets[index])
        return shard.gather_scores(own, index, len(packed.targets))

    def _run_one(self, packed: PackedBatch, score: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute one number of each trained token, `[N]`, from the states `[n, H]`."""
        (found,) = self.run(packed, lambda hidden, _: (score(hidden),))
        return cast("Tensor", found)

    def _run_body(self, packed: PackedBatch, shard: SequenceShard | None) -> Tensor:
        """Return the last hidden states of all tokens, or of this rank's part: `[1, S, H]`."""
        placed = self.tower.place(packed.media, packed.encoder)
        ids, positions = packed.input_ids, packed.position_ids
        if positions.ndim == 3 and not has_mrope(self.config):
            positions = positions[0]
        arguments: dict[str, Any] = {}
        if shard is not None:
            ids, positions = shard.take(ids), shard.take(positions)
            placed = None if placed is None else _take_part(placed, shard)
            arguments["sequence_shard"] = shard
        return run_body(
            self.lm,
            ids,
            positions,
            placed,
            attention_plan=packed.plan,
            attention_kernel=self.kernel,
            **arguments,
        )

    def check_packing(self, score: Callable[[PackedBatch], Tensor]) -> None:
        """Refuse a model that lets the sequences of a micro-batch change each other. A collective.

        The weights are float32 here, for any compute dtype: in 16 bits, rounding in a deep model is
        as large as what some models mix.

        Args:
            score: Computes a number of each trained token, `[N]`, of the size of its nats.

        Raises:
            ConfigError: with the difference of these numbers.
        """
        self.lm.set_attn_implementation(_attention_of_text(self.config))
        was_training, kernel = self.training, self.kernel
        sharing = self.max_sharing_length(share_prefixes=True)
        self.eval()
        if self.compute_dtype != torch.float32:  # a kernel of 16-bit types; it equals this one
            self.kernel = SdpaKernel()
        packed, shared = measure_crossing(
            score,
            vocab_size=self.text_config.vocab_size,
            device=self.world.device,
            max_sharing_length=sharing,
            longest=find_probe_length(self.config),
        )
        self.kernel = kernel
        self.train(was_training)
        limit = 5e-4
        # Not a number: the weights are broken, which the first step reports.
        if packed > limit or shared > limit:
            how = "in one micro-batch" if packed > limit else "that share a prefix"
            raise ConfigError(
                f"{type(self.lm).__name__}: sequences {how} change each other's log-probabilities, "
                f"by {max(packed, shared):.2g} nats per token",
                key="model.path",
                expected="a model that computes attention by the attention interface of "
                "transformers and reads position_ids",
            )

    def train(self, mode: bool = True) -> Self:
        """Compute as in evaluation also in the update, unless the run asks for noise.

        The ratio of a first mini-batch is 1 then, and layout is invisible.
        """
        return super().train(mode and bool(self.noise))

    def max_sharing_length(self, *, share_prefixes: bool) -> int:
        """Return the most tokens of a row that shares prefixes with others; 0: none does.

        With dropout, the rows of a batch would drop the same parts of a prefix.
        """
        shares = share_prefixes and not self.noise
        return max_sharing_length(self.lm, self.kernel) if shares else 0

    def on_device(self) -> AbstractContextManager[None]:
        """Have the weights in their own memory while the block runs (`param_offload`)."""
        return nullcontext() if self.offload is None else self.offload.in_use()

    def named_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the sharded weights by Hugging Face name, tied weights once."""
        self.release_gathered()
        return self.lm.named_parameters()

    def float32_modules(self) -> Iterable[nn.Module]:
        """Iterate over the modules that compute in float32, for any compute dtype."""
        return ()

    def trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the weights that have gradients: what an optimizer and a checkpoint hold."""
        return ((name, weight) for name, weight in self.named_weights() if weight.requires_grad)

    def merged_weights(
        self, without: Set[nn.Parameter] = frozenset()
    ) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the weights that other programs get, by Hugging Face name, sharded.

        With LoRA these are the base's with the adapters in them, each computed on demand. A
        collective: every rank must exhaust the iterator.

        Args:
            without: Weights that are left out.
        """
        for name, weight in self.named_weights():
            if weight in without:
                continue
            if self.adapters is None:
                yield name, weight.detach()
            elif not is_adapter(name):
                plain = base_name(name)
                yield plain, self.adapters.merge(plain, weight.detach())

    def as_at_start(self) -> AbstractContextManager[None]:
        """Compute with the weights of the start of the run while the block runs; LoRA only."""
        return nullcontext() if self.adapters is None else self.adapters.as_at_start()

    def release_gathered(self) -> None:
        """Free gathered weights, so that the modules hold the optimizer's shards again.

        A forward pass without a backward pass may leave gathered copies in the modules, which
        would be stale after the next step.
        """
        for module in self.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @property
    def config(self) -> PretrainedConfig:
        """The Hugging Face configuration."""
        return self.lm.config

    @property
    def text_config(self) -> PretrainedConfig:
        """The configuration of the language part; of a text model, the whole."""
        return self.lm.config.get_text_config()


def _attention_of_text(config: PretrainedConfig) -> str | dict[str, str]:
    """Return packed attention for the language part; a vision tower keeps its own."""
    text = config.get_text_config()
    if text is config:
        return PACKED_ATTENTION
    return {
        name: PACKED_ATTENTION for name in config.sub_configs if getattr(config, name, None) is text
    }


def _take_part(placed: PlacedFeatures, shard: SequenceShard) -> PlacedFeatures:
    """Return the features of the tokens that a rank of a sequence group computes."""
    index, columns = shard.find_own(placed.index)
    embeds, layers = placed.features
    return PlacedFeatures(
        columns, VisionFeatures(embeds[index], tuple(layer[index] for layer in layers))
    )


class PolicyModel(PackedModel):
    """A causal LM that computes the scores of the trained tokens of a packed batch.

    Args:
        lm: The Hugging Face model, float32. Weights that are on another device are moved, layer by
            layer.
        world: The ranks that shard it.
        compute_dtype: The dtype of its layers.
        fsdp: Settings of the sharding.
        files: The weights of a model that is on the meta device; each rank reads its slices.
        adapters: The adapters that were inserted into `lm`; None: every weight is trained.
        stored_dtype: The dtype of an export; None: that of `lm`.
    """

    def __init__(
        self,
        lm: PreTrainedModel,
        world: World,
        compute_dtype: torch.dtype,
        fsdp: FsdpConfig,
        *,
        files: WeightFiles | None = None,
        adapters: Adapters | None = None,
        stored_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(lm, world, compute_dtype, stored_dtype=stored_dtype)
        # Before weights are read: no rank has the memory of a gathered weight.
        with stand_in_weights(lm, world.device, torch.float32):
            self.transform = probe_head(lm)
            params = ScoringParams(temperature=1.0)
            self.check_packing(lambda batch: self(batch, params).log_probs)
        self.place(fsdp, files, adapters)

    def forward(self, packed: PackedBatch, params: ScoringParams) -> TokenScores:
        """Score the trained tokens of a micro-batch, `[N]` each."""
        head = _head(self.lm)

        def score(hidden: Tensor, targets: Tensor) -> TokenScores:
            return score_tokens(
                hidden,
                head.weight,
                head.bias,
                targets,
                temperature=params.temperature,
                transform=self.transform,
                block_bytes=params.logits_block_bytes,
                with_sum_pi_squared=params.with_sum_pi_squared,
            )

        return TokenScores(*cast("TokenScores", self.run(packed, score)))


@torch.no_grad()
def probe_head(lm: PreTrainedModel) -> HeadTransform:
    """Read a model's transform of its logits, and check it against the model's own logits.

    Raises:
        ConfigError: if agentrl's log-probabilities differ from the model's.
    """
    transform = read_head_transform(lm.config.get_text_config())
    if _head_agrees(lm, transform, *_skip_body(lm)):
        return transform
    # The body is computed only if that did not work.
    ids, was_training = torch.tensor([[0, 1]], device=_head(lm).weight.device), lm.training
    lm.eval()
    logits = lm(input_ids=ids, use_cache=False).logits
    hidden = lm.base_model(input_ids=ids, use_cache=False).last_hidden_state
    lm.train(was_training)
    if not _head_agrees(lm, transform, hidden, logits):
        raise ConfigError(
            f"{type(lm).__name__} transforms its logits in a way that agentrl does not support",
            key="model.path",
            expected="plain logits, logit_scale, logits_scaling or final_logit_softcapping",
        )
    return transform


def _skip_body(lm: PreTrainedModel) -> tuple[Tensor, Tensor | None]:
    """Return random states and the model's logits for them; None if it needs more than states."""
    head, body = _head(lm), lm.base_model
    draws = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, 2, head.in_features, generator=draws).to(head.weight)
    body.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden)  # pyright: ignore[reportArgumentType]
    try:
        ids = torch.tensor([[0, 1]], device=head.weight.device)
        return hidden, lm(input_ids=ids, use_cache=False).logits
    except AttributeError:
        return hidden, None
    finally:
        del body.forward


def _head_agrees(
    lm: PreTrainedModel, transform: HeadTransform, hidden: Tensor, logits: Tensor | None
) -> bool:
    """Return whether the model's logits give our log-probabilities of its likeliest tokens."""
    if logits is None:
        return False
    head, expected = _head(lm), logits[0].float().log_softmax(-1)
    targets = expected.argmax(-1)
    found = score_tokens(
        hidden[0], head.weight, head.bias, targets, temperature=1.0, transform=transform
    ).log_probs
    rounding = torch.finfo(hidden.dtype).eps * float(logits.abs().max())
    return torch.allclose(found, expected.amax(-1), atol=1e-3 + 2 * rounding)


def _head(lm: PreTrainedModel) -> nn.Linear:
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"{type(lm).__name__} has no linear head", key="model.path")
    return head


def make_mesh(world: World, fsdp_size: int) -> DeviceMesh:
    """Return the ranks that shard the weights; with several copies, in two dimensions.

    Raises:
        ConfigError: if the ranks cannot be divided into groups of `fsdp_size`.
    """
    if fsdp_size < 1 or fsdp_size >= world.size:
        return world.mesh
    if world.size % fsdp_size:
        raise ConfigError(
            f"{world.size} ranks cannot be divided into groups of {fsdp_size}",
            key="actor.fsdp_config.fsdp_size",
            expected="a divisor of the number of ranks, or -1",
        )
    shape = (world.size // fsdp_size, fsdp_size)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("replicate", "shard"))


def _shard(model: PackedModel, fsdp: FsdpConfig) -> None:
    """Shard each decoder layer, then the rest (embeddings, last norm, head) as one group.

    FSDP2 copies every weight for the forward pass and every gradient after the backward pass, also
    on one rank. If a single rank computes in the dtype of its weights, nothing is sharded.
    """
    low = model.compute_dtype != torch.float32
    if model.world.is_alone and not low and not fsdp.offload_policy:
        if model.lm.device.type != "meta":
            nn.Module.to(model, model.world.device)
        return
    shared: dict[str, Any] = {
        "mesh": make_mesh(model.world, fsdp.fsdp_size),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=model.compute_dtype if low else None,
            reduce_dtype=torch.float32 if low else None,
        ),
    }
    if fsdp.offload_policy:
        shared["offload_policy"] = CPUOffloadPolicy(pin_memory=model.world.device.type == "cuda")
    layer_types = set(model.lm._no_split_modules or [])
    for module in list(model.lm.modules()):
        if type(module).__name__ in layer_types:
            fully_shard(module, reshard_after_forward=fsdp.reshard_after_forward, **shared)
    full: dict[str, Any] = {**shared, "mp_policy": MixedPrecisionPolicy()}
    for module in model.float32_modules():
        fully_shard(module, **full)
    # The backward pass begins with the head, so the last group stays gathered until then.
    fully_shard(model, reshard_after_forward=False, **shared)
    if any(isinstance(one, nn.ModuleList) for one in _experts(model.lm)):
        # An expert without a token has no gradient, and the ranks would reduce different sizes.
        reduce_unused = getattr(model, "set_reduce_scatter_unused_params", None)
        if reduce_unused is None and not model.world.is_alone:
            raise ConfigError(
                f"{type(model.lm).__name__} has one module for each expert, which torch "
                f"{torch.__version__} cannot train on several ranks",
                key="model.path",
                expected="torch 2.13 or later, or one rank",
            )
        if reduce_unused is not None:
            reduce_unused(True)


def _experts(lm: PreTrainedModel) -> Iterator[nn.Module]:
    """Iterate over the modules of a mixture's experts."""
    for name, module in lm.named_modules():
        if name.endswith("experts"):
            yield module
