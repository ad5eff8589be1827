"""Set up everything that a rollout needs besides weights: tokenizer, template, parser, plug-ins."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, cast

from transformers import PreTrainedTokenizerBase

from agentrl.agent_loops.registry import SINGLE_TURN
from agentrl.agent_loops.routing import make_run
from agentrl.config.schema.agent import TOOL_AGENT
from agentrl.config.schema.run import MultiTurnConfig, RunConfig
from agentrl.engines.protocol import Engine
from agentrl.media.processor import MediaProcessor
from agentrl.rollout.context import RolloutContext, choose_parser
from agentrl.rollout.fitting import PromptEncoder, TextFitter
from agentrl.rollout.manager import RolloutManager, RunRequest
from agentrl.rollout.media import RequestMedia
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.seeding import should_check
from agentrl.rollout.templates import (
    ChatTemplate,
    TemplateNeeds,
    TemplateReport,
    check_request,
    probe_template,
    require,
)
from agentrl.rollout.tool_calls import ToolCaller
from agentrl.rollout.tool_parsers import ToolParser, get_tool_parser
from agentrl.tools.delegate_tool import DelegateTool
from agentrl.trainer.setup.plugins import Plugins
from agentrl.workers.tokenizer import find_model_stops, load_processor, load_tokenizer

_UNUSED_PARSER = "hermes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetup:
    """The plug-ins of a run, and the tokenizer, template and parser of its model."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    report: TemplateReport
    """What the template does with texts, and what it supports."""
    parser: ToolParser
    plugins: Plugins
    tools_per_row: Literal["all", "tools_kwargs"] = "all"
    """`rollout.multi_turn.tools_per_row`."""

    @property
    def processor(self) -> MediaProcessor | None:
        """The model's processor of images and videos; None: it reads text only."""
        return self.template.media

    @property
    def pad_token_id(self) -> int:
        """The token id of padding."""
        return int(cast("int", self.tokenizer.pad_token_id))


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A model's tokenizer and template, and the report on the template."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    report: TemplateReport


def probe_model(config: RunConfig, plugins: Plugins, *, now: datetime | None = None) -> ProbedModel:
    """Load the tokenizer, and probe what its chat template does with texts and tools.

    Args:
        config: Names the model, and has the variables of its template.
        plugins: Has the tools that the template renders.
        now: The date for templates that write one; None for today.

    Raises:
        ConfigError: if there is no tokenizer.
        TemplateError: if there is no template, or it cannot be read.
    """
    tokenizer = load_tokenizer(config.model)
    processor = load_processor(config.model, tokenizer, kwargs=config.data.mm_processor_kwargs)
    template = ChatTemplate(
        tokenizer,
        custom_template=config.model.custom_chat_template,
        template_kwargs=config.data.apply_chat_template_kwargs,
        now=now,
        model_stops=find_model_stops(tokenizer, config.model.path),
        media=processor,
    )
    if config.model.custom_chat_template is not None:
        tokenizer.chat_template = template.structure.renderer.source  # which an export then has
    report = probe_template(template, [tool.tool_schema for tool in plugins.tools])
    return ProbedModel(tokenizer, template, report)


def make_rollout_setup(
    config: RunConfig, plugins: Plugins, probed: ProbedModel, *, serves_agents: bool = False
) -> RolloutSetup:
    """Check a probed template against what the run needs.

    Args:
        config: The run's configuration.
        plugins: Has the tools of the run.
        probed: The model's tokenizer and template.
        serves_agents: Whether agents speak to a gateway, also if `rollout.agent` names none.

    Raises:
        ConfigError: if no known tool-call format fits the template.
        TemplateError: if the template does not support what the run needs.
    """
    serves_agents = serves_agents or config.rollout.agent.is_external
    require(probed.report, template_needs(config, plugins, serves_agents=serves_agents))
    format_name = _format(config, plugins)
    if serves_agents and not config.rollout.multi_turn.format and probed.report.call_example:
        format_name = None  # agents bring tools of their own
    parser = choose_parser(format_name, probed.report)
    parser.check_tools([tool.tool_schema for tool in plugins.tools])
    return RolloutSetup(
        tokenizer=probed.tokenizer,
        template=probed.template,
        report=probed.report,
        parser=parser,
        plugins=plugins,
        tools_per_row=config.rollout.multi_turn.tools_per_row,
    )


