"""Word problems of a few steps, told from phrases.

A story opens with a count, each step changes it (more, fewer, times as many), and the question asks
for what it has become. Two sets of phrases share no sentence: `SEEN` tells the problems of warm-up,
training and validation, `UNSEEN` those of a second validation set.
"""

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass

_LARGEST = 9999
_NAMES = (
    "Ann", "Ben", "Cara", "Dan", "Eva", "Finn", "Gina", "Hugo",
    "Ida", "Jan", "Kim", "Leo", "Mia", "Nils", "Olga", "Paul",
)  # fmt: skip
_ITEMS = ("apples", "books", "cards", "coins", "eggs", "pens", "shells", "stamps")


@dataclass(frozen=True)
class Wording:
    """Phrases of a set of problem templates; `{name}`, `{n}` and `{items}` are filled in."""

    openings: tuple[str, ...]
    steps: dict[str, tuple[str, ...]]
    """By operator: `+`, `-`, `*`."""
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
        """What is typed into a calculator."""
        return f"{self.left}{self.operator}{self.right}"

    @property
    def result(self) -> int:
        """What the calculator says."""
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
        """The right answer."""
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
        """Where the problem falls in [0, 1), by its numbers and operators alone.

        Sets of problems that take theirs from different ranges share no combination of numbers,
        whatever the seed and the wording.
        """
        key = ",".join(step.expression for step in self.steps)
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) / 2**32


def draw_problem(draw: random.Random, wording: Wording, *, num_steps: int) -> Problem:
    """Draw a problem: its numbers, its operators, and how it is told."""
    name, items = draw.choice(_NAMES), draw.choice(_ITEMS)
    value = draw.randint(2, 99)
    steps: list[Step] = []
    for _ in range(num_steps):
        steps.append(_draw_step(draw, value))
        value = steps[-1].result
    opening = draw.choice(wording.openings).format(name=name, n=steps[0].left, items=items)
    told = [
        draw.choice(wording.steps[step.operator]).format(name=name, n=step.right, items=items)
        for step in steps
    ]
    question = draw.choice(wording.questions).format(name=name, items=items)
    return Problem(" ".join([opening, *told, question]), tuple(steps), name, items)


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
