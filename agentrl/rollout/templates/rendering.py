"""One chat template on one tokenizer, as a function from messages to a string."""

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
    """Render messages through a chat template, always on the same date.

    Args:
        tokenizer: Gives the template, unless `custom_template` replaces it, and its variables.
        custom_template: A template's text, or the path of a file that holds it.
        template_kwargs: Further variables of the template, such as `enable_thinking`.
        now: The date that the template may write.

    Raises:
        TemplateError: where there is no template or it is no valid Jinja.
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
        """The template's text, as it was given (that with tools, where there are several)."""
        return self._sources.get("tool_use") or next(iter(self._sources.values()))

    @property
    def writes_date(self) -> bool:
        """Whether the template asks for the date."""
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
            TemplateError: where the template refuses it (the template's own words), or fails.
        """
        apply: Any = self._tokenizer.apply_chat_template
        try:
            return apply(
                list(messages),
                tools=list(tools) or None,
                chat_template=self._prepared(with_tools=bool(tools)),
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **self._kwargs,
            )
        # A template is a program that somebody else wrote: whatever it raises, it refuses.
        except Exception as error:
            raise TemplateError(_words(error), template=self.name) from error

    def _prepared(self, *, with_tools: bool) -> str:
        chosen = self._sources.get("tool_use") if with_tools else None
        source = chosen or self._sources.get("default") or next(iter(self._sources.values()))
        return _frozen_clock(self.now) + source if "strftime_now" in source else source


def _find_sources(
    tokenizer: "PreTrainedTokenizerBase", custom: str | None
) -> tuple[str, dict[str, str]]:
    """The template's name and its text, by variant."""
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
                f"the chat template is no valid Jinja: {error.message}",
                template=name,
                line=error.lineno,
            ) from None


def _frozen_clock(now: datetime) -> str:
    """A prelude that answers `strftime_now` with one date, in any format.

    Transformers replaces callables among a template's variables, so the date is frozen inside the
    template. The newline behind the last tag is the one that `trim_blocks` takes away.
    """
    steps = "".join(
        f"|replace({directive!r}, {now.strftime(directive)!r})"
        for directive in (*_LENIENT, *_DIRECTIVES)
    )
    return "{% macro strftime_now(format) %}{{ format" + steps + " }}{% endmacro %}\n"


def _words(error: Exception) -> str:
    text = re.sub(r"\s+", " ", str(error)).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
