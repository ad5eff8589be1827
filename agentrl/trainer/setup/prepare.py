"""Prepare what a run file's `prepare` names and is missing: data, policy, warm-up."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

from agentrl.atomic_io import restore_replaced
from agentrl.config.schema.prepare import PrepareConfig, SftConfig
from agentrl.config.schema.run import RunConfig
from agentrl.data.prepare.geometry3k import prepare_geometry3k
from agentrl.data.prepare.gsm8k import prepare_gsm8k
from agentrl.data.prepare.manifest import content_of, is_unfinished, make_once, must_make
from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.quickstart.arithmetic import prepare_arithmetic
from agentrl.quickstart.pictures import prepare_pictures
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.tools import BaseTool, load_all_tools
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.workers.distributed import World
from agentrl.workers.sft import SftStep, run_sft
from agentrl.workers.snapshot import on_main

_SFT = "sft/2"
"""Name and version of the warm-up in its folder's manifest."""


def prepare_run(
    config: RunConfig, world: World, run_logger: RunLogger, tools: list[BaseTool], *, now: datetime
) -> float:
    """Make what is missing, in the order of the file; keep what exists.

    Args:
        config: The run; the warm-up uses its model settings and its chat template.
        world: The ranks; the main rank writes the files.
        run_logger: Reports what was made.
        tools: The run's tools; the tokenizer of a small policy is trained on their schemas.
        now: The run's date, for templates that write a date.

    Returns:
        The seconds that it took.
    """
    started = time.monotonic()
    world.status.enter("the making of data and policy")
    with world.raise_on_all_ranks():
        if world.is_main:
            _prepare_files(config.prepare, run_logger, tools)
    if config.prepare.sft is not None:
        world.status.enter("the warm-up")
        warm_up(config, config.prepare.sft, world, run_logger, tools, now=now)
    return time.monotonic() - started


def _prepare_files(config: PrepareConfig, run_logger: RunLogger, tools: list[BaseTool]) -> None:
    def make(what: str, folder: Path, make: Callable[[], bool], *, downloads: bool = False) -> None:
        reason = _describe_remake(folder)
        # A download has a bar of its own.
        with nullcontext() if downloads else run_logger.progress.bar(f"making {what}", None):
            is_made = make()
        run_logger.info(f"{what}: {folder}{reason if is_made else ', made before'}")

    if (problems := config.arithmetic) is not None:
        make("problems", problems.out_dir, lambda: prepare_arithmetic(problems).made)
    if (pictures := config.pictures) is not None:
        make("pictures", pictures.out_dir, lambda: prepare_pictures(pictures).made)
    if (gsm8k := config.gsm8k) is not None:
        downloads = gsm8k.source_dir is None
        make("GSM8K", gsm8k.out_dir, lambda: prepare_gsm8k(gsm8k).made, downloads=downloads)
    if (geometry := config.geometry3k) is not None:
        downloads, folder = geometry.source_dir is None, geometry.out_dir
        make("Geometry3K", folder, lambda: prepare_geometry3k(geometry).made, downloads=downloads)
    if (policy := config.tiny_policy) is not None:
        schemas = [tool.tool_schema for tool in tools]
        make("policy", policy.out_dir, lambda: make_tiny_policy(policy, tools=schemas))


def _describe_remake(folder: Path) -> str:
    """Explain why a folder's content is made again; empty if the folder is new."""
    return ", made again: it was not finished" if is_unfinished(folder) else ""


