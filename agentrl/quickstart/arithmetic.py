"""Make word problems in the format of GSM8K, and rough demonstrations of how to solve them.

The demonstrator is rough on purpose: a policy warmed up on it speaks the tool's language and mostly
stops too early, so reinforcement has something to teach.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.config.schema.run import ArithmeticConfig
from agentrl.data.files import Row, write_jsonl, write_parquet
from agentrl.data.prepare.manifest import make_once
from agentrl.quickstart.stories import SEEN, UNSEEN, Problem, Step, Wording, draw_problem

DATA_SOURCE = "agentrl/arithmetic"
TOOL = "calculator"
"""The answer counts only where this tool was called (`extra_info.required_tool`)."""
SYSTEM_PROMPT = "Use the calculator for each step. Then write #### and the number."

WHOLE_SOLUTIONS = 0.35
STOP_AFTER_FIRST_CALL = 0.50
"""The remaining demonstrations guess without a call."""

_MAKER = "arithmetic/1"
_MAX_STEPS = 3


class ArithmeticFiles(NamedTuple):
    """What was made, and whether it was made just now."""

    train: Path
    val: Path
    val_unseen: Path
    """Problem templates that neither the warm-up nor the training sees."""
    demos: Path
    """Conversations for the supervised warm-up."""
    made: bool


class _Share(NamedTuple):
    """The part of all combinations of numbers that one set may draw from."""

    name: str
    wording: Wording
    start: float
    stop: float


_DEMOS = _Share("demos", SEEN, 0.0, 0.6)
_TRAIN = _Share("train", SEEN, 0.6, 0.8)
_VAL = _Share("val", SEEN, 0.8, 0.9)
_VAL_UNSEEN = _Share("val_unseen", UNSEEN, 0.9, 1.0)


def prepare_arithmetic(config: ArithmeticConfig) -> ArithmeticFiles:
    """Make train, val, val_unseen (Parquet) and demos.jsonl, unless they are there.

    The same arguments make the same files. No combination of numbers and operators stands in two
    of the sets, whatever their seeds.

    Raises:
        DataError: where `out_dir` holds files of these names that something else made.
    """
    out_dir = config.out_dir
    parquet = [out_dir / f"{share.name}.parquet" for share in (_TRAIN, _VAL, _VAL_UNSEEN)]
    files = [*parquet, out_dir / "demos.jsonl"]
    arguments = config.model_dump(mode="json", exclude={"out_dir"})
    made = make_once(out_dir, _MAKER, arguments, files, lambda: _write(config, files))
    train, val, val_unseen, demos = files
    return ArithmeticFiles(train, val, val_unseen, demos, made)


def _write(config: ArithmeticConfig, files: list[Path]) -> None:
    train, val, val_unseen, demos = files
    for file, share, count in (
        (train, _TRAIN, config.num_train),
        (val, _VAL, config.num_val),
        (val_unseen, _VAL_UNSEEN, config.num_val),
    ):
        problems = _draw_problems(share, count, config.seed)
        write_parquet(file, [_row(p, n, share.name) for n, p in enumerate(problems)])
    draw = random.Random(f"demonstrator/{config.seed}")
    problems = _draw_problems(_DEMOS, config.num_demos, config.seed)
    write_jsonl(demos, ({"messages": demonstrate(p, draw)} for p in problems))


def _draw_problems(share: _Share, count: int, seed: int) -> Iterator[Problem]:
    """Draw different problems, as many of each number of steps."""
    draw = random.Random(f"{share.name}/{seed}")
    told: set[str] = set()
    while len(told) < count:
        problem = draw_problem(draw, share.wording, num_steps=1 + len(told) % _MAX_STEPS)
        if share.start <= problem.pool < share.stop and problem.question not in told:
            told.add(problem.question)
            yield problem


def _row(problem: Problem, index: int, split: str) -> Row:
    return {
        "data_source": DATA_SOURCE,
        "prompt": _opening(problem),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(problem.result)},
        "extra_info": {
            "index": index,
            "split": split,
            "question": problem.question,
            "answer": problem.answer,
            "num_steps": len(problem.steps),
            "required_tool": TOOL,
        },
    }


def demonstrate(problem: Problem, draw: random.Random) -> list[dict[str, Any]]:
    """Lead one conversation as the rough demonstrator does.

    Returns:
        OpenAI-format messages: the question, tool calls with their results, and an answer that is
        right, or the first step's result, or a number of the question.
    """
    luck = draw.random()
    if luck < WHOLE_SOLUTIONS:
        steps, answer = problem.steps, problem.result
    elif luck < WHOLE_SOLUTIONS + STOP_AFTER_FIRST_CALL:
        steps, answer = problem.steps[:1], problem.steps[0].result
    else:
        steps, answer = (), draw.choice(problem.numbers)
    calls = [message for step in steps for message in _call(step)]
    return [*_opening(problem), *calls, {"role": "assistant", "content": f"#### {answer}"}]


def _opening(problem: Problem) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": problem.question},
    ]


def _call(step: Step) -> list[dict[str, Any]]:
    function = {"name": TOOL, "arguments": {"expression": step.expression}}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "name": TOOL, "content": str(step.result)},
    ]
