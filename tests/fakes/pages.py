"""Pages of docs/ as tests run them: their titled files, their commands, the output they show."""

import re
import runpy
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes.runs import ROOT, run_agentrl

FENCE = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.M | re.S)


class Block(NamedTuple):
    """A fenced block: its language, the name of its file (if it is one) and its text."""

    language: str
    title: str
    text: str


def blocks_of(page: str) -> list[Block]:
    """All blocks of a page, by its path below docs/."""
    return [Block(*found) for found in FENCE.findall((ROOT / "docs" / page).read_text("utf-8"))]


def write_files(page: str, folder: Path) -> None:
    """Write each block with a title to the file of that name."""
    for block in blocks_of(page):
        if block.title:
            (folder / block.title).write_text(block.text, encoding="utf-8")


def steps_of(page: str) -> list[tuple[str, list[str]]]:
    """Each command of the page, with the lines of output that the page shows after it."""
    steps: list[tuple[str, list[str]]] = []
    for language, title, text in blocks_of(page):
        if language == "sh":
            steps += [(line, []) for line in text.replace("\\\n", " ").splitlines() if line]
        elif language == "text" and not title:
            steps[-1][1].extend(line for line in text.splitlines() if line.strip(" ."))
    return steps


def shape(text: str) -> str:
    """A text without figures, durations, blanks and frames: these differ from run to run."""
    text = re.sub(r"\b\d+(\.\d+)? ?(ms|s|min|h)\b", "", text)
    return re.sub(r"[\s\W\d]|e-\d+", "", text)


def follow(
    page: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    changes: tuple[str, ...] = (),
) -> None:
    """Do what a page says in a folder, and find each line of output that it shows.

    Args:
        page: Its path below docs/.
        folder: An empty one.
        changes: Keys for the commands that train or roll out, such as fewer steps.
    """
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    write_files(page, folder)
    for command, lines in steps_of(page):
        program, *arguments = shlex.split(command)
        if program == "python":
            runpy.run_path(arguments[0], run_name="__main__")
            out = capsys.readouterr().out
        else:
            assert program == "agentrl", command
            given = changes if arguments[0] in {"train", "rollout", "sft"} else ()
            code, out, err = run_agentrl(capsys, *arguments, *given)
            assert code == 0, f"{command}\n{out}\n{err}"
            out += err
        for line in lines:
            assert shape(line) in shape(out), f"{command}\ndoes not print {line!r}:\n{out}"
