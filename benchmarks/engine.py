"""Speed of the embedded engine over plain lock-step decoding of the same requests.

The work is that of the quick start: 256 concurrent episodes of 3 turns, prompts of 120 to 250
tokens, about 25 sampled tokens a turn and 10 observed ones between turns, with the small policy of
the quick start. Lock-step decoding is a loop over `model(..., past_key_values=...)` on a batch
padded on the left, which waits for the longest row in each turn. It is measured twice: with the
cache kept from turn to turn (what a row sampled beyond its budget is masked, so only observed
tokens are prefilled), and with each turn prefilled anew, as trainers do that call `generate` once a
turn. The ratio that counts is the one to the faster of the two.

Expectation: a ratio of at least 0.8 on two cores. All are measured in turn in one run, and the
fastest run of each counts, as other load slows all.

Run: python benchmarks/engine.py [repeats]
"""

import asyncio
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from agentrl.engines import SamplingParams, TransformersEngine

NUM_EPISODES, NUM_TURNS, NUM_OBSERVED = 256, 3, 10
KEPT, ANEW = "lock step, cache kept", "lock step, prefill anew"
VOCAB_SIZE = 600


@dataclass(frozen=True)
class Episode:
    """One conversation: its prompt, what each turn samples, what is observed behind it."""

    prompt: list[int]
    budgets: list[int]
    observed: list[int]


def make_episodes() -> list[Episode]:
    generator = torch.Generator().manual_seed(0)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    system = integers(0, VOCAB_SIZE, 78)
    return [
        Episode(
            prompt=system + integers(0, VOCAB_SIZE, length - len(system)),
            budgets=integers(15, 36, NUM_TURNS),
            observed=integers(0, VOCAB_SIZE, NUM_OBSERVED),
        )
        for length in integers(120, 251, NUM_EPISODES)
    ]


def make_model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config).eval()


class LockStep:
    """A batch that is decoded in lock step: its cache, and which of its places are tokens."""

    def __init__(self, model: Qwen2ForCausalLM, num_rows: int) -> None:
        self.model = model
        self.cache = DynamicCache()
        self.mask = torch.zeros(num_rows, 0, dtype=torch.int64)

    @torch.no_grad()
    def feed(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Take `[B, n]` tokens in; sample one for each row, with its log-probability."""
        self.mask = torch.cat([self.mask, mask], dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        logits = self.model(
            input_ids=ids, attention_mask=self.mask, position_ids=positions,
            past_key_values=self.cache, logits_to_keep=1,
        ).logits[:, -1]  # fmt: skip
        scores = torch.log_softmax(logits.float(), dim=-1)
        sampled = torch.multinomial(scores.exp(), 1)
        return sampled, scores.gather(1, sampled)

    def turn(self, ids: Tensor, mask: Tensor, budgets: Tensor) -> tuple[Tensor, Tensor]:
        """Sample a turn of all rows: `[B, most of the budgets]`, and which of it counts."""
        found = [self.feed(ids, mask)]
        counts = torch.arange(int(budgets.max())) < budgets[:, None]
        for step in range(1, counts.shape[1]):
            found.append(self.feed(found[-1][0], counts[:, step - 1 : step].long()))
        sampled, log_probs = (torch.cat(parts, dim=1) for parts in zip(*found, strict=True))
        log_probs.tolist()
        return sampled, counts.long()


def pad_left(histories: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(map(len, histories))
    ids = torch.tensor([[0] * (width - len(h)) + h for h in histories])
    return ids, torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in histories])


def budgets_of(episodes: list[Episode], turn: int) -> Tensor:
    return torch.tensor([episode.budgets[turn] for episode in episodes])


def run_keeping_cache(model: Qwen2ForCausalLM, episodes: list[Episode]) -> None:
    batch = LockStep(model, len(episodes))
    ids, mask = pad_left([episode.prompt for episode in episodes])
    observed = torch.tensor([episode.observed for episode in episodes])
    for turn in range(NUM_TURNS):
        sampled, counts = batch.turn(ids, mask, budgets_of(episodes, turn))
        # The last sampled token is in no cache yet.
        ids = torch.cat([sampled[:, -1:], observed], dim=1)
        mask = torch.cat([counts[:, -1:], torch.ones_like(observed)], dim=1)


def run_prefilling_anew(model: Qwen2ForCausalLM, episodes: list[Episode]) -> None:
    histories = [list(episode.prompt) for episode in episodes]
    for turn in range(NUM_TURNS):
        batch = LockStep(model, len(episodes))
        sampled, _ = batch.turn(*pad_left(histories), budgets_of(episodes, turn))
        for history, new, episode in zip(histories, sampled.tolist(), episodes, strict=True):
            history += new[: episode.budgets[turn]] + episode.observed


async def run_engine(engine: TransformersEngine, episodes: list[Episode]) -> None:
    async def run(number: int, episode: Episode) -> None:
        history = list(episode.prompt)
        for budget in episode.budgets:
            sampling = SamplingParams(max_new_tokens=budget)
            completion = await engine.generate(history, sampling, request_id=str(number))
            history += completion.token_ids + episode.observed

    async with asyncio.TaskGroup() as group:
        for number, episode in enumerate(episodes):
            group.create_task(run(number, episode))
    await engine.flush_cache()


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    model, episodes = make_model(), make_episodes()
    engine = TransformersEngine.from_model(model)
    num_tokens = sum(sum(episode.budgets) for episode in episodes)
    with asyncio.Runner() as runner:
        works: dict[str, Callable[[], None]] = {
            KEPT: lambda: run_keeping_cache(model, episodes),
            ANEW: lambda: run_prefilling_anew(model, episodes),
            "engine": lambda: runner.run(run_engine(engine, episodes)),
        }
        best = dict.fromkeys(works, math.inf)
        for name, work in list(works.items()) * repeats:
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
        runner.run(engine.close())
    for name, time_s in best.items():
        print(f"{name:>24}: {num_tokens / time_s:8.0f} tokens/s ({time_s:.2f} s of {num_tokens})")
    for name in (KEPT, ANEW):
        print(f"engine over {name}: {best[name] / best['engine']:.2f}")
    print("(at least 0.8 over the faster of the two is expected)")
    print(f"load: {os.getloadavg()}, {os.cpu_count()} cores, torch {torch.get_num_threads()}")


if __name__ == "__main__":
    main()
