"""One chat template of one tokenizer, as a function from messages to a string."""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.errors import TemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DIRECTIVES = tuple("%" + letter for letter in "aAwdbBmyYHIpMSfjUWcxXGuVeDFTR")
_LENIENT = tuple("%-" + letter for letter in "dmHIMSjy")


class Renderer:
    """Renders messages through a chat template, always with the same date.

    Args:
        tokenizer: Provides the template, unless `custom_template` replaces it, and its variables.
        custom_template: A template's text, or the path of a file that holds it.
        template_kwargs: Further variables of the template, such as `enable_thinking`.
        now: The date that the template may write.

    Raises:
        TemplateError: if there is no template, or it is not valid Jinja.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        *,
        custom_template: str | None,
        template_kwargs: Mapping[str, Any],
        now: datetime,
    ) -> None:
        self._tokenizer = tokenizer
        self._kwargs = dict(template_kwargs)
        self.name, self._sources = _find_sources(tokenizer, custom_template)
        self.now = now
        _check_syntax(self.name, self._sources.values())

    @property
    def source(self) -> str:
        """The template's text (the variant for tools, if there are several)."""
        return self._sources.get("tool_use") or next(iter(self._sources.values()))

    @property
    def writes_date(self) -> bool:
        """Whether the template writes the date."""
        return any("strftime_now" in source for source in self._sources.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        add_generation_prompt: bool,
    ) -> str:
        """Render a conversation.

        Raises:
            TemplateError: if the template refuses it (with the template's message), or fails.
        """
        apply: Any = self._tokenizer.apply_chat_template
        try:
            chosen = self._sources.get("tool_use") if tools else None
            source = chosen or self._sources.get("default") or next(iter(self._sources.values()))
            if "strftime_now" in source:
                source = _frozen_clock(self.now) + source
            return apply(
                list(messages),
                tools=list(tools) or None,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        # A template is a foreign program: any error means that it refuses the conversation.
        except Exception as error:
            kind, text = type(error).__name__, re.sub(r"\s+", " ", str(error)).strip()
            raise TemplateError(f"{kind}: {text}" if text else kind, template=self.name) from error


def _find_sources(
    tokenizer: "PreTrainedTokenizerBase", custom: str | None
) -> tuple[str, dict[str, str]]:
    """Return the template's name, and its text by variant."""
    if custom is not None:
        return _read_custom(custom)
    owner = Path(str(tokenizer.name_or_path)).name or type(tokenizer).__name__
    template: Any = tokenizer.chat_template
    if not template:
        raise TemplateError(
            f"the tokenizer {owner} has no chat template",
            template=owner,
            expected="model.custom_chat_template",
        )
    return owner, dict(template) if isinstance(template, dict) else {"default": template}


def _read_custom(custom: str) -> tuple[str, dict[str, str]]:
    if "{{" in custom or "{%" in custom:
        return "custom_chat_template", {"default": custom}
    try:
        return Path(custom).name, {"default": Path(custom).read_text(encoding="utf-8")}
    except OSError as error:
        raise TemplateError(
            f"cannot read the chat template: {error}",
            template=custom,
            expected="a template's text or the path of a .jinja file",
        ) from None


def _check_syntax(name: str, sources: Any) -> None:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    for source in sources:
        try:
            render_jinja_template(conversations=[], chat_template=source)
        except TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template is not valid Jinja: {error.message}",
                template=name,
                line=error.lineno,
            ) from None


def _frozen_clock(now: datetime) -> str:
    """Return a Jinja prelude that answers `strftime_now` with one date, in any format.

    Transformers replaces callables among a template's variables, so the date is frozen inside the
    template. `trim_blocks` removes the newline after the last tag.
    """
    steps = "".join(
        f"|replace({directive!r}, {now.strftime(directive)!r})"
        for directive in (*_LENIENT, *_DIRECTIVES)
    )
    return "{% macro strftime_now(format) %}{{ format" + steps + " }}{% endmacro %}\n"
