"""meanings.yaml names every metric: those of runs, and those of the code."""

import ast
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import agentrl
from agentrl import Trainer
from agentrl.config import parse_config
from agentrl.config.tables import load_table
from agentrl.errors import Fault
from agentrl.messages import CallOutcome
from agentrl.rewards.combination import Source
from agentrl.rollout.records import BranchCause
from agentrl.rollout.states import StopReason
from agentrl.trainer.metrics.alerts import expand_name
from tests.fakes.runs import tiny_run
from tests.trainer.test_critic_runs import score_parity

PACKAGE = Path(agentrl.__file__).parent
TABLE = load_table(PACKAGE / "trainer/metrics/meanings.yaml")
FAMILIES = {name.partition("/")[0] for section in TABLE.values() for name in section}
SOURCES = {
    file: file.read_text(encoding="utf-8")
    for package in ("trainer", "workers", "algorithms", "rewards", "rollout", "agent_loops")
    for file in sorted((PACKAGE / package).rglob("*.py"))
}
SUMMARIES = ("mean", "max", "min", "p95")


CHOICES = {
    "<source>": Source, "<outcome>": CallOutcome, "<reason>": StopReason, "<fault>": Fault,
    "<cause>": get_args(BranchCause),
}  # fmt: skip
"""What a placeholder stands for, if it is not any name."""


def choices(placeholder: re.Match[str]) -> str:
    return f"(?:{'|'.join(CHOICES[placeholder[0]])})" if placeholder[0] in CHOICES else "(?:.+)"


NAMES = [one for section in TABLE.values() for name in section for one in expand_name(name)]
KNOWN = [re.compile(re.sub(r"<\w+>", choices, name)) for name in NAMES]


def is_known(name: str) -> bool:
    return any(pattern.fullmatch(name) for pattern in KNOWN)


def literal(node: ast.AST) -> str:
    """Return a string of the code; parts that are computed become `x`."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(literal(part) or "x" for part in parts)
    return ""


def names_in(source: str) -> set[str]:
    found = {literal(node) for node in ast.walk(ast.parse(source))}
    return {n for n in found if n.partition("/")[0] in FAMILIES and re.fullmatch(r"[\w/]+/\w+", n)}


def test_the_names_in_the_code_have_a_meaning():
    named = {name for source in SOURCES.values() for name in names_in(source)}
    assert len(named) > 100
    unknown = [
        name for name in sorted(named) if not any(map(names_a_metric, [name, *suffixed(name)]))
        if name not in NOT_METRICS
    ]  # fmt: skip
    assert not unknown, "add them to meanings.yaml, then `make docs`"


NOT_METRICS = {
    "agent_loop/generate_sequences", "agent_loop/num_turns", "agent_loop/tool_calls",
    "rollout/generations", "val/x/generations",
}  # fmt: skip
"""Kept on requests and not logged; tables of trackers."""


def names_a_metric(name: str) -> bool:
    """Whether a name of the code, in which `x` is any text, is that of a metric."""
    pattern = re.compile(re.sub(r"(?<![a-z])x(?![a-z])", ".+", name))
    return any(pattern.fullmatch(known) for known in NAMES) or is_known(name)


def suffixed(name: str) -> list[str]:
    return [f"{name}/{summary}" for summary in SUMMARIES]


def test_a_metric_that_has_a_meaning_is_in_the_code():
    code = "\n".join(SOURCES.values())
    names = {name for section in TABLE.values() for name in section}
    words = {word for name in names for word in re.findall(r"(?<![<\w])[a-z]\w{3,}", name)}
    assert not [word for word in sorted(words) if word not in code]


def test_meanings_are_sentences():
    for section in TABLE.values():
        for name, (unit, meaning) in section.items():
            assert isinstance(unit, str), name
            assert meaning.endswith("."), name


RUNS: dict[str, dict[str, Any]] = {
    "grpo": {
        "algorithm__rollout_correction": {
            "rollout_is": "token", "rollout_is_threshold": 2.0,
            "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0",
        },
        "algorithm__filter_groups": {"enable": True, "metric": "score", "max_num_gen_batches": 2},
        "actor__use_kl_loss": True,
        "reward__overlong_buffer": {"enable": True, "len": 16, "penalty_factor": 1.0},
    },
    "gae": {"algorithm__adv_estimator": "gae", "algorithm__use_kl_in_reward": True},
    "remax": {"algorithm__adv_estimator": "remax", "rollout__n": 1},
}  # fmt: skip


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", RUNS)
def test_what_a_run_logs_has_a_meaning(tiny_home: Path, tmp_path: Path, name: str):
    content = tiny_run(tiny_home, tmp_path / "run", trainer__total_training_steps=1, **RUNS[name])
    Trainer(parse_config(content), reward=score_parity).fit()
    lines = (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    logged = {key for line in lines for key in json.loads(line)} - {"step"}
    assert len(logged) > 100
    assert not [key for key in sorted(logged) if not is_known(key)]
