"""Make what a run file's `prepare` names and is not there yet: data, policy, warm-up."""

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from agentrl.config.schema import PrepareConfig, RunConfig, SftConfig
from agentrl.data.prepare import prepare_arithmetic, prepare_gsm8k
from agentrl.data.prepare.manifest import content_of, is_made, is_unfinished, make_once
from agentrl.tools import BaseTool
from agentrl.trainer.journal import Journal
from agentrl.training.distributed import World
from agentrl.training.folders import put_back_replaced
from agentrl.training.sft import SftStep, run_sft
from agentrl.training.tiny_policy import make_tiny_policy


def prepare_run(
    config: RunConfig, world: World, journal: Journal, tools: list[BaseTool], *, now: datetime
) -> float:
    """Make what is missing, in the order of the file; what is there already is left alone.

    Args:
        config: The run, whose model settings and template the warm-up shares.
        world: The ranks; files are made by the main one.
        journal: Told what was made.
        tools: The run's tools: a small policy's tokenizer knows their schemas.
        now: The run's date, for templates that write one.

    Returns:
        The seconds that it took.
    """
    started = time.monotonic()
    world.board.note("the making of data and policy")
    with world.agreeing():
        if world.is_main:
            _prepare_files(config.prepare, journal, tools)
    if config.prepare.sft is not None:
        world.board.note("the warm-up")
        warm_up(config, config.prepare.sft, world, journal, now=now)
    return time.monotonic() - started


def _prepare_files(config: PrepareConfig, journal: Journal, tools: list[BaseTool]) -> None:
    if (problems := config.arithmetic) is not None:
        _make(journal, "problems", problems.out_dir, lambda: prepare_arithmetic(problems).made)
    if (gsm8k := config.gsm8k) is not None:
        _make(journal, "GSM8K", gsm8k.out_dir, lambda: prepare_gsm8k(gsm8k).made)
    if (policy := config.tiny_policy) is not None:
        schemas = [tool.tool_schema for tool in tools]
        _make(journal, "policy", policy.out_dir, lambda: make_tiny_policy(policy, tools=schemas))


def _make(journal: Journal, what: str, folder: Path, make: Callable[[], bool]) -> None:
    """Make what is missing in a folder, and tell whether anything was."""
    why = _why_anew(folder)
    if not make():
        journal.say(f"{what}: {folder}, made before")
    else:
        journal.say(f"{what}: {folder}{why}")


def _why_anew(folder: Path) -> str:
    """Say why what a folder holds would be made anew; empty where nothing was made there."""
    if is_unfinished(folder):
        return ", made anew: it was not finished"
    return ", made anew: its settings or inputs have changed" if is_made(folder) else ""


def warm_up(
    run: RunConfig, config: SftConfig, world: World, journal: Journal, *, now: datetime
) -> None:
    """Run the supervised warm-up on all ranks, unless its result is there.

    Whether it is missing is for the main rank to say; the others wait for its word.
    """
    if world.is_main:
        put_back_replaced(config.out_dir)
    why = _why_anew(config.out_dir)

    def train() -> None:
        if why:
            journal.say(f"warmed-up policy: {config.out_dir}{why}")
        world.broadcast(True)
        _train(run, config, world, journal, now=now)

    if not world.is_main:
        if world.broadcast(False):
            _train(run, config, world, journal, now=now)
        return
    files = [config.out_dir / "config.json", config.out_dir / "model.safetensors"]
    arguments = config.model_dump(
        mode="json", exclude={"out_dir", "model_path", "train_file", "tool_config_path"}
    )
    # The warm-up shares the run's model settings and template: with others it is another one.
    arguments["model"] = run.model.model_dump(mode="json", exclude={"path"})
    arguments["template_kwargs"] = run.data.apply_chat_template_kwargs
    inputs = (config.train_file, config.model_path, config.tool_config_path)
    arguments["of"] = [content_of(path) for path in inputs if path is not None]
    if not make_once(config.out_dir, "sft/1", arguments, files, train):
        world.broadcast(False)
        journal.say(f"warmed-up policy: {config.out_dir}, made before")


def _train(
    run: RunConfig, config: SftConfig, world: World, journal: Journal, *, now: datetime
) -> None:
    started = time.monotonic()
    with journal.bar("warm-up", config.steps) as advance:

        def on_step(step: SftStep) -> None:
            advance(1)
            if step.step % max(1, config.steps // 4) == 0:
                journal.say(f"  warm-up step {step.step}: loss {step.loss:.3f}")

        result = run_sft(
            config,
            world,
            model=run.model,
            template_kwargs=run.data.apply_chat_template_kwargs,
            now=now,
            on_step=on_step,
        )
    journal.say(
        f"warmed-up policy: {config.out_dir}, {result.num_conversations} conversations, "
        f"{time.monotonic() - started:.0f} s"
    )