def template_needs(
    config: RunConfig, plugins: Plugins, *, serves_agents: bool = False
) -> TemplateNeeds:
    """Return what a run needs from its chat template.

    Agents that are called with a conversation, or speak to a gateway, may add system messages.

    Raises:
        ConfigError: for an unknown tool-call format.
    """
    name, has_tools = _format(config, plugins), bool(plugins.tools)
    # Every format that is derived from a template's own calls answers with the role `tool`.
    by_role = name is None or get_tool_parser(name).result_role == "tool"
    loops = (TOOL_AGENT, SINGLE_TURN)
    has_agents = serves_agents or config.rollout.agent.default_agent_loop not in loops
    return TemplateNeeds(
        # Of other runs the rows say it: see `check_system_messages`.
        system=None if has_agents or config.rollout.agent.is_external else False,
        tools=has_tools and by_role,
        tool_images=any(tool.returns_images for tool in plugins.tools),
        interaction=bool(plugins.interactions) or (has_tools and not by_role),
        compaction=config.rollout.multi_turn.compaction is not None
        or any(isinstance(tool, DelegateTool) and tool.has_compaction for tool in plugins.tools),
        on_rewritten_history=config.model.on_rewritten_history,
        sanity_check=config.rollout.multi_turn.tokenization_sanity_check_mode,
    )


def _format(config: RunConfig, plugins: Plugins) -> str | None:
    """Return the tool-call format; None to choose the one that fits the template."""
    # Without tools no text is parsed as a call, so the template needs no format for calls.
    return config.rollout.multi_turn.format or (None if plugins.tools else _UNUSED_PARSER)


def make_manager(
    config: RunConfig, setup: RolloutSetup, engine: Engine, run: RunRequest | None = None
) -> RolloutManager:
    """Make the rollout manager from engine and plug-ins.

    Args:
        config: The run's configuration.
        setup: Template, parser, plug-ins.
        engine: Generates the completions.
        run: Drives one request; None: the agent that the configuration or the row names.

    Raises:
        ConfigError: if `rollout.agent` names an agent that does not exist.
    """
    turns = config.rollout.multi_turn
    fitter = TextFitter(
        setup.template,
        max_tokens=turns.max_tool_response_length,
        side=turns.tool_response_truncate_side,
    )
    context = RolloutContext(
        engine=engine,
        template=setup.template,
        parser=setup.parser,
        caller=ToolCaller(setup.parser, fitter.fit),
        fitter=fitter,
        media=RequestMedia(setup.processor),
        tools=setup.plugins.tools,
        interactions=setup.plugins.interactions,
        settings=turns,
        encode_prompt=PromptEncoder(
            setup.template,
            max_tokens=config.data.max_prompt_length,
            truncation=config.data.truncation,
        ).encode,
        check_tokens=make_token_check(setup.template, turns),
        is_deterministic=config.rollout.deterministic,
    )
    if run is None:
        run = router = make_run(config, setup.tokenizer)
        setup.plugins.started.append(router)
    return RolloutManager(context, config.rollout, config.data, run)


def make_token_check(
    template: ChatTemplate, settings: MultiTurnConfig
) -> Callable[[AsyncRolloutRequest, Callable[[], Sequence[str]]], None]:
    """Make the check that compares finished ledgers with renderings of their conversations."""
    mode = settings.tokenization_sanity_check_mode
    share = settings.tokenization_sanity_check_frac

    def check(request: AsyncRolloutRequest, wording: Callable[[], Sequence[str]]) -> None:
        if mode != "disable" and should_check(request, share):
            request.differences = check_request(template, request, mode, wording=wording())
            request.is_checked = True

    return check
