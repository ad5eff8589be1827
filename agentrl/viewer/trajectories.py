"""Describe one trajectory: its messages with pictures, its neighbors, and each of its tokens."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.errors import DataError
from agentrl.trainer.rollouts.token_files import TOKEN_COLUMNS, read_tokens, token_path
from agentrl.viewer.index import Entry, FileIndex
from agentrl.viewer.queries import rank_by_reward
from agentrl.viewer.runs import RunReader
from agentrl.viewer.timeline import describe_timeline

MAX_TOKENS = 500
"""Tokens of one answer."""
RESPONSE, PROMPT = PARTS = ("response", "prompt")
"""Parts of a sequence."""


def describe_trajectory(run: RunReader, entry_id: str) -> dict[str, Any]:
    """Return the conversation, turns, rewards and neighbors of a trajectory."""
    index, entry = run.entry(entry_id)
    request = index.read(entry)["request"]
    sequences = (*request["branches"], request)
    group = sorted((one for one in index.entries if one.uid == entry.uid), key=lambda e: e.sample)
    rewards = ("reward", "agent_reward", "rm_score", "tool_rewards", "reward_extra_info")
    return {
        **entry.shown(),
        "advantage": index.advantages.get(entry.request_id),
        "file": entry.id.rpartition(":")[0],
        "timeline": describe_timeline(request),
        "sequences": [_describe_sequence(one, index) for one in sequences],
        "rewards": {"combined_reward": entry.reward} | {key: request.get(key) for key in rewards},
        "ground_truth": request["ground_truth"],
        "dropped": request.get("dropped"),
        "error": request["error"],
        "around": _around(index, entry),
        "group": [
            {**one.shown(), "advantage": index.advantages.get(one.request_id)} for one in group
        ],
        "same_row": [one.shown() for one in _same_row(run, entry)],
    }


def _around(index: FileIndex, entry: Entry) -> dict[str, str | None]:
    """Return the neighbors of a trajectory in its file, by reward and by line."""
    ranked = sorted(
        (one for one in index.entries if one.reward is not None and one.reward == one.reward),
        key=lambda one: rank_by_reward(one, index.advantages.get(one.request_id)),
    )
    worse, better = _neighbors(ranked, entry)
    previous, following = _neighbors(index.entries, entry)
    return {"worse": worse, "better": better, "previous": previous, "next": following}


def _neighbors(entries: Sequence[Entry], entry: Entry) -> tuple[str | None, str | None]:
    ids = [one.id for one in entries]
    if entry.id not in ids:
        return None, None
    at = ids.index(entry.id)
    return ids[at - 1] if at else None, ids[at + 1] if at + 1 < len(ids) else None


def _describe_sequence(request: Mapping[str, Any], index: FileIndex) -> dict[str, Any]:
    pictures = _pictures(request, index)
    messages = [{**one, "content": _with_pictures(one, pictures)} for one in request["messages"]]
    return {
        "request_id": request["request_id"],
        "cause": request.get("branch_cause"),
        "messages": messages,
        "pictures": [one for left in pictures.values() for one in left],
        "turns": request["turns"],
        "num_prompt_tokens": len(request["prompt_ids"]),
        "num_tokens": len(request["response_ids"]),
    }


def _pictures(request: Mapping[str, Any], index: FileIndex) -> dict[str, list[dict[str, Any]]]:
    """Return the images and videos of a sequence by kind, in the order in which they were shown."""
    num_tokens: Counter[tuple[str, int | None]] = Counter()
    sources: dict[tuple[str, int | None], str] = {}
    for run in request.get("media_runs", ()):
        key = run["kind"], run["index"]
        num_tokens[key] += run["end"] - run["start"]
        sources.setdefault(key, run["source"])
    found = {}
    for kind, entries in (request.get("multi_modal_data") or {}).items():
        saved = [one if isinstance(one, Mapping) else {"text": str(one)} for one in entries]
        found[kind] = [
            {
                **one,
                "kind": kind,
                "has_files": all(map(index.has_picture, (one.get("path"), one.get("thumbnail")))),
                "num_tokens": num_tokens[kind, number],
                "source": sources.get((kind, number), ""),
            }
            for number, one in enumerate(saved)
        ]
    return found


def _with_pictures(message: Mapping[str, Any], pictures: Mapping[str, list[dict[str, Any]]]) -> Any:
    """Return a message's content; its parts of images and videos take the next ones."""
    content = message["content"]
    if not isinstance(content, list):
        return content
    return [
        {**part, "picture": pictures[part["type"]].pop(0)} if pictures.get(part["type"]) else part
        for part in content
    ]


def _same_row(run: RunReader, entry: Entry) -> list[Entry]:
    kind = entry.id.rpartition("_")[0]
    found = [
        one
        for index in run.indexed().values()
        for one in index.entries
        if one.row == entry.row and one.step != entry.step and one.id.rpartition("_")[0] == kind
    ]
    return sorted(found, key=lambda one: (one.step, one.sample))[:100]


