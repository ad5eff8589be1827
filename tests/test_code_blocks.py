"""The code blocks of the pages: Python runs, run files are valid, commands have these options.

The commands run in tests/test_tutorial_pages.py and tests/test_page_commands.py; `await` outside of
a method runs in tests/agent_loops/test_placeholders.py.
"""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest
import typer
import yaml

from agentrl.cli import app
from agentrl.config import parse_config
from agentrl.config.schema.run import RunConfig

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(app)


class Block(NamedTuple):
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> Iterator[Block]:
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    for found in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", text, re.M | re.S):
        line = text[: found.start()].count("\n") + 1
        yield Block(name, line, found[2], found[3])


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def named(*languages: str) -> Any:
    found = [pytest.param(b, id=b.name) for b in BLOCKS if b.language in languages]
    return pytest.mark.parametrize("block", found)


RUN_BY = {
    "docs/chat_templates.md": "tests/rollout/templates/test_page.py",
    "docs/library.md": "tests/trainer/test_library.py",
}
"""Pages whose Python blocks follow each other, and the test that runs them."""
TUTORIALS = "docs/tutorials/"
"""Pages that tests/test_tutorial_pages.py runs."""
BEFORE = {
    "docs/algorithms/kl.md": """
        import torch
        old_log_probs, ref_log_prob, token_level_scores = torch.zeros(3, 2, 4)
        response_mask = torch.ones(2, 4)
    """,
    "docs/rewards.md": """
        import torch
        from safetensors.torch import save_file
        save_file({"score.weight": torch.zeros(1, 4)}, "model.safetensors")
    """,
}
"""What the Python blocks of a page find in place: names and files."""


@named("python", "py")
def test_python_compiles(block: Block):
    compile(block.text, block.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


RUN = """
import json, os, sys, tempfile, traceback
failed = {}
for name, code in json.load(sys.stdin):
    os.chdir(tempfile.mkdtemp(dir=sys.argv[1]))
    try:
        exec(compile(code, name, "exec"), {"__name__": "block"})
    except BaseException:
        failed[name] = traceback.format_exc()
json.dump(failed, sys.stdout)
"""


SLOW = {"docs/cluster.md"}
"""Pages with a block that takes many seconds: it starts Ray."""


@pytest.mark.parametrize(
    "pages", [{b.page for b in BLOCKS} - SLOW, pytest.param(SLOW, marks=pytest.mark.slow)],
    ids=["everyday", "slow"],
)  # fmt: skip
def test_python_runs(tmp_path: Path, pages: set[str]):
    codes = [
        (block.name, textwrap.dedent(BEFORE.get(block.page, "")) + block.text)
        for block in BLOCKS
        if block.language in ("python", "py") and block.page in pages - RUN_BY.keys()
        if not block.page.startswith(TUTORIALS)
        if not re.search(r"^(?!\s).*\bawait\b", block.text, re.M)  # a part of a method
    ]
    assert codes
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUN, tmp_path], input=json.dumps(codes), text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {}


@pytest.mark.parametrize("page", RUN_BY)
def test_the_test_that_runs_a_page_names_it(page: str):
    assert page in (ROOT / RUN_BY[page]).read_text(encoding="utf-8")


@named("json")
def test_json_is_json(block: Block):
    json.loads(block.text)


PLUGIN_FILES = ({"tools"}, {"interaction"})
"""The keys of files of tools and interactions; the tests of their pages load them."""


@named("yaml")
def test_yaml_is_a_part_of_a_run_file(block: Block):
    content = yaml.safe_load(block.text)
    if content.keys() in PLUGIN_FILES:
        assert all("class_name" in entry for entry in content.popitem()[1])
        return
    if "actor_rollout_ref" in content:  # a whole file of verl
        parse_config(content)
        return
    whole: dict[str, Any] = {"data": {"train_files": ["a.jsonl"]}, "model": {"path": "model"}}
    for section, keys in content.items():
        whole[section] = {**whole.get(section, {}), **keys} if isinstance(keys, dict) else keys
    parse_config(whole)


# Commands.


@named("bash", "sh")
def test_shell_is_shell(block: Block):
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def commands_in(text: str) -> Iterator[list[str]]:
    """Yield the words after `agentrl` of each command of a block."""
    joined = re.sub(r"\\\n\s*", " ", text)
    for line in joined.splitlines():
        found = re.search(r"(?:^|[&;] ?|\w=\S+ |-m )agentrl (?=[a-z])(.*)", line.strip())
        if found and "[OPTIONS]" not in line:
            yield shlex.split(found[1].partition(" &&")[0], comments=True)


COMMAND_LINES = [
    pytest.param(words, id=f"{block.name}:{number}")
    for block in BLOCKS
    if block.language in ("bash", "sh", "text")
    for number, words in enumerate(commands_in(block.text))
]
INLINE = [
    pytest.param(shlex.split(found), id=f"{page.relative_to(ROOT)}:{number}")
    for page in PAGES
    for number, found in enumerate(
        re.findall(r"`agentrl ([a-z][^`]* [^`]*)`", page.read_text(encoding="utf-8"))
    )
]


def find_command(words: list[str]) -> tuple[Any, list[str]]:
    command, rest = COMMANDS, words
    while hasattr(command, "commands") and rest and rest[0] != "...":
        assert rest[0] in command.commands, words
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


@pytest.mark.parametrize("words", COMMAND_LINES + INLINE)
def test_a_command_has_these_options_and_keys(words: list[str]):
    command, rest = find_command(words)
    options = {name for parameter in command.params for name in parameter.opts}
    for word in rest:
        if word.startswith("-"):
            assert word.partition("=")[0] in {*options, "--help"}, word
        elif (key := re.match(r"([a-z_]+(?:\.\w+)+)=", word)) and not is_verls(key[1]):
            assert has_key(key[1]), word


def is_verls(key: str) -> bool:
    return key.partition(".")[0] in ("actor_rollout_ref", "reward_model", "custom_reward_function")


def has_key(key: str) -> bool:
    kind: Any = RunConfig
    for name in key.split("."):
        if not hasattr(kind, "model_fields"):
            return True  # in a mapping
        if name not in kind.model_fields:
            return False
        annotation = kind.model_fields[name].annotation
        inner = [k for k in (annotation, *get_args(annotation)) if hasattr(k, "model_fields")]
        kind = inner[0] if inner else None
    return True


def test_there_are_commands():
    assert len(COMMAND_LINES) > 15
    assert len(INLINE) > 20
