"""Pages with a word each, of which the context holds two: a task that needs compaction.

`python examples/compaction/pages.py FOLDER` writes train.jsonl, val.jsonl and demos.jsonl.
A row has three pages. `next_page` returns them one by one; the answer is all three words. The
demonstrations contain the summary and the continuation after it. Their summaries often leave out
a word, so that reinforcement learning can improve them.
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

from agentrl.messages import OpenAIFunctionToolSchema
from agentrl.tools import BaseTool, ToolError, ToolResponse, ToolResult

TASK = "Read pages a, b and c. Write their words."
INSTRUCTION = "Write a summary."  # as in run.yaml
HEADING = "Summary:"  # as in run.yaml
FILLER = " ".join(["the text of a page is long"] * 5)
"""The long text of every page."""
ANIMALS = """
ant bee cat cow crab crow deer dog dove duck eel elk fox frog goat hare hawk hen horse kite lark
lion lynx mole moth mouse owl pig ram rat seal slug swan toad wasp wolf worm wren yak zebu
"""
WORDS = ANIMALS.split()
WHOLE_SUMMARIES = 0.3
"""Share of the demonstrations; the others forget one page."""


class NextPage(BaseTool):
    """Return the pages of a conversation, one for each call."""

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema)
        self.pages: dict[str, list[str]] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        """Return a schema without arguments."""
        function = {
            "name": "next_page",
            "description": "Read the next page.",
            "parameters": {"type": "object", "properties": {}},
        }
        return OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})

    async def create(
        self, instance_id: str | None = None, **create_kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Keep the pages of the row."""
        instance_id, response = await super().create(instance_id)
        self.pages[instance_id] = list(create_kwargs["pages"])
        return instance_id, response

    async def execute(self, instance_id: str, parameters: dict[str, Any], **_: Any) -> ToolResult:
        """Return the next page. A summary does not change which one is next."""
        if not self.pages[instance_id]:
            raise ToolError("There is no further page.")
        return ToolResult(ToolResponse(text=self.pages[instance_id].pop(0)))

    async def release(self, instance_id: str, **_: Any) -> None:
        """Drop the pages."""
        self.pages.pop(instance_id, None)


def compute_score(solution_str: str, ground_truth: str, **_: Any) -> float:
    """Return 1.0 if the last answer is exactly the notes of all pages."""
    return float(solution_str.strip().endswith(ground_truth))


def make_page(note: str) -> str:
    """Return a note at the start and the end of a long text."""
    return f"{note}\n{FILLER}\n{note}"


def draw_notes(draw: random.Random) -> list[str]:
    """Draw the notes of pages a, b and c."""
    return [f"{page}: {draw.choice(WORDS)}" for page in "abc"]


def make_row(notes: list[str]) -> dict[str, Any]:
    """Return a row of the data."""
    pages = [make_page(note) for note in notes]
    return {
        "data_source": "agentrl/pages",
        "prompt": [{"role": "user", "content": TASK}],
        "reward_model": {"ground_truth": "\n".join(notes)},
        "extra_info": {"tools_kwargs": {"next_page": {"create_kwargs": {"pages": pages}}}},
    }


def demonstrate(notes: list[str], draw: random.Random) -> list[list[dict[str, Any]]]:
    """Return the two sequences of a demonstration: to the summary, and from it to the answer."""
    is_whole = draw.random() < WHOLE_SUMMARIES
    summary = "\n".join(notes[:2]) if is_whole else draw.choice(notes[:2])
    first, second, third = (make_page(note) for note in notes)
    task = {"role": "user", "content": TASK}
    continued = {"role": "user", "content": f"{TASK}\n\n{HEADING}\n{summary}"}
    ask = {"role": "user", "content": INSTRUCTION}
    return [
        [task, *_call(first), *_call(second), ask, {"role": "assistant", "content": summary}],
        [continued, *_call(third), {"role": "assistant", "content": f"{summary}\n{notes[2]}"}],
    ]


def _call(page: str) -> list[dict[str, Any]]:
    function = {"name": "next_page", "arguments": {}}
    call = {"type": "function", "function": function}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "next_page", "content": page},
    ]


def write_files(folder: Path, *, num_train: int = 2000, num_val: int = 128, num_demos: int = 8000):
    """Write the three files. Validation has no combination of words of the others."""
    draw = random.Random(0)
    drawn: dict[str, list[str]] = {}
    while len(drawn) < num_train + num_val + num_demos:
        notes = draw_notes(draw)
        drawn["\n".join(notes)] = notes
    combinations = list(drawn.values())
    train, rest = combinations[:num_train], combinations[num_train:]
    demos = [messages for notes in rest[num_val:] for messages in demonstrate(notes, draw)]
    rows = {
        "train": [make_row(notes) for notes in train],
        "val": [make_row(notes) for notes in rest[:num_val]],
        "demos": [{"messages": messages} for messages in demos],
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    write_files(Path(sys.argv[1]))
