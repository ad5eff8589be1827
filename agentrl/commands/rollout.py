"""`agentrl rollout`: roll out a few prompts without training, and show every token."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from torch import nn

from agentrl.commands.run_file import RunFile
from agentrl.commands.train import PreparedRun, open_run
from agentrl.config import RunConfig
from agentrl.data.rows import Prompt
from agentrl.engines import Engine
from agentrl.errors import DataError
from agentrl.rewards import drive_and_score
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.interruption import Interruption
from agentrl.trainer.rollouts.files import save_rollouts
from agentrl.trainer.rollouts.transcript import print_transcript, read_transcript, token_table
from agentrl.trainer.setup.datasets import RunData, load_run_data
from agentrl.trainer.setup.engine_factory import (
    announce_start,
    build_engine,
    build_scripted_engine,
    check_model_config,
    check_sampled,
    choose_engine,
)
from agentrl.trainer.setup.preflight import claim_file, claim_prepared
from agentrl.trainer.setup.prepare import prepare_run
from agentrl.trainer.setup.rollout_setup import (
    RolloutSetup,
    make_manager,
    make_rollout_setup,
    probe_model,
)
from agentrl.workers.distributed import World
from agentrl.workers.load import load_causal_lm, load_hf_config, resolve_dtype
from agentrl.workers.rng import seed_everything
from agentrl.workers.tokenizer import check_tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """The options of `agentrl rollout`."""

    num: int = 2
    """Number of prompts."""
    samples: int = 1
    """Samples of each prompt."""
    split: str = "train"
    """`train`, or the name of a validation set."""
    greedy: bool = False
    """Sample as validation does."""
    tokens: bool = False
    """Add a table of every token."""
    out: Path | None = None
    """File to save the rollouts to."""


def rollout_from_file(
    file: RunFile, options: RolloutOptions, console: Console
) -> list[AsyncRolloutRequest]:
    """Roll out a few prompts without training, and show every token.

    Failed requests are shown too, with their error.

    Raises:
        DataError: for a split that the run file does not have.
    """
    with open_run(file, console) as run:
        if options.out is not None:
            claim_file(options.out, key="--out")
        claim_prepared(run.config)
        config, now = allow_failures(run.config), datetime.now()
        prepare_run(config, run.world, run.run_logger, run.plugins.tools, now=now)
        if config.reward.model is not None:
            run.run_logger.notes(["reward.model scores in training runs, not in this command"])
        seed_everything(config.trainer.seed)
        setup = make_rollout_setup(config, run.plugins, probe_model(config, run.plugins, now=now))
        prompts = choose_prompts(load_run_data(config, setup), options)
        run.run_logger.info(*announce_start(config))
        engine = load_engine(config, setup, run.world)
        manager = make_manager(config, setup, engine)
        plan = manager.val_plan(options.split) if options.greedy else manager.train_plan()
        plan = plan._replace(name=options.split, n=options.samples)
        requests = manager.make_requests(prompts, plan)
        stopping = Interruption(run.world, consequence="nothing is shown or saved")
        with stopping.listening() as interruption, asyncio.Runner() as runner:
            finished = interruption.run(runner, roll_out(run, manager, requests))
        for request in finished:
            transcript = read_transcript(request, setup.template.decode, config.reward)
            print_transcript(console, transcript)
            if options.tokens:
                console.print(token_table(transcript))
        if options.out is not None:
            save_rollouts(options.out, finished, step=0, reward=config.reward)
            text = f"saved {len(finished)} rollouts to {options.out}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        return finished


def allow_failures(config: RunConfig) -> RunConfig:
    """Allow any number of requests to fail."""
    allowed = {"policy": "mask", "max_failed_frac": 1.0, "max_failed_calls_frac": 1.0}
    failure = config.rollout.failure.model_copy(update=allowed)
    rollout = config.rollout.model_copy(update={"failure": failure})
    return config.model_copy(update={"rollout": rollout})


def choose_prompts(data: RunData, options: RolloutOptions) -> Sequence[Prompt]:
    """Return the first prompts of the chosen split.

    Raises:
        DataError: for a split that the run file does not have.
    """
    sets = {"train": data.train, **data.val}
    if not sets.get(options.split):
        known = [name for name, rows in sets.items() if rows]
        raise DataError(f"no rows of a split {options.split!r}", expected=f"one of {known}")
    return sets[options.split][: options.num]


def load_engine(config: RunConfig, setup: RolloutSetup, world: World) -> Engine:
    """Load the configured engine with the model's weights, without a trainer."""
    if choose_engine(config) == "scripted":
        return build_scripted_engine(config, setup.tokenizer)
    hf_config = load_hf_config(config.model)
    check_tokenizer(setup.tokenizer, hf_config)
    check_model_config(config, hf_config)
    check_sampled(config, hf_config)
    model = load_causal_lm(config.model)
    nn.Module.to(model, device=world.device, dtype=resolve_dtype(config.model, world.device))
    return build_engine(config, model, setup.tokenizer, device=world.device)


async def roll_out(
    run: PreparedRun, manager: RolloutManager, requests: Sequence[AsyncRolloutRequest]
) -> list[AsyncRolloutRequest]:
    """Run requests to their ends, score them, and close plug-ins and engine."""
    try:
        with run.run_logger.requests_bar("rollout", len(requests)) as count:
            finished = await drive_and_score(
                manager, run.plugins.rewards, requests, on_finished=count
            )
        manager.apply_failure_policy(finished)
        return finished
    finally:
        await run.plugins.shutdown()
        await manager.context.engine.close()
