"""Speed and memory of the update over the same step with padding and full logits.

The work is one optimizer step on a ragged batch of several turns: prompts and responses of spread
lengths, half of each response observed; once with the small policy of the quick start (600 words),
once with the same body under the vocabulary of Qwen2.5 (151,669 words). Ours is
`Actor.update_policy` with its defaults. The plain step is what one writes with a Hugging Face model
alone: micro-batches padded on the right to the longest row of the batch (so that no mask is needed
and attention takes its fast causal path), logits of every position in float32, `log_softmax`,
`gather` and the entropy, the clipped loss averaged over the batch's tokens. Both have the same
weights, threads and optimizer, and their loss, entropy and gradient norm must agree before anything
is timed. Tokens per second count real tokens (prompts, samples, observations) for both.

Expectation before it was measured: rows fill about half of the padding, and a fifth of the
positions are trained. The body then does half of the work, the head 4/15 of it (a fifth of the
positions by four matrix products, one of which makes the logits again, instead of three), and a
block of logits stays in the cache. So at least 2 times with few words, and 4 or more with many.

With the small policy, rows in groups of 8 that share their prompt are timed with and without
`actor.share_prefixes`: linear layers compute at most 16/9 times fewer tokens if the prompt is as
long as the response, and 40/12 times fewer if it is four times as long. The same rows are timed
with half of the groups silent (advantage 0), which should take half of the time.

The FLOP rate of the update counts what a dense model needs (two per weight and token, three passes;
attention over half of the scores), with the optimizer's step, in groups that share nothing. It is
divided by the rate of a plain matrix product of the same sizes, measured in turn. Expectation: 0.6.

The part `actor` takes the step that the other libraries were measured on: 32 rows of 512 prompt and
512 response tokens, all of them trained, 5.25 million float32 weights, the default micro-batch, in
a process of its own. Its time is divided by that of a plain matrix product with the FLOP of the
step, and the process's peak memory is everything: interpreter, torch, weights, moments.
Expectation: twice the product (small layers, attention, an optimizer's step), under 0.9 GiB.

Memory is the growth of the resident set over one step: activations, gradients and logits, but not
weights and moments. All rows are in one micro-batch, which is doubled, with few words and many.

Run: python benchmarks/update.py [repeats] [plain] [groups] [flops] [actor] [memory]
"""

import ctypes
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.config.schema.training import ActorConfig, FsdpConfig, OptimConfig
from agentrl.protocol import DataProto
from agentrl.workers.actor import Actor
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.model import PolicyModel
from agentrl.workers.optim import PolicyOptimizer

MAX_TOKENS, NUM_TURNS = 768, 3
OPTIM = OptimConfig(lr=1e-4)
GRAD_CLIP, CLIP, DUAL_CLIP = 1.0, 0.2, 3.0
MIB = 2**20

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One policy and its batch."""

    vocab_size: int
    num_rows: int
    plain_rows: int
    """Rows of a micro-batch of the plain step, which changes its speed by a tenth at most."""
    our_tokens: int | None = ActorConfig().ppo_max_token_len_per_gpu
    """Tokens of a micro-batch of ours: the default."""


CASES = (Case(600, 64, 8), Case(151_669, 16, 2))


@dataclass(frozen=True)
class Row:
    """One trajectory: its tokens, what of them is trained, and what the step needs of it."""

    ids: Tensor
    prompt_length: int
    mask: Tensor
    """1 on sampled tokens, for each response token."""
    advantage: float
    drift: Tensor
    """What the old log-probability of each response token is above the new one."""


def make_rows(case: Case, *, seed: int = 0) -> list[Row]:
    """Draw trajectories whose lengths are lognormal and whose responses are half observed."""
    generator = torch.Generator().manual_seed(seed)

    def length(median: float, largest: int) -> int:
        factor = math.exp(0.6 * float(torch.randn((), generator=generator)))
        return max(8, min(largest, round(median * factor)))

    def row() -> Row:
        prompt = length(100, MAX_TOKENS // 4)
        sampled = length(120, (MAX_TOKENS - prompt) // 2) // NUM_TURNS
        observed = sampled * NUM_TURNS // (NUM_TURNS - 1)
        turn = [1] * sampled + [0] * observed
        mask = torch.tensor((turn * NUM_TURNS)[: -len([0] * observed)])
        size = (prompt + len(mask),)
        return Row(
            ids=torch.randint(0, case.vocab_size, size, generator=generator),
            prompt_length=prompt,
            mask=mask,
            advantage=float(torch.randn((), generator=generator)),
            drift=0.3 * torch.randn(len(mask), generator=generator),
        )

    return [row() for _ in range(case.num_rows)]


def make_model(vocab_size: int) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=1024,
        tie_word_embeddings=True, initializer_range=0.1,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


@dataclass(frozen=True)
class StepResult:
    """What both steps must agree on."""

    loss: float
    entropy: float
    grad_norm: float


class OurStep:
    """The library's update, with its defaults."""

    def __init__(self, case: Case, rows: Sequence[Row], world: World) -> None:
        policy = PolicyModel(make_model(case.vocab_size), world, torch.float32, FsdpConfig())
        config = ActorConfig(optim=OPTIM, ppo_max_token_len_per_gpu=case.our_tokens)
        self.actor = Actor(policy, config, total_steps=100, response_budget=MAX_TOKENS)
        self.tensors = _collate(rows)

    def score(self) -> Tensor:
        """Give the old log-probabilities: those of now, and a drift so that some are clipped."""
        batch = DataProto.from_dict(tensors=self.tensors)
        scores = self.actor.compute_log_probs(batch, temperature=1.0).log_probs
        self.tensors["old_log_probs"] = scores + self.tensors["drift"]
        return scores

    def update(self) -> StepResult:
        """Take one step."""
        batch = DataProto.from_dict(tensors=self.tensors)
        metrics = self.actor.update_policy(batch, temperature=1.0).metrics
        return StepResult(
            metrics["actor/pg_loss"], metrics["actor/entropy"], metrics["actor/grad_norm"]
        )


