"""What the commands do: from a run file to a finished run."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from agentrl.commands.run_file import RunFile
from agentrl.config import RunConfig, check_model_length, comment, describe, naming_origin
from agentrl.config.problems import naming_file
from agentrl.config.schema.reward import RewardConfig
from agentrl.data.rows import Prompt
from agentrl.engines import Engine
from agentrl.errors import ConfigError, DataError
from agentrl.rewards import drive_and_score
from agentrl.rollout.manager import RolloutManager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates import TemplateReport
from agentrl.trainer.components import check_names_and_engine, prepare_components
from agentrl.trainer.interruption import Interruption
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.rollouts.files import save_rollouts
from agentrl.trainer.rollouts.transcript import print_transcript, read_transcript, token_table
from agentrl.trainer.setup.datasets import RunData, load_run_data
from agentrl.trainer.setup.engine_factory import (
    announce_start,
    build_engine,
    build_scripted_engine,
    choose_engine,
)
from agentrl.trainer.setup.huggingface import quiet_libraries
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.preflight import (
    claim_file,
    claim_prepared,
    is_made_later,
    with_absolute_paths,
)
from agentrl.trainer.setup.prepare import prepare_run
from agentrl.trainer.setup.rollout_setup import (
    RolloutSetup,
    make_manager,
    make_rollout_setup,
    probe_model,
)
from agentrl.trainer.state.summary import Summary
from agentrl.trainer.trainer import Trainer
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.model import load_causal_lm, load_hf_config, resolve_dtype
from agentrl.workers.rng import seed_everything
from agentrl.workers.tokenizer import check_tokenizer


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run file, read and checked, among its ranks."""

    config: RunConfig
    world: World
    run_logger: RunLogger
    plugins: Plugins


@contextmanager
def open_run(file: RunFile, console: Console | None = None) -> Iterator[PreparedRun]:
    """Join the ranks of a run for the `with` block, after the checks that need torch."""
    quiet_libraries()
    config = with_absolute_paths(file.config)
    world = start_world(config.trainer.device, timeout_s=config.trainer.collective_timeout_s)
    run_logger = RunLogger(config.trainer, is_main=world.is_main, console=console)
    try:
        if file.report is not None:
            run_logger.info(f"{file.path}: {file.report.summarize()}")
        run_logger.info(*(f"note: {note}" for note in file.notes))
        with world.status.explain_errors():
            with naming_origin(file.overrides, file.report), naming_file(file.path):
                check_names_and_engine(config, purpose=file.purpose)
            yield PreparedRun(
                config=config, world=world, run_logger=run_logger, plugins=file.plugins
            )
    finally:
        run_logger.close()
        stop_world()


def train_from_file(file: RunFile) -> Summary:
    """Prepare what is missing, train, and say what came of it."""
    with open_run(file) as run:
        parts = prepare_components(run.config, run.world, run.run_logger, run.plugins)
        trainer = Trainer(run.config, parts)
        summary = trainer.fit()
        run.run_logger.info(summary.describe(trainer.folder))
        return summary


