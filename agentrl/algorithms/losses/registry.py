"""The registry of policy losses. Shapes: B sequences, T response positions.

A user's loss in ten lines::

    @register_policy_loss("reinforce")
    def compute_reinforce_loss(
        old_log_prob, log_prob, advantages, response_mask,
        loss_agg_mode="token-mean", config=None, rollout_is_weights=None, *, scale=None,
    ):
        scale = scale or LossScale.of(response_mask)
        losses = -advantages * log_prob
        return scale.aggregate(losses, response_mask, loss_agg_mode, rollout_is_weights), {}

The update sets values at masked positions to 0 before it calls a loss.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

import torch

from agentrl.algorithms.aggregation import LossScale
from agentrl.config.schema.training import ActorConfig, LossAggMode
from agentrl.errors import ConfigError
from agentrl.plugins.registry import Registry

LossAndMetrics = tuple[torch.Tensor, dict[str, torch.Tensor]]
F = TypeVar("F", bound=Callable[..., LossAndMetrics])


class PolicyLossFn(Protocol):
    """The signature of a policy loss: verl's parameters, and `scale`."""

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
        """Compute one micro-batch's part of the loss and of each metric. Parts add up.

        Args:
            old_log_prob: `[B, T]`, recomputed before the update.
            log_prob: `[B, T]`, with gradient.
            advantages: `[B, T]`.
            response_mask: `[B, T]`, nonzero at trained tokens.
            loss_agg_mode: See `agentrl.algorithms.aggregation`.
            config: Clips and coefficients.
            rollout_is_weights: `[B, T]`, factors of the tokens' losses; None: 1.
            scale: The mini-batch's denominators; None: these rows are the whole mini-batch.
        """
        ...


class TrainedTokens(NamedTuple):
    """The trained tokens of a mini-batch, as they are known before the update, `[N]` each."""

    old_log_prob: torch.Tensor
    advantages: torch.Tensor


SummaryFn = Callable[[TrainedTokens, ActorConfig], object]
"""Computes what a loss must know of the whole mini-batch: all micro-batches of all ranks."""


class LossFacts(NamedTuple):
    """Facts about a policy loss, for the checks of a run file and for the update."""

    loss_agg_mode: LossAggMode | None
    """The aggregation that is part of the method; None: `actor.loss_agg_mode`."""
    summarise: SummaryFn | None
    reads: frozenset[str] | None
    """Keys of the run file that it reads; None: unknown."""
    only_advantages: bool
    """Whether a row in which every advantage is 0 has the loss 0 and the gradient 0."""
    by_row: bool = False
    """Whether a token's loss depends on the other tokens of its row."""


_POLICY_LOSSES: Registry[PolicyLossFn] = Registry("policy loss", key="actor.policy_loss")
_FACTS: dict[str, LossFacts] = {}
DEFAULTS = ActorConfig()
"""The settings of a loss that is called without `config`."""


def register_policy_loss(
    name: str,
    *,
    loss_agg_mode: LossAggMode | None = None,
    summarise: SummaryFn | None = None,
    reads: Iterable[str] | None = None,
    only_advantages: bool = False,
    by_row: bool = False,
) -> Callable[[F], F]:
    """Decorate a policy loss, so that `actor.policy_loss` finds it under `name`.

    Args:
        name: The name in the run file.
        loss_agg_mode: The aggregation that is part of the method; None: `actor.loss_agg_mode`.
        summarise: Computes what the loss must know of the whole mini-batch. The loss reads the
            result from `scale.summary`.
        reads: Settings of `actor` that it reads (`clip_ratio`, `policy_loss.dro_beta`, ...). None:
            unknown, and no setting is reported as unused.
        only_advantages: Whether a row in which every advantage is 0 has the loss 0 and the gradient
            0, and changes nothing in the loss of other rows. The update then computes no such row,
            if no other term needs it.
        by_row: Whether a token's loss depends on the other tokens of its row, as a ratio of the
            sequence does, or on the rows of its micro-batch. The update then refuses trajectories
            of which several rows are trained: the number of rows would have an effect.

    Raises:
        ConfigError: if another loss has the name, or the function does not take `scale` (without
            it, the loss of a mini-batch would depend on its micro-batches).
    """

    def put(function: F) -> F:
        if "scale" not in inspect.signature(function).parameters:
            raise ConfigError(
                f"the policy loss {name!r} takes no `scale`",
                expected="a keyword `scale: LossScale | None = None`, for `scale.aggregate(...)`",
            )
        registered = _POLICY_LOSSES.register(name)(function)
        keys = None if reads is None else frozenset(f"actor.{key}" for key in reads)
        _FACTS[name] = LossFacts(loss_agg_mode, summarise, keys, only_advantages, by_row)
        return registered

    return put


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Find a policy loss by name.

    Raises:
        ConfigError: for an unknown name.
    """
    return _POLICY_LOSSES.get(name)


def policy_loss_names() -> list[str]:
    """List the names of all registered losses, sorted."""
    return _POLICY_LOSSES.names


def policy_loss_facts(name: str) -> LossFacts:
    """Return the facts that a policy loss was registered with.

    Raises:
        ConfigError: for an unknown name.
    """
    get_policy_loss_fn(name)
    return _FACTS[name]


def effective_loss_agg_mode(config: ActorConfig) -> LossAggMode:
    """Return a run's aggregation: that of its loss if it has one, else `actor.loss_agg_mode`."""
    return policy_loss_facts(config.policy_loss.loss_mode).loss_agg_mode or config.loss_agg_mode


def needs_summary(config: ActorConfig) -> bool:
    """Return whether the run's loss reads a summary of the whole mini-batch."""
    return policy_loss_facts(config.policy_loss.loss_mode).summarise is not None


def with_summary(
    scale: LossScale, parts: Iterable[TrainedTokens], config: ActorConfig
) -> LossScale:
    """Add to a mini-batch's scale the summary that the run's loss needs.

    Args:
        scale: The scale of the mini-batch.
        parts: The trained tokens of the mini-batch on each rank; their order has no effect.
        config: Names the loss.

    Returns:
        The scale with a `summary`; the same scale if the loss needs none.
    """
    summarise = policy_loss_facts(config.policy_loss.loss_mode).summarise
    if summarise is None:
        return scale
    columns = [torch.cat(column) for column in zip(*parts, strict=True)]
    return replace(scale, summary=summarise(TrainedTokens(*columns), config))
