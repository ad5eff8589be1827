"""The examples and tables of docs/rewards.md are right."""

import re
from pathlib import Path

import pytest
import yaml

from agentrl.config.schema.reward import RewardConfig, RewardModelConfig
from agentrl.messages import Message
from agentrl.rewards import get_reward_manager, make_reward_manager
from agentrl.rewards.judge import JudgeConfig
from agentrl.rewards.rendering import ConversationEncoder
from agentrl.rewards.sources import BUNDLED, PATTERNS, SOURCES
from agentrl.rollout.templates import ChatTemplate
from agentrl.rollout.templates.probe_conversations import tool_schema, user_message
from tests.fakes.requests import build_request, said
from tests.fakes.reward_models import END, OPENING, byte_tokenizer
from tests.fakes.scorers import score

PAGE = (Path(__file__).resolve().parents[2] / "docs/rewards.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^<!-- (\S+) -->\n```\w+\n(.*?)^```", PAGE, re.M | re.S))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, content in BLOCKS.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(file: str) -> RewardConfig:
    return RewardConfig.model_validate(yaml.safe_load(BLOCKS[file])["reward"])


def requests():
    texts = ("So <answer>5</answer>", "It is 5")
    return [build_request(said(2, text=text), ground_truth=5) for text in texts]


def test_a_reward_is_written_in_less_than_30_lines() -> None:
    assert BLOCKS["my_rewards.py"].count("\n") < 30


@pytest.mark.parametrize("manager", ["naive", "prime"])
def test_the_reward_of_the_page_works(here: Path, manager: str) -> None:
    config = read("run.yaml").model_copy(update={"manager": manager, "num_workers": 1})
    scored = requests()
    score(make_reward_manager(config), scored)
    assert [request.reward for request in scored] == [1.0, 0.0]
    assert scored[0].reward_extra_info == {"success": 1.0, "answered": 1.0}


def test_the_several_functions_of_the_page_work(here: Path) -> None:
    scored = requests()
    score(make_reward_manager(read("several.yaml")), scored)
    assert [request.reward for request in scored] == [pytest.approx(1.2), pytest.approx(0.2)]
    assert scored[0].reward_extra_info["gsm8k"] == 0.0


def test_the_judge_of_the_page_is_one() -> None:
    [function] = read("judge.yaml").functions
    config = JudgeConfig.model_validate(function.reward_kwargs)
    assert [criterion.weight for criterion in config.criteria] == [3.0, 1.0]
    assert "`max_points` (10)" in PAGE
    assert config.max_points == 10
    assert f"`max_unreadable` ({config.max_unreadable})" in PAGE


def test_the_tables_of_the_page_are_whole() -> None:
    for name in BUNDLED:
        sources = [
            *(s for s, n in SOURCES.items() if n == name),
            *(p for p, n in PATTERNS if n == name),
        ]
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{name}`"))
        named = set(re.findall(r"`([^`]+)`", row.split("|")[2]))
        assert named == set(sources) - ({"math_dapo"} if name == "math_dapo" else set())
    for manager in ("naive", "dapo", "prime", "batch"):
        assert get_reward_manager(manager)
        assert f"`{manager}`" in PAGE
    defaults = re.findall(r"^\| `(\w+)` \| (\w+) \|", PAGE, re.M)
    for key, default in defaults:
        assert yaml.safe_load(default) == getattr(RewardConfig(), key)
    assert len(defaults) == 5


def test_the_template_of_the_page_writes_tools() -> None:
    template = BLOCKS["with_tools.jinja"].replace("<|im_start|>", OPENING)
    tokenizer = byte_tokenizer(template.replace("<|im_end|>", END))
    config = RewardModelConfig(path="unused")
    encoder = ConversationEncoder(ChatTemplate(tokenizer), None, config)
    system = [Message(role="system", content="Be kind.")]
    encoder.check([tool_schema()], has_user_turns=True, prompts=[[*system, user_message()]])
