"""What the rollout itself costs: CPU time a turn, and wall time over the critical path.

512 requests (64 prompts, groups of 8) of 4 turns. The policy is scripted: three turns of about 100
tokens that each call one tool, then an answer. An observation has 200 tokens. The tokenizer is that
of Qwen2.5; template, parser, budgets, time-outs, watchdog and the check of each finished ledger are
those of a run that configures nothing but `rollout.max_concurrent_requests: 512`.

1. **CPU a turn.** Engine and tool answer at once. What counts is the CPU time of the whole process,
   all threads and garbage collection in it, from the making of the requests to the end of the last,
   divided by the turns. The tokenizer's own time is that of a bare loop in the same process, which
   calls the tokenizers library once for each text: it encodes the words of every prompt (once for a
   group) and of every observation, and decodes every completion. The rest is the overhead. Both are
   measured in turn, and the fastest of each counts, as other load slows both.
2. **Wall time.** The engine takes 1 s a turn, the tool a lognormal time (median 0.5 s, sigma 1).
   What counts is the wall time over the larger of the critical path (the longest of the requests'
   own waits) and the tokenizer's own time.
3. **Parts.** What the overhead is made of: each part alone, in a loop over the same work.

Expectation: at most 150 us a turn over the tokenizer's own time, and a ratio of at most 1.10.

Run: python benchmarks/rollout_overhead.py [--tokenizer FOLDER_OR_HUB_NAME] [--requests N]
    [--turns N] [--observation-tokens N] [--seed N] [--repeats N]
"""

import asyncio
import gc
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from agentrl.config import RewardConfig, parse_config
from agentrl.data.prompt import Prompt
from agentrl.engines import ScriptedEngine
from agentrl.engines.scripted import ScriptedAnswer
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rewards import make_reward_manager
from agentrl.rollout import AsyncRolloutRequest, RolloutManager, StopReason
from agentrl.rollout.templates import ChatTemplate
from agentrl.tools import BaseTool, ToolResult
from agentrl.trainer.rollout_setup import (
    Plugins,
    make_manager,
    make_rollout_setup,
    probe_model,
)

T = TypeVar("T")

OVERHEAD_BOUND_US, RATIO_BOUND = 150.0, 1.10
TURN_S, TOOL_MEDIAN_S, TOOL_SIGMA = 1.0, 0.5, 1.0
NUM_THOUGHT_TOKENS = 75

WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "was",
    "on",
    "are",
    "as",
    "with",
    "his",
    "they",
    "at",
    "be",
    "this",
    "from",
    "have",
    "or",
    "by",
    "one",
    "had",
    "not",
    "but",
    "what",
    "all",
    "were",
    "when",
    "we",
    "there",
    "can",
    "an",
    "your",
    "which",
    "their",
    "said",
    "if",
    "do",
    "will",
    "each",
    "about",
    "how",
    "up",
    "out",
    "them",
    "then",
    "she",
    "many",
    "some",
    "so",
    "these",
    "would",
    "other",
    "into",
    "has",
    "more",
    "her",
    "two",
    "like",
    "him",
    "see",
    "time",
    "could",
    "no",
    "make",
    "than",
    "first",
    "been",
    "its",
    "who",
    "now",
    "people",
    "my",
    "made",
    "over",
    "did",
    "down",
    "only",
    "way",
    "find",
    "use",
    "may",
    "water",
    "long",
    "little",
    "very",
    "after",
    "words",
    "called",
    "just",
    "where",
    "most",
    "know",
    "station",
    "river",
    "record",
    "found",
    "report",
    "city",
    "built",
    "year",
    "data",
]

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the records, and return the passage that fits best.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to look for."},
                    "top_k": {"type": "integer", "minimum": 1, "maximum": 10},
                },
                "required": ["query"],
            },
        },
    }
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much work."""

    requests: int = 512
    turns: int = 4
    observation_tokens: int = 200
    group: int = 8
    seed: int = 0

    @property
    def num_turns(self) -> int:
        """Turns of all requests together."""
        return self.requests * self.turns


@dataclass(frozen=True, slots=True)
class Lookup:
    """One call of the tool: its question, its answer, and how long the answer takes."""

    query: str
    observation: str
    delay_s: float


@dataclass(frozen=True, slots=True)
class Episode:
    """What happens in one request."""

    lookups: list[Lookup]
    """Of each turn but the last."""
    completions: list[list[int]]
    """Token ids of each turn, the stop token included."""

    @property
    def wait_s(self) -> float:
        """What the request waits for engine and tool."""
        return len(self.completions) * TURN_S + sum(lookup.delay_s for lookup in self.lookups)


class Writer:
    """Writes texts of a wanted length in tokens, from a seed."""

    def __init__(self, template: ChatTemplate, seed: int) -> None:
        self._random = random.Random(seed)
        self._count = lru_cache(lambda word: len(template.encode_text(f" {word}")))

    def words(self, num_tokens: int) -> str:
        """Words, and now and then a number, of that many tokens."""
        words: list[str] = []
        while num_tokens > 0:
            is_number = self._random.random() < 0.05 and num_tokens > 4
            word = f"{self._random.randrange(1000)}" if is_number else self._random.choice(WORDS)
            words.append(word)
            num_tokens -= self._count(word)
        return " ".join(words)

    def delay_s(self) -> float:
        """How long a call of the tool takes."""
        return TOOL_MEDIAN_S * self._random.lognormvariate(0, TOOL_SIGMA)


def make_prompts(writer: Writer, sizes: Sizes) -> list[Prompt]:
    number = -(-sizes.requests // sizes.group)
    texts = (writer.words(100) for _ in range(number))
    return [
        Prompt(index=index, messages=[Message(role="user", content=text)])
        for index, text in enumerate(texts)
    ]


def make_episode(writer: Writer, template: ChatTemplate, sizes: Sizes, number: int) -> Episode:
    lookups = [
        Lookup(
            query=f"{writer.words(6)} {number} {turn}",
            observation=writer.words(sizes.observation_tokens),
            delay_s=writer.delay_s(),
        )
        for turn in range(sizes.turns - 1)
    ]
    calls = [{"name": "search", "arguments": {"query": look.query, "top_k": 3}} for look in lookups]
    texts = [
        *(
            f"{writer.words(NUM_THOUGHT_TOKENS)}\n<tool_call>\n{json.dumps(call)}\n</tool_call>"
            for call in calls
        ),
        writer.words(NUM_THOUGHT_TOKENS),
    ]
    stop = template.anatomy.encoder.encode_literal(template.anatomy.end_of_turn.text)
    return Episode(lookups, [[*template.encode_policy_text(text), *stop] for text in texts])


class SearchTool(BaseTool):
    """Knows the answer to every question, and takes its time where it is told to."""

    def __init__(self) -> None:
        super().__init__({}, SCHEMA)
        self.lookups: dict[str, Lookup] = {}
        self.waits = False

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> ToolResult:
        """Look the query up."""
        lookup = self.lookups[parameters["query"]]
        if self.waits:
            await asyncio.sleep(lookup.delay_s)
        return ToolResult.of(lookup.observation, tool=self.name)


class Bench:
    """The work, and all that a rollout of it needs.

    Args:
        tokenizer: Folder or hub name of a tokenizer with a chat template.
        sizes: How much work.
    """

    def __init__(self, tokenizer: str, sizes: Sizes) -> None:
        self.sizes = sizes
        self.tool = SearchTool()
        self.config = parse_config(
            {
                "data": {"train_files": ["none.parquet"]},
                "model": {"path": tokenizer},
                "rollout": {"n": sizes.group, "max_concurrent_requests": sizes.requests},
            }
        )
        plugins = Plugins([self.tool], {}, make_reward_manager(RewardConfig()))
        probed = probe_model(self.config, plugins)
        self.setup = make_rollout_setup(self.config, plugins, probed)
        writer = Writer(self.template, sizes.seed)
        self.prompts = make_prompts(writer, sizes)
        self.episodes = [
            make_episode(writer, self.template, sizes, n) for n in range(sizes.requests)
        ]
        self.tool.lookups = {look.query: look for e in self.episodes for look in e.lookups}

    @property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template."""
        return self.setup.template

    def make_manager(self, *, waits: bool) -> RolloutManager:
        """Make a manager and its engine, as a run would."""
        self.tool.waits = waits
        delay_s = TURN_S if waits else 0.0

        def answer(_ids: Any, _sampling: Any, request_id: str, turn: int) -> ScriptedAnswer:
            completion = self.episodes[self._place(request_id)].completions[turn]
            return ScriptedAnswer(completion, delay_s=delay_s)

        return make_manager(self.config, self.setup, ScriptedEngine(answer))

    def make_requests(self, manager: RolloutManager) -> list[AsyncRolloutRequest]:
        """Make the requests of the work."""
        requests = manager.make_requests(self.prompts, manager.train_plan())
        return requests[: self.sizes.requests]

    def roll_out(self, *, waits: bool) -> list[AsyncRolloutRequest]:
        """Roll everything out, and see that it went as it was written."""
        manager = self.make_manager(waits=waits)
        return asyncio.run(manager.rollout(self.make_requests(manager)))

    def use_tokenizer(self) -> None:
        """Encode and decode what the rollout must, each text once, and nothing else."""
        backend: Any = self.setup.tokenizer.backend_tokenizer
        texts = [prompt.messages[0].text for prompt in self.prompts]
        texts += [look.observation for episode in self.episodes for look in episode.lookups]
        for text in texts:
            backend.encode(text, add_special_tokens=False).ids
        for episode in self.episodes:
            for ids in episode.completions:
                backend.decode(ids, skip_special_tokens=False)

    def _place(self, request_id: str) -> int:
        """Place of a request: its id ends in row, place of the row, and place in its group."""
        _, place, offset = request_id.rsplit("-", 2)
        return int(place) * self.sizes.group + int(offset)


