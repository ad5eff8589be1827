"""Conversations as a reward model reads them: rendered again with its own template and tokenizer.

A reward model was trained on renderings of its own chat template, so the tokens of the rollout are
of no use to it. The conversation is encoded as prompts of the policy are: no text of a row, a user
or a tool becomes a control token (outside text is never a control token).
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from agentrl.config.schema.reward import RewardModelConfig
from agentrl.errors import RewardError, TemplateError
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates import ChatTemplate
from agentrl.rollout.templates.compiled import CompiledTemplate, Filled
from agentrl.rollout.templates.cutting import learn
from agentrl.rollout.templates.probe_conversations import (
    answer_message,
    call_message,
    result_message,
    tool_schema,
    user_message,
)

NUM_TOKENS, NUM_CUT_TOKENS = "rm_num_tokens", "rm_num_cut_tokens"
"""Keys of a request's metrics: tokens that the reward model read, and tokens that were cut."""
REMEDY = (
    "reward.model.custom_chat_template: a template that writes every role of the run's "
    "conversations, the tool calls and the tools (docs/rewards.md has one)"
)


class ScoredTokens(NamedTuple):
    """A conversation as tokens of the reward model."""

    ids: list[int]
    num_cut: int
    """Tokens that were cut, because the conversation was too long."""


@dataclass(frozen=True, slots=True)
class ConversationEncoder:
    """Renders finished requests for a reward model."""

    template: ChatTemplate
    """The reward model's own."""
    max_length: int | None
    """Most tokens; None: no limit."""
    config: RewardModelConfig

    def encode(
        self, requests: Sequence[AsyncRolloutRequest]
    ) -> Iterator[ScoredTokens | TemplateError | RewardError]:
        """Encode conversations, all texts in one call of the tokenizer.

        Yields:
            The tokens of each; or why it has none, which concerns its request alone.
        """
        filled = [self._fill(request.messages, request.tool_schemas) for request in requests]
        texts = [text for one in filled if isinstance(one, Filled) for text in one.texts]
        encoded = iter(self.template.encode_texts(texts))
        for one in filled:
            if isinstance(one, Filled):
                yield self._cut(one.encode([next(encoded) for _ in one.texts])[0])
            else:
                yield one

    def check(
        self,
        tools: Sequence[OpenAIFunctionToolSchema],
        *,
        has_user_turns: bool,
        prompts: Iterable[Sequence[Message]] = (),
    ) -> None:
        """Check that the template writes the conversations of a run.

        Args:
            tools: Schemas of the run's tools.
            has_user_turns: Whether a user answers the policy.
            prompts: Messages of rows.

        Raises:
            TemplateError: with what it refuses or drops, and the remedy.
        """
        schemas = [tool_schema(), *tools] if tools else []
        with _naming_remedy(self.template.name):
            for what, messages, shown in _trials(tools, has_user_turns, prompts):
                texts = self.template.read(messages, schemas).texts
                written = self._compile(messages, schemas).write(texts).text
                if missing := [text for text in shown if text not in written]:
                    raise TemplateError(f"it drops {', '.join(map(repr, missing))} of {what}")

    def _fill(
        self, messages: Sequence[Message], tools: Sequence[OpenAIFunctionToolSchema]
    ) -> Filled | TemplateError:
        try:
            return self._compile(messages, tools).fill(self.template.read(messages, tools).texts)
        except TemplateError as error:
            return error

    def _compile(
        self, messages: Sequence[Message], tools: Sequence[OpenAIFunctionToolSchema]
    ) -> CompiledTemplate:
        """Find what the template writes for a whole conversation of this shape, once."""
        template = self.template
        read = template.read(messages, tools)

        def find() -> CompiledTemplate:
            render = template.structure.render_node(read.nodes, read.tools.nodes, False)
            return template.compile(learn(render, read.slots))

        return template.learn_once("scored", read.key, find)

    def _cut(self, ids: list[int]) -> ScoredTokens | RewardError:
        limit = self.max_length or len(ids)
        if (num_cut := len(ids) - limit) <= 0:
            return ScoredTokens(ids, 0)
        match self.config.truncation:
            case "left":
                return ScoredTokens(ids[num_cut:], num_cut)
            case "right":
                return ScoredTokens(ids[:limit], num_cut)
            case "error":
                return RewardError(
                    f"the conversation has {len(ids)} tokens of the reward model",
                    key="reward.model.truncation",
                    expected=f"at most {limit}; or left or right, the side that is cut",
                )


Trial = tuple[str, list[Message], list[str]]
"""A kind of conversation, an example, and texts that its rendering must contain."""


def _trials(
    tools: Sequence[OpenAIFunctionToolSchema],
    has_user_turns: bool,
    prompts: Iterable[Sequence[Message]],
) -> Iterator[Trial]:
    ask, answer = user_message("Raining where?"), answer_message("In Oslo.")
    if tools:
        results = [result_message("It pours.", 0), result_message("It snows.", 1)]
        one, other = call_message("Lima"), call_message("Bergen", 1)
        calls = [*(one.tool_calls or ()), *(other.tool_calls or ())]
        yield (
            "a tool call and its result",
            [ask, one, results[0], answer],
            ["Lima", "It pours.", "In Oslo.", "Tell the weather.", "A city.",
             "probe_tool", *(tool.name for tool in tools)],
        )  # fmt: skip
        yield (
            "two tool calls and their results",
            [ask, one.model_copy(update={"tool_calls": calls}), *results, answer],
            ["Lima", "Bergen", "It pours.", "It snows."],
        )
    yield "a question and its answer", [ask, answer], ["Raining where?", "In Oslo."]
    if has_user_turns:
        more = [user_message("Are you sure?"), answer_message("Quite sure.")]
        shown = ["In Oslo.", "Are you sure?", "Quite sure."]
        yield "a second user turn", [ask, answer, *more], shown
    roles: set[str] = set()
    for prompt in prompts:
        new = {message.role for message in prompt} - roles - {"user", "assistant", "tool"}
        roles |= new
        for role in sorted(new):
            note = Message.model_validate({"role": role, "content": "Be brief."})
            yield f"a {role} message", [note, ask, answer], ["Be brief.", "In Oslo."]
        yield "a row of the data", [*prompt, answer], ["In Oslo."]


@contextmanager
def _naming_remedy(template: str) -> Generator[None]:
    try:
        yield
    except TemplateError as error:
        raise TemplateError(
            f"the chat template {template!r} of the reward model cannot render what the run needs: "
            f"{error.args[0]}",
            key="reward.model.custom_chat_template",
            expected=REMEDY,
        ) from error
