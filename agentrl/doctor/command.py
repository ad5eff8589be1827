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
from agentrl.doctor.engine import check_end, check_engine, check_rollout, child_pids
from agentrl.doctor.engine_sync import check_hand_over, check_sync, check_way_back
from agentrl.doctor.inputs import (
    check_data,
    check_plugins,
    check_preparation,
    check_run_file,
    check_tool_lives,
)
from agentrl.doctor.log_probs import check_log_probs
from agentrl.doctor.machine import (
    check_device,
    check_disk,
    check_machine,
    check_versions,
)
from agentrl.doctor.model import (
    check_control_tokens,
    check_plausibility,
    check_policy,
    check_sampled_tokens,
    check_tokenizer_files,
)
from agentrl.doctor.report import Checkup, Result, Row
from agentrl.doctor.sandbox import check_sandboxes
from agentrl.trainer.setup.datasets import RunData
from agentrl.trainer.setup.huggingface import quiet_libraries
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.preflight import is_made_later
from agentrl.trainer.setup.rollout_setup import RolloutSetup
from agentrl.workers.distributed import stop_world
from agentrl.workers.model import PolicyModel

T = TypeVar("T")


def examine(run_file: Path, overrides: Sequence[str], console: Console) -> list[Row]:
    """Look at everything that a run stands on, and show a table of it.

    What can be looked at is, whatever else is wrong. Files are left by `prepare` alone, processes
    by nobody.

    Args:
        run_file: A YAML run file.
        overrides: `section.key=value`.
        console: Where the table goes.
    """
    quiet_libraries()
    with ExitStack() as stack:
        stack.callback(stop_world)
        runner = stack.enter_context(asyncio.Runner())
        checkup = stack.enter_context(Checkup(console))
        checkup.look("versions", check_versions)
        checkup.look("machine", check_machine)
        config = checkup.look("run file", lambda: check_run_file(run_file, overrides))
        parts = look_at_parts(checkup, config, stack)
        look_at_engine(checkup, parts, runner, stack)
        return checkup.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the engine is looked at with."""

    config: Result[RunConfig]
    """The run, writing nowhere that lasts."""
    plugins: Result[Plugins]
    tokenizer: Result[PreTrainedTokenizerBase]
    setup: Result[RolloutSetup]
    data: Result[RunData]
    policy: Result[PolicyModel]


def look_at_parts(checkup: Checkup, config: Result[RunConfig], stack: ExitStack) -> Parts:
    """Look at what a run is made of, one by one.

    Args:
        checkup: Makes the checks.
        config: As the user wrote it.
        stack: Clears away what they made.
    """
    look = checkup.look
    here = look("disk", lambda: check_disk(config.need(), stack))
    world = look("device", lambda: check_device(config.need()))
    plugins = look("tools and users", lambda: check_plugins(config.need()))
    made = look("prepare", lambda: check_preparation(config.need(), world.need(), plugins))
    tokenizer = look("tokenizer", lambda: check_tokenizer_files(with_model(config.need(), made)))
    probed = look(
        "template: outside text is never a control token",
        lambda: check_control_tokens(after(tokenizer, config.need()), plugins.need()),
    )
    setup = look(
        "template: sampled tokens are kept",
        lambda: check_sampled_tokens(config.need(), plugins.need(), probed.need()),
    )
    data = look("data", lambda: check_data(here.need(), setup.need()))
    look("sandbox", lambda: check_sandboxes(config.need(), plugins.need(), data))
    policy = look(
        "policy",
        lambda: check_policy(after(tokenizer, here.need()), world.need()),
        advice="where memory ran out: a smaller model, or actor.fsdp_config on several devices",
    )
    look(
        "policy and tokenizer",
        lambda: check_plausibility(here.need(), setup.need(), data.need(), policy.need()),
    )
    return Parts(
        config=here, plugins=plugins, tokenizer=tokenizer, setup=setup, data=data, policy=policy
    )


def look_at_engine(
    checkup: Checkup, parts: Parts, runner: asyncio.Runner, stack: ExitStack
) -> None:
    """Look at what happens when the parts run together.

    Args:
        checkup: Makes the checks.
        parts: What they are made with.
        runner: The loop that tools and engine live on.
        stack: Stops the engine, should a check be interrupted.
    """
    look, config, policy = checkup.look, parts.config, parts.policy
    look(
        "tools: created and released",
        lambda: check_tool_lives(config.need(), parts.plugins.need(), parts.data.need(), runner),
    )
    before = child_pids()
    engine = look(
        "engine start",
        lambda: check_engine(config.need(), policy.need(), parts.tokenizer.need(), stack, runner),
        advice="rollout.engine.name=transformers shows whether it is the engine or the model",
    )
    requests = look(
        "rollout",
        lambda: check_rollout(
            config.need(), parts.setup.need(), parts.data.need(), engine.need(), runner
        ),
        advice="agentrl rollout FILE shows such conversations token by token",
    )
    engine_sync = look(
        "memory hand-over",
        lambda: check_hand_over(
            config.need(), policy.need(), engine.need(), requests.need(), runner
        ),
        advice="rollout.free_cache_engine=false keeps the engine awake, where memory allows",
    )
    look(
        "log-probabilities: engine and trainer",
        lambda: check_log_probs(config.need(), policy.need(), requests.need()),
    )
    look(
        "weight sync: every weight changed",
        lambda: check_sync(config.need(), engine_sync.need(), requests.need(), runner),
    )
    look(
        "weight sync: put back",
        lambda: check_way_back(config.need(), engine_sync.need(), requests.need(), runner),
    )
    look("engine end", lambda: check_end(engine.need(), before, runner))


def with_model(config: RunConfig, made: Result[None]) -> RunConfig:
    """Give a run to a check of its model, which may have been made by an earlier run.

    Raises:
        SkipCheckError: where `prepare` came to no end, and has yet to make it.
    """
    named = (config.model.path, config.model.tokenizer_path or config.model.path)
    is_missing = any(is_made_later(config, Path(name)) for name in named)
    return after(made, config) if is_missing else config


def after(first: Result[Any], value: T) -> T:
    """Give a value to a check that means nothing where another one came to no end.

    Raises:
        SkipCheckError: where that is so.
    """
    first.need()
    return value
