"""Check what the user wrote: the run file, its plug-ins, its rows, the sandboxes they need."""

import asyncio
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Protocol, runtime_checkable

from jsonschema import SchemaError

from agentrl.agent_loops.routing import check_agents
from agentrl.config import KeyNote, RunConfig, check_config, naming_origin, read_config
from agentrl.config.schema.sandbox import SandboxConfig
from agentrl.data.prepare.manifest import is_made
from agentrl.data.rows import Prompt
from agentrl.doctor.memory import this_machine
from agentrl.doctor.report import Checked, Result
from agentrl.errors import AgentRLError
from agentrl.messages import schema_validator, without_nulls
from agentrl.rewards.managers import runs_code
from agentrl.sandbox.factory import ISOLATING_PROVIDERS, check_sandbox, unavailable_reason
from agentrl.tools import BaseTool
from agentrl.tools.runtime.session import ToolSession
from agentrl.trainer.components import check_names, make_order
from agentrl.trainer.metrics.run_logger import RunLogger
from agentrl.trainer.setup.datasets import RunData, load_run_data
from agentrl.trainer.setup.engine_factory import check_engine
from agentrl.trainer.setup.plugins import (
    Plugins,
    find_classes_of_verl,
    import_plugins,
    load_plugins,
)
from agentrl.trainer.setup.preflight import check_inputs, claim_prepared
from agentrl.trainer.setup.prepare import prepare_run
from agentrl.trainer.setup.rollout_setup import (
    RolloutSetup,
)
from agentrl.trainer.state.data_fingerprint import DataRecord, check_rows
from agentrl.workers.distributed import World


@runtime_checkable
class RunsCode(Protocol):
    """A plug-in that runs code in a sandbox."""

    @property
    def sandbox_config(self) -> SandboxConfig:
        """The settings of its sandbox."""
        ...


def check_run_file(run_file: Path, overrides: Sequence[str]) -> Checked[RunConfig]:
    """Check the run file: keys, contradictions, names, missing files, engine arguments.

    Raises:
        ConfigError: if a single key is invalid.
    """
    config, report = read_config(run_file, overrides)
    notes: list[str] = []
    faults: list[str] = []

    def check_keys(config: RunConfig) -> list[KeyNote]:
        num_devices = this_machine(config).num_devices
        return check_config(config, world_size=num_devices if num_devices > 1 else None)

    def import_named(config: RunConfig) -> None:
        import_plugins(config.plugins)

    for check in (check_keys, import_named, check_names, check_inputs, check_engine):
        try:
            with naming_origin(overrides, report):
                notes += map(str, check(config) or ())
        except AgentRLError as error:
            faults.append(str(error))
    found = str(run_file) if report is None else f"{run_file}: {report.summarize()}"
    return Checked(config, found, tuple(notes), tuple(faults))


def check_plugins(config: RunConfig) -> Checked[Plugins]:
    """Build the plug-ins that the run file names; check the agents and the tools' schemas.

    Raises:
        AgentRLError: for a YAML or a class path that cannot be used.
    """
    plugins = load_plugins(config)
    tools = ", ".join(tool.name for tool in plugins.tools) or "none"
    users = ", ".join(plugins.interactions) or "none"
    found = f"tools: {tools}; interactions: {users}; reward: {config.reward.manager}"
    wrong: list[str] = []
    try:
        check_agents(config)
    except AgentRLError as error:
        wrong.append(str(error))
    for tool in plugins.tools:
        try:
            parameters = tool.tool_schema.function.parameters
            schema_validator(parameters).check_schema(without_nulls(parameters))
        except SchemaError as error:
            wrong.append(f"the parameters of {tool.name!r} are no JSON Schema: {error.message}")
    return Checked(plugins, found, tuple(find_classes_of_verl(config)), tuple(wrong))


def check_preparation(config: RunConfig, world: World, plugins: Result[Plugins]) -> Checked[None]:
    """Make what the run file's `prepare` names and does not exist yet. It stays on disk.

    Raises:
        SkipCheckError: if something must be made for tools that could not be built.
    """
    claim_prepared(config)
    silent = RunLogger(config.trainer, is_main=False)
    if plugins.checked:
        prepare_run(config, world, silent, plugins.need().tools, now=datetime.now())
    else:
        prepare_run(without_made(config, plugins), world, silent, [], now=datetime.now())
    named = [name for name, maker in config.prepare if maker is not None]
    return Checked(None, f"ready: {', '.join(named)}" if named else "nothing to make")


