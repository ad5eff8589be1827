"""Make word problems in the format of GSM8K, and imperfect demonstrations of how to solve them.

A problem starts with a count, each step changes it (more, fewer, times as many), and the question
asks for the result. Two sets of phrases share no sentence: warm-up, training and validation use
`SEEN`, a second validation set uses `UNSEEN`.

The demonstrations are imperfect on purpose. A policy that is warmed up on them calls the tool, but
mostly stops too early, so that reinforcement learning can improve it.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.config.schema.prepare import ArithmeticConfig
from agentrl.data.files import Row, write_jsonl, write_parquet
from agentrl.data.prepare.manifest import make_once

_LARGEST = 9999
_NAMES = (
    "Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo",
    "Ida", "Jan", "Kim", "Leo", "Mia", "Nils", "Olga", "Paul",
)  # fmt: skip
_ITEMS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")


@dataclass(frozen=True)
class Wording:
    """Phrases of problems, with the placeholders `{name}`, `{n}` and `{items}`."""

    openings: tuple[str, ...]
    steps: dict[str, tuple[str, ...]]
    """Phrases for each operator: `+`, `-`, `*`."""
    questions: tuple[str, ...]


SEEN = Wording(
    openings=(
        "{name} has {n} {items}.",
        "{name} starts with {n} {items}.",
        "There are {n} {items} on the desk of {name}.",
    ),
    steps={
        "+": ("{name} buys {n} more.", "{name} finds {n} more.", "A friend brings {n} more."),
        "-": ("{name} gives away {n}.", "{name} loses {n}.", "A friend takes {n} away."),
        "*": (
            "Then there are {n} times as many.",
            "{name} makes it {n} times as many.",
            "The next day it is {n} times as many.",
        ),
    },
    questions=(
        "How many {items} does {name} have now?",
        "How many {items} are there in the end?",
    ),
)
UNSEEN = Wording(
    openings=("{name} finds {n} {items} on the desk.", "{name} buys {n} {items} from a friend."),
    steps={
        "+": ("Then {n} more are brought.", "The next day there are {n} more."),
        "-": ("Then {n} of them are lost.", "{name} gives {n} to a friend."),
        "*": ("Now {name} has {n} times as many.", "In the end there are {n} times as many."),
    },
    questions=("How many {items} are on the desk now?", "How many of them does {name} have?"),
)


@dataclass(frozen=True)
class Step:
    """One operation of a solution."""

    left: int
    operator: str
    right: int

    @property
    def expression(self) -> str:
        """The expression for the calculator."""
        return f"{self.left}{self.operator}{self.right}"

    @property
    def result(self) -> int:
        """The result of the expression."""
        return _RESULTS[self.operator](self.left, self.right)


@dataclass(frozen=True)
class Problem:
    """A word problem with its solution."""

    question: str
    steps: tuple[Step, ...]
    name: str
    items: str

    @property
    def result(self) -> int:
        """The correct answer."""
        return self.steps[-1].result

    @property
    def answer(self) -> str:
        """The solution as GSM8K writes it: a line for each step with its note, then `####`."""
        notes = [f"{s.expression} = <<{s.expression}={s.result}>>{s.result}" for s in self.steps]
        lines = [f"{self.name} has {note} {self.items}." for note in notes]
        return "\n".join([*lines, f"#### {self.result}"])

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the question, in order."""
        return (self.steps[0].left, *(step.right for step in self.steps))

    @property
    def pool(self) -> float:
        """Return a number in [0, 1), a hash of the numbers and operators.

        Sets of problems that use different ranges share no combination of numbers, for any seed and
        any phrases.
        """
        key = ",".join(step.expression for step in self.steps)
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) / 2**32


def draw_problem(draw: random.Random, wording: Wording, *, num_steps: int) -> Problem:
    """Draw a problem: its numbers, operators and phrases."""
    name, items = draw.choice(_NAMES), draw.choice(_ITEMS)
    value = draw.randint(2, 99)
    steps: list[Step] = []
    for _ in range(num_steps):
        steps.append(_draw_step(draw, value))
        value = steps[-1].result
    opening = draw.choice(wording.openings).format(name=name, n=steps[0].left, items=items)
    changes = [
        draw.choice(wording.steps[step.operator]).format(name=name, n=step.right, items=items)
        for step in steps
    ]
    question = draw.choice(wording.questions).format(name=name, items=items)
    return Problem(" ".join([opening, *changes, question]), tuple(steps), name, items)


def _draw_step(draw: random.Random, value: int) -> Step:
    """Draw an operation whose result is a whole number from 1 to `_LARGEST`."""
    possible = ["+"]
    if value > 2:
        possible.append("-")
    if value * 9 <= _LARGEST:
        possible.append("*")
    operator = draw.choice(possible)
    match operator:
        case "*":
            return Step(value, operator, draw.randint(2, 9))
        case "-":
            return Step(value, operator, draw.randint(1, min(99, value - 1)))
        case _:
            return Step(value, operator, draw.randint(2, 99))


_RESULTS: dict[str, Callable[[int, int], int]] = {
    "+": int.__add__,
    "-": int.__sub__,
    "*": int.__mul__,
}


DATA_SOURCE = "agentrl/arithmetic"
TOOL = "calculator"
"""The answer counts only if this tool was called (`extra_info.required_tool`)."""
SYSTEM_PROMPT = "Use the calculator for each step. Then write #### and the number."

WHOLE_SOLUTIONS = 0.35
STOP_AFTER_FIRST_CALL = 0.50
"""Share of the demonstrations. The remaining ones guess without a call."""

_MAKER = "arithmetic/1"
_MAX_STEPS = 3


class ArithmeticFiles(NamedTuple):
    """The files, and whether this call made them."""

    train: Path
    val: Path
    val_unseen: Path
    """Problems with phrases that neither warm-up nor training uses."""
    demos: Path
    """Conversations for the supervised warm-up."""
    made: bool


class _Share(NamedTuple):
    """The range of all combinations of numbers that one set uses."""

    name: str
    wording: Wording
    start: float
    stop: float


_DEMOS = _Share("demos", SEEN, 0.0, 0.6)
_TRAIN = _Share("train", SEEN, 0.6, 0.8)
_VAL = _Share("val", SEEN, 0.8, 0.9)
_VAL_UNSEEN = _Share("val_unseen", UNSEEN, 0.9, 1.0)


def prepare_arithmetic(config: ArithmeticConfig) -> ArithmeticFiles:
    """Make train, val, val_unseen (Parquet) and demos.jsonl, unless they exist.

    The same arguments make the same files. No combination of numbers and operators is in two of
    the sets, for any seeds.

    Raises:
        DataError: If `out_dir` has files of these names and of another origin.
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
    """Draw different problems, with equal shares of each number of steps."""
    draw = random.Random(f"{share.name}/{seed}")
    questions: set[str] = set()
    while len(questions) < count:
        problem = draw_problem(draw, share.wording, num_steps=1 + len(questions) % _MAX_STEPS)
        if share.start <= problem.pool < share.stop and problem.question not in questions:
            questions.add(problem.question)
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
    """Make one conversation of the rough demonstrator.

    Returns:
        Messages: the question, tool calls with their results, and the answer. It is correct, or the
        result of the first step, or a number of the question.
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
