"""The report on a chat template, and the decision whether a run can use it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from agentrl.errors import TemplateError


class TextTransform(StrEnum):
    """What a template does to a text before it writes it."""

    VERBATIM = "verbatim"
    """Writes it unchanged."""
    TRIMS = "trims"
    """Strips white space from its ends."""
    SPLITS = "splits"
    """Drops a part of it, at a marker that it looks for."""
    ESCAPES = "escapes in JSON"
    """Writes it as a JSON string, or with another known escape."""
    REWRITES = "rewrites"
    """Changes it in a way that no known escape explains."""
    DROPS = "drops"
    """Omits it."""
    BRANCHES = "branches on it"
    """Writes other text elsewhere, or refuses, depending on it."""
    REFUSES = "refuses"
    """Refuses every message of this kind."""


class Capability(StrEnum):
    """A feature of conversations that a template may support."""

    GENERATION_PROMPT = "generation prompt"
    WITHOUT_TOOLS = "conversation without tools"
    SYSTEM = "system message"
    TOOLS = "tools in the prompt"
    CALLS = "tool calls of the assistant"
    TOOL_RESULT = "tool result"
    PARALLEL_CALLS = "several tool calls of a turn"
    PARALLEL_RESULTS = "several tool results"
    TOOL_IMAGES = "images in a tool result"
    PROMPT_AFTER_TOOL = "generation prompt after a tool"
    USER_AFTER_ASSISTANT = "user after an assistant"
    USER_AFTER_TOOL = "user after a tool"


class History(StrEnum):
    """A kind of older turn that a template should leave as it was sampled."""

    ANSWER_BEFORE_USER = "an answer, when a user follows"
    THOUGHT_BEFORE_USER = "a thought, when a user follows"
    CALL_BEFORE_TOOL = "a tool call, when its result follows"
    THOUGHT_BEFORE_TOOL = "a thought before a tool call"
    TWO_TOOL_ROUNDS = "two rounds of tools"
    PARALLEL_CALLS = "two tool calls of a turn, when their results follow"
    TOOL_ROUND_BEFORE_USER = "a tool call and its answer, when a user follows"
    THOUGHT_OF_ROUND_BEFORE_USER = "thoughts before a tool call and its answer, when a user follows"


@dataclass(frozen=True, slots=True)
class TextReport:
    """What the template does to the texts of one position."""

    position: str
    """A key of `ROLES`."""
    transforms: tuple[TextTransform, ...]
    exact: bool
    """Whether the compiled template wrote what the template writes, for every text that was
    tried."""
    note: str = ""
    """The first text for which it did not, or why the template refuses."""


@dataclass(frozen=True, slots=True)
class CapabilityReport:
    """Whether the template supports a feature."""

    capability: Capability
    carried: bool
    reason: str = ""
    """Why it does not."""


@dataclass(frozen=True, slots=True)
class HistoryReport:
    """Whether the template writes an older turn as it was sampled."""

    history: History
    stable: bool | None
    """None if the template does not support such a conversation."""
    difference: str = ""
    """The difference between the sampled and the rendered turn, or why the template refuses."""
    is_cut: bool = False
    """Whether a stop token ends a turn before its text is complete."""
    after_system: str = ""
    """The difference if the conversation starts with a system message, and only then."""
    rewrites_empty: str = ""
    """The difference if the policy writes an empty thought, and only then."""


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """What the probe found out about a template, once, when the run starts."""

    template: str
    generation_prompt: str | None
    """None if the template writes none."""
    starts_in_thought: bool
    thinks: bool
    """Whether the template supports thoughts: it looks for their tags, or writes them."""
    end_of_turn: str
    stop_tokens: tuple[str, ...]
    date: str | None
    """The date that it writes, frozen for the run; None if it writes none."""
    texts: tuple[TextReport, ...]
    capabilities: tuple[CapabilityReport, ...]
    histories: tuple[HistoryReport, ...]
    call_example: str | None
    """How the template writes the call of `probe_tool` with `{"city": "Oslo"}`; None if it does
    not."""
    parallel_call_example: str | None
    """How the template writes a turn with two calls, for `PARALLEL_CITIES`; None if it does not."""
    round_trip: bool
    """Whether outside text is unchanged after encoding and decoding."""
    lost_characters: tuple[str, ...]
    """Rare characters that decoding does not return: the policy is shown something else."""
    missing_tokens: tuple[str, ...] = ()
    """Control tokens that the template writes and that the tokenizer encodes as plain text."""
    plain_frames: tuple[str, ...] = ()
    """Those in a frame of a turn that contains no real control token: outside text can forge such a
    turn."""

    @property
    def notes(self) -> list[str]:
        """Warnings about the template for the start of a run, a sentence each."""
        notes: list[str] = []
        if self.missing_tokens:
            missing = ", ".join(self.missing_tokens)
            notes.append(
                f"the chat template {self.template!r} writes {missing} as control tokens, which "
                "the tokenizer does not have: they are plain text, and users and tools can write "
                "them"
            )
        emptied = (found.rewrites_empty for found in self.histories if found.rewrites_empty)
        if self.starts_in_thought and (what := next(emptied, "")):
            notes.append(
                f"the generation prompt of the chat template {self.template!r} opens a thought; if "
                f"the policy leaves it empty, older turns are rendered without it: {what}"
            )
        return notes

    def text(self, position: str) -> TextReport:
        """Return the report on the texts of a position."""
        return next(text for text in self.texts if text.position == position)

    def carries(self, capability: Capability) -> bool:
        """Whether the template supports this."""
        return self.capability(capability).carried

    def history(self, history: History) -> HistoryReport:
        """Return the report on older turns of this kind."""
        return next(report for report in self.histories if report.history is history)

    def describe(self) -> list[tuple[str, str]]:
        """Return rows (what, finding) for people."""
        round_trip = "exact" if self.round_trip else "not exact"
        if lost := ", ".join(f"U+{ord(character):04X}" for character in self.lost_characters):
            round_trip += f", and these are lost: {lost}"
        rows = [
            ("template", self.template),
            ("generation prompt", _quoted(self.generation_prompt)),
            ("starts in a thought", "yes" if self.starts_in_thought else "no"),
            ("end of turn", _quoted(self.end_of_turn)),
            ("stop tokens", " ".join(self.stop_tokens)),
            ("date", f"{self.date} (frozen for the run)" if self.date else "none"),
            ("text round trip", round_trip),
            ("not in the tokenizer", ", ".join(self.missing_tokens) or "none"),
        ]
        rows += [(f"text: {text.position}", _describe_text(text)) for text in self.texts]
        rows += [
            (f"supports: {report.capability}", "yes" if report.carried else f"no: {report.reason}")
            for report in self.capabilities
        ]
        rows += [(f"keeps: {kept.history}", _describe_history(kept)) for kept in self.histories]
        return rows

    def capability(self, capability: Capability) -> CapabilityReport:
        """Return whether the template supports this, and why not."""
        return next(report for report in self.capabilities if report.capability is capability)


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateNeeds:
    """What a run requires of its template."""

    system: bool | None = None
    """Whether conversations have system messages; None: they may have."""
    tools: bool = False
    """The prompt contains tools, and the policy calls them."""
    parallel_results: bool = False
    """Several calls of one turn may be answered."""
    tool_images: bool = False
    """A tool returns images."""
    interaction: bool = False
    """A user answers the policy."""
    compaction: bool = False
    """A user message that asks for a summary may follow tool results."""
    thoughts: bool | None = None
    """Whether the policy writes thoughts into its turns; None: if its template supports them."""
    on_rewritten_history: Literal["error", "keep"] = "error"
    """`keep`: continue with the tokens as they were sampled."""
    sanity_check: Literal["disable", "strict", "ignore_strippable"] = "disable"
    """`strict`: what the check would find later is an error at start."""

    @property
    def capabilities(self) -> list[Capability]:
        """The features that the template must support."""
        needed = [Capability.GENERATION_PROMPT]
        needed += [] if self.tools else [Capability.WITHOUT_TOOLS]
        needed += [Capability.SYSTEM] if self.system else []
        if self.tools:
            needed += [Capability.TOOLS, Capability.TOOL_RESULT, Capability.PROMPT_AFTER_TOOL]
        if self.tools and self.parallel_results:
            needed += [Capability.PARALLEL_RESULTS, Capability.PARALLEL_CALLS]
        needed += [Capability.TOOL_IMAGES] if self.tools and self.tool_images else []
        needed += [Capability.USER_AFTER_ASSISTANT] if self.interaction else []
        needed += [Capability.USER_AFTER_TOOL] if self.tools and self.compaction else []
        return needed

    @property
    def positions(self) -> list[str]:
        """Positions at which the run has texts."""
        used = ["system"] if self.system else []
        used += ["user", "assistant"]
        used += ["tool", "tool name", "call argument", "tool description"] if self.tools else []
        return used

    def histories(self, report: TemplateReport) -> list[HistoryReport]:
        """Return the reports on older turns of the run's conversations."""
        thoughts = report.thinks if self.thoughts is None else self.thoughts
        asked = {
            History.ANSWER_BEFORE_USER: self.interaction,
            History.THOUGHT_BEFORE_USER: self.interaction and thoughts,
            History.CALL_BEFORE_TOOL: self.tools,
            History.THOUGHT_BEFORE_TOOL: self.tools and thoughts,
            History.TWO_TOOL_ROUNDS: self.tools,
            History.PARALLEL_CALLS: self.tools and self.parallel_results,
            History.TOOL_ROUND_BEFORE_USER: self.tools and self.interaction,
            History.THOUGHT_OF_ROUND_BEFORE_USER: self.tools and self.interaction and thoughts,
        }
        return [report.history(history) for history, is_asked in asked.items() if is_asked]


