"""What a rollout needs besides weights: tokenizer, template, parser, tools, interactions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, cast

from transformers import PreTrainedTokenizerBase

from agentrl.config.schema.run import MultiTurnConfig, RunConfig
from agentrl.engines.protocol import Engine
from agentrl.rollout.context import RolloutContext, choose_parser
from agentrl.rollout.fitting import PromptEncoder, TextFitter
from agentrl.rollout.manager import RolloutManager
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
from agentrl.trainer.setup.plugins import Plugins
from agentrl.workers.tokenizer import find_model_stops, load_tokenizer

_UNUSED_PARSER = "hermes"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSetup:
    """The plug-ins of a run, and how its model is spoken to."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    report: TemplateReport
    """What the template does with texts, and what it can carry."""
    parser: ToolParser
    plugins: Plugins
    tools_per_row: Literal["all", "tools_kwargs"] = "all"
    """`rollout.multi_turn.tools_per_row`."""

    @property
    def pad_token_id(self) -> int:
        """What stands on padding."""
        return int(cast("int", self.tokenizer.pad_token_id))


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """A model's tokenizer and template, and what the template was found to do."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    report: TemplateReport


def probe_model(config: RunConfig, plugins: Plugins, *, now: datetime | None = None) -> ProbedModel:
    """Load the tokenizer, and learn what its chat template does with texts and tools.

    Args:
        config: The model, and variables of its template.
        plugins: The tools that the template is told of.
        now: The date for templates that write one; None: today's.

    Raises:
        ConfigError: where there is no tokenizer.
        TemplateError: where there is no template, or none that can be read.
    """
    tokenizer = load_tokenizer(config.model)
    template = ChatTemplate(
        tokenizer,
        custom_template=config.model.custom_chat_template,
        template_kwargs=config.data.apply_chat_template_kwargs,
        now=now,
        model_stops=find_model_stops(tokenizer, config.model.path),
    )
    report = probe_template(template, [tool.tool_schema for tool in plugins.tools])
    return ProbedModel(tokenizer, template, report)


def make_rollout_setup(config: RunConfig, plugins: Plugins, probed: ProbedModel) -> RolloutSetup:
    """Hold a probed template against what the run needs.

    Raises:
        ConfigError: where no known tool-call format fits the template.
        TemplateError: where the template cannot carry what the run needs.
    """
    require(probed.report, template_needs(config, plugins))
    parser = choose_parser(_format(config, plugins), probed.report)
    parser.check_tools([tool.tool_schema for tool in plugins.tools])
    return RolloutSetup(
        tokenizer=probed.tokenizer,
        template=probed.template,
        report=probed.report,
        parser=parser,
        plugins=plugins,
        tools_per_row=config.rollout.multi_turn.tools_per_row,
    )


def template_needs(config: RunConfig, plugins: Plugins) -> TemplateNeeds:
    """Say what a run asks of its chat template.

    Raises:
        ConfigError: for an unknown tool-call format.
    """
    name, has_tools = _format(config, plugins), bool(plugins.tools)
    # Every format that a template's own calls can lead to answers by the role `tool`.
    by_role = name is None or get_tool_parser(name).result_role == "tool"
    return TemplateNeeds(
        tools=has_tools and by_role,
        interaction=bool(plugins.interactions) or (has_tools and not by_role),
        on_rewritten_history=config.model.on_rewritten_history,
        sanity_check=config.rollout.multi_turn.tokenization_sanity_check_mode,
    )


def _format(config: RunConfig, plugins: Plugins) -> str | None:
    """Name the tool-call format; None: the one that fits the template."""
    # Where there are no tools nothing is read as a call, and the template need not know how.
    return config.rollout.multi_turn.format or (None if plugins.tools else _UNUSED_PARSER)


def make_manager(config: RunConfig, setup: RolloutSetup, engine: Engine) -> RolloutManager:
    """Put engine and plug-ins together."""
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
        tools=setup.plugins.tools,
        interactions=setup.plugins.interactions,
        settings=turns,
        encode_prompt=PromptEncoder(
            setup.template,
            max_tokens=config.data.max_prompt_length,
            truncation=config.data.truncation,
        ).encode,
        check_tokens=make_token_check(setup.template, turns),
    )
    return RolloutManager(context, config.rollout, config.data)


def make_token_check(
    template: ChatTemplate, settings: MultiTurnConfig
) -> Callable[[AsyncRolloutRequest, Callable[[], Sequence[str]]], None]:
    """Make the check that holds finished ledgers against the renderings of their conversations."""
    mode = settings.tokenization_sanity_check_mode
    share = settings.tokenization_sanity_check_frac

    def check(request: AsyncRolloutRequest, wording: Callable[[], Sequence[str]]) -> None:
        if mode != "disable" and should_check(request, share):
            request.differences = check_request(template, request, mode, wording=wording())
            request.is_checked = True

    return check
