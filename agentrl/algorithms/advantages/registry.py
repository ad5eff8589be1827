"""Advantage estimators, by name, and how a batch is handed to one.

An estimator names the arguments that it wants, and is given those: columns of the batch by their
keys (`token_level_rewards`, `response_mask`, `values`, `turn_ids`, ...), `index` (the group of each
row), settings of `algorithm` by theirs (`gamma`, `norm_adv_by_std_in_grpo`, ...), `config` (all of
those settings), `batch` and `non_tensor_batch`. One of your own, in ten lines::

    @register_adv_est("raw")
    def compute_raw_advantage(token_level_rewards, response_mask):
        scores = (token_level_rewards * response_mask).sum(-1, keepdim=True)
        advantages = scores * response_mask
        return advantages, advantages
"""

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple, TypeVar

import torch

from agentrl.config.schema.run import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.plugins.registry import Registry
from agentrl.protocol import DataProto

AdvantageFn = Callable[..., tuple[torch.Tensor, torch.Tensor]]
F = TypeVar("F", bound=AdvantageFn)

_ESTIMATORS: Registry[AdvantageFn] = Registry("advantage estimator", key="algorithm.adv_estimator")


def register_adv_est(name_or_enum: str | Enum) -> Callable[[F], F]:
    """Decorate an estimator, so that `algorithm.adv_estimator` finds it under this name.

    It returns advantages and returns, both `[B, T]`, 0 on masked positions.

    Raises:
        ConfigError: where the name is taken.
    """
    return _ESTIMATORS.register(name_or_enum)


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvantageFn:
    """Find an estimator by name.

    Raises:
        ConfigError: for an unknown name.
    """
    return _ESTIMATORS.get(name_or_enum)


def adv_estimator_names() -> list[str]:
    """Name every registered estimator."""
    return _ESTIMATORS.names


class ColumnNames(NamedTuple):
    """Columns of a batch."""

    tensors: list[str]
    objects: list[str]


def columns_read(data: DataProto, config: AlgorithmConfig) -> ColumnNames:
    """Name what `compute_advantage` reads of a batch.

    An estimator may compare all rows of a batch with each other; where they lie on several ranks,
    these are the columns to bring together. One that takes whatever there is (`batch`,
    `non_tensor_batch`, `**kwargs`) reads them all.

    Raises:
        ConfigError: for an unknown estimator.
    """
    tensors = [] if data.batch is None else list(data.batch.keys())
    parameters = inspect.signature(get_adv_estimator_fn(config.adv_estimator)).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds or parameters.keys() & {"batch", "non_tensor_batch"}:
        return ColumnNames(tensors, list(data.non_tensor_batch))
    wanted = {*parameters, "token_level_scores", "response_mask"}
    if "token_level_rewards" in tensors:
        wanted -= {"token_level_scores"} - parameters.keys()
    objects = ["uid"] if "index" in parameters and "uid" in data.non_tensor_batch else []
    return ColumnNames([name for name in tensors if name in wanted], objects)


def compute_advantage(data: DataProto, config: AlgorithmConfig) -> DataProto:
    """Add `advantages` and `returns` to a scored batch, by the configured estimator.

    Where the batch has no `token_level_rewards` yet (nothing was taken off the scores), they are
    `token_level_scores`.

    Raises:
        ConfigError: for an unknown estimator, one that wants what the batch does not have, or one
            that returns another shape.
    """
    if data.batch is None:
        raise ConfigError("a batch without tensors has no advantages")
    if "token_level_rewards" not in data.batch:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    function = get_adv_estimator_fn(config.adv_estimator)
    wanted = _choose_arguments(function, _gather_arguments(data, config), config.adv_estimator)
    advantages, returns = function(**wanted)
    for name, values in (("advantages", advantages), ("returns", returns)):
        if values.shape != data.batch["response_mask"].shape:
            raise ConfigError(
                f"{config.adv_estimator!r} returned {name} of shape {tuple(values.shape)}",
                expected=f"{tuple(data.batch['response_mask'].shape)}",
            )
        data.batch[name] = values
    return data


def _gather_arguments(data: DataProto, config: AlgorithmConfig) -> dict[str, Any]:
    tensors = {} if data.batch is None else dict(data.batch.items())
    settings = {name: getattr(config, name) for name in type(config).model_fields}
    whole = {"config": config, "batch": data.batch, "non_tensor_batch": data.non_tensor_batch}
    groups = {"index": data.non_tensor_batch["uid"]} if "uid" in data.non_tensor_batch else {}
    return settings | tensors | groups | whole


def _choose_arguments(
    function: AdvantageFn, available: Mapping[str, Any], name: str
) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(available)
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in available:
            raise ConfigError(
                f"{name!r} needs {parameter.name!r}, which the batch does not have",
                key="algorithm.adv_estimator",
                expected=f"parameters among {', '.join(sorted(available))}",
            )
    return {p.name: available[p.name] for p in parameters if p.name in available}
