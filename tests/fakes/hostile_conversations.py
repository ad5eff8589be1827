"""A conversation with tools and a user on a production template, with hostile texts from outside.

The expected tokens do not depend on how the hostile strings are encoded: the same conversation is
played once with harmless words, and each word is replaced by the text that the template writes at
that position according to the probe.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from agentrl.errors import TemplateError
from agentrl.messages import Message, ToolResponse
from agentrl.rollout.fitting import TextFitter, as_unicode
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.templates import (
    Capability,
    ChatTemplate,
    TemplateReport,
    TextTransform,
    probe_template,
)
from agentrl.rollout.templates.assistant_turn import encode_turn
from agentrl.rollout.tool_calls import ToolCaller
from agentrl.rollout.tool_parsers import get_tool_parser
from tests.fakes.templates import (
    NAMES,
    assistant,
    call,
    load_report,
    load_template,
    load_tokenizer,
    read_source,
    schema,
    system,
    user,
)

OBSERVATION_TOKENS = 160
"""Budget of one observation: the longest strings are cut to it."""
TOOLS = [schema()]
WORD = re.compile(r"harmless(\d)word")
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"
LARGE_BUDGETS = Budgets(max_response_tokens=1 << 20, max_model_len=1 << 20)


def names_with_tools() -> list[str]:
    """Return the production templates that render tools: a run with tools starts on them."""
    needed = (Capability.TOOLS, Capability.TOOL_RESULT, Capability.PROMPT_AFTER_TOOL)
    return [name for name in NAMES if all(map(load_report(name).carries, needed))]


@dataclass(frozen=True)
class HarmlessTokens:
    """Tokens without the texts from outside: control tokens, and the text between them."""

    control: list[int]
    between: list[list[str | int]]
    """One entry more than `control`: literals, and the indices of texts."""

    def filled(self, texts: Sequence[str]) -> list[str]:
        return [
            "".join(part if isinstance(part, str) else texts[part] for part in parts)
            for parts in self.between
        ]


@dataclass
class Conversation:
    """A request, its texts and its expected tokens."""

    request: AsyncRolloutRequest
    texts: list[str] = field(default_factory=list[str])
    """Texts from outside, in order, as they are in the messages."""
    control: list[int] = field(default_factory=list[int])
    between: list[str] = field(default_factory=lambda: [""])
    """The expected text between the control tokens."""

    def expect(self, control: Sequence[int], between: Sequence[str]) -> None:
        self.control += control
        self.between[-1] += between[0]
        self.between += between[1:]


class TemplateCase:
    """One template on one tokenizer; plays conversations on it and checks their tokens.

    Args:
        template: The template.
        report: The probe's report on it.
        tokenizer: Its tokenizer.
        normalize: What the tokenizer does to every text, decoding included.
    """

    def __init__(
        self,
        template: ChatTemplate,
        report: TemplateReport,
        tokenizer: Any,
        normalize: Callable[[str], str],
    ) -> None:
        self.template = template
        self.report = report
        self._tokenizer = tokenizer
        self._normalize = normalize
        self._lost = {ord(character): "_" for character in self.report.lost_characters}
        self.control = tokenizer.get_added_vocab()
        self.added = frozenset(self.control.values())
        fitter = TextFitter(self.template, max_tokens=OBSERVATION_TOKENS, side="middle")
        self._fit = fitter.fit
        # The parser does not matter: results have the template's own role.
        self._caller = ToolCaller(get_tool_parser("hermes"), fitter.fit)
        self._skeletons: dict[tuple[str, ...], HarmlessTokens] = {}
        self._turns: dict[tuple[str, int], list[int]] = {}
        parallel = self.report.carries(Capability.PARALLEL_RESULTS)
        self.num_results = (1, 2, 3) if parallel else (1,)
        self.max_calls_rendered = 3 if self._renders(self._calls(2)) else 1

    # What a text becomes.

    def normalize(self, text: str) -> str:
        """Normalize a text as the tokenizer does: one form of each character."""
        return self._normalize(as_unicode(text))

    def without_lost(self, text: str) -> str:
        """Return the text without the characters that the probe reports as lost."""
        return text.translate(self._lost)

    def written(self, text: str, position: str) -> str:
        """Return the text that the template writes for a text according to the probe."""
        transforms = set(self.report.text(position).transforms)
        known = {
            TextTransform.VERBATIM,
            TextTransform.TRIMS,
            TextTransform.ESCAPES,
            TextTransform.BRANCHES,
        }
        assert transforms <= known, transforms
        text = text.strip() if TextTransform.TRIMS in transforms else text
        if TextTransform.ESCAPES in transforms:
            text = json.dumps(text, ensure_ascii=False)[1:-1]
        return text

    # A conversation.

    def play(self, said: Iterator[str], num_results: int) -> Conversation:
        """Play two rounds of tools, each followed by an answer and a reply of the user."""
        messages = [system(next(said)), _in_parts(next(said))]
        request = AsyncRolloutRequest(messages=messages, tool_schemas=TOOLS, budgets=LARGE_BUDGETS)
        conversation = Conversation(request)
        request.begin(self.template.encode_prompt(messages, TOOLS))
        self._expect(conversation, "prompt", messages)
        for _ in range(2):
            results = [self._result(next(said), number) for number in range(num_results)]
            self._sample(
                conversation, self._calls(min(num_results, self.max_calls_rendered)), results
            )
            self._observe(conversation, results)
            reply = [user(self._fit(next(said)).text)]
            self._sample(conversation, assistant("It is four."), reply)
            self._observe(conversation, reply)
        self._sample(conversation, assistant("Bye."), [])
        return conversation

    def _renders(self, message: Message) -> bool:
        try:
            encode_turn(self.template, message, [], TOOLS)
        except TemplateError:
            return False
        return True

    def _calls(self, number: int) -> Message:
        return assistant("", *(call(number=place, query="2 + 2") for place in range(number)))

    def _result(self, text: str, number: int) -> Message:
        shown = self._caller.show(
            ToolResponse(text=text), tool="search", call_id=f"call0000{number}"
        )
        assert shown.num_cut or shown.message.text == as_unicode(text)
        return shown.message

    def _sample(
        self, conversation: Conversation, message: Message, replies: Sequence[Message]
    ) -> None:
        # The policy's texts are constant, so each is encoded once.
        key = (message.model_dump_json(), len(replies))
        if key not in self._turns:
            harmless = [reply.model_copy(update={"content": "4"}) for reply in replies]
            self._turns[key] = encode_turn(self.template, message, harmless, TOOLS)
        ids = self._turns[key]
        conversation.request.append_sampled(ids, [-0.5] * len(ids))
        conversation.request.messages.append(message)
        conversation.expect(*self._split(ids))

    def _observe(self, conversation: Conversation, messages: list[Message]) -> None:
        request = conversation.request
        role = "user" if messages[0].role == "user" else "tool"
        last_ids = request.response_ids[request.turns[-1].start :]
        delta = self.template.encode_delta(messages, last_ids=last_ids, tools=TOOLS)
        request.append_observed(delta.ids, role=role)
        request.messages.extend(messages)
        self._expect(conversation, "delta", messages, last_ids)

    # The expected tokens.

    def _expect(
        self,
        conversation: Conversation,
        kind: str,
        messages: Sequence[Message],
        last_ids: Sequence[int] = (),
    ) -> None:
        said = [(m, "tool" if m.role == "tool" else m.role) for m in messages]
        texts = [self.normalize(self.written(m.text, position)) for m, position in said]
        conversation.texts += [message.text for message in messages]
        skeleton = self._skeleton(kind, messages, last_ids)
        conversation.expect(skeleton.control, skeleton.filled(texts))

    def _skeleton(
        self, kind: str, messages: Sequence[Message], last_ids: Sequence[int]
    ) -> HarmlessTokens:
        """Return the tokens of these messages with a harmless word for each text (cached)."""
        words = [
            message.text if not message.text.strip() else f"harmless{place}word"
            for place, message in enumerate(messages)
        ]
        key = (kind, *(message.role for message in messages), *words, *map(str, last_ids[-2:]))
        if key not in self._skeletons:
            harmless = [
                m.model_copy(update={"content": w}) for m, w in zip(messages, words, strict=True)
            ]
            if kind == "prompt":
                ids = self.template.encode_prompt(harmless, TOOLS)
            else:
                ids = self.template.encode_delta(harmless, last_ids=last_ids, tools=TOOLS).ids
            control, between = self._split(ids)
            self._skeletons[key] = HarmlessTokens(
                control, [_cut_at_words(text) for text in between]
            )
        return self._skeletons[key]

    def _split(self, ids: Sequence[int]) -> tuple[list[int], list[str]]:
        """Return the control tokens and the text between them."""
        control = [id for id in ids if id in self.added]
        return control, [self.template.decode(run) for run in self._runs(ids)]

    def _runs(self, ids: Sequence[int]) -> list[list[int]]:
        runs: list[list[int]] = [[]]
        for id in ids:
            if id in self.added:
                runs.append([])
            else:
                runs[-1].append(id)
        return runs

    # The invariants.

    def check(self, conversation: Conversation) -> None:
        """Check that no control token is forged, the round trip is exact and the ledger agrees."""
        request = conversation.request
        control, between = self._split(request.input_ids)
        assert (
            control == conversation.control
        )  # control tokens: as many, the same, in the same order
        assert between == conversation.between  # control tokens: and in the same places
        names = [self.template.decode([id]) for id in conversation.control]
        pairs = zip(conversation.between, [*names, ""], strict=True)
        assert self.template.decode(request.input_ids) == "".join(map("".join, pairs))
        assert request.input_ids == request.prompt_ids + request.response_ids  # sampled tokens
        for turn in request.turns:
            mask = int(turn.role == "assistant")
            assert set(request.loss_mask[turn.start : turn.end]) <= {mask}

    def check_rendering(self, conversation: Conversation) -> None:
        """Compare the tokens around the first call with the template's own rendering."""
        request, (call, results) = conversation.request, conversation.request.turns[:2]
        num_results = sum(message.role == "tool" for message in request.messages) // 2
        really = self.normalize(self._render(request.messages[: 3 + num_results]))
        prompt = self.template.decode(request.prompt_ids)
        called = self.template.decode(request.response_ids[call.start : call.end])
        observed = self.template.decode(request.response_ids[results.start : results.end])
        # Qwen3 writes an empty thought before a call only if the call is last.
        calls = (called, called.replace(EMPTY_THOUGHT, ""))
        assert really in [prompt + said + observed for said in calls]

    def _render(self, messages: Sequence[Message]) -> str:
        """Render the messages with transformers."""
        return self._tokenizer.apply_chat_template(
            [m.model_copy(update={"content": m.text}).to_template() for m in messages],
            tools=[tool.to_template() for tool in TOOLS],
            chat_template=self.template.structure.renderer.source,
            add_generation_prompt=True,
            tokenize=False,
        )