def check_outcome(requests: Sequence[AsyncRolloutRequest], sizes: Sizes) -> None:
    """Refuse a run that was not the one that is to be measured."""
    for request in requests:
        observed = [turn.num_tokens for turn in request.turns if turn.role == "tool"]
        assert request.stop_reason is StopReason.ANSWERED, request.error
        assert request.num_assistant_turns == sizes.turns
        assert not request.differences, request.differences
        assert all(0 <= n - sizes.observation_tokens <= 30 for n in observed), observed


class CollectorClock:
    """How long the garbage collector works; a context manager."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> "CollectorClock":
        gc.callbacks.append(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._note)

    def _note(self, phase: str, info: dict[str, int]) -> None:
        self.seconds += time.process_time() * (1 if phase == "stop" else -1)


def cpu_s(work: Callable[[], object]) -> float:
    """CPU time of the process while it does some work, in seconds."""
    started = time.process_time()
    work()
    return time.process_time() - started


# The parts, each alone.


def part_making(bench: Bench, finished: Sequence[AsyncRolloutRequest]) -> Callable[[], object]:
    manager = bench.make_manager(waits=False)
    return lambda: bench.make_requests(manager)


def main() -> None:
    bench = Bench("../shared/data/tokenizers/qwen2_5", Sizes())
    for i in range(5):
        with CollectorClock() as clock:
            c = cpu_s(lambda: bench.roll_out(waits=False))
        t = cpu_s(bench.use_tokenizer)
        n = bench.sizes.num_turns
        print(
            f"{c / n * 1e6:.0f} {t / n * 1e6:.0f} over {(c - t) / n * 1e6:.0f} gc {clock.seconds / n * 1e6:.0f}"
        )
    check_outcome(bench.roll_out(waits=False), bench.sizes)


if __name__ == "__main__":
    main()
