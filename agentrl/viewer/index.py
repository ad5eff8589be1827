"""Index the files of saved rollouts: where each line is, and the values that lists show.

A file is read once; its lines are read again only if a trajectory is opened. Rollout files appear
when they are complete, so a file that has not changed is never read again.
"""

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.errors import DataError
from agentrl.trainer.rollouts.line_files import FrameStart, LineReader, read_range
from agentrl.trainer.rollouts.pictures import is_picture_name
from agentrl.trainer.rollouts.token_files import read_tokens, token_path

_TOKENS = (b',"loss_mask":[', b', "loss_mask": [')
"""The last keys of a line are lists of tokens, which the index does not need. Lines of older
versions have spaces."""
_PROMPT = re.compile(rb'"prompt_ids": ?\[([^\]]*)\]')
_MAX_TEXT = 1 << 16
"""Longer conversations are searched in their file."""
_EXCERPT = 160
_MAX_NAME = 100
"""Characters of names that the policy writes: tools that it calls."""
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError)
"""Errors of reading a line that is not a saved request."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One trajectory, as lists show it."""

    id: str
    """Name of the file and number of the line: `rollouts/step_000010:3`."""
    offset: int
    """First byte of the line in the text of its file."""
    num_bytes: int
    step: int
    request_id: str
    uid: str
    row: str
    """The same for trajectories with the same prompt."""
    sample: int
    source: str
    reward: float | None
    end: str
    state: str
    fault: str
    message: str
    turns: int
    tokens: int
    trained: int
    seconds: float
    calls: tuple[tuple[str, str, float, float], ...]
    """Tool, outcome, seconds in the queue, seconds at work."""
    excerpt: str
    """The start of the last message of the assistant."""
    text: str | None
    """All texts in lower case; None if they are too long to keep."""

    def __post_init__(self) -> None:
        texts = (self.request_id, self.uid, self.source, self.end, self.state, self.fault)
        whole = (self.step, self.sample, self.turns, self.tokens, self.trained)
        times = [self.seconds, *(time for _, _, *two in self.calls for time in two)]
        names = [name for tool, outcome, *_ in self.calls for name in (tool, outcome)]
        if not all(isinstance(one, str) for one in (*texts, self.message, *names)):
            raise TypeError("a name that is no text")
        if not all(type(one) is int for one in whole):
            raise TypeError("a count that is no whole number")
        if not all(type(one) in (int, float) for one in times):
            raise TypeError("a time that is no number")

    def shown(self) -> dict[str, Any]:
        """Return the values of a list."""
        keys = (
            "id step request_id uid sample source reward end state fault message turns tokens"
            " trained seconds excerpt"
        )
        values = {key: getattr(self, key) for key in keys.split()}
        names = dict.fromkeys(name for name, *_ in self.calls)
        bad = sum(outcome != "ok" for _, outcome, *_ in self.calls)
        return {**values, "tools": list(names), "calls": len(self.calls), "bad_calls": bad}


@dataclass(slots=True)
class FileIndex:
    """The trajectories of one file."""

    path: Path
    signature: tuple[int, int]
    """Time and size of the file that was read."""
    entries: list[Entry] = field(default_factory=list[Entry])
    damaged: list[int] = field(default_factory=list[int])
    """Numbers of lines that cannot be read."""
    pictures: set[str] = field(default_factory=set[str])
    """Files of images and videos that the lines name, relative to the folder of `path`."""
    frames: Sequence[FrameStart] = ()
    """Parts of a compressed file."""
    text_bytes: int = 0
    """Memory of the texts that are kept."""
    _advantages: dict[str, float] | None = None

    def read(self, entry: Entry) -> dict[str, Any]:
        """Read the whole line of a trajectory."""
        return json.loads(read_range(self.path, entry.offset, entry.num_bytes, self.frames))

    def contains(self, entry: Entry, text: str) -> bool:
        """Return whether a conversation has `text`, which is in lower case."""
        if entry.text is not None:
            return text in entry.text
        with suppress(*_DAMAGED, OSError):  # the file has been damaged or removed since
            return text in "\n".join(texts_of(self.read(entry)["request"])).lower()
        return False

    def picture(self, name: str) -> Path:
        """Return the file of a picture.

        Raises:
            LookupError: If no line names it, or it is not a file in the folder of pictures.
        """
        if name in self.pictures:
            folder = self.path.parent.resolve()
            path = (folder / name).resolve()  # a link may lead to another folder
            if path == folder / name and path.is_file():
                return path
        raise LookupError(name)

    def has_picture(self, name: Any) -> bool:
        """Return whether `picture` returns a file."""
        with suppress(LookupError, TypeError, OSError):
            return self.picture(name).is_file()
        return False

    @property
    def advantages(self) -> dict[str, float]:
        """Mean advantage of the trained tokens, by `request_id`; empty without a file of tokens."""
        if self._advantages is None:
            self._advantages = _read_advantages(self.path)
        return self._advantages


