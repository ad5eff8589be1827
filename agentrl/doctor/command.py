"""The checks of `agentrl doctor`, in their order."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from agentrl.config.schema.run import RunConfig
from agentrl.doctor.cluster import check_cluster
from agentrl.doctor.engine import check_end, check_engine, check_rollout, child_pids
from agentrl.doctor.engine_sync import check_restored, check_sleep, check_sync
from agentrl.doctor.inputs import (
    check_data,
    check_plugins,
    check_preparation,
    check_run_file,
    check_sandboxes,
    check_tool_lives,
)
from agentrl.doctor.log_probs import check_log_probs
from agentrl.doctor.machine import check_device, check_disk, check_machine, check_versions
from agentrl.doctor.memory import check_memory
from agentrl.doctor.model import (
    check_control_tokens,
    check_plausibility,
    check_policy,
    check_sampled_tokens,
    check_tokenizer_files,
)
from agentrl.doctor.report import CheckRunner, Result, Row, SkipCheckError
from agentrl.trainer.setup.datasets import RunData
from agentrl.trainer.setup.huggingface import quiet_libraries
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.preflight import is_made_later
from agentrl.trainer.setup.rollout_setup import RolloutSetup
from agentrl.workers.distributed import stop_world
from agentrl.workers.model import PolicyModel

T = TypeVar("T")


def examine(run_file: Path, overrides: Sequence[str], console: Console) -> list[Row]:
    """Check everything that a run needs, and print a table of it.

    A check is made whenever its inputs exist, even if others failed. Only `prepare` leaves files,
    and no process stays.

    Args:
        run_file: A YAML run file.
        overrides: `section.key=value`.
        console: Prints the table.
    """
    quiet_libraries()
    with ExitStack() as stack:
        stack.callback(stop_world)
        loop = stack.enter_context(asyncio.Runner())
        checks = stack.enter_context(CheckRunner(console))
        checks.run("versions", check_versions)
        checks.run("machine", check_machine)
        config = checks.run("run file", lambda: check_run_file(run_file, overrides))
        targets = check_parts(checks, config, stack)
        check_together(checks, targets, loop, stack)
        return checks.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorTargets:
    """The parts of the run that the checks of the engine use."""

    config: Result[RunConfig]
    """The run; its files go to a temporary folder."""
    plugins: Result[Plugins]
    tokenizer: Result[PreTrainedTokenizerBase]
    setup: Result[RolloutSetup]
    data: Result[RunData]
    policy: Result[PolicyModel]


def check_parts(checks: CheckRunner, config: Result[RunConfig], stack: ExitStack) -> DoctorTargets:
    """Check the parts of a run one by one.

    Args:
        checks: Makes the checks.
        config: The run as the user wrote it.
        stack: Removes what the checks made.
    """
    run = checks.run
    local = run("disk", lambda: check_disk(config.need(), stack))
    world = run("device", lambda: check_device(config.need()))
    run("cluster", lambda: check_cluster(config.need()))
    plugins = run("tools and interactions", lambda: check_plugins(config.need()))
    made = run("prepare", lambda: check_preparation(config.need(), world.need(), plugins))
    tokenizer = run("tokenizer", lambda: check_tokenizer_files(with_model(config.need(), made)))
    probed = run(
        "template: outside text is never a control token",
        lambda: check_control_tokens(after(tokenizer, config.need()), plugins.need()),
    )
    setup = run(
        "template: sampled tokens are kept",
        lambda: check_sampled_tokens(config.need(), plugins.need(), probed.need()),
    )
    data = run("data", lambda: check_data(local.need(), setup.need(), world.need()))
    run("sandbox", lambda: check_sandboxes(config.need(), plugins.need(), data))
    memory = run("memory", lambda: check_memory(after(tokenizer, config.need())))
    policy = run(
        "policy",
        lambda: check_policy(within(memory, after(tokenizer, local.need())), world.need()),
        advice="if memory ran out: a smaller model, or actor.fsdp_config on several devices",
    )
    run(
        "policy and tokenizer",
        lambda: check_plausibility(local.need(), setup.need(), data.need(), policy.need()),
    )
    return DoctorTargets(
        config=local, plugins=plugins, tokenizer=tokenizer, setup=setup, data=data, policy=policy
    )


def check_together(
    checks: CheckRunner, targets: DoctorTargets, loop: asyncio.Runner, stack: ExitStack
) -> None:
    """Check that the parts work together.

    Args:
        checks: Makes the checks.
        targets: The parts.
        loop: The event loop of tools and engine.
        stack: Stops the engine if a check is interrupted.
    """
    run, config, policy = checks.run, targets.config, targets.policy
    run(
        "tools: created and released",
        lambda: check_tool_lives(config.need(), targets.plugins.need(), targets.data.need(), loop),
    )
    before = child_pids()
    engine = run(
        "engine start",
        lambda: check_engine(config.need(), policy.need(), targets.tokenizer.need(), stack, loop),
        advice="try rollout.engine.name=transformers: if it starts, the engine is the cause",
    )
    requests = run(
        "rollout",
        lambda: check_rollout(
            config.need(), targets.setup.need(), targets.data.need(), engine.need(), loop
        ),
        advice="agentrl rollout FILE shows such conversations token by token",
    )
    sync = run(
        "engine sleep and wake",
        lambda: check_sleep(config.need(), policy.need(), engine.need(), requests.need(), loop),
        advice="rollout.free_cache_engine=false keeps the engine awake, if memory allows",
    )
    run(
        "log-probabilities: engine and trainer",
        lambda: check_log_probs(config.need(), policy.need(), requests.need()),
    )
    run(
        "weight sync: every weight changed",
        lambda: check_sync(config.need(), sync.need(), requests.need(), loop),
    )
    run(
        "weight sync: weights restored",
        lambda: check_restored(config.need(), sync.need(), requests.need(), loop),
    )
    run("engine end", lambda: check_end(engine.need(), before, loop))


def with_model(config: RunConfig, made: Result[None]) -> RunConfig:
    """Return the run for a check of its model.

    Raises:
        SkipCheckError: if `prepare` failed before it made the model.
    """
    named = (config.model.path, config.model.tokenizer_path or config.model.path)
    is_missing = any(is_made_later(config, Path(name)) for name in named)
    return after(made, config) if is_missing else config


def after(first: Result[Any], value: T) -> T:
    """Return a value for a check that has no meaning if another check failed.

    Raises:
        SkipCheckError: if it failed.
    """
    first.need()
    return value


def within(memory: Result[None], value: T) -> T:
    """Return a value for a check that loads the model.

    Raises:
        SkipCheckError: if the model does not fit into memory.
    """
    if memory.checked is not None and memory.checked.faults:
        raise SkipCheckError(f"because of {memory.name!r}")
    return value
