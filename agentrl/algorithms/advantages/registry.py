"""The registry of advantage estimators, and the call of one on a batch.

The names of an estimator's arguments select what it gets: columns of the batch
(`token_level_rewards`, `response_mask`, `values`, `turn_ids`, ...), `index` (the group of each
row), settings of `algorithm` (`gamma`, `norm_adv_by_std_in_grpo`, ...), `config` (all these
settings), `batch` and `non_tensor_batch`. A user's estimator in ten lines::

    @register_adv_est("raw")
    def compute_raw_advantage(token_level_rewards, response_mask):
        scores = (token_level_rewards * response_mask).sum(-1, keepdim=True)
        advantages = scores * response_mask
        return advantages, advantages
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from agentrl.algorithms.trajectories import TRAJECTORY_IDS, join_trajectories
from agentrl.config.schema.training import AlgorithmConfig
from agentrl.errors import ConfigError
from agentrl.plugins.registry import Registry
from agentrl.protocol import DataProto

AdvantageFn = Callable[..., tuple[torch.Tensor, torch.Tensor]]
F = TypeVar("F", bound=AdvantageFn)

RewardUnit = Literal["row", "turn", "token", "named"]
"""What an estimator sums rewards over; `named`: it reads single rewards of the scorer instead."""


class EstimatorFacts(NamedTuple):
    """What the checks of a run file need to know about an estimator."""

    parameters: frozenset[str]
    """Names of its arguments: columns of the batch, and settings of `algorithm`."""
    reads: frozenset[str] | None
    """Keys of the run file that it reads; None: unknown."""
    reward_unit: RewardUnit
    by_position: bool = False
    """Whether it compares tokens by their positions in rows, masked tokens included."""


_ESTIMATORS: Registry[AdvantageFn] = Registry("advantage estimator", key="algorithm.adv_estimator")
_FACTS: dict[str, EstimatorFacts] = {}


def register_adv_est(
    name_or_enum: str | Enum,
    *,
    reads: Iterable[str] | None = None,
    reward_unit: RewardUnit = "token",
    by_position: bool = False,
) -> Callable[[F], F]:
    """Decorate an estimator, so that `algorithm.adv_estimator` finds it under this name.

    The estimator returns advantages and returns, both `[B, T]`, 0 on masked positions.

    Args:
        name_or_enum: The name in the run file.
        reads: Settings of `algorithm` that it reads from its argument `config`, by their names.
            Settings that are arguments themselves need no declaration. None: if it takes `config`,
            what it reads is unknown, and no setting is reported as unused.
        reward_unit: What it sums rewards over.
        by_position: Whether it compares tokens by their positions in rows, masked tokens included.
            Then it refuses trajectories of several rows.

    Raises:
        ConfigError: if another estimator has the name.
    """

    def put(function: F) -> F:
        registered = _ESTIMATORS.register(name_or_enum)(function)
        name = str(name_or_enum.value) if isinstance(name_or_enum, Enum) else name_or_enum
        _FACTS[name] = _read_facts(function, reads, reward_unit)._replace(by_position=by_position)
        return registered

    return put


def _read_facts(
    function: AdvantageFn, reads: Iterable[str] | None, reward_unit: RewardUnit
) -> EstimatorFacts:
    parameters = inspect.signature(function).parameters
    settings = {*AlgorithmConfig.model_fields} & {*parameters, *(reads or ())}
    is_open = "config" in parameters or _takes_everything(parameters.values())
    keys = None if reads is None and is_open else {f"algorithm.{name}" for name in settings}
    return EstimatorFacts(
        frozenset(parameters), None if keys is None else frozenset(keys), reward_unit
    )


def estimator_facts(name: str) -> EstimatorFacts:
    """Return what the checks of a run file need to know about an estimator.

    Raises:
        ConfigError: for an unknown name.
    """
    get_adv_estimator_fn(name)
    return _FACTS[name]


def get_adv_estimator_fn(name_or_enum: str | Enum) -> AdvantageFn:
    """Find an estimator by name.

    Raises:
        ConfigError: for an unknown name.
    """
    return _ESTIMATORS.get(name_or_enum)


def adv_estimator_names() -> list[str]:
    """List the names of all registered estimators."""
    return _ESTIMATORS.names


class ColumnNames(NamedTuple):
    """Columns of a batch."""

    tensors: list[str]
    objects: list[str]


def columns_read(data: DataProto, config: AlgorithmConfig) -> ColumnNames:
    """List the columns of a batch that `compute_advantage` reads.

    An estimator may compare all rows of a batch with each other. If these are on several ranks,
    these columns must be gathered. An estimator that takes `batch`, `non_tensor_batch` or
    `**kwargs` reads them all.

    Raises:
        ConfigError: for an unknown estimator.
    """
    tensors = [] if data.batch is None else list(data.batch.keys())
    parameters = inspect.signature(get_adv_estimator_fn(config.adv_estimator)).parameters
    whole = parameters.keys() & {"batch", "non_tensor_batch"}
    if whole or _takes_everything(parameters.values()):
        return ColumnNames(tensors, list(data.non_tensor_batch))
    wanted = {*parameters, "token_level_scores", "response_mask", TRAJECTORY_IDS}
    if "token_level_rewards" in tensors:
        wanted -= {"token_level_scores"} - parameters.keys()
    objects = ["uid"] if "index" in parameters and "uid" in data.non_tensor_batch else []
    return ColumnNames([name for name in tensors if name in wanted], objects)


def compute_advantage(data: DataProto, config: AlgorithmConfig) -> DataProto:
    """Add `advantages` and `returns` to a scored batch, by the configured estimator.

    If the batch has no `token_level_rewards` (no KL was subtracted), they are
    `token_level_scores`. The rows of one trajectory are one row for the estimator
    (`join_trajectories`).

    Raises:
        ConfigError: for an unknown estimator, for an argument that the batch does not have, for a
            result of another shape, and for trajectories of several rows if the estimator compares
            tokens by position.
    """
    if data.batch is None:
        raise ConfigError("cannot compute advantages: the batch has no tensors")
    if "token_level_rewards" not in data.batch:
        data.batch["token_level_rewards"] = data.batch["token_level_scores"]
    if (joined := join_trajectories(data)) is not None:
        if estimator_facts(config.adv_estimator).by_position:
            raise ConfigError(
                f"{config.adv_estimator!r} compares tokens by their positions in sequences, and a "
                "trajectory has several sequences (compaction, sub-agents, rewritten history)",
                key="algorithm.adv_estimator",
                expected="another estimator, such as tir_optimal_token_baseline",
            )
        compute_advantage(joined.data, config)
        joined.copy_back(data, ("advantages", "returns"))
        return data
    function = get_adv_estimator_fn(config.adv_estimator)
    settings = {name: getattr(config, name) for name in type(config).model_fields}
    groups = {"index": data.non_tensor_batch["uid"]} if "uid" in data.non_tensor_batch else {}
    whole = {"config": config, "batch": data.batch, "non_tensor_batch": data.non_tensor_batch}
    available = settings | dict(data.batch.items()) | groups | whole
    advantages, returns = function(**_choose_arguments(function, available, config.adv_estimator))
    for name, values in (("advantages", advantages), ("returns", returns)):
        if values.shape != data.batch["response_mask"].shape:
            raise ConfigError(
                f"{config.adv_estimator!r} returned {name} of shape {tuple(values.shape)}",
                expected=f"{tuple(data.batch['response_mask'].shape)}",
            )
        data.batch[name] = values
    return data


def _choose_arguments(
    function: AdvantageFn, available: Mapping[str, Any], name: str
) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    if _takes_everything(parameters):
        return dict(available)
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in available:
            raise ConfigError(
                f"{name!r} needs {parameter.name!r}, which the batch does not have",
                key="algorithm.adv_estimator",
                expected=f"parameters among {', '.join(sorted(available))}",
            )
    return {p.name: available[p.name] for p in parameters if p.name in available}


def _takes_everything(parameters: Iterable[inspect.Parameter]) -> bool:
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
