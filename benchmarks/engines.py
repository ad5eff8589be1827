"""What agentrl adds to SGLang: speed of a rollout, use of the radix cache, cost of a weight sync.

Three ratios, each of things measured in turn in one run; the fastest run of each counts, as other
load slows all. A fourth compares the two ways to reach SGLang (`paths`).

1. Tokens per second of a multi-turn rollout through agentrl (`RolloutManager`, `SGLangEngine`,
   chat template, tool parser, a tool that answers at once) over the same number of tokens asked of
   the same SGLang directly. The work is that of the quick start: 256 conversations of 3 turns,
   prompts of 120 to 250 tokens, 25 sampled tokens a turn, some 30 observed ones between turns.
   Direct is `sglang.Engine.async_generate` on token ids: each turn of all conversations is one
   batched call, with the prompts, the observed tokens and the lengths of the conversations that
   agentrl has just had, and log-probabilities; nothing is decoded, parsed, rendered or recorded.
   A second form of direct has no barrier between turns: one task for each conversation.
2. Prompt tokens served from the radix cache on turns after the first, over those that could be:
   all that the conversation had before the observation, its last sampled token too, which a pass
   has read only where SGLang had begun one more than was needed.
3. Seconds of a weight sync in memory over a plain copy of the same bytes, with a policy of half a
   GiB in float32, in the default buckets.

Expectation before it was measured: agentrl's own work (rendering, parsing, ledger) runs while
SGLang's process computes, so with two cores 0.95 and more of the direct rate; more than 0.99 of the
cache, as ids go back as they were sampled; and 2 to 3 times the copy, as a sync copies twice (into
the bucket, out of it) and waits for an answer of some milliseconds with each bucket.

4. Seconds of the same rollout through a local server (HTTP) over seconds in process, and the same
   for a weight sync. Both engines run; their rollouts alternate, and the order alternates too. The
   ratio is the median of the ratios of neighbors, with quartiles, in wall-clock and CPU seconds (of
   this process and all its children). The CPU seconds hardly depend on other load.

5. CPU time that this process needs for a call, without SGLang (`calls`): 256 conversations of 3
   turns against a fake of `sglang.Engine` that answers all waiting calls at once. Printed are the
   fake alone, through the thread of `SGLangHost`, and through `SGLangEngine`. Expectation: 60 us
   more than the fake alone.

Run: python benchmarks/engines.py [all|direct|sync|paths|calls] [repeats]
"""

import asyncio
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from agentrl.config import parse_config
from agentrl.config.schema.engine import SGLangServerConfig, WeightSyncConfig
from agentrl.config.schema.prepare import TinyPolicyConfig
from agentrl.config.schema.reward import RewardConfig
from agentrl.data.rows import Conversation, Prompt
from agentrl.engines.protocol import Engine, SamplingParams
from agentrl.engines.sglang.arguments import SGLangNeeds
from agentrl.engines.sglang.inprocess import host as host_module
from agentrl.engines.sglang.inprocess.engine import SGLangEngine
from agentrl.engines.sglang.servers.factory import SyncSource, connect
from agentrl.engines.sglang.servers.launch import LocalServers, ServeOptions, plan_servers
from agentrl.messages import Message, OpenAIFunctionToolSchema
from agentrl.quickstart.tiny_policy import build_tiny_model, train_tokenizer
from agentrl.rewards import make_reward_manager
from agentrl.rollout import AsyncRolloutRequest, RolloutManager
from agentrl.rollout.tool_parsers.base import ParsedCall, ParsedTurn, Piece, ToolParser
from agentrl.tools import BaseTool
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.rollout_setup import make_manager, make_rollout_setup, probe_model

NUM_CONVERSATIONS, NUM_TURNS, NUM_SAMPLED, MAX_MODEL_LEN = 256, 3, 25, 768
TEXT = "the of and to in is that for it was on are as with his they at be this have from"
WORDS = TEXT.split()
SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look it up.",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    }
)
AGENTRL, BATCHED, FREE = "through agentrl", "direct, batched by turn", "direct, without a barrier"


