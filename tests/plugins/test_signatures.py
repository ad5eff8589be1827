"""A plug-in that cannot be called as the library calls it is refused when it is built."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.config.schema.reward import RewardConfig
from agentrl.errors import AgentRLError
from agentrl.interactions.registry import initialize_interactions_from_config
from agentrl.rewards import make_reward_manager
from agentrl.tools.registry import initialize_tools_from_config

SCHEMA = {"type": "function", "function": {"name": "t", "description": "", "parameters": {}}}
TOOL = "from agentrl.tools import BaseTool\nclass T(BaseTool):\n"
USER = "from agentrl.interactions import BaseInteraction\nclass T(BaseInteraction):\n"
ANSWERS = "    async def execute(self, instance_id, parameters, **kwargs): return 'x'\n"
REPLIES = "    async def generate_response(self, instance_id, messages): return True, '', 0.0, {}\n"


def build_tool(tmp_path: Path, code: str) -> None:
    (tmp_path / "t.py").write_text(TOOL + code)
    entry = {"class_name": f"{tmp_path}/t.py:T", "config": {}, "tool_schema": SCHEMA}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    initialize_tools_from_config(tmp_path / "t.yaml")


def build_user(tmp_path: Path, code: str) -> None:
    (tmp_path / "t.py").write_text(USER + code)
    entry = {"class_name": f"{tmp_path}/t.py:T", "config": {}}
    (tmp_path / "t.yaml").write_text(yaml.safe_dump({"interaction": [entry]}))
    initialize_interactions_from_config(tmp_path / "t.yaml")


def build_scorer(tmp_path: Path, code: str, manager: str = "naive") -> None:
    (tmp_path / "t.py").write_text(code)
    named = {"path": f"{tmp_path}/t.py", "name": "score"}
    make_reward_manager(
        RewardConfig.model_validate({"manager": manager, "custom_reward_function": named})
    )


def build_scorer_of_batches(tmp_path: Path, code: str) -> None:
    build_scorer(tmp_path, code, "batch")


@pytest.mark.parametrize(
    ("build", "code", "words"),
    [
        (build_tool, "    pass\n", "T has no execute"),
        (build_tool, "    def execute(self, instance_id): return 'x'\n", "too many positional"),
        (build_tool, "    async def execute(self): return 'x'\n", "too many positional"),
        (build_tool, f"{ANSWERS}    async def create(self): return 'x'\n", "T.create"),
        (build_tool, f"{ANSWERS}    async def calc_reward(self): return 1.0\n", "T.calc_reward"),
        (build_tool, f"{ANSWERS}    def release(self, *, instance_id): pass\n", "T.release"),
        (build_user, "    pass\n", "T has no generate_response"),
        (build_user, "    def generate_response(self, messages): pass\n", "T.generate_response"),
        (build_user, f"{REPLIES}    def start_interaction(self, *, row): pass\n", "T.start_inter"),
        (build_scorer, "def score(completions, **kwargs): return 1\n", "'completions'"),
        (build_scorer, "def score(solution_str, truth): return 1\n", "'truth'"),
        (build_scorer, "def score(solution_str, /): return 1\n", "'solution_str'"),
        (build_scorer, "class score:\n    def __call__(self, answer): return 1\n", "'answer'"),
        (build_scorer_of_batches, "def score(solution_str, **kwargs): return 1\n", "solution_str"),
    ],
)  # fmt: skip
def test_what_cannot_be_called_is_refused(tmp_path: Path, build: Any, code: str, words: str):
    with pytest.raises(AgentRLError) as refused:
        build(tmp_path, code)
    assert words in str(refused.value)
    assert refused.value.details["key"]
    assert "def " in str(refused.value.details["expected"]) or "a method" in str(refused.value)


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (build_tool, ANSWERS),
        (build_tool, "    def execute(self, *args, **kwargs): return 'x'\n"),
        (build_tool, "    def execute(self, one, two, *, of_the_row): return 'x'\n"),
        (build_tool, f"{ANSWERS}    def create(self, instance_id, ground_truth): return 'x'\n"),
        (build_user, REPLIES),
        (build_user, f"{REPLIES}    def finalize_interaction(self): pass\n"),
        (build_scorer, "def score(solution_str): return 1\n"),
        (build_scorer, "def score(**kwargs): return 1\n"),
        (build_scorer, "def score(data_source, solution_str, extra_info=None): return 1\n"),
        (build_scorer, "class score:\n    def __call__(self, solution_str, bonus=1): return 1\n"),
        (build_scorer, "class score:\n    async def __call__(self, solution_str): return 1\n"),
        (build_scorer_of_batches, "def score(solution_strs, ground_truths): return [1]\n"),
    ],
)  # fmt: skip
def test_what_can_be_called_is_built(tmp_path: Path, build: Any, code: str):
    build(tmp_path, code)


def test_a_loaded_scorer_is_named_by_its_function(tmp_path: Path):
    with pytest.raises(AgentRLError) as refused:
        build_scorer(tmp_path, "def score(completions, **kwargs): return 1\n")
    assert str(refused.value).startswith("score cannot be called")