def signature_of(path: Path) -> tuple[int, int]:
    """Return what changes if a file is replaced."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_size


def index_file(path: Path, label: str, max_text_bytes: int = 1 << 29) -> FileIndex:
    """Read a rollout file once.

    Args:
        path: The file.
        label: The first part of each `Entry.id`.
        max_text_bytes: Memory for texts of conversations; those that exceed it are not kept.
    """
    index = FileIndex(path, signature_of(path))
    offset = 0
    with LineReader(path) as file:
        index.frames = file.frames
        for number, line in enumerate(file):
            try:
                saved = _read_head(line)
                entry = _make_entry(saved, line, f"{label}:{number}", offset)
                index.pictures.update(picture_names(saved["request"]))
                size = sys.getsizeof(entry.text)
                if index.text_bytes + size > max_text_bytes:
                    entry, size = replace(entry, text=None), 0
                index.text_bytes += size
                index.entries.append(entry)
            except _DAMAGED:
                index.damaged.append(number + 1)
            offset += len(line)
    return index


def texts_of(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a saved request: messages, calls and the error, of all sequences."""
    for branch in request["branches"]:
        yield from texts_of(branch)
    for message in request["messages"]:
        content = message["content"]
        yield content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
        for call in message.get("tool_calls") or ():
            yield json.dumps(call, ensure_ascii=False)
    if request.get("error"):
        yield request["error"]["message"]


def _read_head(line: bytes) -> dict[str, Any]:
    """Read a line without its lists of tokens, except if it has images, videos or branches.

    Raises:
        ValueError: If it is not JSON, or its end is missing.
    """
    if not line.endswith(b"}}\n"):
        raise ValueError("the end of the line is missing")
    head = line[: _find_tokens(line)] + b"}}"
    try:
        saved = json.loads(head)
    except ValueError:
        return json.loads(line)
    request = saved["request"]
    return json.loads(line) if request["branches"] or request["multi_modal_data"] else saved


def _find_tokens(line: bytes) -> int:
    """Return where the lists of tokens begin; -1 if there are none."""
    return max(map(line.rfind, _TOKENS))


def picture_names(request: Mapping[str, Any]) -> Iterator[str]:
    """Yield the files of images and videos that a saved request names, of all sequences."""
    for one in (*request["branches"], request):
        for entries in (one.get("multi_modal_data") or {}).values():
            files = [entry for entry in entries if isinstance(entry, dict)]
            names = (file.get(key) for file in files for key in ("path", "thumbnail"))
            yield from filter(is_picture_name, names)


def _hash_prompt(request: Mapping[str, Any], line: bytes) -> str:
    """Return a digest of the tokens of a prompt and of its images and videos."""
    first = [*request["branches"], request][0]
    if "prompt_ids" in first:
        ids, media = first["prompt_ids"], first.get("multi_modal_data") or {}
        shown = [run for run in first.get("media_runs", ()) if run["end"] <= len(ids)]
        files = [media[run["kind"]][run["index"]] for run in shown if run["index"] is not None]
        prompt = json.dumps(ids).strip("[]").encode() + json.dumps(files or "").strip('"').encode()
    else:
        match = _PROMPT.search(line, _find_tokens(line))
        prompt = match[1] if match else b""
    return hashlib.sha1(prompt.replace(b" ", b""), usedforsecurity=False).hexdigest()


def _make_entry(saved: Mapping[str, Any], line: bytes, entry_id: str, offset: int) -> Entry:
    request, summary = saved["request"], saved["summary"]
    error = request["error"] or {}
    reward = saved.get("combined_reward")
    reward = request["reward"] if reward is None else reward
    text = "\n".join(texts_of(request))
    return Entry(
        id=entry_id,
        offset=offset,
        num_bytes=len(line),
        step=saved["step"],
        request_id=request["request_id"],
        uid=request["uid"],
        row=_hash_prompt(request, line),
        sample=request["rollout_offset"],
        source=request["data_source"],
        reward=None if reward is None else _number(reward),
        end=request["stop_reason"] or "",
        state=request["state"],
        fault=error.get("fault", ""),
        message=error.get("message", ""),
        turns=summary["num_turns"],
        tokens=summary["num_response_tokens"],
        trained=summary["num_trained_tokens"],
        seconds=request["metrics"].get("seconds") or sum(t["seconds"] for t in request["turns"]),
        calls=tuple(_calls_of(request)),
        excerpt=_excerpt(request["messages"]),
        text=text.lower() if len(text) <= _MAX_TEXT else None,
    )


def _calls_of(request: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float]]:
    for one in (*request["branches"], request):
        for turn in one["turns"]:
            for call in turn["calls"]:
                name, outcome = call["name"][:_MAX_NAME], call["outcome"][:_MAX_NAME]
                yield name, outcome, call["queue_seconds"], call["seconds"]


def _number(value: Any) -> float:
    """Return a finite or infinite number as a float.

    Raises:
        TypeError: If it is none.
        OverflowError: If it is a whole number that no float can hold.
    """
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _excerpt(messages: list[dict[str, Any]]) -> str:
    last = next((one for one in reversed(messages) if one["role"] == "assistant"), None)
    content = "" if last is None else last["content"]
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return text[-_EXCERPT:]


def _read_advantages(rollout_file: Path) -> dict[str, float]:
    columns = ("request_id", "advantages", "response_mask")
    try:
        table = read_tokens(token_path(rollout_file), columns=columns)
    except (DataError, ValueError):
        return {}
    if not {*columns} <= {*table.column_names}:
        return {}
    found: dict[str, float] = {}
    lists = (table[name].combine_chunks() for name in columns[1:])
    advantages, mask = (column.to_numpy(zero_copy_only=False) for column in lists)
    for name, values, ones in zip(table["request_id"].to_pylist(), advantages, mask, strict=True):
        if ones is not None and values is not None and len(values) == len(ones) and np.sum(ones):
            found[name] = float(np.sum(values * ones) / np.sum(ones))
    return found