ROLES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "tool name": "tool",
    "call argument": "assistant",
    "tool description": "system",
}
"""Positions of texts, and the role of the message that holds them."""
_ROLES = {
    Capability.GENERATION_PROMPT: "assistant",
    Capability.WITHOUT_TOOLS: "user",
    Capability.SYSTEM: "system",
    Capability.TOOLS: "system",
    Capability.CALLS: "assistant",
    Capability.USER_AFTER_ASSISTANT: "user",
    Capability.USER_AFTER_TOOL: "user",
}

_LAXER = "rollout.multi_turn.tokenization_sanity_check_mode: ignore_strippable or disable"


def require(report: TemplateReport, needs: TemplateNeeds) -> None:
    """Refuse to start if the template does not support what the run needs.

    Raises:
        TemplateError: names the template, the role, and what the template does.
    """
    _require_frames(report)
    _require_capabilities(report, needs)
    if needs.sanity_check == "strict":
        _require_exact(report, needs)
    _require_histories(report, needs)


def _require_frames(report: TemplateReport) -> None:
    """Refuse a tokenizer that lacks the tokens of the template's frames."""
    if report.plain_frames:
        raise TemplateError(
            "the tokenizer lacks the tokens that frame a turn in the chat template, so any "
            "outside text could open a turn",
            template=report.template,
            role="user",
            missing=", ".join(report.plain_frames),
            expected="the tokenizer of the template's own model (model.tokenizer_path), or another "
            "model.custom_chat_template",
        )