def sft_from_file(file: RunFile) -> None:
    """Run a run file's supervised warm-up, and what it needs before it."""
    with open_run(file) as run:
        prepare = run.config.prepare
        if prepare.sft is None:
            raise ConfigError(
                "the file has no warm-up",
                file=file.path,
                key="prepare.sft",
                expected="model_path, train_file, out_dir",
            )
        claim_prepared(run.config)
        with run.world.raise_on_all_ranks():
            run.run_logger.lock_folder()
        now = datetime.now()
        prepare_run(run.config, run.world, run.run_logger, run.plugins.tools, now=now)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What `agentrl rollout` shows."""

    num: int = 2
    """Prompts."""
    samples: int = 1
    """Of each prompt."""
    split: str = "train"
    """`train`, or the name of a validation set."""
    greedy: bool = False
    """Sample as validation does."""
    tokens: bool = False
    """Add a table of every token."""
    out: Path | None = None
    """Also save the rollouts here."""


def rollout_from_file(
    file: RunFile, options: RolloutOptions, console: Console
) -> list[AsyncRolloutRequest]:
    """Roll out a few prompts without training, and show every token of them.

    A request that fails is shown like the others, with what it says: it is what one came to see.
    """
    with open_run(file, console) as run:
        if options.out is not None:
            claim_file(options.out, key="--out")
        claim_prepared(run.config)
        config = showing_failures(run.config)
        now = datetime.now()
        prepare_run(config, run.world, run.run_logger, run.plugins.tools, now=now)
        seed_everything(config.trainer.seed)
        setup = make_rollout_setup(config, run.plugins, probe_model(config, run.plugins, now=now))
        prompts = choose_prompts(load_run_data(config, setup), options)
        run.run_logger.info(*announce_start(config))
        engine = load_engine(config, setup, run.world)
        manager = make_manager(config, setup, engine)
        plan = manager.val_plan(options.split) if options.greedy else manager.train_plan()
        requests = manager.make_requests(
            prompts, plan._replace(name=options.split, n=options.samples)
        )
        stopping = Interruption(run.world, fate="nothing is shown or saved")
        with stopping.listening() as interruption, asyncio.Runner() as runner:
            rolled_out = roll_out(manager, requests, run.plugins, run.run_logger)
            finished = interruption.run(runner, rolled_out)
        show_rollouts(finished, setup, options, config.reward, console)
        return finished


def showing_failures(config: RunConfig) -> RunConfig:
    """Let failed requests pass, however many they are."""
    allowed = {"policy": "mask", "max_failed_frac": 1.0, "max_failed_calls_frac": 1.0}
    failure = config.rollout.failure.model_copy(update=allowed)
    rollout = config.rollout.model_copy(update={"failure": failure})
    return config.model_copy(update={"rollout": rollout})


def choose_prompts(data: RunData, options: RolloutOptions) -> Sequence[Prompt]:
    """Take the first prompts of the chosen split.

    Raises:
        DataError: for a split that the run file does not have.
    """
    sets = {"train": data.train, **data.val}
    if not sets.get(options.split):
        there = [name for name, rows in sets.items() if rows]
        raise DataError(f"no rows of a split {options.split!r}", expected=f"one of {there}")
    return sets[options.split][: options.num]


def load_engine(config: RunConfig, setup: RolloutSetup, world: World) -> Engine:
    """Load the configured engine with the model's own weights, no trainer beside it."""
    if choose_engine(config) == "scripted":
        return build_scripted_engine(config, setup.tokenizer)
    model = load_causal_lm(config.model)
    check_tokenizer(setup.tokenizer, model.config)
    check_model_length(config, model.config.max_position_embeddings)
    nn.Module.to(model, device=world.device, dtype=resolve_dtype(config.model, world.device))
    return build_engine(config, model, setup.tokenizer, device=world.device)


async def roll_out(
    manager: RolloutManager,
    requests: Sequence[AsyncRolloutRequest],
    plugins: Plugins,
    run_logger: RunLogger,
) -> list[AsyncRolloutRequest]:
    """Drive requests to their ends, score them, and close plug-ins and engine."""
    try:
        with run_logger.bar("rollout", len(requests)) as advance:
            finished = await drive_and_score(
                manager, plugins.rewards, requests, on_finished=lambda _: advance(1)
            )
        manager.apply_failure_policy(finished)
        return finished
    finally:
        await plugins.shutdown()
        await manager.context.engine.close()


def show_rollouts(
    finished: Sequence[AsyncRolloutRequest],
    setup: RolloutSetup,
    options: RolloutOptions,
    reward: RewardConfig,
    console: Console,
) -> None:
    """Print conversations token by token, and save them where that is asked for."""
    for request in finished:
        transcript = read_transcript(request, setup.template.decode, reward)
        print_transcript(console, transcript)
        if options.tokens:
            console.print(token_table(transcript))
    if options.out is not None:
        save_rollouts(options.out, finished, step=0, reward=reward)
        _say(console, f"saved {len(finished)} rollouts to {options.out}")


def explain_config(file: RunFile, console: Console) -> None:
    """Print what a checked run file means (`agentrl config check`)."""
    quiet_libraries()
    config, plugins = file.config, file.plugins
    if file.report is not None:
        _say(console, comment(file.report))
    _say(console, describe(config))
    with naming_origin(file.overrides, file.report), naming_file(file.path):
        notes = [*file.notes, *check_names_and_engine(config, starts_here=False)]
    for note in notes:
        _say(console, f"note: {note}")
    _say(console, f"tools: {', '.join(tool.name for tool in plugins.tools) or 'none'}")
    _say(console, f"interactions: {', '.join(plugins.interactions) or 'none'}")
    model = Path(config.model.tokenizer_path or config.model.path)
    files = [*config.data.train_files, *config.data.val_files.values()]
    if missing := [path for path in (model, *files) if is_made_later(config, path)]:
        made = ", ".join(map(str, missing))
        return _say(console, f"template and data: not looked at, `prepare` has yet to make {made}")
    if (Path(config.model.path) / "config.json").is_file():
        positions = load_hf_config(config.model).max_position_embeddings
        check_model_length(config, positions, file=file.path)
    probed = probe_model(config, plugins)
    console.print(_template_table(probed.report))
    setup = make_rollout_setup(config, plugins, probed)
    return _explain_data(load_run_data(config, setup), console)


def _template_table(report: TemplateReport) -> Table:
    table = Table("chat template", "finding", show_lines=False)
    for what, finding in report.describe():
        table.add_row(what, Text(finding))
    return table


def _explain_data(data: RunData, console: Console) -> None:
    for note in data.notes:
        _say(console, f"note: {note}")
    for name, rows in {"train": data.train, **data.val}.items():
        _say(console, f"rows of {name}: {len(rows)}")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