def _collate(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Lay rows out as a batch is: prompts padded on the left, responses on the right."""
    left = max(row.prompt_length for row in rows)
    right = max(len(row.mask) for row in rows)
    tensors = {
        "input_ids": torch.zeros(len(rows), left + right, dtype=torch.int64),
        "attention_mask": torch.zeros(len(rows), left + right, dtype=torch.int64),
        "response_mask": torch.zeros(len(rows), right, dtype=torch.int64),
        "advantages": torch.zeros(len(rows), right),
        "drift": torch.zeros(len(rows), right),
    }
    for place, row in enumerate(rows):
        tokens = slice(left - row.prompt_length, left + len(row.mask))
        tensors["input_ids"][place, tokens] = row.ids
        tensors["attention_mask"][place, tokens] = 1
        tensors["response_mask"][place, : len(row.mask)] = row.mask
        tensors["advantages"][place] = row.advantage
        tensors["drift"][place, : len(row.mask)] = row.drift
    return tensors


class PlainStep:
    """The same step with padding and full logits, on a Hugging Face model alone."""

    def __init__(self, case: Case, rows: Sequence[Row], world: World) -> None:
        self.lm = make_model(case.vocab_size)
        self.rows_at_once = case.plain_rows
        self.optimizer = PolicyOptimizer(self.lm.named_parameters(), OPTIM, world, 100)
        width = max(len(row.ids) for row in rows)
        self.ids = torch.zeros(len(rows), width, dtype=torch.int64)
        self.mask = torch.zeros(len(rows), width)
        self.drift = torch.zeros(len(rows), width)
        self.advantages = torch.tensor([[row.advantage] for row in rows])
        for place, row in enumerate(rows):
            response = slice(row.prompt_length - 1, len(row.ids) - 1)
            self.ids[place, : len(row.ids)] = row.ids
            self.mask[place, response] = row.mask.float()
            self.drift[place, response] = row.drift
        self.targets = self.ids.roll(-1, dims=1)
        self.old_log_probs = torch.zeros_like(self.mask)

    def _log_probs(self, part: slice) -> tuple[Tensor, Tensor]:
        """Log-probabilities of all next tokens `[b, L]`, and the sum of trained entropies."""
        every = self.lm(input_ids=self.ids[part], use_cache=False).logits.float().log_softmax(-1)
        with torch.no_grad():
            entropy = -torch.linalg.vecdot(every.exp(), every)
        log_probs = every.gather(-1, self.targets[part, :, None]).squeeze(-1)
        return log_probs, (entropy * self.mask[part]).sum()

    def _parts(self) -> list[slice]:
        starts = range(0, len(self.ids), self.rows_at_once)
        return [slice(start, start + self.rows_at_once) for start in starts]

    @torch.no_grad()
    def score(self) -> Tensor:
        """Give the old log-probabilities, as ours does."""
        scores = torch.cat([self._log_probs(part)[0] for part in self._parts()])
        self.old_log_probs = scores + self.drift
        return scores

    def update(self) -> StepResult:
        """Take one step."""
        loss_sum, entropy_sum, num_tokens = 0.0, 0.0, self.mask.sum()
        for part in self._parts():
            log_probs, entropy = self._log_probs(part)
            ratio = (log_probs - self.old_log_probs[part]).exp()
            advantages = self.advantages[part]
            clipped = -advantages * ratio.clamp(1 - CLIP, 1 + CLIP)
            losses = torch.maximum(-advantages * ratio, clipped)
            bounded = torch.minimum(losses, -advantages * DUAL_CLIP)
            losses = torch.where(advantages < 0, bounded, losses)
            loss = (losses * self.mask[part]).sum() / num_tokens
            loss.backward()
            loss_sum += float(loss.detach())
            entropy_sum += float(entropy)
        grad_norm = self.optimizer.grad_norm()
        self.optimizer.step(grad_scale=min(1.0, GRAD_CLIP / (grad_norm + 1e-6)))
        return StepResult(loss_sum, entropy_sum / float(num_tokens), grad_norm)


STEPS = {"plain": PlainStep, "ours": OurStep}


def check_same_step(case: Case, rows: Sequence[Row], world: World) -> None:
    """Refuse to time two steps that are not the same one."""
    results: list[StepResult] = []
    for make in STEPS.values():
        step = make(case, rows, world)
        step.score()
        results.append(step.update())
    plain, ours = results
    print(f"  plain {plain}\n  ours  {ours}")
    for mine, theirs in zip(vars(ours).values(), vars(plain).values(), strict=True):
        if not math.isclose(mine, theirs, rel_tol=1e-4, abs_tol=1e-6):
            raise SystemExit("the two steps differ")


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def time_case(case: Case, rows: Sequence[Row], world: World, repeats: int) -> None:
    """Time both steps in turn; the fastest of each counts, as other load slows both."""
    steps = {name: make(case, rows, world) for name, make in STEPS.items()}
    best: dict[tuple[str, str], float] = {}
    for _ in range(repeats):
        for name, step in steps.items():
            for kind, work in (("old_log_probs", step.score), ("update", step.update)):
                best[kind, name] = min(best.get((kind, name), math.inf), seconds_of(work))
    num_tokens = sum(len(row.ids) for row in rows)
    for kind in ("update", "old_log_probs"):
        plain, ours = best[kind, "plain"], best[kind, "ours"]
        print(
            f"  {kind:>13}: plain {num_tokens / plain:8.0f} tokens/s, "
            f"ours {num_tokens / ours:8.0f} tokens/s, ratio {plain / ours:.2f}"
        )


def measure_growth(name: str, vocab_size: int, num_rows: int) -> float:
    """Measure in a process of its own what one update adds to the resident set, in MiB."""
    case = Case(vocab_size, num_rows, plain_rows=num_rows, our_tokens=num_rows * MAX_TOKENS)
    world = start_world("cpu", timeout_s=60)
    step = STEPS[name](case, make_rows(case), world)
    step.score()
    step.update()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    step.update()
    growth = _status_bytes("VmHWM") - before
    stop_world()
    return growth / MIB


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = [line.split()[1] for line in lines if line.startswith(f"{key}:")]
    return int(kib) * 1024


def print_memory() -> None:
    print("growth of the resident set over one update, all rows in one micro-batch, MiB:")
    print(f"  {'words':>8} {'weights':>8} {'rows':>5} {'plain':>8} {'ours':>8}")
    for case in CASES:
        weights = sum(p.numel() for p in make_model(case.vocab_size).parameters()) * 4 / MIB
        for num_rows in (2, 4, 8):
            # Eight rows of full logits with many words would take over 7 GB.
            names = ["plain", "ours"] if num_rows < 8 or case.vocab_size < 1000 else ["ours"]
            found = {
                name: _in_own_process(measure_growth, name, case.vocab_size, num_rows)
                for name in names
            }
            cells = [f"{found[name]:8.0f}" if name in found else f"{'-':>8}" for name in STEPS]
            print(f"  {case.vocab_size:8} {weights:8.0f} {num_rows:5} {' '.join(cells)}")


def _in_own_process(work: Callable[..., T], *args: object) -> T:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *args).result()


GROUP = 8
"""Samples of a prompt."""


def make_dense_model(
    hidden: int, layers: int, *, vocab_size: int = 1024, mlp_ratio: int = 3, kv_heads: int = 0
) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=mlp_ratio * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 64,
        num_key_value_heads=kv_heads or max(1, hidden // 256), max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def make_groups(
    num_groups: int, prompt_length: int, response_length: int, *, samples: int, num_silent: int = 0
) -> DataProto:
    """Draw groups of equal lengths; the first ones have no advantage."""
    draw = torch.Generator().manual_seed(0)
    num_rows = num_groups * samples
    prompts = torch.randint(0, 1024, (num_groups, prompt_length), generator=draw)
    responses = torch.randint(0, 1024, (num_rows, response_length), generator=draw)
    ids = torch.cat([prompts.repeat_interleave(samples, dim=0), responses], dim=1)
    advantages = torch.randn(num_rows, 1, generator=draw)
    advantages[: num_silent * samples] = 0.0
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "response_mask": torch.ones_like(responses),
            "advantages": advantages.expand_as(responses).contiguous(),
            "old_log_probs": torch.full(responses.shape, -math.log(1024)),
        },
        non_tensors={"uid": np.arange(num_groups).repeat(samples)},
    )


def make_dense_actor(world: World, lm: Qwen2ForCausalLM, *, share: bool) -> Actor:
    policy = PolicyModel(lm, world, torch.float32, FsdpConfig())
    # All rows of a batch in one micro-batch, so that each prompt is computed once.
    config = ActorConfig(optim=OPTIM, share_prefixes=share, ppo_max_token_len_per_gpu=2**20)
    return Actor(policy, config, total_steps=100, response_budget=MAX_TOKENS)


def time_in_turn(works: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Time each after a first call of each; the fastest counts."""
    best = dict.fromkeys(works, math.inf)
    for repeat in range(repeats + 1):
        for name, work in works.items():
            seconds = seconds_of(work)
            best[name] = min(best[name], seconds) if repeat else math.inf
    return best


def time_groups(world: World, repeats: int) -> None:
    print(f"groups of {GROUP} rows, hidden 256, 2 layers, two groups:")
    for prompt, response in ((128, 128), (512, 128)):
        batch = make_groups(2, prompt, response, samples=GROUP)
        silent = make_groups(2, prompt, response, samples=GROUP, num_silent=1)
        shared = make_dense_actor(world, make_dense_model(256, 2), share=True)
        apart = make_dense_actor(world, make_dense_model(256, 2), share=False)
        first = [one.update_policy(batch, temperature=1.0).metrics for one in (shared, apart)]
        for name in ("actor/pg_loss", "actor/grad_norm"):
            assert math.isclose(first[0][name], first[1][name], rel_tol=1e-4, abs_tol=1e-6), first
        works = {
            "apart": lambda apart=apart, batch=batch: apart.update_policy(batch, temperature=1.0),
            "shared": lambda one=shared, batch=batch: one.update_policy(batch, temperature=1.0),
            "silent": lambda one=shared, batch=silent: one.update_policy(batch, temperature=1.0),
            "scores apart": lambda apart=apart, batch=batch: apart.compute_log_probs(
                batch, temperature=1.0
            ),
            "scores": lambda one=shared, batch=batch: one.compute_log_probs(batch, temperature=1.0),
        }
        best = time_in_turn(works, repeats)
        bound = GROUP * (prompt + response) / (prompt + GROUP * response)
        print(
            f"  prompt {prompt}, response {response}: sharing {best['apart'] / best['shared']:.2f} "
            f"times in the update, {best['scores apart'] / best['scores']:.2f} in "
            f"log-probabilities ({bound:.2f} times fewer tokens); half of the groups silent: "
            f"{best['silent'] / best['shared']:.2f} of the time"
        )


def time_flops(world: World, repeats: int, hidden: int = 1024, layers: int = 8) -> None:
    rows, length = 4, 512
    lm = make_dense_model(hidden, layers)
    actor = make_dense_actor(world, lm, share=True)
    batch = make_groups(rows, length // 2, length // 2, samples=1)
    # The last token of a row is not computed.
    num_tokens = rows * (length - 1)
    weights = sum(weight.numel() for weight in lm.model.layers.parameters())
    flops = 6 * num_tokens * weights + 6 * rows * (length // 2) * 1024 * hidden
    flops += 3 * layers * rows * 4 * hidden * length**2 // 2
    inputs, weight = torch.randn(num_tokens, hidden), torch.randn(3 * hidden, hidden)
    works = {
        "update": lambda: actor.update_policy(batch, temperature=1.0),
        "product": lambda: [torch.nn.functional.linear(inputs, weight) for _ in range(4)],
    }
    best = time_in_turn(works, repeats)
    rate = flops / best["update"]
    plain = 4 * 2 * num_tokens * weight.numel() / best["product"]
    print(
        f"hidden {hidden}, {layers} layers, {num_tokens} tokens: update {rate / 1e9:.0f} GFLOP/s, "
        f"plain product {plain / 1e9:.0f} GFLOP/s, ratio {rate / plain:.2f}"
    )


@dataclass(frozen=True)
class ActorFigures:
    """What the step of the part `actor` takes."""

    seconds: float
    cpu_seconds: float
    over_product: float
    """CPU time over that of a plain product with the step's FLOP."""
    log_prob_cpu_seconds: float
    peak_mib: float


def measure_actor(repeats: int) -> ActorFigures:
    """Take the steps, and the products in turn, in this process."""
    world = start_world("cpu", timeout_s=60)
    length, rows = 512, 32
    lm = make_dense_model(256, 4, vocab_size=5120, mlp_ratio=4, kv_heads=2)
    num_weights = sum(weight.numel() for weight in lm.parameters())
    config = ActorConfig(optim=OPTIM)
    policy = PolicyModel(lm, world, torch.float32, FsdpConfig())
    actor = Actor(policy, config, total_steps=100, response_budget=length)
    batch = make_groups(rows, length, length, samples=1)
    hidden, head = lm.config.hidden_size, lm.lm_head.weight.numel()
    num_tokens = rows * (2 * length - 1)
    flops = 6 * num_tokens * (num_weights - head) + 6 * rows * length * head
    flops += 3 * lm.config.num_hidden_layers * rows * 4 * hidden * (2 * length) ** 2 // 2
    inputs, weight = torch.randn(2048, hidden), torch.randn(hidden, 4 * hidden)
    out = torch.empty(len(inputs), weight.shape[1])
    count = round(flops / (2 * len(inputs) * weight.numel()))
    works = {
        "update": lambda: actor.update_policy(batch, temperature=1.0),
        "log_probs": lambda: actor.compute_log_probs(batch, temperature=1.0),
        "product": lambda: [torch.mm(inputs, weight, out=out) for _ in range(count)],
    }
    wall, cpu = dict.fromkeys(works, math.inf), dict.fromkeys(works, math.inf)
    for repeat in range(repeats + 1):
        for name, work in works.items():
            started, cpu_started = time.perf_counter(), time.process_time()
            work()
            if repeat:  # the first call allocates
                wall[name] = min(wall[name], time.perf_counter() - started)
                cpu[name] = min(cpu[name], time.process_time() - cpu_started)
    stop_world()
    return ActorFigures(
        wall["update"],
        cpu["update"],
        cpu["update"] / cpu["product"],
        cpu["log_probs"],
        _status_bytes("VmHWM") / MIB,
    )


def time_actor(repeats: int) -> None:
    found = _in_own_process(measure_actor, repeats)
    print(
        f"32 rows of 512 + 512 tokens, 5.25 M weights: update {found.seconds:.2f} s, "
        f"{found.cpu_seconds:.2f} s of CPU time, {found.over_product:.2f} times a plain product; "
        f"log-probabilities {found.log_prob_cpu_seconds:.2f} s of CPU time; "
        f"peak memory {found.peak_mib:.0f} MiB"
    )


def time_steps(world: World, repeats: int) -> None:
    for case in CASES:
        rows = make_rows(case)
        num_tokens = sum(len(row.ids) for row in rows)
        fill = num_tokens / len(rows) / max(len(row.ids) for row in rows)
        trained = sum(int(row.mask.sum()) for row in rows)
        print(
            f"{case.vocab_size} words, {len(rows)} rows, {num_tokens} tokens: "
            f"{fill:.0%} of the padded batch, {trained / num_tokens:.0%} of them trained"
        )
        check_same_step(case, rows, world)
        time_case(case, rows, world, repeats)


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    parts = sys.argv[2:] or ["plain", "groups", "flops", "actor", "memory"]
    world = start_world("cpu", timeout_s=60)
    for name, part in (("plain", time_steps), ("groups", time_groups), ("flops", time_flops)):
        if name in parts:
            part(world, repeats)
    stop_world()
    if "actor" in parts:
        time_actor(repeats)
    if "memory" in parts:
        print_memory()
    print(f"load: {os.getloadavg()}, {os.cpu_count()} cores, torch {torch.get_num_threads()}")


if __name__ == "__main__":
    main()
