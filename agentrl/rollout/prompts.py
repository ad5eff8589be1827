"""From a request's messages to the tokens of its prompt, within their budget."""

from collections.abc import Sequence
from typing import NamedTuple

from agentrl.data.fit import Truncation, fit_prompt
from agentrl.messages import Message
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates import ChatTemplate

MAX_CACHED_GROUPS = 1024
"""Groups whose prompt is kept; more are never in flight at once for long."""


class EncodedPrompt(NamedTuple):
    """A prompt within its budget."""

    ids: list[int]
    """Its tokens, generation prompt included."""
    num_cut: int
    """Tokens that it lost."""
    text: str
    """What the tokens say; empty where they were cut."""


class _Cached(NamedTuple):
    messages: list[Message]
    tools: list[str]
    prompt: EncodedPrompt


class PromptEncoder:
    """Render each group's prompt once, within its budget.

    Args:
        template: The run's chat template.
        max_tokens: Budget of a prompt.
        truncation: What becomes of a longer one: `error`, or the side that is cut away. The
            generation prompt is kept, whichever side it is.
    """

    def __init__(self, template: ChatTemplate, *, max_tokens: int, truncation: Truncation) -> None:
        self._template = template
        self._max_tokens = max_tokens
        self._truncation: Truncation = truncation
        self._cached: dict[str, _Cached] = {}

    def encode(self, request: AsyncRolloutRequest) -> EncodedPrompt:
        """Give the prompt's tokens.

        Raises:
            DataError: for a prompt over its budget under `truncation: error`.
            TemplateError: where the template cannot carry its messages.
        """
        tools = [tool.name for tool in request.tool_schemas]
        cached = self._cached.get(request.uid)
        # Compared, not trusted: tools may open each sample of a group in another way, and a uid of
        # the user's own may come again.
        if cached and cached.messages == request.messages and cached.tools == tools:
            return cached.prompt
        conversation = request.messages, request.tool_schemas
        ids = self._template.encode_prompt(*conversation)
        prompt = self._fit(ids, self._template.write_prompt(*conversation))
        self._remember(request.uid, _Cached(list(request.messages), tools, prompt))
        return prompt

    def _fit(self, ids: Sequence[int], text: str) -> EncodedPrompt:
        kept = self._generation_prompt(ids) if self._truncation != "error" else []
        head = ids[: len(ids) - len(kept)]
        fitted = fit_prompt(head, self._max_tokens - len(kept), self._truncation)
        num_cut = len(head) - len(fitted)
        return EncodedPrompt([*fitted, *kept], num_cut, "" if num_cut else text)

    def _generation_prompt(self, ids: Sequence[int]) -> list[int]:
        """The end of a prompt that no cut may touch; none where it would be all that is left."""
        end = self._template.generation_prompt_ids
        text = self._template.decode(end)
        # The first token of some generation prompts is joined with the text before it.
        kept = next((n for n in range(1, len(end) + 1) if self._ends_with(ids[-n:], text)), 0)
        return list(ids[-kept:]) if 0 < kept < self._max_tokens else []

    def _ends_with(self, ids: Sequence[int], text: str) -> bool:
        return self._template.decode(ids).endswith(text)

    def _remember(self, uid: str, cached: _Cached) -> None:
        if len(self._cached) >= MAX_CACHED_GROUPS:
            del self._cached[next(iter(self._cached))]
        self._cached[uid] = cached
