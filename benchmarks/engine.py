"""Speed of the embedded engine over plain lock-step decoding of the same requests.

The work is that of the quick start: 256 concurrent episodes of 3 turns, prompts of 120 to 250
tokens, about 25 sampled tokens a turn and 10 observed ones between turns, with the small policy of
the quick start. Lock-step decoding is a loop over `model(..., past_key_values=...)` on a batch
padded on the left, which waits for the longest row in each turn and prefills each turn anew.

Expectation: a ratio of at least 0.8 on two cores (measured: 2.04 on an idle machine, 2.1 to 2.7
with other load). Both are measured in turn in one run, and the ratio of the fastest runs counts, as
other load slows both.

Run: python benchmarks/engine.py [repeats]
"""

import asyncio
import os
import sys
import time
from dataclasses import dataclass

import torch
from transformers import DynamicCache, Qwen2Config, Qwen2ForCausalLM

from agentrl.engines import SamplingParams, TransformersEngine

NUM_EPISODES, NUM_TURNS, NUM_OBSERVED = 256, 3, 10
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


@torch.no_grad()
def lock_step_turn(
    model: Qwen2ForCausalLM, histories: list[list[int]], budgets: list[int]
) -> list[list[int]]:
    """Sample each row's budget; returns the sampled ids."""
    width = max(map(len, histories))
    ids = torch.tensor([[0] * (width - len(h)) + h for h in histories])
    mask = torch.tensor([[0] * (width - len(h)) + [1] * len(h) for h in histories])
    cache, sampled, log_probs = DynamicCache(), [], []
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for _ in range(max(budgets)):
        logits = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
            logits_to_keep=1,
        ).logits[:, -1]  # fmt: skip
        scores = torch.log_softmax(logits.float(), dim=-1)
        ids = torch.multinomial(scores.exp(), 1)
        log_probs.append(scores.gather(1, ids))
        sampled.append(ids)
        mask = torch.cat([mask, mask.new_ones(len(histories), 1)], dim=1)
        positions = positions[:, -1:] + 1
    rows = torch.cat(sampled, dim=1).tolist()
    torch.cat(log_probs, dim=1).tolist()
    return [row[:budget] for row, budget in zip(rows, budgets, strict=True)]


def run_lock_step(model: Qwen2ForCausalLM, episodes: list[Episode]) -> None:
    histories = [list(episode.prompt) for episode in episodes]
    for turn in range(NUM_TURNS):
        sampled = lock_step_turn(model, histories, [e.budgets[turn] for e in episodes])
        for history, new, episode in zip(histories, sampled, episodes, strict=True):
            history += new + episode.observed


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
    seconds: dict[str, list[float]] = {"lock-step": [], "engine": []}
    with asyncio.Runner() as runner:
        for _ in range(repeats):
            start = time.perf_counter()
            run_lock_step(model, episodes)
            middle = time.perf_counter()
            runner.run(run_engine(engine, episodes))
            seconds["lock-step"].append(middle - start)
            seconds["engine"].append(time.perf_counter() - middle)
        runner.run(engine.close())
    best = {name: min(times) for name, times in seconds.items()}
    for name, time_s in best.items():
        print(f"{name:>9}: {num_tokens / time_s:8.0f} tokens/s ({time_s:.2f} s of {num_tokens})")
    print(f"    ratio: {best['lock-step'] / best['engine']:8.2f} (at least 0.8 is expected)")
    print(f"     load: {os.getloadavg()}, {os.cpu_count()} cores, torch {torch.get_num_threads()}")


if __name__ == "__main__":
    main()
