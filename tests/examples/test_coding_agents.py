"""Claude Code, OpenCode and Codex CLI, as npm installs them, with the scripts of the example.

Each writes a file with its own tools. The tokenizer and the template are those of Qwen2.5.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest
import yaml
from transformers import AutoTokenizer

from agentrl.agent_loops.external import ExternalAgent
from agentrl.agent_loops.gateway import Gateway, GatewaySettings
from agentrl.config.schema.agent import AgentConfig
from agentrl.engines import SamplingParams
from agentrl.engines.scripted import ScriptedEngine
from agentrl.rollout.records import Budgets
from agentrl.rollout.request import AsyncRolloutRequest
from agentrl.rollout.states import StopReason
from agentrl.rollout.templates import ChatTemplate
from tests.fakes.plugins import make_context, make_request
from tests.fakes.templates import DATA

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples/agents/coding_agents"
SECTION = (ROOT / "docs/agents.md").read_text("utf-8").partition("## Coding agents")[2]
SECTION = SECTION.partition("\n## ")[0]
MODEL_LEN = 65_536
ANSWER = "I wrote the file."


class CodingAgent(NamedTuple):
    """An agent, and how its tools write `hello` into a file and read it."""

    package: str
    writes: tuple[str, dict[str, str]]
    reads: tuple[str, dict[str, str]]
    counts: dict[str, int]


READS = {"command": "cat out.txt", "description": "Show the file"}
AGENTS = {
    "claude_code": CodingAgent(
        "@anthropic-ai/claude-code@2.1.197",
        ("Write", {"file_path": "FOLDER/out.txt", "content": "hello\n"}),
        ("Bash", READS),
        {},
    ),
    "opencode": CodingAgent(
        "opencode-ai@1.18.33",
        ("write", {"filePath": "FOLDER/out.txt", "content": "hello\n"}),
        ("bash", READS),
        {"sequences_side_call": 1},
    ),
    "codex": CodingAgent(
        "@openai/codex@0.171.0",
        ("exec_command", {"cmd": "echo hello > out.txt"}),
        ("exec_command", {"cmd": "cat out.txt"}),
        {"ignored_tools": 3},
    ),
}


def call_of(tool: tuple[str, dict[str, str]], folder: Path) -> str:
    """What the policy writes, as the template writes it."""
    name, arguments = tool
    filled = {k: v.replace("FOLDER", str(folder)) for k, v in arguments.items()}
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': filled})}\n</tool_call>"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that is removed at the end: an installed agent has hundreds of megabytes."""
    with TemporaryDirectory(prefix="agentrl-coding-agent-") as folder:
        yield Path(folder).resolve()


def install(package: str, folder: Path) -> Path:
    """Install a package of npm, and return the folder of its programs."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("needs npm, which is not installed")
    asked = subprocess.run(
        [npm, "view", package, "version", "--fetch-retries=0"],
        capture_output=True,
        text=True,
        check=False,
    )
    if asked.returncode:
        pytest.skip(f"the registry of npm does not answer for {package}: {asked.stderr[-500:]}")
    command = [npm, "install", "--prefix", str(folder), "--no-audit", "--no-fund", package]
    installed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert installed.returncode == 0, installed.stderr
    return folder / "node_modules/.bin"


async def run_script(name: str, programs: Path, folder: Path, said: list[str]) -> Any:
    """Run a script of the example in a folder that stays, against a scripted policy."""
    if not DATA.exists():
        pytest.skip(f"needs the tokenizer in {DATA}")
    tokenizer = AutoTokenizer.from_pretrained(DATA / "tokenizers/qwen2_5")
    template = ChatTemplate(tokenizer)

    def speak(ids: Any, *_: Any) -> str:
        text = tokenizer.decode(ids)
        is_title = "# Tools" not in text
        return "A title" if is_title else said[text.count("<|im_start|>assistant\n") - 1]

    engine = ScriptedEngine(speak, tokenizer=tokenizer, max_model_len=MODEL_LEN)
    context = make_context(engine, template=template, max_prompt_tokens=MODEL_LEN)
    sampling = SamplingParams(max_new_tokens=4096, stop_token_ids=template.stop_token_ids)
    request = make_request(
        "Write the word hello into the file out.txt",
        sampling=sampling,
        budgets=Budgets(max_model_len=MODEL_LEN),
    )
    moved = f"cp row.json '{folder}' && cd '{folder}' && exec bash '{SCRIPTS / name}.sh'"
    config = AgentConfig(
        command=["bash", "-c", moved],
        env={"PATH": f"{programs}:{os.environ['PATH']}"},
        gateway=agent_settings()["gateway"],
        timeout_s=600,
    )
    agent = ExternalAgent(config, Gateway(GatewaySettings.of(config.gateway)))
    try:
        await agent(request, context, engine)
    finally:
        await agent.close()
    return request, tokenizer


def check_trained(request: AsyncRolloutRequest, tokenizer: Any, said: list[str]) -> None:
    """Exactly the sampled tokens are in the loss, in one sequence, as the template writes them."""
    trained = [
        token for token, mask in zip(request.response_ids, request.loss_mask, strict=True) if mask
    ]
    assert tokenizer.decode(trained) == "".join(f"{text}<|im_end|>" for text in said)
    assert [turn.role for turn in request.turns if turn.role == "assistant"] == ["assistant"] * 3
    assert [sum(one.loss_mask) for one in request.branches] == [0] * len(request.branches)
    assert {one.branch_cause for one in request.branches} <= {"side_call"}
    assert [one.differences for one in request.sequences] == [[]] * len(request.sequences)


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
async def test_a_coding_agent_writes_a_file_in_one_trained_sequence(name: str, place: Path) -> None:
    agent, folder = AGENTS[name], place / "work"
    folder.mkdir()
    said = [call_of(agent.writes, folder), call_of(agent.reads, folder), ANSWER]
    request, tokenizer = await run_script(name, install(agent.package, place), folder, said)
    assert request.stop_reason is StopReason.ANSWERED, (request.error, request.agent_run)
    assert (folder / "out.txt").read_text(encoding="utf-8") == "hello\n"
    assert ANSWER in request.agent_run.stdout
    results = [message.text for message in request.messages if message.role == "tool"]
    assert "hello" in results[1]
    check_trained(request, tokenizer, said)
    counts = {k.removeprefix("gateway/"): v for k, v in request.metrics.items() if v}
    assert counts["completions"] == 3 + len(request.branches)
    assert len(request.branches) == counts.get("sequences_side_call", 0)
    watched = ("ignored_tools", "sequences_side_call", "sequences_rewrite", "sequences_branch")
    assert {k: v for k, v in counts.items() if k in watched} == agent.counts, counts


def agent_settings() -> dict[str, Any]:
    """The settings that the page shows for coding agents."""
    (block,) = re.findall(r"^```yaml\n(.*?)^```", SECTION, re.M | re.S)
    return yaml.safe_load(block)["rollout"]["agent"]


def test_the_page_shows_the_lines_of_the_scripts_and_the_packages_of_the_test() -> None:
    script = SCRIPTS / Path(agent_settings()["command"][1]).name
    assert script.is_file()
    scripts = "".join((SCRIPTS / f"{name}.sh").read_text("utf-8") for name in AGENTS)
    installed, shown = re.findall(r"^```sh\n(.*?)^```", SECTION, re.M | re.S)
    assert installed.split()[3:] == [agent.package for agent in AGENTS.values()]
    for line in shown.splitlines():
        assert line in scripts.splitlines() or line.startswith("#")
