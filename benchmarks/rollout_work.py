"""The work of `rollout_overhead.py` and `rollout_batch.py`: conversations, written from a seed."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from agentrl.config import parse_config
from agentrl.config.schema.reward import RewardConfig
from agentrl.data.rows import Prompt
from agentrl.engines import ScriptedEngine
from agentrl.engines.scripted import ScriptedAnswer
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.rewards import make_reward_manager
from agentrl.rollout import AsyncRolloutRequest, RolloutManager, StopReason
from agentrl.rollout.templates import ChatTemplate
from agentrl.tools import BaseTool
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.rollout_setup import make_manager, make_rollout_setup, probe_model

TURN_S, TOOL_MEDIAN_S, TOOL_SIGMA = 1.0, 0.5, 1.0
NUM_THOUGHT_TOKENS, NUM_PROMPT_TOKENS = 75, 100
MOST_RESULTS = 10

TEXT = """
the of and to in a is that for it was on are as with his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out them
then she many some so these would other into has more her two like him see time could no make than
first been its who now people my made over did down only way find use may water long little very
after words called just where most know station river record found report city built year data
"""
WORDS = TEXT.split()

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
                    "top_k": {"type": "integer", "minimum": 1, "maximum": MOST_RESULTS},
                },
                "required": ["query"],
            },
        },
    }
)


@dataclass(frozen=True)
class Sizes:
    """How much work."""

    requests: int = 512
    turns: int = 4
    observation_tokens: int = 200
    group: int = 8
    seed: int = 0
    turn_s: float = TURN_S
    tool_median_s: float = TOOL_MEDIAN_S
    tool_sigma: float = TOOL_SIGMA

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
    turn_s: float

    @property
    def wait_s(self) -> float:
        """What the request waits for engine and tool."""
        return len(self.completions) * self.turn_s + sum(lookup.delay_s for lookup in self.lookups)


class Writer:
    """Writes what is said, and draws how long it takes, from a seed."""

    def __init__(self, template: ChatTemplate, sizes: Sizes) -> None:
        self._template = template
        self._sizes = sizes
        self._random = random.Random(sizes.seed)
        self._count = lru_cache(lambda word: len(template.encode_text(f" {word}")))

    def words(self, num_tokens: int) -> str:
        """Words, and now and then a number, of that many tokens."""
        words: list[str] = []
        while num_tokens > 0:
            is_number = num_tokens > 4 and self._random.random() < 0.05
            word = str(self._random.randrange(1000)) if is_number else self._random.choice(WORDS)
            words.append(word)
            num_tokens -= self._count(word)
        return " ".join(words)

    def prompt(self, index: int) -> Prompt:
        """Write a row."""
        message = Message(role="user", content=self.words(NUM_PROMPT_TOKENS))
        return Prompt(index=index, messages=[message])

    def episode(self, number: int) -> Episode:
        """Write what happens in one request."""
        lookups = [self._lookup(f"{number} {turn}") for turn in range(self._sizes.turns - 1)]
        said = [*map(self._call, lookups), self.words(NUM_THOUGHT_TOKENS)]
        stop = self._template.stop_token_ids[0]
        completions = [[*self._template.encode_policy_text(t), stop] for t in said]
        return Episode(lookups, completions, self._sizes.turn_s)

    def _lookup(self, name: str) -> Lookup:
        sizes = self._sizes
        return Lookup(
            query=f"{self.words(6)} {name}",
            observation=self.words(sizes.observation_tokens),
            delay_s=sizes.tool_median_s * self._random.lognormvariate(0, sizes.tool_sigma),
        )

    def _call(self, lookup: Lookup) -> str:
        arguments = {"query": lookup.query, "top_k": self._random.randint(1, MOST_RESULTS)}
        call = json.dumps({"name": "search", "arguments": arguments})
        return f"{self.words(NUM_THOUGHT_TOKENS)}\n<tool_call>\n{call}\n</tool_call>"


class SearchTool(BaseTool):
    """Knows the answer to every question, and takes its time where it is told to."""

    def __init__(self) -> None:
        super().__init__({}, SCHEMA)
        self.lookups: dict[str, Lookup] = {}
        self.waits = False

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **execute_kwargs: Any
    ) -> str:
        """Look the query up."""
        lookup = self.lookups[parameters["query"]]
        if self.waits:
            await asyncio.sleep(lookup.delay_s)
        return lookup.observation


class Bench:
    """The work, and all that a rollout of it needs.

    Args:
        tokenizer: Folder or hub name of a tokenizer with a chat template.
        sizes: How much work.
        max_response_length: Budget of a request; None: the default.
        max_tool_response_length: Budget of an observation; None: the default.
    """

    def __init__(
        self,
        tokenizer: str,
        sizes: Sizes,
        *,
        max_response_length: int | None = None,
        max_tool_response_length: int | None = None,
    ) -> None:
        self.sizes = sizes
        self.tool = SearchTool()
        data: dict[str, Any] = {"train_files": ["none.parquet"]}
        rollout: dict[str, Any] = {"n": sizes.group, "max_concurrent_requests": sizes.requests}
        if max_response_length is not None:
            data["max_response_length"] = max_response_length
        if max_tool_response_length is not None:
            rollout["multi_turn"] = {"max_tool_response_length": max_tool_response_length}
        self._config = parse_config(
            {"data": data, "model": {"path": tokenizer}, "rollout": rollout}
        )
        plugins = Plugins([self.tool], {}, make_reward_manager(RewardConfig()))
        probed = probe_model(self._config, plugins)
        self._setup = make_rollout_setup(self._config, plugins, probed)
        self.template = self._setup.template
        self.tokenizer: Any = self._setup.tokenizer.backend_tokenizer
        writer = Writer(self.template, sizes)
        self.prompts = [writer.prompt(index) for index in range(-(-sizes.requests // sizes.group))]
        self.episodes = [writer.episode(number) for number in range(sizes.requests)]
        self.tool.lookups = {look.query: look for look in self.lookups}

    @property
    def lookups(self) -> list[Lookup]:
        """Every call of the tool."""
        return [lookup for episode in self.episodes for lookup in episode.lookups]

    def make_manager(self, *, waits: bool) -> RolloutManager:
        """Make a manager and its engine, as a run would."""
        self.tool.waits = waits
        delay_s = self.sizes.turn_s if waits else 0.0
        answers = [
            [ScriptedAnswer(completion, delay_s=delay_s) for completion in episode.completions]
            for episode in self.episodes
        ]
        manager = make_manager(
            self._config,
            self._setup,
            ScriptedEngine(
                # `id#2` is a further sequence of the request `id`.
                lambda ids, sampling, name, turn: (said := script[name.split("#")[0]])[
                    turn % len(said)
                ]
            ),
        )
        ids = (request.request_id for request in self.make_requests(manager))
        script = dict(zip(ids, answers, strict=True))
        return manager

    def make_requests(self, manager: RolloutManager) -> list[AsyncRolloutRequest]:
        """Make the requests of the work."""
        requests = manager.make_requests(self.prompts, manager.train_plan())
        return requests[: self.sizes.requests]

    def roll_out(self, manager: RolloutManager) -> list[AsyncRolloutRequest]:
        """Roll everything out."""
        return asyncio.run(manager.rollout(self.make_requests(manager)))

    def use_tokenizer(self) -> None:
        """Encode and decode what the rollout must, each text once, and nothing else."""
        for text in self._texts():
            assert self.tokenizer.encode(text, add_special_tokens=False).ids
        self._decode()

    def use_tokenizer_together(self) -> None:
        """The same, with as many texts in one call as there are requests."""
        texts = self._texts()
        for start in range(0, len(texts), self.sizes.requests):
            some = texts[start : start + self.sizes.requests]
            for encoding in self.tokenizer.encode_batch_fast(some, add_special_tokens=False):
                assert encoding.ids
        self._decode()

    def _texts(self) -> list[str]:
        texts = [prompt.messages[0].text for prompt in self.prompts]
        return texts + [lookup.observation for lookup in self.lookups]

    def _decode(self) -> None:
        for episode in self.episodes:
            for ids in episode.completions:
                self.tokenizer.decode(ids, skip_special_tokens=False)


def check_outcome(requests: Sequence[AsyncRolloutRequest], sizes: Sizes) -> None:
    """Refuse a rollout that was not the one that is to be measured."""
    for request in requests:
        shown = [turn.num_tokens for turn in request.turns if turn.role == "tool"]
        assert request.stop_reason is StopReason.ANSWERED, request.error
        assert request.num_assistant_turns == sizes.turns
        assert not request.differences, request.differences
        assert all(0 <= number - sizes.observation_tokens <= 30 for number in shown), shown
    assert any(request.is_checked for request in requests)
