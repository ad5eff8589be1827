"""What the commands do: from a run file to a finished run."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from agentrl.config import RunConfig, check_config, describe, load_config
from agentrl.engines import Engine, ScriptedEngine
from agentrl.errors import ConfigError, DataError
from agentrl.rewards import make_reward_manager
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.trainer.build import build_parts
from agentrl.trainer.datasets import load_run_data
from agentrl.trainer.engine_choice import build_engine, choose_engine
from agentrl.trainer.journal import Journal
from agentrl.trainer.preparation import prepare_run, warm_up
from agentrl.trainer.rollout_log import save_rollouts
from agentrl.trainer.rollout_setup import (
    RolloutSetup,
    load_plugins,
    load_rollout_setup,
    make_manager,
)
from agentrl.trainer.summary import Summary
from agentrl.trainer.trainer import Trainer
from agentrl.trainer.transcript import print_transcript, read_transcript, token_table
from agentrl.training.distributed import start_world, stop_world
from agentrl.training.model import load_causal_lm
from agentrl.training.rng import seed_everything
from agentrl.training.tokenizer import check_tokenizer


def train_from_file(run_file: Path, overrides: Sequence[str]) -> Summary:
    """Prepare what is missing, train, and say what came of it."""
    config = load_config(run_file, overrides)
    world = start_world(config.trainer.device)
    journal = Journal(config.trainer, is_main=world.is_main)
    try:
        for note in check_config(config, world_size=world.size, file=run_file):
            journal.say(f"note: {note}")
        tools, _ = load_plugins(config)
        seconds = prepare_run(config.prepare, world, journal, tools)
        trainer = Trainer(config, build_parts(config, journal))
        trainer.note_preparation(seconds)
        summary = trainer.fit()
        journal.say(summary.in_words(trainer.folder))
        return summary
    finally:
        stop_world()


def sft_from_file(run_file: Path, overrides: Sequence[str]) -> None:
    """Run a run file's supervised warm-up, and what it needs before it."""
    config = load_config(run_file, overrides)
    sft = config.prepare.sft
    if sft is None:
        raise ConfigError(
            "there is nothing to train", file=run_file, key="prepare.sft", expected="its settings"
        )
    world = start_world(config.trainer.device)
    journal = Journal(config.trainer, is_main=world.is_main)
    try:
        tools, _ = load_plugins(config)
        prepare_run(config.prepare.model_copy(update={"sft": None}), world, journal, tools)
        warm_up(sft, world, journal)
    finally:
        stop_world()


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOptions:
    """What `agentrl rollout` shows."""

    num: int = 2
    """Prompts."""
    split: str = "train"
    """`train`, or the name of a validation set."""
    greedy: bool = False
    """Sample as validation does."""
    tokens: bool = False
    """Add a table of every token."""
    out: Path | None = None
    """Also save the rollouts here."""


def rollout_from_file(
    run_file: Path, overrides: Sequence[str], options: RolloutOptions, console: Console
) -> list[AsyncRolloutRequest]:
    """Roll out a few prompts without training, and show every token of them."""
    config = load_config(run_file, overrides)
    check_config(config, file=run_file)
    seed_everything(config.trainer.seed)
    setup = load_rollout_setup(config)
    data = load_run_data(config, setup)
    sets = {"train": data.train, **data.val}
    if options.split not in sets:
        raise DataError(f"no split {options.split!r}", expected=f"one of {', '.join(sets)}")
    engine = load_engine(config, setup)
    manager = make_manager(config, setup, engine)
    plan = manager.val_plan(options.split) if options.greedy else manager.train_plan()
    requests = manager.make_requests(sets[options.split][: options.num], plan)

    async def roll_out() -> list[AsyncRolloutRequest]:
        try:
            finished = await manager.rollout(requests)
            await make_reward_manager(config.reward).score(finished)
            return finished
        finally:
            await engine.close()

    finished = asyncio.run(roll_out())
    show_rollouts(finished, setup, options, console)
    return finished


def load_engine(config: RunConfig, setup: RolloutSetup) -> Engine:
    """Load the configured engine with the model's own weights, no trainer beside it."""
    if choose_engine(config) == "scripted":
        answers = config.rollout.engine.scripted.answers
        return ScriptedEngine(answers, tokenizer=setup.tokenizer)
    model = load_causal_lm(config.model)
    check_tokenizer(setup.tokenizer, model.config)
    return build_engine(config, model, setup.tokenizer)


def show_rollouts(
    finished: Sequence[AsyncRolloutRequest],
    setup: RolloutSetup,
    options: RolloutOptions,
    console: Console,
) -> None:
    """Print conversations token by token, and save them where that is asked for."""
    for request in finished:
        transcript = read_transcript(request, setup.template.decode)
        print_transcript(console, transcript)
        if options.tokens:
            console.print(token_table(transcript))
    if options.out is not None:
        save_rollouts(options.out, finished, step=0)
        console.print(f"saved {len(finished)} rollouts to {options.out}", markup=False)


def explain_config(run_file: Path, overrides: Sequence[str], console: Console) -> None:
    """Check a run file and print what it means (`agentrl config check`)."""
    config = load_config(run_file, overrides)
    notes = check_config(config, file=run_file)
    console.print(describe(config), markup=False, highlight=False)
    for note in notes:
        console.print(f"note: {note}", markup=False)
    tools, interactions = load_plugins(config)
    console.print(f"tools: {', '.join(tool.name for tool in tools) or 'none'}", markup=False)
    console.print(f"interactions: {', '.join(interactions) or 'none'}", markup=False)
    if not Path(config.model.tokenizer_path or config.model.path).is_dir():
        console.print(f"chat template: not looked at: {config.model.path} is not there yet")
        return
    setup = load_rollout_setup(config)
    table = Table("chat template", "finding", show_lines=False)
    for what, finding in setup.report.describe():
        table.add_row(what, finding)
    console.print(table, markup=False)
