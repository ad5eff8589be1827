"""Match the history that a client sends to what the policy sampled. Pure: no I/O, no tokens.

A client sends the whole conversation with every call. `HistoryTree` keeps each conversation as a
path of messages, as they were sent; the completions of the policy are marked. A new history follows
the path as long as each of its messages says the same. Clients change details that do not change
the content: these are `Difference`s, and each is counted. Any other change leaves the path.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar, cast

from agentrl.agent_loops.gateway.calls import SentCall, SentMessage, write_json
from agentrl.messages import THOUGHTS, OpenAIFunctionToolSchema

S = TypeVar("S")
"""What is stored with a completion."""
Tools = Sequence[OpenAIFunctionToolSchema]

LEFT_OUT_LINES = (
    r"x-[a-z0-9-]+-header: .*",  # Claude Code's `x-anthropic-billing-header`
)
"""Lines of system messages for the server's accounts (regular expressions). The policy does not get
them."""

VOLATILE_LINES = (
    # "Current time: 13:04", "Today's date is 2026-11-27", "It is now Fri Nov 27 2026 13:04:06"
    r"(?=.*(?<![a-z])(?:date|time|datetime|timestamp|today|now)(?![a-z]))"
    r".*(?<!\d)(?:\d\d?:\d\d|20\d\d)(?!\d).*",
    # "timestamp: 1795784686"
    r"\W*(?:[a-z]+[ _-]){0,2}(?:time|timestamp|now)\W+\d{9,}(?:\.\d+)?\W*",
    # "request_id: 7f3a", "<trace-id>7f3a</trace-id>", "nonce = 7f3a"
    r"\W*(?:(?:[a-z]+[ _-]){0,2}(?:request|trace|turn|message|call|span)[ _-]?id|nonce)\W*[:=>].*",
)
"""Lines of system messages with a time, or an id of the call (regular expressions). The policy gets
the first one; another value in a later call does not change the history."""

_LEFT_OUT, _VOLATILE = (
    re.compile("|".join(f"(?:{line})" for line in lines), re.IGNORECASE)
    for lines in (LEFT_OUT_LINES, VOLATILE_LINES)
)


class Difference(StrEnum):
    """A detail in which a history differs from what was sampled or first sent."""

    WHITESPACE = "whitespace"
    """Blanks at the ends of the text or of its lines, or another kind of line ends."""
    EMPTY_CONTENT = "empty_content"
    """An empty text instead of null, or the reverse."""
    CONTENT_PARTS = "content_parts"
    """One text instead of its parts, or the reverse."""
    DROPPED_THINKING = "dropped_thinking"
    """The thought of a completion is missing."""
    INLINE_THINKING = "inline_thinking"
    """The thought of a completion is in its text, between tags."""
    ARGUMENTS = "arguments"
    """The same arguments as other JSON: re-ordered keys, blanks, escapes, 1.0 for 1."""
    CALL_IDS = "call_ids"
    """Other ids of the same tool calls."""
    SPLIT_MESSAGE = "split_message"
    """The text and the calls of one completion as several messages."""
    VOLATILE_LINE = "volatile_line"
    """A line of a system message that `LEFT_OUT_LINES` or `VOLATILE_LINES` names."""
    RESULT_ORDER = "result_order"
    """Tool results in another order than their calls. They are shown in the order of the calls."""
    TOOL_ORDER = "tool_order"
    """The same tools in another order."""


class Node(Generic[S]):
    """A message of a conversation; its path to the root is the history before it."""

    def __init__(self, message: SentMessage | None, parent: "Node[S] | None" = None) -> None:
        self.message = message
        """None for the root."""
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0
        """Number of messages up to this one."""
        self.children: list[Node[S]] = []
        self.sampled: S | None = None
        """Set if the policy sampled the message."""
        self.is_prompt = False
        """Whether a prompt ended with this message."""
        if parent is not None:
            parent.children.append(self)

    def path(self) -> "Iterator[Node[S]]":
        """Yield this node and those before it, up to the root."""
        node: Node[S] | None = self
        while node is not None:
            yield node
            node = node.parent


class Match(NamedTuple, Generic[S]):
    """The longest known beginning of a history."""

    messages: list[SentMessage]
    """The history, as `tidy` returned it."""
    completion: Node[S] | None
    """The last completion after which the history has messages of others only; None if there is
    none, or if later assistant messages were not sampled there."""
    same_prompt: Node[S] | None
    """The node of an earlier prompt, if the whole history is that prompt."""
    nearest: Node[S]
    """The deepest known node of the history."""
    differences: Counter[Difference]
    """Differences of the known beginning, and those that `tidy` removed."""

    @property
    def new_messages(self) -> list[SentMessage]:
        """The messages after the completion."""
        return self.messages[self.completion.depth if self.completion else 0 :]


class _Path(NamedTuple, Generic[S]):
    """A known path that a history follows so far, and how the history differs from it."""

    node: Node[S]
    differences: Counter[Difference]


class HistoryTree(Generic[S]):
    """The conversations of one trajectory: a tree of messages for each list of tools.

    Args:
        is_free: Whether a completion has not been continued yet.
    """

    def __init__(self, is_free: Callable[[S], bool]) -> None:
        self._is_free = is_free
        self._roots: dict[str, tuple[Node[S], list[str]]] = {}

    def match(self, messages: Sequence[SentMessage], tools: Tools) -> Match[S]:
        """Find the longest known beginning of a history. Nothing is stored.

        If several completions fit equally far, the one with the fewest differences is chosen; then
        one that was not continued yet; then the last.
        """
        history, differences = tidy(messages)
        root, names = self._root(tools)
        if names != [tool.name for tool in tools]:
            differences[Difference.TOOL_ORDER] += 1
        paths, completions = [_Path(root, differences)], list[_Path[S]]()
        nearest = paths
        for message in history:
            paths = [step for path in paths for step in _follow(path, message)]
            if not paths:
                break
            nearest = paths
            completions = [path for path in paths if path.node.sampled is not None] or completions
        deepest = self._choose(nearest)
        is_whole = deepest.node.depth == len(history)
        completion = self._choose(completions) if completions else None
        if completion and any(m.role == "assistant" for m in history[completion.node.depth :]):
            completion = None
        return Match(
            messages=history,
            completion=completion.node if completion else None,
            same_prompt=deepest.node if is_whole and deepest.node.is_prompt else None,
            nearest=deepest.node,
            differences=(completion or deepest).differences,
        )

    def add(
        self, messages: Sequence[SentMessage], tools: Tools, *, after: Node[S] | None = None
    ) -> Node[S]:
        """Store messages after a node (None: after the root of the tools); return the last node.

        Equal messages share a node.
        """
        node = after or self._root(tools)[0]
        for message in messages:
            equal = (c for c in node.children if c.sampled is None and c.message == message)
            node = next(equal, None) or Node(message, node)
        return node

    def add_completion(self, after: Node[S], message: SentMessage, sampled: S) -> Node[S]:
        """Store a completion. Completions never share a node, even if they are equal."""
        node = Node(message, after)
        node.sampled = sampled
        return node

    def _root(self, tools: Tools) -> tuple[Node[S], list[str]]:
        written = sorted(write_json(_sorted_keys(tool.to_template())) for tool in tools)
        names = [tool.name for tool in tools]
        return self._roots.setdefault("\n".join(written), (Node(None), names))

    def _choose(self, paths: Sequence[_Path[S]]) -> _Path[S]:
        """Choose among paths of one depth; the last of equally good ones."""

        def badness(path: _Path[S]) -> tuple[int, bool]:
            sampled = path.node.sampled
            return path.differences.total(), sampled is not None and not self._is_free(sampled)

        return min(reversed(paths), key=badness)


def _follow(path: _Path[S], message: SentMessage) -> Iterator[_Path[S]]:
    for child in path.node.children:
        found = compare(cast("SentMessage", child.message), message)
        if found is not None:
            yield _Path(child, path.differences + Counter(found) if found else path.differences)


def tidy(messages: Sequence[SentMessage]) -> tuple[list[SentMessage], Counter[Difference]]:
    """Write a history in one form, and count what was changed.

    Lines for the server are left out; the text and the calls of one completion become one message;
    results are in the order of their calls and have the names of their tools.
    """
    found: Counter[Difference] = Counter()
    tidied: list[SentMessage] = []
    split: dict[int, list[SentCall]] = {}
    for message in messages:
        last = tidied[-1] if tidied else None
        if message.role == "system":
            lines = message.text.split("\n")
            kept = [line for line in lines if not _LEFT_OUT.fullmatch(line.strip())]
            found[Difference.VOLATILE_LINE] += len(lines) - len(kept)
            if any(kept) or kept == lines:
                tidied.append(replace(message, text="\n".join(kept)))
        elif last and _is_continued(last, message):
            found[Difference.SPLIT_MESSAGE] += 1
            split.setdefault(len(tidied) - 1, list(last.calls)).extend(message.calls)
        else:
            tidied.append(message)
    for index, calls in split.items():
        tidied[index] = replace(tidied[index], calls=tuple(calls))
    for start, end in list(_results(tidied)):
        calls = tidied[start - 1].calls
        order = {call.id: index for index, call in enumerate(calls)}
        results = sorted(tidied[start:end], key=lambda m: order.get(m.call_id, len(order)))
        found[Difference.RESULT_ORDER] += results != tidied[start:end]
        names = {call.id: call.name for call in calls}
        tidied[start:end] = [replace(m, name=names.get(m.call_id, m.name)) for m in results]
    return tidied, +found


def _is_continued(first: SentMessage, second: SentMessage) -> bool:
    """Whether two messages are parts of one completion: its text or calls, then calls only."""
    is_assistant = first.role == second.role == "assistant"
    return is_assistant and bool(second.calls) and not second.text and not second.thought


def _results(messages: Sequence[SentMessage]) -> Iterator[tuple[int, int]]:
    """Yield the span of the tool messages after each assistant message with calls."""
    for index, message in enumerate(messages):
        if message.calls:
            end = index + 1
            while end < len(messages) and messages[end].role == "tool":
                end += 1
            if end > index + 1:
                yield index + 1, end


def compare(known: SentMessage, sent: SentMessage) -> list[Difference] | None:
    """Return the differences of a sent message from a known one; None if it says something else."""
    if known.role != sent.role or len(known.calls) != len(sent.calls):
        return None
    found: list[Difference] = []
    if known.thought and not sent.thought and (inline := split_thought(sent.text))[0]:
        sent = replace(sent, thought=inline[0], text=inline[1])
        found.append(Difference.INLINE_THINKING)
    if known.thought and not sent.thought:
        found.append(Difference.DROPPED_THINKING)
    elif known.thought != sent.thought and not _add_text(found, known.thought, sent.thought):
        return None
    if not _add_text(found, known.text, sent.text):
        if known.role != "system" or _steady(known.text) != _steady(sent.text):
            return None
        found.append(Difference.VOLATILE_LINE)
    if known.form != sent.form and not (known.form == "null" and found):
        is_empty = not sent.text.strip() and "parts" not in (known.form, sent.form)
        found.append(Difference.EMPTY_CONTENT if is_empty else Difference.CONTENT_PARTS)
    if known.call_id != sent.call_id:
        found.append(Difference.CALL_IDS)
    for mine, theirs in zip(known.calls, sent.calls, strict=True):
        if mine.name != theirs.name or not same_json(mine.arguments, theirs.arguments):
            return None
        found += [Difference.ARGUMENTS] * (mine.text != theirs.text)
        found += [Difference.CALL_IDS] * (mine.id != theirs.id)
    return list(dict.fromkeys(found))


def _add_text(found: list[Difference], known: str, sent: str) -> bool:
    """Whether two texts say the same; adds a difference in blanks."""
    if known == sent:
        return True
    if _without_blanks(known) != _without_blanks(sent):
        return False
    found.append(Difference.WHITESPACE)
    return True


def _steady(text: str) -> list[str]:
    """Return the lines of a system message, without the values of volatile ones."""
    lines = (line.strip() for line in text.strip().splitlines())
    return ["" if _VOLATILE.fullmatch(line) else line for line in lines]


def _without_blanks(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


def split_thought(text: str) -> tuple[str, str]:
    """Split a text that starts with a thought between tags into the thought and the rest.

    A thought that is not closed is the whole text. Without a thought the first part is empty.

    Example:
        >>> split_thought("<think>Two and two.</think>4")
        ('Two and two.', '4')
    """
    stripped = text.lstrip()
    for opening, closing in THOUGHTS.items():
        if stripped.startswith(opening):
            thought, _, rest = stripped.removeprefix(opening).partition(closing)
            return thought.strip(), rest.lstrip()
    return "", text


def same_json(one: Any, other: Any) -> bool:
    """Whether two values are the same JSON: keys in any order, numbers by value.

    Example:
        >>> same_json({"a": 1, "b": [2.0]}, {"b": [2], "a": 1})
        True
        >>> same_json({"a": True}, {"a": 1})
        False
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        mine, theirs = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        return mine.keys() == theirs.keys() and all(same_json(mine[k], theirs[k]) for k in mine)
    if isinstance(one, list) and isinstance(other, list):
        ours, others = cast("list[Any]", one), cast("list[Any]", other)
        return len(ours) == len(others) and all(map(same_json, ours, others))
    return one == other


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: _sorted_keys(item) for key, item in sorted(cast("dict[str, Any]", value).items())
        }
    if isinstance(value, list):
        return [_sorted_keys(item) for item in cast("list[Any]", value)]
    return value