def list_tokens(
    run: RunReader, entry_id: str, *, sequence: int = -1, start: int = 0, part: str = RESPONSE
) -> dict[str, Any]:
    """Return at most `MAX_TOKENS` tokens of one sequence, with all that is known of each.

    Args:
        run: The run.
        entry_id: The trajectory.
        sequence: Index of the sequence; -1 for the last one.
        start: Index of the first token in its part.
        part: `response` or `prompt`.

    Raises:
        DataError: If there is no such part.
    """
    if part not in PARTS:
        raise DataError(f"no part {part!r} of a sequence", expected=" or ".join(PARTS))
    index, entry = run.entry(entry_id)
    request = index.read(entry)["request"]
    one = [*request["branches"], request][sequence]
    computed = _computed(index, one) if part == RESPONSE else ({}, "")
    return tokens_of(run, SavedSequence(one, *computed), start, part)


@dataclass(frozen=True, slots=True)
class SavedSequence:
    """A sequence of a trajectory, read from its files."""

    request: Mapping[str, Any]
    computed: Mapping[str, list[float]]
    """Columns that training computed."""
    note: str
    """Why there are none."""


def read_sequences(index: FileIndex, entry: Entry) -> list[SavedSequence]:
    """Read the sequences of a trajectory."""
    request = index.read(entry)["request"]
    return [SavedSequence(one, *_computed(index, one)) for one in (*request["branches"], request)]


def tokens_of(
    run: RunReader, saved: SavedSequence, start: int, part: str = RESPONSE
) -> dict[str, Any]:
    """Return at most `MAX_TOKENS` tokens from `start`, as `list_tokens` does."""
    one, at = saved.request, slice(start, start + MAX_TOKENS)
    is_response = part == RESPONSE
    ids = one["response_ids" if is_response else "prompt_ids"]
    columns: dict[str, list[Any]] = {"id": ids[at]}
    columns |= _response_columns(saved, at) if is_response else {"mask": [0] * len(ids[at])}
    if run.tokenizer is not None:
        columns["text"] = [
            run.tokenizer.decode([token], skip_special_tokens=False) for token in columns["id"]
        ]
    turns = [
        {"role": turn["role"], "start": turn["start"], "end": turn["end"]} for turn in one["turns"]
    ]
    return {
        "start": start,
        "num": len(ids),
        "columns": columns,
        "turns": turns if is_response else [],
        "media": _media_spans(one, part),
        "note": saved.note if is_response else "",
    }


def _response_columns(saved: SavedSequence, at: slice) -> dict[str, list[Any]]:
    one = saved.request
    columns: dict[str, list[Any]] = {
        "mask": one["loss_mask"][at],
        "rollout_log_probs": one["rollout_log_probs"][at],
    }
    columns |= {name: values[at] for name, values in saved.computed.items()}
    if "old_log_probs" in columns:
        columns["ratio"] = [
            math.exp(min(old - new, 50)) if is_one else None
            for old, new, is_one in zip(
                columns["old_log_probs"], columns["rollout_log_probs"], columns["mask"], strict=True
            )
        ]
    end = min(at.stop, len(one["response_ids"]))
    columns["version"] = list(_versions(one["turns"], at.start, end))
    return columns


def _computed(index: FileIndex, sequence: Mapping[str, Any]) -> tuple[dict[str, list[float]], str]:
    """Return the columns that training computed for a sequence, and why there are none."""
    if not token_path(index.path).is_file():
        return {}, "no file of tokens was saved next to the rollouts"
    names = ("request_id", *TOKEN_COLUMNS)
    try:
        table = read_tokens(
            token_path(index.path), columns=names, request_ids=[sequence["request_id"]]
        )
    except DataError as error:
        return {}, str(error)
    num = len(sequence["response_ids"])
    for row in table.to_pylist():
        if len(row["response_mask"]) == num:
            known = {name: row.get(name) for name in TOKEN_COLUMNS if name != "rollout_log_probs"}
            return {name: values for name, values in known.items() if values is not None}, ""
    return {}, "the sequence was not in the batch"


def _media_spans(request: Mapping[str, Any], part: str) -> list[dict[str, Any]]:
    """Return the runs of placeholder tokens, as indices of tokens of the part."""
    num_prompt = len(request["prompt_ids"])
    first = num_prompt if part == RESPONSE else 0
    return [
        {"kind": run["kind"], "start": run["start"] - first, "end": run["end"] - first}
        for run in request.get("media_runs", ())
        if (run["start"] >= num_prompt) == (part == RESPONSE)
    ]


def _versions(turns: Sequence[Mapping[str, Any]], start: int, end: int) -> Iterator[int | None]:
    known = {
        turn["start"] + position: version
        for turn in turns
        for version, first, last in turn["weight_versions"]
        for position in range(first, last)
        if start <= turn["start"] + position < end
    }
    return (known.get(position) for position in range(start, end))
