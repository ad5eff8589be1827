"""The stages of `benchmarks.gpu`: each checks something, and returns figures.

Weights are random, so that nothing is downloaded. A check that fails raises.
"""

import asyncio
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.config.schema.training import ActorConfig, FsdpConfig
from agentrl.engines import SamplingParams
from agentrl.engines.transformers.engine import TransformersEngine, TransformersEngineSettings
from agentrl.protocol import DataProto
from agentrl.workers.actor import Actor
from agentrl.workers.batches import read_padded_rows
from agentrl.workers.checkpoint import RunState, open_checkpoint
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.load import enable_checkpointing
from agentrl.workers.log_probs import HeadTransform, score_tokens
from agentrl.workers.model import PolicyModel, ScoringParams
from agentrl.workers.packing import pack_rows
from agentrl.workers.rng import choose_exact_kernels
from agentrl.workers.snapshot import identify, load_run, save_run
from agentrl.workers.weight_sync import sync_weights

Figures = dict[str, Any]
MIB = 2**20
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the work: Qwen2.5's architecture of 0.5 billion weights."""

    model: dict[str, Any] = field(
        default_factory=lambda: {
            "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
            "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        }
    )  # fmt: skip
    lengths: tuple[int, ...] = (4096, 32768)
    """Tokens of one update."""
    num_requests: int = 64
    new_tokens: int = 256
    num_repeats: int = 5
    quick_start: tuple[str, ...] = ()
    """More arguments of the quick start."""

    @classmethod
    def small(cls) -> "Sizes":
        """Return sizes that a CPU computes in seconds."""
        model = {
            "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        }  # fmt: skip
        quick = (
            "prepare.arithmetic.num_train=24", "prepare.arithmetic.num_val=6",
            "prepare.arithmetic.num_demos=120", "prepare.sft.steps=2",
            "prepare.tiny_policy.vocab_size=400", "prepare.tiny_policy.hidden_size=32",
            "data.train_batch_size=4", "actor.ppo_mini_batch_size=4", "rollout.n=2",
            "rollout.multi_turn.max_assistant_turns=2", "rollout.multi_turn.max_tokens_per_turn=8",
            "trainer.total_training_steps=1", "trainer.test_freq=-1", "trainer.plot=false",
        )  # fmt: skip
        return cls(model, (128, 512), 4, 16, 2, quick)

    def make_model(self) -> Qwen2ForCausalLM:
        """Make the model with random weights, in float32."""
        torch.manual_seed(0)
        config = Qwen2Config(
            **self.model, max_position_embeddings=32768, tie_word_embeddings=True,
            initializer_range=0.05,
        )  # fmt: skip
        return Qwen2ForCausalLM(config)


@contextmanager
def joined(device: str) -> Iterator[World]:
    """Start a world of one rank."""
    try:
        yield start_world(device, timeout_s=120)
    finally:
        stop_world()


def make_actor(
    sizes: Sizes, world: World, dtype: torch.dtype, *, checkpointing: bool = False,
    offload: bool = False, budget: int | None = None,
) -> Actor:  # fmt: skip
    lm = sizes.make_model()
    if checkpointing:
        enable_checkpointing(lm)
    policy = PolicyModel(lm, world, dtype, FsdpConfig(offload_policy=offload))
    config = ActorConfig(ppo_max_token_len_per_gpu=budget or max(sizes.lengths))
    return Actor(policy, config, total_steps=100, response_budget=max(sizes.lengths))


def make_batch(sizes: Sizes, num_tokens: int, *, num_rows: int = 8, ragged: bool = False) -> Any:
    """Make rows of half prompt, half response, with `num_tokens` tokens if they are not ragged."""
    vocab_size = sizes.model["vocab_size"]
    draw = torch.Generator().manual_seed(num_tokens)
    each = max(8, num_tokens // num_rows)
    length, prompt = each, each // 2
    ids = torch.randint(0, vocab_size, (num_rows, length), generator=draw)
    attention, mask = torch.ones_like(ids), torch.ones(num_rows, length - prompt, dtype=torch.int64)
    if ragged:
        for row in range(num_rows):
            cut = length - (length - prompt) * row // num_rows
            attention[row, cut:], mask[row, max(cut - prompt, 1) :] = 0, 0
    noise = torch.randn(num_rows, 1, generator=draw)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": attention,
            "response_mask": mask,
            "advantages": noise.expand(mask.shape).clone(),
            "old_log_probs": torch.full(mask.shape, -math.log(vocab_size)),
        }
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(device: torch.device, repeats: int, act: Callable[[], object]) -> float:
    """Return the median seconds of one call, after one that is not counted."""
    act()
    times: list[float] = []
    for _ in range(repeats):
        synchronize(device)
        begun = time.perf_counter()
        act()
        synchronize(device)
        times.append(time.perf_counter() - begun)
    return sorted(times)[len(times) // 2]


@contextmanager
def peak_memory(device: torch.device, figures: Figures, name: str) -> Iterator[None]:
    """Record the most memory that torch had allocated in the block, in MiB."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    yield
    if device.type == "cuda":
        figures[name] = torch.cuda.max_memory_allocated(device) / MIB


def check(condition: bool, what: str) -> None:
    if not condition:
        raise AssertionError(what)


def run_quick_start(device: str, sizes: Sizes, out: Path, *more: str) -> Figures:
    """Run the quick start as a user does."""
    shutil.rmtree(out, ignore_errors=True)
    begun = time.monotonic()
    arguments = [f"trainer.device={device}", f"trainer.default_local_dir={out}"]
    done = subprocess.run(
        [sys.executable, "-m", "agentrl", "train", "examples/gsm8k_multiturn/quickstart.yaml",
         *arguments, *sizes.quick_start, *more],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    print(done.stdout, done.stderr, sep="\n")
    check(done.returncode == 0, " ".join((done.stderr or done.stdout).split()[-60:]))
    return {"seconds": time.monotonic() - begun}


def run_quick_start_sglang(device: str, sizes: Sizes, out: Path) -> Figures:
    """Run the quick start with SGLang in its own processes."""
    import sglang  # noqa: F401  # pyright: ignore[reportMissingImports]

    return run_quick_start(device, sizes, out, "rollout.engine.name=sglang")


def run_engine(device: str, sizes: Sizes, _out: Path) -> Figures:
    """Generate, and compare with a plain forward pass of the same weights."""
    figures: Figures = {}
    with joined(device) as world:
        for dtype, tolerance in ((torch.float32, 1e-3), (torch.bfloat16, 0.25)):
            lm = sizes.make_model().eval().to(world.device, dtype)  # pyright: ignore
            found = asyncio.run(_generate(lm, world, sizes))
            figures |= {f"{name}, {dtype}": value for name, value in found.items()}
            apart = found["largest difference of log-probabilities"]
            check(apart < tolerance, f"log-probabilities differ by {apart:.3g} in {dtype}")
    return figures


async def _generate(lm: Qwen2ForCausalLM, world: World, sizes: Sizes) -> Figures:
    settings = TransformersEngineSettings(
        max_model_len=64 + sizes.new_tokens, max_batch_size=sizes.num_requests, seed=0
    )
    engine = TransformersEngine.from_model(lm, device=world.device, settings=settings)
    sampling = SamplingParams(max_new_tokens=sizes.new_tokens)
    prompts = [[(7 * row + at) % 500 for at in range(32)] for row in range(sizes.num_requests)]
    try:
        calls = [engine.generate(ids, sampling, request_id=f"{n}") for n, ids in enumerate(prompts)]
        begun = time.perf_counter()
        completions = await asyncio.gather(*calls)
        seconds = time.perf_counter() - begun
        tokens = sum(len(one.token_ids) for one in completions)
        check(tokens == sizes.num_requests * sizes.new_tokens, f"{tokens} tokens were sampled")
        apart = 0.0
        for prompt, one in list(zip(prompts, completions, strict=True))[:4]:
            ids = torch.tensor([[*prompt, *one.token_ids]], device=world.device)
            with torch.no_grad():
                logits = lm(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            expected = logits.float().log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
            found = torch.tensor(one.log_probs, device=world.device)
            apart = max(apart, float((found - expected[:, 0]).abs().max()))
        await engine.sleep()
        await engine.wake()
        again = await engine.generate(prompts[0], replace(sampling, temperature=0), request_id="x")
        check(len(again.token_ids) == sizes.new_tokens, "no tokens after sleep")
    finally:
        await engine.close()
    return {
        "tokens per second": tokens / seconds,
        "largest difference of log-probabilities": apart,
    }


def run_resume(device: str, sizes: Sizes, out: Path) -> Figures:
    """Continue from a checkpoint, and compare with the run that was not stopped."""
    figures: Figures = {}
    with joined(device) as world:
        batch = make_batch(sizes, sizes.lengths[0])
        first, second = (make_actor(sizes, world, torch.bfloat16) for _ in "ab")
        first.update_policy(batch, temperature=1.0)
        begun = time.perf_counter()
        path = save_run(out, first, RunState(step=1, identity=identify(first.policy)))
        figures["save seconds"] = time.perf_counter() - begun
        begun = time.perf_counter()
        load_run(open_checkpoint(path), second)
        figures["load seconds"] = time.perf_counter() - begun
        apart = _distance(first.policy, second.policy)
        check(apart == 0.0, f"weights differ by {apart:.3g} after loading")
        for actor in (first, second):
            actor.update_policy(batch, temperature=1.0)
        figures["difference after one more step"] = _distance(first.policy, second.policy)
        check(figures["difference after one more step"] < 1e-3, "the resumed run differs")
    shutil.rmtree(out, ignore_errors=True)
    return figures


def _whole(tensor: Tensor) -> Tensor:
    whole = getattr(tensor, "full_tensor", None)
    return (whole() if whole else tensor).detach().float()


def _distance(one: PolicyModel, other: PolicyModel) -> float:
    pairs = zip(one.named_weights(), other.named_weights(), strict=True)
    return max(float((_whole(a) - _whole(b)).abs().max()) for (_, a), (_, b) in pairs)


def run_deterministic(device: str, sizes: Sizes, _out: Path) -> Figures:
    """Take the same step twice with deterministic kernels."""
    with joined(device) as world:
        choose_exact_kernels(world.device)
        actors = [make_actor(sizes, world, torch.bfloat16) for _ in "ab"]
        for actor in actors:
            actor.update_policy(make_batch(sizes, sizes.lengths[0]), temperature=1.0)
        apart = _distance(actors[0].policy, actors[1].policy)
    check(device != "cpu" or apart == 0.0, f"weights differ by {apart:.3g}")
    return {"largest difference of weights": apart, "bit-identical": apart == 0.0}


def run_bf16(device: str, sizes: Sizes, _out: Path) -> Figures:
    """Compare gradients and log-probabilities in bfloat16 with float32."""
    batch = make_batch(sizes, sizes.lengths[0])
    rows, found = read_padded_rows(batch), []
    with joined(device) as world:
        for dtype in (torch.float32, torch.bfloat16):
            policy = make_actor(sizes, world, dtype).policy
            packed = pack_rows(rows, range(len(rows.input_ids)), world.device)
            scores = policy(packed, ScoringParams(temperature=1.0)).log_probs
            (-scores.mean()).backward()
            policy.release_gathered()
            grads = [_whole(w.grad).flatten() for _, w in policy.named_weights()]  # pyright: ignore
            found.append((scores.detach(), torch.cat(grads)))
            kernel = policy.kernel.name
    (scores, grad), (scores16, grad16) = found
    cosine = float(torch.nn.functional.cosine_similarity(grad, grad16, dim=0))
    check(cosine > 0.98, f"cosine of the gradients is {cosine:.4f}")
    return {
        "attention": kernel,
        "cosine of the gradients": cosine,
        "mean difference of log-probabilities": float((scores - scores16).abs().mean()),
    }


def run_packed(device: str, sizes: Sizes, _out: Path) -> Figures:
    """Compare packed rows with padded ones: values and time, forward and backward."""
    figures: Figures = {}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with joined(device) as world:
        plain = sizes.make_model().to(world.device, dtype)  # pyright: ignore
        policy = make_actor(sizes, world, dtype).policy
        figures["attention"] = policy.kernel.name
        for length in sizes.lengths:
            batch = make_batch(sizes, length, num_rows=16, ragged=True)
            rows = read_padded_rows(batch)
            packed = pack_rows(rows, range(len(rows.input_ids)), world.device)
            ids, mask = rows.input_ids.to(world.device), rows.attention_mask.to(world.device)
            trained = rows.response_mask.bool().to(world.device)

            def ours(packed: Any = packed) -> Tensor:
                scores = policy(packed, ScoringParams(temperature=1.0)).log_probs
                scores.sum().backward()
                return packed.unpack(scores.detach())

            def padded(ids: Tensor = ids, mask: Tensor = mask, on: Tensor = trained) -> Tensor:
                logits = plain(input_ids=ids, attention_mask=mask, use_cache=False).logits
                logits = logits[:, -on.shape[1] - 1 : -1].float()
                target = ids[:, -on.shape[1] :, None]
                scores = (logits.gather(2, target)[..., 0] - logits.logsumexp(-1)) * on
                scores.sum().backward()
                return scores.detach()

            expected = padded()[list(packed.row_index)]
            apart = float((ours() - expected).abs().max())
            figures[f"{length} tokens: largest difference"] = apart
            check(apart < (0.5 if dtype == torch.bfloat16 else 1e-3), f"differ by {apart:.3g}")
            times = [measure(world.device, sizes.num_repeats, act) for act in (ours, padded)]
            figures[f"{length} tokens: padded / packed seconds"] = times[1] / times[0]
    return figures


def run_update(device: str, sizes: Sizes, _out: Path) -> Figures:
    """Measure an update: tokens per second, and share of the matrix products' own speed."""
    figures: Figures = {}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with joined(device) as world:
        peak = _matrix_rate(world.device, dtype)
        figures["matrix product, TFLOP/s"] = peak / 1e12
        for length in sizes.lengths:
            actor = make_actor(sizes, world, dtype, checkpointing=length > 8192, budget=length)
            batch = make_batch(sizes, length, num_rows=8)
            with peak_memory(world.device, figures, f"{length} tokens: peak MiB"):
                seconds = measure(
                    world.device,
                    sizes.num_repeats,
                    lambda actor=actor, batch=batch: actor.update_policy(batch, temperature=1.0),
                )
            figures[f"{length} tokens: tokens per second"] = length / seconds
            flop = _update_flop(actor.policy, length, length // 8)
            figures[f"{length} tokens: model FLOP utilization"] = flop / seconds / peak
            del actor
    return figures


def _update_flop(policy: PolicyModel, num_tokens: int, length: int) -> float:
    """Count 6 per weight and token, and 6 per head size and pair of tokens in causal attention."""
    config: Any = policy.config
    body = sum(w.numel() for n, w in policy.named_weights() if "embed" not in n and "head" not in n)
    head = config.vocab_size * config.hidden_size / 2  # half of the tokens are trained
    attention = config.num_hidden_layers * config.hidden_size * length
    return 6.0 * num_tokens * (body + head + attention)


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in "ab")
    return 2 * size**3 / measure(device, 10, lambda: left @ right)


def run_head(device: str, sizes: Sizes, _out: Path) -> Figures:
    """Measure log-probabilities of a vocabulary, in blocks and with full logits."""
    figures: Figures = {}
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    with joined(device) as world:
        head = sizes.make_model().lm_head.weight.detach().to(world.device, dtype).requires_grad_()
        count = sizes.lengths[0]
        hidden = torch.randn(count, head.shape[1], device=world.device, dtype=dtype)
        hidden.requires_grad_()
        targets = torch.randint(0, len(head), (count,), device=world.device)

        def blocks() -> Tensor:
            scores = score_tokens(
                hidden, head, None, targets, temperature=1.0, transform=HeadTransform()
            )
            scores.log_probs.sum().backward()
            return scores.log_probs.detach()

        def full() -> Tensor:
            logits = (hidden @ head.T).float()
            found = logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)
            found.sum().backward()
            return found.detach()

        apart = float((blocks() - full()).abs().max())
        check(apart < (0.1 if dtype == torch.bfloat16 else 1e-3), f"differ by {apart:.3g}")
        times: list[float] = []
        for name, act in (("blocks", blocks), ("full logits", full)):
            with peak_memory(world.device, figures, f"{name}: peak MiB"):
                times.append(measure(world.device, sizes.num_repeats, act))
            figures[f"{name}: tokens per second"] = count / times[-1]
        figures["full logits / blocks seconds"] = times[1] / times[0]
    return figures


def run_sync(device: str, sizes: Sizes, _out: Path) -> Figures:
    """Measure a weight sync to the embedded engine over a plain copy of the same bytes."""
    with joined(device) as world:
        policy = make_actor(sizes, world, torch.bfloat16).policy

        async def sync() -> tuple[float, int]:
            settings = TransformersEngineSettings(max_model_len=256, max_batch_size=4)
            engine = TransformersEngine.from_model(
                policy.lm, dtype=torch.bfloat16, device=world.device, settings=settings
            )
            try:
                await sync_weights(policy, engine, version=1)
                synchronize(world.device)
                begun = time.perf_counter()
                done = await sync_weights(policy, engine, version=2)
                synchronize(world.device)
                return time.perf_counter() - begun, done.num_bytes
            finally:
                await engine.close()

        seconds, num_bytes = asyncio.run(sync())
        source = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=world.device)
        target = torch.empty_like(source)
        copy = measure(world.device, sizes.num_repeats, lambda: target.copy_(source))
    return {"seconds": seconds, "MiB": num_bytes / MIB, "over a plain copy": seconds / copy}


def run_memory(device: str, sizes: Sizes, _out: Path) -> Figures:
    """Measure the peak memory of an update with each way to save memory."""
    figures: Figures = {}
    cases = {
        "plain": {},
        "activation checkpointing": {"checkpointing": True},
        "offloaded shards": {"offload": True},
    }
    for name, settings in cases.items():
        with joined(device) as world:
            batch = make_batch(sizes, sizes.lengths[0])
            with peak_memory(world.device, figures, f"{name}: peak MiB"):
                actor = make_actor(sizes, world, torch.bfloat16, **settings)
                begun = time.perf_counter()
                actor.update_policy(batch, temperature=1.0)
                synchronize(world.device)
                figures[f"{name}: seconds of the first update"] = time.perf_counter() - begun
            del actor
    return figures


class Stage(NamedTuple):
    """A check or measurement."""

    about: str
    run: Callable[[str, Sizes, Path], Figures]


STAGES = {
    "quick_start": Stage("The quick start, as a user runs it.", run_quick_start),
    "engine": Stage("The embedded engine against a plain forward pass.", run_engine),
    "resume": Stage("A checkpoint, and the step after it.", run_resume),
    "deterministic": Stage("Two equal steps in deterministic mode.", run_deterministic),
    "bf16": Stage("bfloat16 against float32.", run_bf16),
    "packed": Stage("Packed attention against padded rows.", run_packed),
    "update": Stage("Throughput of an update.", run_update),
    "head": Stage("The log-probability head against full logits.", run_head),
    "sync": Stage("A weight sync to the embedded engine.", run_sync),
    "memory": Stage("Peak memory of an update.", run_memory),
    "quick_start_sglang": Stage("The quick start with SGLang.", run_quick_start_sglang),
}