@lru_cache(maxsize=16)
def production_case(name: str) -> TemplateCase:
    """Return a production template on the real tokenizer, which composes characters."""
    tokenizer: Any = load_tokenizer()
    normalizer = tokenizer.backend_tokenizer.normalizer
    return TemplateCase(load_template(name), load_report(name), tokenizer, normalizer.normalize_str)


@lru_cache(maxsize=1)
def byte_fallback_case() -> TemplateCase:
    """Return a production template on a byte-fallback tokenizer."""
    real: Any = load_tokenizer()
    tokenizer = byte_fallback_tokenizer(list(real.get_added_vocab()))
    template = ChatTemplate(tokenizer, custom_template=read_source("qwen2_5"))
    return TemplateCase(template, probe_template(template), tokenizer, lambda text: text)


def byte_fallback_tokenizer(control: Sequence[str]) -> PreTrainedTokenizerFast:
    """Make a tokenizer with letters, `▁` for blanks, bytes for the rest and a leading blank."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    merges = [("t", "h"), ("th", "e"), ("▁", "t"), ("▁", "▁"), ("<", "|"), ("|", ">"), ("<", "s")]
    vocab = {piece: id for id, piece in enumerate([*pieces, *map("".join, merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(steps)  # type: ignore[assignment]
    backend.decoder = decoders.Sequence(  # type: ignore[assignment]
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1),
        ]
    )
    added = [AddedToken(text, special=True, normalized=False) for text in [*special, *control]]
    backend.add_special_tokens(added)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def _in_parts(text: str) -> Message:
    """Make a user message whose text has two parts, as in some datasets."""
    parts = [
        {"type": "text", "text": part} for part in (text[: len(text) // 2], text[len(text) // 2 :])
    ]
    return Message.model_validate({"role": "user", "content": parts})


def _cut_at_words(text: str) -> list[str | int]:
    parts = WORD.split(text)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]
