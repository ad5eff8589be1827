"""Make what a run file's `prepare` names and is not there yet: data, policy, warm-up."""

import hashlib
import time
from datetime import datetime
from pathlib import Path

from agentrl.config.schema import PrepareConfig, RunConfig, SftConfig
from agentrl.data.prepare import prepare_arithmetic, prepare_gsm8k
from agentrl.data.prepare.manifest import make_once
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
    if config.arithmetic is not None:
        made = prepare_arithmetic(config.arithmetic).made
        _tell(journal, "problems", config.arithmetic.out_dir, made=made)
    if config.gsm8k is not None:
        made = prepare_gsm8k(config.gsm8k).made
        _tell(journal, "GSM8K", config.gsm8k.out_dir, made=made)
    if config.tiny_policy is not None:
        schemas = [tool.tool_schema for tool in tools]
        made = make_tiny_policy(config.tiny_policy, tools=schemas)
        _tell(journal, "policy", config.tiny_policy.out_dir, made=made)


def _tell(journal: Journal, what: str, folder: Path, *, made: bool) -> None:
    journal.say(f"{what}: {folder}{'' if made else ', made before'}")


def warm_up(
    run: RunConfig, config: SftConfig, world: World, journal: Journal, *, now: datetime
) -> None:
    """Run the supervised warm-up on all ranks, unless its result is there.

    Whether it is missing is for the main rank to say; the others wait for its word.
    """
    if world.is_main:
        put_back_replaced(config.out_dir)
    was_there = (config.out_dir / "manifest.json").is_file()

    def train() -> None:
        if was_there:
            journal.say(f"{config.out_dir}: made anew, its settings or inputs have changed")
        world.broadcast(True)
        _train(run, config, world, journal, now=now)

    if not world.is_main:
        if world.broadcast(False):
            _train(run, config, world, journal, now=now)
        return
    files = [config.out_dir / "config.json", config.out_dir / "model.safetensors"]
    arguments = config.model_dump(mode="json", exclude={"out_dir"})
    # The warm-up shares the run's model settings and template: with others it is another one.
    arguments["model"] = run.model.model_dump(mode="json", exclude={"path"})
    arguments["template_kwargs"] = run.data.apply_chat_template_kwargs
    arguments["of"] = [_digest(config.train_file), _digest(Path(config.model_path))]
    if not make_once(config.out_dir, "sft/1", arguments, files, train):
        world.broadcast(False)
        _tell(journal, "warmed-up policy", config.out_dir, made=False)


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


def _digest(path: Path) -> str:
    """Hash of a file, or of a model folder's weights; a hub's name stands for itself."""
    file = path / "model.safetensors" if path.is_dir() else path
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else str(path)