def without_made(config: RunConfig, plugins: Result[Plugins]) -> RunConfig:
    """Drop the steps of `prepare` that depend on the tools, which could not be built.

    Raises:
        SkipCheckError: if one of these steps has not been done yet.
    """
    prepare = config.prepare
    steps = {"tiny_policy": prepare.tiny_policy, "sft": prepare.sft}
    if not all(is_made(step.out_dir) for step in steps.values() if step is not None):
        plugins.need()
    left = prepare.model_copy(update=dict.fromkeys(steps))
    return config.model_copy(update={"prepare": left})


def check_data(config: RunConfig, setup: RolloutSetup, world: World) -> Checked[RunData]:
    """Load every row, and check it against tools, interactions, scorers and budgets.

    Raises:
        AgentRLError: for rows that cannot be used, or too few for a batch.
    """
    data = load_run_data(config, setup)
    make_order(config, data, world)
    notes = [*data.notes, *check_rows(DataRecord.of(config, data, setup), config)]
    sets = {"train": data.train, **data.val}
    found = ", ".join(f"{len(rows)} of {name}" for name, rows in sets.items() if rows)
    return Checked(data, f"rows: {found}", tuple(notes))


def check_sandboxes(config: RunConfig, plugins: Plugins, data: Result[RunData]) -> Checked[None]:
    """Report which sandbox providers work on this machine, and check those that the run uses."""
    used = find_sandboxes(config, plugins, data)
    faults: list[str] = []
    for name, keys in used.items():
        try:
            check_sandbox(keys, key=f"sandbox of {name}")
        except AgentRLError as error:
            for provider in ISOLATING_PROVIDERS:  # the row has these reasons already
                error.details.pop(provider, None)
            faults.append(str(error))
    users = ", ".join(f"{name} ({keys.provider})" for name, keys in used.items())
    reasons = {provider: unavailable_reason(provider) for provider in ISOLATING_PROVIDERS}
    found = [f"used by {users}" if users else "nothing in the run uses one"]
    found += [f"{provider}: {reason or 'works'}" for provider, reason in reasons.items()]
    return Checked(None, "\n".join(found), faults=tuple(faults))


def find_sandboxes(
    config: RunConfig, plugins: Plugins, data: Result[RunData]
) -> Mapping[str, SandboxConfig]:
    """Find the plug-ins and rewards that run a model's code, and the settings of their sandboxes.

    Args:
        config: The run.
        plugins: Its tools and interactions.
        data: Its rows, which select scorers by their source. If they could not be read, only the
            reward's own settings count.
    """
    named = chain(((tool.name, tool) for tool in plugins.tools), plugins.interactions.items())
    used = {name: one.sandbox_config for name, one in named if isinstance(one, RunsCode)}
    sources: set[str] = set()
    if data.checked:
        rows = data.need()
        sources.update(rows.train.sources(), *(one.sources() for one in rows.val.values()))
    if runs_code(config.reward, sources):
        used["reward"] = config.reward.sandbox
    return used


def check_tool_lives(
    config: RunConfig, plugins: Plugins, data: RunData, loop: asyncio.Runner
) -> Checked[None]:
    """Create and release each tool once, with the settings of a row that has some for it."""
    rows = list(chain(data.train, *data.val.values()))
    faults: list[str] = []
    for tool in plugins.tools:
        row = next((row for row in rows if row.tools_kwargs.get(tool.name)), None)
        faults += loop.run(_create_and_release(tool, row, config.rollout.multi_turn.tool_timeout_s))
    if not plugins.tools:
        return Checked(None, "no tools")
    names = ", ".join(tool.name for tool in plugins.tools)
    return Checked(None, f"created and released: {names}", faults=tuple(faults))


async def _create_and_release(tool: BaseTool, row: Prompt | None, timeout_s: float) -> list[str]:
    given = {} if row is None else {tool.name: row.tools_kwargs[tool.name]}
    session = ToolSession(
        {tool.name: tool}, instance_id="doctor", tools_kwargs=given, timeout_s=timeout_s
    )
    failed: list[BaseException] = []
    try:
        await session.create()
    except AgentRLError as error:
        failed.append(error)
    failed += await session.release()
    return [f"{tool.name}: {error}" for error in failed]