class Look(BaseTool):
    """Answers at once."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        """Say the same to everyone."""
        return "the answer that was asked for is 42"


class EveryTurn(ToolParser):
    """Reads one call in every turn, whatever an untrained policy has said."""

    opener = "(?!)"

    def read(self, text: str, start: int, body: int, tools: Any) -> Piece:
        """Read what begins at an opener, of which there is none."""
        raise AssertionError("nothing opens a call")

    def parse(self, text: str, *, starts_in_thought: bool = False, tools: Any = ()) -> ParsedTurn:
        """Find the call."""
        return ParsedTurn(text, [ParsedCall("look", {})])


@dataclass(frozen=True)
class Talk:
    """One conversation as it is asked for directly."""

    prompt: list[int]
    lengths: list[int]
    """Sampled tokens of each turn."""
    observed: list[list[int]]
    """Tokens behind each turn but the last."""

    @classmethod
    def of(cls, request: AsyncRolloutRequest) -> "Talk":
        """Read what agentrl has done."""
        said = [turn for turn in request.turns if turn.role == "assistant"]
        behind = [request.response_ids[one.end : other.start] for one, other in pairwise(said)]
        return cls(list(request.prompt_ids), [turn.num_tokens for turn in said], behind)


class Bench:
    """A small policy in SGLang, and conversations with it."""

    def __init__(self, folder: Path) -> None:
        self._random = random.Random(0)
        tokenizer = write_policy(folder, self._words)
        self._config = parse_config(
            {
                "data": {"train_files": ["none.parquet"], "max_prompt_length": 384,
                         "max_response_length": MAX_MODEL_LEN - 384},
                "model": {"path": str(folder)},
                "rollout": {
                    "n": 1,
                    "max_concurrent_requests": NUM_CONVERSATIONS,
                    "multi_turn": {"max_assistant_turns": NUM_TURNS,
                                   "max_tokens_per_turn": NUM_SAMPLED},
                },
            }
        )  # fmt: skip
        plugins = Plugins([Look({}, SCHEMA)], {}, make_reward_manager(RewardConfig()))
        found = make_rollout_setup(self._config, plugins, probe_model(self._config, plugins))
        self._setup = replace(found, parser=EveryTurn())
        self._prompts = [self._prompt(index) for index in range(NUM_CONVERSATIONS)]
        self.engine = start_engine(folder, tokenizer)
        self.requests: list[AsyncRolloutRequest] = []
        """Of the last rollout."""

    @property
    def num_tokens(self) -> int:
        """Sampled by the last rollout."""
        return sum(sum(Talk.of(request).lengths) for request in self.requests)

    async def roll_out(self, engine: Engine | None = None) -> None:
        """Have the conversations through agentrl."""
        manager: RolloutManager = make_manager(self._config, self._setup, engine or self.engine)
        made = manager.make_requests(self._prompts, manager.train_plan())
        self.requests = await manager.rollout(made)
        assert all(request.num_assistant_turns == NUM_TURNS for request in self.requests)

    async def ask_by_turn(self) -> None:
        """Have the same conversations directly, all of them turn by turn."""
        talks = [Talk.of(request) for request in self.requests]
        histories = [list(talk.prompt) for talk in talks]
        for turn in range(NUM_TURNS):
            lengths = [talk.lengths[turn] for talk in talks]
            answers = await self._ask(histories, [sampling(length) for length in lengths])
            for history, answer, talk in zip(histories, answers, talks, strict=True):
                history += answer["output_ids"] + (talk.observed[turn : turn + 1] or [[]])[0]

    async def ask_freely(self) -> None:
        """Have the same conversations directly, each at its own pace."""

        async def talk_through(talk: Talk) -> None:
            history = list(talk.prompt)
            for length, observed in zip(talk.lengths, [*talk.observed, []], strict=True):
                answer = await self._ask(history, sampling(length))
                history += answer["output_ids"] + observed

        async with asyncio.TaskGroup() as group:
            for request in self.requests:
                group.create_task(talk_through(Talk.of(request)))

    def cache_share(self) -> float:
        """Tokens served from the cache on later turns of the last rollout, over what could be."""
        served = possible = 0
        for request in self.requests:
            said = [turn for turn in request.turns if turn.role == "assistant"]
            for before, turn in pairwise(said):
                possible += len(request.prompt_ids) + before.end
                served += turn.cached_tokens
        return served / possible

    async def _ask(self, input_ids: Any, sampling_params: Any) -> Any:
        return await self.engine._host.generate(
            {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        )

    def _words(self, number: int) -> str:
        return " ".join(self._random.choices(WORDS, k=number))

    def _prompt(self, index: int) -> Prompt:
        said = self._words(self._random.randint(30, 160))
        return Prompt(index=index, messages=[Message(role="user", content=said)])


def sampling(length: int) -> dict[str, Any]:
    return {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True}


def write_policy(folder: Path, words: Callable[[int], str]) -> Qwen2Tokenizer:
    """Write the quick start's model with random weights, and its tokenizer."""
    corpus = [Conversation(messages=[Message(role="user", content=words(60))]) for _ in range(200)]
    settings = TinyPolicyConfig(out_dir=folder, corpus=folder)
    tokenizer = train_tokenizer(corpus, settings.vocab_size, [SCHEMA])
    build_tiny_model(settings, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return tokenizer


def needs_of(folder: Path) -> SGLangNeeds:
    return SGLangNeeds(
        model_path=str(folder),
        max_model_len=MAX_MODEL_LEN,
        max_requests=NUM_CONVERSATIONS,
        dtype="float32",
    )


def start_engine(folder: Path, tokenizer: Any) -> SGLangEngine:
    return SGLangEngine.start(needs_of(folder), tokenizer)


async def fastest(
    works: Mapping[str, Callable[[], Awaitable[None]]],
    repeats: int,
    between: Callable[[], Awaitable[None]],
) -> dict[str, float]:
    """Run each in turn, so often; seconds of the fastest run of each."""
    best = dict.fromkeys(works, math.inf)
    for name, work in list(works.items()) * repeats:
        await between()
        start = time.perf_counter()
        await work()
        best[name] = min(best[name], time.perf_counter() - start)
    return best


async def measure_rollout(folder: Path, repeats: int) -> None:
    bench = Bench(folder)
    engine = bench.engine
    try:
        await bench.roll_out()  # warms everything up, and says what direct is to ask for
        works = {AGENTRL: bench.roll_out, BATCHED: bench.ask_by_turn, FREE: bench.ask_freely}
        best = await fastest(works, repeats, engine.flush_cache)
    finally:
        await engine.close()
    for name, seconds in best.items():
        print(f"{name:>26}: {bench.num_tokens / seconds:8.0f} tokens/s ({seconds:.2f} s)")
    for name in (BATCHED, FREE):
        print(f"agentrl over {name}: {best[name] / best[AGENTRL]:.3f}")
    print("(at least 0.95 over batched is the aim)")
    print(f"cache, of what could be served: {bench.cache_share():.4f} (above 0.95 is the aim)")


async def measure_sync(folder: Path, tokenizer: Any, repeats: int) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=1024, intermediate_size=4096, num_hidden_layers=9,
        num_attention_heads=16, num_key_value_heads=4, tie_word_embeddings=True,
        max_position_embeddings=1024,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = [(name, weight.detach()) for name, weight in model.named_parameters()]
    copies = [torch.empty_like(weight) for _, weight in weights]
    engine = start_engine(folder, tokenizer)

    async def sync() -> None:
        await engine.update_weights(iter(weights), version=1)

    async def copy() -> None:
        copy_all(weights, copies)

    async def nothing() -> None:
        pass

    try:
        figures = await engine.update_weights(iter(weights), version=0)
        best = await fastest({"sync": sync, "copy": copy}, repeats, nothing)
    finally:
        await engine.close()
    print(f"weights: {figures.num_bytes / 2**20:.0f} MiB in {figures.num_buckets} buckets")
    for name, seconds in best.items():
        print(f"{name:>26}: {seconds:.3f} s ({figures.num_bytes / seconds / 2**30:.2f} GiB/s)")
    print(f"sync over copy: {best['sync'] / best['copy']:.2f}")


async def measure_paths(folder: Path, repeats: int) -> None:
    bench = Bench(folder)
    tokenizer = Qwen2Tokenizer.from_pretrained(folder)
    plans = plan_servers(needs_of(folder), ServeOptions())
    source = SyncSource(
        settings=WeightSyncConfig(), device=torch.device("cpu"), folder=folder / "weights"
    )
    async with LocalServers(plans, say=print):
        settings = SGLangServerConfig(addresses=[plan.address for plan in plans])
        server = connect(settings, needs_of(folder), tokenizer, source)
        engines = {"in process": bench.engine, "server": server}
        try:
            await compare(
                "rollout", {n: lambda e=e: bench.roll_out(e) for n, e in engines.items()}, repeats
            )
            weights = policy_weights(folder)
            await compare(
                "weight sync",
                {
                    n: lambda e=e: e.update_weights(iter(weights), version=1)
                    for n, e in engines.items()
                },
                repeats,
            )
        finally:
            await server.close()
            await bench.engine.close()


def policy_weights(folder: Path) -> list[tuple[str, torch.Tensor]]:
    model = Qwen2ForCausalLM.from_pretrained(folder)
    return [(name, weight.detach()) for name, weight in model.named_parameters()]


async def compare(
    what: str, works: Mapping[str, Callable[[], Awaitable[Any]]], repeats: int
) -> None:
    """Print how much longer the second takes than the first, by neighbors in time."""
    for work in works.values():
        await work()
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for index in range(repeats):
        for name in list(works)[:: 1 if index % 2 else -1]:
            cpu, start = cpu_seconds(), time.perf_counter()
            await works[name]()
            seconds[name].append((time.perf_counter() - start, cpu_seconds() - cpu))
            print(f"{what}, {name}: {seconds[name][-1]}", file=sys.stderr, flush=True)
    for clock, unit in enumerate(("wall-clock", "CPU")):
        first, second = ([times[clock] for times in found] for found in seconds.values())
        ratios = [b / a for a, b in zip(first, second, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{what}, {unit}: {' over '.join(list(works)[::-1])} {middle:.3f} (quartiles {low:.3f} "
            f"to {high:.3f}, {repeats} pairs; medians {statistics.median(second):.2f} s and "
            f"{statistics.median(first):.2f} s; fastest {min(second):.2f} s and {min(first):.2f} s)"
        )


class FakeSGLang:
    """Stands in for `sglang.Engine`: answers all waiting calls together, some time after the first.

    Args:
        arguments: Not read.
    """

    def __init__(self, **arguments: Any) -> None:
        self._waiting: list[asyncio.Future[None]] = []
        self.send_to_rpc = None
        self.tokenizer_manager = SimpleNamespace(
            _subprocess_watchdog=None, recv_from_detokenizer=None, send_to_scheduler=None
        )

    def get_all_child_pids(self) -> list[int]:
        """Return no process."""
        return []

    def shutdown(self) -> None:
        """Do nothing."""

    async def async_generate(self, **fields: Any) -> dict[str, Any]:
        """Return `NUM_SAMPLED` tokens."""
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        self._waiting.append(answer)
        if len(self._waiting) == 1:
            loop.call_later(0.03, self._answer)
        await answer
        ids = list(range(NUM_SAMPLED))
        meta = {
            "finish_reason": {"type": "stop"},
            "output_token_logprobs": [(-1.0, token_id, None) for token_id in ids],
        }
        return {"output_ids": ids, "meta_info": meta}

    def _answer(self) -> None:
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            answer.set_result(None)


def measure_calls(repeats: int) -> None:
    host_module._engine_class = lambda: FakeSGLang
    host, fake = host_module.SGLangHost({}), FakeSGLang()
    engine = SGLangEngine(host, lambda ids: "", max_model_len=MAX_MODEL_LEN)
    prompt = list(range(MAX_MODEL_LEN // 2))
    asked = SamplingParams(max_new_tokens=NUM_SAMPLED, stop_token_ids=(NUM_SAMPLED - 1,))
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "the fake alone": lambda: fake.async_generate(rid="", input_ids=prompt),
        "through SGLangHost": lambda: host.generate({"rid": "", "input_ids": prompt}),
        "through SGLangEngine": lambda: engine.generate(prompt, asked, request_id="0"),
    }

    async def converse(call: Callable[[], Awaitable[Any]]) -> None:
        for _ in range(NUM_TURNS):
            await call()

    async def converse_all(call: Callable[[], Awaitable[Any]]) -> None:
        await asyncio.gather(*(converse(call) for _ in range(NUM_CONVERSATIONS)))

    best = dict.fromkeys(calls, math.inf)
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.process_time()
            asyncio.run(converse_all(call))
            best[name] = min(best[name], time.process_time() - started)
    host.close()
    for name, seconds in best.items():
        print(f"{name:>26}: {1e6 * seconds / NUM_CONVERSATIONS / NUM_TURNS:.1f} us of CPU a call")


def cpu_seconds() -> float:
    """CPU time of this process and its living children."""
    me = psutil.Process()
    clocks = (process.cpu_times() for process in (me, *me.children(recursive=True)))
    return sum(clock.user + clock.system for clock in clocks)


def copy_all(weights: Sequence[tuple[str, torch.Tensor]], copies: list[torch.Tensor]) -> None:
    for (_, weight), copy in zip(weights, copies, strict=True):
        copy.copy_(weight)


def main() -> None:
    part = sys.argv[1] if len(sys.argv) > 1 else "all"
    repeats = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        if part in ("all", "direct"):
            asyncio.run(measure_rollout(small, repeats))
        if part in ("all", "paths"):
            asyncio.run(measure_paths(small, repeats))
        if part in ("all", "calls"):
            measure_calls(5 * repeats)
        if part in ("all", "sync"):
            write_policy(small, lambda number: " ".join(WORDS * (number // len(WORDS) + 1)))
            asyncio.run(measure_sync(large, Qwen2Tokenizer.from_pretrained(small), repeats))
    print(f"load: {os.getloadavg()}, {os.cpu_count()} cores, torch {torch.get_num_threads()}")


if __name__ == "__main__":
    main()