def _require_capabilities(report: TemplateReport, needs: TemplateNeeds) -> None:
    """Refuse a template that does not support the run's conversations."""
    for capability in needs.capabilities:
        found = report.capability(capability)
        if not found.carried:
            raise TemplateError(
                f"the chat template does not support: {capability}",
                template=report.template,
                role=_ROLES.get(capability, "tool"),
                reason=found.reason,
                expected="another model.custom_chat_template, or a run that does not need it",
            )


def _require_histories(report: TemplateReport, needs: TemplateNeeds) -> None:
    """Refuse a template that rewrites or cuts older turns of the run's conversations."""
    asked = needs.histories(report)
    if cut := next((found for found in asked if found.is_cut), None):
        raise TemplateError(
            f"this chat template ends a turn too early: {cut.difference}",
            template=report.template,
            role="assistant",
            needs=str(cut.history),
            expected="another model.custom_chat_template, or a tokenizer whose end of sequence "
            "the template writes at the end of a turn only",
        )
    rewritten = [found for found in asked if found.stable is False]
    if needs.system is not False:
        rewritten += [found for found in asked if found.after_system]
    if rewritten and needs.sanity_check == "strict":
        raise _rewriting(report, rewritten, _LAXER)
    if rewritten and needs.on_rewritten_history == "error":
        raise _rewriting(
            report,
            rewritten,
            "model.on_rewritten_history: keep (continue with the tokens as sampled), or another "
            "model.custom_chat_template",
        )


def _require_exact(report: TemplateReport, needs: TemplateNeeds) -> None:
    """Refuse a template for which a strict check would find differences in some conversation."""
    if not report.round_trip:
        raise TemplateError(
            "the tokenizer does not decode texts to what they were, which is not allowed with "
            "tokenization_sanity_check_mode: strict",
            template=report.template,
            role="user",
            choices=_LAXER,
        )
    for text in map(report.text, needs.positions):
        # A refusal does not depend on the text: the capabilities say whether the run needs it.
        if text.exact or TextTransform.REFUSES in text.transforms:
            continue
        raise TemplateError(
            f"the chat template changes text at {text.position!r} in a way that agentrl cannot "
            "reproduce, which is not allowed with tokenization_sanity_check_mode: strict",
            template=report.template,
            role=ROLES[text.position],
            does=_describe_text(text),
            choices=_LAXER,
        )


def _rewriting(
    report: TemplateReport, rewritten: Sequence[HistoryReport], choices: str
) -> TemplateError:
    what = "; ".join(
        f"{found.history} ({found.difference or found.after_system})" for found in rewritten
    )
    return TemplateError(
        "the chat template rewrites older turns, so the policy would be shown other tokens "
        "than it sampled",
        template=report.template,
        role="assistant",
        rewrites=what,
        choices=choices,
    )


def _describe_text(text: TextReport) -> str:
    found = ", ".join(text.transforms)
    return found if text.exact else f"{found}; not exact: {text.note}"


def _describe_history(report: HistoryReport) -> str:
    if report.stable is None:
        return f"not supported: {report.difference}"
    if report.is_cut:
        return f"no: {report.difference}"
    if report.after_system:
        return f"yes, but not after a system message: {report.after_system}"
    if report.rewrites_empty:
        return f"yes, but not an empty thought: {report.rewrites_empty}"
    return "yes" if report.stable else f"no, rewrites history: {report.difference}"


def _quoted(text: str | None) -> str:
    return "none" if text is None else repr(text)
