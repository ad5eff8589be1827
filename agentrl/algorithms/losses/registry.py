"""Policy losses, by name. Shapes: B sequences, T response positions.

A loss of your own, in ten lines::

    @register_policy_loss("reinforce")
    def compute_reinforce_loss(
        old_log_prob, log_prob, advantages, response_mask,
        loss_agg_mode="token-mean", config=None, rollout_is_weights=None, *, scale=None,
    ):
        scale = scale or LossScale.of(response_mask)
        losses = -advantages * log_prob
        return scale.aggregate(losses, response_mask, loss_agg_mode, rollout_is_weights), {}

What stands on masked positions is 0 when the update calls a loss.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.config.schema.run import ActorConfig, LossAggMode
from agentrl.errors import ConfigError
from agentrl.plugins.registry import Registry

LossAndMetrics = tuple[torch.Tensor, dict[str, torch.Tensor]]
F = TypeVar("F", bound=Callable[..., LossAndMetrics])


class PolicyLossFn(Protocol):
    """What a policy loss is. The parameters are the reference's, and `scale`."""

    def __call__(
        self,
        old_log_prob: torch.Tensor,
        log_prob: torch.Tensor,
        advantages: torch.Tensor,
        response_mask: torch.Tensor,
        loss_agg_mode: str = ...,
        config: ActorConfig = ...,
        rollout_is_weights: torch.Tensor | None = ...,
        *,
        scale: LossScale | None = ...,
    ) -> LossAndMetrics:
        """Compute one micro-batch's part of the loss, and of each metric (parts add up).

        Args:
            old_log_prob: `[B, T]`, recomputed before the update.
            log_prob: `[B, T]`, with gradient.
            advantages: `[B, T]`.
            response_mask: `[B, T]`, nonzero where a token is trained.
            loss_agg_mode: See `agentrl.algorithms.aggregation`.
            config: Clips and coefficients.
            rollout_is_weights: `[B, T]`, multiplied to the loss of each token; None: 1.
            scale: The mini-batch's denominators; None: these rows are the whole mini-batch.
        """
        ...


class TrainedTokens(NamedTuple):
    """What is known of the trained tokens of a mini-batch before it is computed, `[N]` each."""

    old_log_prob: torch.Tensor
    advantages: torch.Tensor


SummaryFn = Callable[[TrainedTokens, ActorConfig], object]
"""What a loss wants to know of the whole mini-batch, over its micro-batches and over all ranks."""


class LossFacts(NamedTuple):
    """What the checks of a run file, and the update, need to know about a policy loss."""

    loss_agg_mode: LossAggMode | None
    """The aggregation that is a part of the method; None: `actor.loss_agg_mode`."""
    summarise: SummaryFn | None
    reads: frozenset[str] | None
    """Keys of the run file that it reads; None: unknown."""


CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
"""The settings that `clip_range` reads."""
DUAL_CLIP = (*CLIP, "clip_ratio_c")
_POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss", key="actor.policy_loss")
_FACTS: dict[str, LossFacts] = {}
DEFAULTS = ActorConfig()
"""What a loss that is called by hand reads its settings from."""


def register_policy_loss(
    name: str,
    *,
    loss_agg_mode: LossAggMode | None = None,
    summarise: SummaryFn | None = None,
    reads: Iterable[str] | None = None,
) -> Callable[[F], F]:
    """Decorate a policy loss, so that `actor.policy_loss` finds it under `name`.

    Args:
        name: The name in the run file.
        loss_agg_mode: The aggregation that is a part of the method; None: `actor.loss_agg_mode`.
        summarise: What the loss must know of the whole mini-batch; it reads the result from
            `scale.summary`.
        reads: Settings of `actor` that it reads (`clip_ratio`, `policy_loss.dro_beta`, ...). None:
            unknown, and no setting is reported as unused.

    Raises:
        ConfigError: if the name is taken, or the function does not take `scale` (without which
            a mini-batch would be weighted by how it was cut into micro-batches).
    """

    def put(function: F) -> F:
        if "scale" not in inspect.signature(function).parameters:
            raise ConfigError(
                f"the policy loss {name!r} takes no `scale`",
                expected="a keyword `scale: LossScale | None = None`, for `scale.aggregate(...)`",
            )
        registered = _POLICY_LOSSES.register(name)(function)
        keys = None if reads is None else frozenset(f"actor.{key}" for key in reads)
        _FACTS[name] = LossFacts(loss_agg_mode, summarise, keys)
        return registered

    return put


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Find a policy loss by name.

    Raises:
        ConfigError: for an unknown name.
    """
    return _POLICY_LOSSES.get(name)


def policy_loss_names() -> list[str]:
    """List what `actor.policy_loss` can be, sorted."""
    return _POLICY_LOSSES.names


def policy_loss_facts(name: str) -> LossFacts:
    """Return what the checks of a run file, and the update, need to know about a policy loss.

    Raises:
        ConfigError: for an unknown name.
    """
    get_policy_loss_fn(name)
    return _FACTS[name]


def effective_loss_agg_mode(config: ActorConfig) -> LossAggMode:
    """Find how a run aggregates: as its loss prescribes, else as `actor.loss_agg_mode` says."""
    return policy_loss_facts(config.policy_loss.loss_mode).loss_agg_mode or config.loss_agg_mode


def needs_summary(config: ActorConfig) -> bool:
    """Tell whether the run's loss reads something from the whole mini-batch."""
    return policy_loss_facts(config.policy_loss.loss_mode).summarise is not None


def with_summary(
    scale: LossScale, parts: Iterable[TrainedTokens], config: ActorConfig
) -> LossScale:
    """Give a mini-batch's scale what the run's loss must know of the whole mini-batch.

    Args:
        scale: Of the mini-batch.
        parts: The trained tokens of the mini-batch, of each rank; their order has no effect.
        config: Names the loss.

    Returns:
        The scale with a `summary`; the same one where the loss needs none.
    """
    summarise = policy_loss_facts(config.policy_loss.loss_mode).summarise
    if summarise is None:
        return scale
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return replace(scale, summary=summarise(TrainedTokens(*columns), config))