def warm_up(
    run: RunConfig,
    config: SftConfig,
    world: World,
    run_logger: RunLogger,
    tools: Sequence[BaseTool],
    *,
    now: datetime,
) -> None:
    """Run the supervised warm-up on all ranks, unless its result exists.

    Args:
        run: The run; the warm-up uses its model settings and chat template.
        config: The warm-up's settings.
        world: The ranks; the main rank decides whether the result is missing.
        run_logger: Reports what was made.
        tools: The run's tools.
        now: The run's date, for templates that write a date.
    """
    has_own_tools = config.tool_config_path is not None or config.function_tool_path is not None
    shown = [
        tool.tool_schema
        for tool in (
            load_all_tools(config.tool_config_path, config.function_tool_path)
            if has_own_tools
            else tools
        )
    ]
    index = config.out_dir / "model.safetensors.index.json"  # of a model in several files
    weights = index if index.is_file() else config.out_dir / "model.safetensors"
    files = [config.out_dir / "config.json", weights]

    def find_arguments() -> dict[str, Any] | None:
        restore_replaced(config.out_dir)
        arguments = _arguments(run, config, shown)
        return arguments if must_make(config.out_dir, _SFT, arguments, files) else None

    run_logger.notes(compare_tools(shown, tools))
    arguments = on_main(world, find_arguments)
    if arguments is None:
        return run_logger.info(f"warmed-up policy: {config.out_dir}, made before")

    def train() -> None:
        _train(run, config, world, run_logger, shown, now=now)

    if not world.is_main:
        return train()
    if reason := _describe_remake(config.out_dir):
        run_logger.info(f"warmed-up policy: {config.out_dir}{reason}")
    make_once(config.out_dir, _SFT, arguments, files, train)
    return None


def compare_tools(
    shown: Sequence[OpenAIFunctionToolSchema], of_run: Sequence[BaseTool]
) -> Iterator[str]:
    """Report tools that differ between a warm-up and its run: a policy learns what it is shown."""
    schemas = {schema.name: schema.to_template() for schema in shown}
    expected = {tool.name: tool.tool_schema.to_template() for tool in of_run}
    for name in expected.keys() - schemas.keys():
        yield f"prepare.sft: the warm-up is not shown the tool {name!r}, which the run has"
    for name in schemas.keys() - expected.keys():
        yield f"prepare.sft: the warm-up is shown the tool {name!r}, which the run does not have"
    for name in schemas.keys() & expected.keys():
        if schemas[name] != expected[name]:
            yield f"prepare.sft: warm-up and run have different schemas of the tool {name!r}"


def _arguments(
    run: RunConfig, config: SftConfig, shown: Sequence[OpenAIFunctionToolSchema]
) -> dict[str, Any]:
    """Return everything that decides the result: settings, tools, and the content of inputs."""
    named = {"out_dir", "model_path", "train_file", "tool_config_path", "function_tool_path"}
    arguments = config.model_dump(mode="json", exclude=named)
    # The warm-up trains every weight: a run with LoRA shares it with one without.
    lora = {"lora_rank", "lora_alpha", "target_modules", "exclude_modules", "lora_adapter_path"}
    arguments["model"] = run.model.model_dump(mode="json", exclude={"path", *lora})
    arguments["template_kwargs"] = run.data.apply_chat_template_kwargs
    if run.data.mm_processor_kwargs:
        arguments["mm_processor_kwargs"] = run.data.mm_processor_kwargs
    arguments["tools"] = [schema.to_template() for schema in shown]
    arguments["of"] = [content_of(path) for path in (config.train_file, config.model_path)]
    return arguments


def _train(
    run: RunConfig,
    config: SftConfig,
    world: World,
    run_logger: RunLogger,
    shown: Sequence[OpenAIFunctionToolSchema],
    *,
    now: datetime,
) -> None:
    started = time.monotonic()
    with run_logger.progress.bar("warm-up", config.steps) as advance:

        def on_step(step: SftStep) -> None:
            advance(tokens=step.num_tokens)
            if step.step % max(1, config.steps // 4) == 0:
                run_logger.info(f"  warm-up step {step.step}: loss {step.loss:.3f}")

        result = run_sft(
            config,
            world,
            tools=shown,
            model=run.model,
            template_kwargs=run.data.apply_chat_template_kwargs,
            mm_processor_kwargs=run.data.mm_processor_kwargs,
            now=now,
            on_step=on_step,
        )
    held_out = result.held_out_loss
    loss = "" if held_out is None else f"loss on held-out conversations {held_out:.3f}, "
    run_logger.info(
        f"warmed-up policy: {config.out_dir}, {result.num_conversations} conversations, "
        f"{loss}{time.monotonic() - started:.0f} s"
    )
