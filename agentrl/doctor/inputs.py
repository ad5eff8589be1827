"""What the user wrote: the run file, its tools, its rows."""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path

from jsonschema import SchemaError

from agentrl.config import (
    RunConfig,
    SftConfig,
    TinyPolicyConfig,
    check_config,
    read_config,
    telling_where,
)
from agentrl.data.prepare.manifest import is_made
from agentrl.data.rows import Prompt
from agentrl.doctor.report import Checked, Result
from agentrl.errors import AgentRLError
from agentrl.messages import schema_validator, without_nulls
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


def check_run_file(run_file: Path, overrides: Sequence[str]) -> Checked[RunConfig]:
    """Read a run file: unknown, contradictory and dead keys, names, files that are not there.

    Raises:
        ConfigError: where its single keys mean nothing.
    """
    config, report = read_config(run_file, overrides)
    notes: list[str] = []
    faults: list[str] = []
    for look in (check_config, _import, check_names, check_inputs, check_engine):
        try:
            with telling_where(overrides, report):
                notes += map(str, look(config) or ())
        except AgentRLError as error:
            faults.append(str(error))
    told = str(run_file) if report is None else f"{run_file}: {report.in_short()}"
    return Checked(config, told, tuple(notes), tuple(faults))


def _import(config: RunConfig) -> None:
    import_plugins(config.plugins)


def check_plugins(config: RunConfig) -> Checked[Plugins]:
    """Build what the run file names by path, and look at the tools' schemas.

    Raises:
        AgentRLError: for a YAML or a class path that cannot be used.
    """
    plugins = load_plugins(config)
    tools = ", ".join(tool.name for tool in plugins.tools) or "none"
    users = ", ".join(plugins.interactions) or "none"
    told = f"tools: {tools}; interactions: {users}; reward: {config.reward.manager}"
    wrong = tuple(filter(None, map(_wrong_schema, plugins.tools)))
    return Checked(plugins, told, tuple(find_classes_of_verl(config)), wrong)


def check_preparation(config: RunConfig, world: World, plugins: Result[Plugins]) -> Checked[None]:
    """Make what the run file's `prepare` names and is not there: the one thing that stays.

    Raises:
        SkipCheckError: where something is to be made for tools that cannot be built.
    """
    claim_prepared(config)
    silent = RunLogger(config.trainer, is_main=False)
    if plugins.is_there:
        prepare_run(config, world, silent, plugins.need().tools, now=datetime.now())
    else:
        prepare_run(leave_as_made(config, plugins), world, silent, [], now=datetime.now())
    named = [name for name, maker in config.prepare if maker is not None]
    return Checked(None, f"there: {', '.join(named)}" if named else "nothing to make")


def leave_as_made(config: RunConfig, plugins: Result[Plugins]) -> RunConfig:
    """Leave out of a run's `prepare` what was made for its tools, which cannot be built now.

    Raises:
        SkipCheckError: where it is yet to be made.
    """
    prepare = config.prepare
    knowing: dict[str, TinyPolicyConfig | SftConfig] = {}
    if prepare.tiny_policy is not None:
        knowing["tiny_policy"] = prepare.tiny_policy
    if prepare.sft is not None:
        knowing["sft"] = prepare.sft
    if not all(is_made(maker.out_dir) for maker in knowing.values()):
        plugins.need()
    left = prepare.model_copy(update=dict.fromkeys(knowing))
    return config.model_copy(update={"prepare": left})


def check_data(config: RunConfig, setup: RolloutSetup) -> Checked[RunData]:
    """Load every row, and hold them against tools, interactions, scorers and budgets.

    Raises:
        AgentRLError: for rows that cannot be used, or too few for a batch.
    """
    data = load_run_data(config, setup)
    make_order(config, data)
    notes = [*data.notes, *check_rows(DataRecord.of(config, data, setup), config)]
    sets = {"train": data.train, **data.val}
    told = ", ".join(f"{len(rows)} of {name}" for name, rows in sets.items() if rows)
    return Checked(data, f"rows: {told}", tuple(notes))


def check_tool_lives(
    config: RunConfig, plugins: Plugins, data: RunData, runner: asyncio.Runner
) -> Checked[None]:
    """Create and release each tool once, with the settings of a row that has some for it."""
    rows = list(chain(data.train, *data.val.values()))
    faults: list[str] = []
    for tool in plugins.tools:
        row = next((row for row in rows if row.tools_kwargs.get(tool.name)), None)
        faults += runner.run(_live_once(tool, row, config.rollout.multi_turn.tool_timeout_s))
    if not plugins.tools:
        return Checked(None, "no tools")
    names = ", ".join(tool.name for tool in plugins.tools)
    return Checked(None, f"created and released: {names}", faults=tuple(faults))


async def _live_once(tool: BaseTool, row: Prompt | None, timeout_s: float) -> list[str]:
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


def _wrong_schema(tool: BaseTool) -> str | None:
    try:
        parameters = tool.tool_schema.function.parameters
        schema_validator(parameters).check_schema(without_nulls(parameters))
    except SchemaError as error:
        return f"the parameters of {tool.name!r} are no JSON Schema: {error.message}"
    return None
