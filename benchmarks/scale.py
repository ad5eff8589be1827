"""Memory and time of loading, saving and resuming a model that is sharded over ranks.

A Qwen2 with random weights, 1.3 GB in float32, on two gloo ranks with one thread each. Every value
of weights and moments is a function of its tensor and its index in the whole tensor, so that a
resumed rank checks its slices without the whole.

Figures of each rank, the worst one is printed:

- load: growth of the peak resident set (mapped files count) while the policy is loaded. Expected:
  its shard plus at most 15 % of the model.
- save: the same from the start of a save to its end. Expected: one copy of its state (weights and
  two moments) plus at most 15 %.
- stall: seconds for which training waits (`start_save`) over seconds of a plain copy of the state
  (`clone` of each tensor), one after the other, median of three. Expected: 1.0 to 1.2, because a
  save copies the same bytes and exchanges a few objects.
- kill: both ranks are killed (`kill -9`) while they write the next checkpoint in the background.
  Expected: the one before is found and has its values.
- resume: on one rank and on four. Expected: every value equal, peak as for a load (the moments are
  in the shard then).

With the default of 19 layers it needs 12 GB of memory and of disk. Small models have a larger part
of fixed memory.

Run: python benchmarks/scale.py [layers]
"""

import ctypes
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import ActorConfig, FsdpConfig
from agentrl.workers.actor import Actor
from agentrl.workers.checkpoint import RunState
from agentrl.workers.distributed import World, start_world, stop_world
from agentrl.workers.load import load_policy
from agentrl.workers.shards import LocalSlice
from agentrl.workers.snapshot import find_latest, identify, load_run, start_save, weight_slices

LAYERS, REPEATS = 19, 3
GB = 1e9


def make_model(folder: Path, layers: int) -> None:
    """Write a model with random weights, one file for each."""
    config = Qwen2Config(
        vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=1024,
        tie_word_embeddings=True, architectures=["Qwen2ForCausalLM"], dtype="float32",
    )  # fmt: skip
    with torch.device("meta"):
        lm = Qwen2ForCausalLM(config)
    config.save_pretrained(folder)
    names: dict[str, str] = {}
    for name, weight in lm.named_parameters():
        names[name] = f"{name}.safetensors"
        save_file({name: torch.randn(weight.shape) * 0.02}, folder / names[name])
    index = json.dumps({"metadata": {}, "weight_map": names})
    (folder / "model.safetensors.index.json").write_text(index)


def expected_values(name: str, part: LocalSlice) -> Tensor:
    """Values from 0 to 1 that depend on the name and on the index in the whole tensor."""
    total = torch.full(part.local.shape, float(zlib.crc32(name.encode()) % 1009))
    for dim, (start, size) in enumerate(zip(part.offset, part.local.shape, strict=True)):
        shape = [1] * part.local.ndim
        shape[dim] = size
        total += (torch.arange(start, start + size) * (31, 7, 3)[dim] % 1009).reshape(shape)
    return total.remainder_(1009).div_(1009)


def state_slices(actor: Actor) -> dict[str, LocalSlice]:
    """Return a rank's whole state."""
    return weight_slices(actor.policy) | actor.optimizer.state_slices()


def peak_growth(act: Callable[[], Any]) -> int:
    """Return the growth of this process's peak resident set over a call."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    act()
    return status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def seconds_of(act: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    kept = act()
    seconds = time.perf_counter() - begun
    del kept
    return seconds


def load_actor(folder: Path, world: World) -> Actor:
    policy = load_policy(ModelConfig(path=str(folder / "model")), world, FsdpConfig())
    return Actor(policy, ActorConfig(), total_steps=10, response_budget=1)


def fill(actor: Actor) -> None:
    """Give weights and moments their values."""
    names = [name for name, _ in actor.policy.named_weights()]
    moments = [f"{key}/{name}" for name in names for key in ("exp_avg", "exp_avg_sq")]
    actor.optimizer.allocate_state(moments, 1)
    with torch.no_grad():
        for name, part in state_slices(actor).items():
            part.local.copy_(expected_values(name, part))


def largest_error(actor: Actor) -> float:
    errors = [
        (part.local - expected_values(name, part)).abs().max().item()
        for name, part in state_slices(actor).items()
        if part.local.numel()
    ]
    return max(errors)


def save_and_be_killed(folder: Path, world: World) -> None:
    """Measure a load, saves, and their stall; then write until the parent kills."""
    actors: list[Actor] = []
    load_bytes = peak_growth(lambda: actors.append(load_actor(folder, world)))
    actor = actors[0]
    fill(actor)
    parts = state_slices(actor)
    root = folder / "checkpoints"

    def start(step: int) -> Any:
        return start_save(root, actor, RunState(step, identify(actor.policy)), keep=1)

    save_bytes = peak_growth(lambda: start(1).finish())
    stalls, copies = list[float](), list[float]()
    for step in range(2, 2 + REPEATS):
        world.gather(None)
        copies.append(seconds_of(lambda: [part.local.clone() for part in parts.values()]))
        world.gather(None)
        begun = time.perf_counter()
        running = start(step)
        stalls.append(time.perf_counter() - begun)
        running.finish()
    size = {name: part.local.nbytes for name, part in parts.items()}
    report(folder, world, {
        "load": load_bytes, "save": save_bytes, "stall": median(stalls), "copy": median(copies),
        "stalls": stalls, "copies": copies, "state": sum(size.values()),
        "shard": sum(num for name, num in size.items() if name.startswith("weight/")),
    })  # fmt: skip
    start(100).finish()


def resume(folder: Path, world: World) -> None:
    """Measure a resume, and check every value."""
    actor = load_actor(folder, world)

    def restore() -> None:
        checkpoint = find_latest(folder / "checkpoints", world)
        assert checkpoint is not None
        assert checkpoint.state.step == 1 + REPEATS, "the checkpoint before the kill"
        load_run(checkpoint, actor)

    growth = peak_growth(restore)
    state = sum(part.local.nbytes for part in actor.optimizer.state_slices().values())
    result = {"growth": growth, "moments": state, "error": largest_error(actor)}
    report(folder, world, result)


def report(folder: Path, world: World, result: dict[str, Any]) -> None:
    results = world.gather(result)
    if world.is_main:
        draft = folder / "result.draft"
        draft.write_text(json.dumps(results))
        draft.rename(folder / "result.json")


def start_ranks(task: str, folder: Path, size: int) -> list[subprocess.Popen[bytes]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, __file__, task, str(folder)],
            env=os.environ | shared
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]  # fmt: skip


def take_result(folder: Path, ranks: list[subprocess.Popen[bytes]]) -> list[dict[str, Any]]:
    while not (folder / "result.json").exists():
        if any(rank.poll() for rank in ranks):
            raise RuntimeError("a rank failed")
        time.sleep(0.01)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").unlink()
    return result


def kill_while_writing(folder: Path, ranks: list[subprocess.Popen[bytes]], num_bytes: int) -> None:
    """Kill the ranks when a third of the next checkpoint is written."""
    draft = folder / "checkpoints/.writing-global_step_100"
    written = 0
    while written < num_bytes / 3:
        with suppress(FileNotFoundError):
            written = sum(file.stat().st_size for file in draft.glob("rank_*.safetensors"))
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()
    assert draft.is_dir(), "killed too late"
    print(f"killed with {written / GB:.2f} of {num_bytes / GB:.2f} GB written")


def measure(folder: Path, layers: int) -> None:
    """Run all parts; print a line for each."""
    (folder / "model").mkdir()
    make_model(folder / "model", layers)
    ranks = start_ranks("save", folder, 2)
    try:
        results = take_result(folder, ranks)
        kill_while_writing(folder, ranks, sum(one["state"] for one in results))
        model = sum(one["shard"] for one in results)
        print(f"model {model / GB:.2f} GB; state of a rank {results[0]['state'] / GB:.2f} GB")
        over = max(one["load"] - one["shard"] for one in results) / model
        print(f"load: the shard plus {over:.1%} of the model (at most 15 %)")
        over = max(one["save"] / one["state"] - 1 for one in results)
        print(f"save: the state plus {over:.1%} (at most 15 %)")
        for one in results:
            pairs = " ".join(
                f"{s:.2f}/{c:.2f}" for s, c in zip(one["stalls"], one["copies"], strict=True)
            )
            print(f"stall {one['stall'] / one['copy']:.2f} of a copy (at most 1.5); s: {pairs}")
        for size in (1, 4):
            ranks = start_ranks("resume", folder, size)
            results = take_result(folder, ranks)
            over = max(one["growth"] - one["moments"] for one in results) / model
            error = max(one["error"] for one in results)
            print(
                f"resume on {size}: largest error {error:g} (at most 1e-5); peak: the moments ",
                end="",
            )
            print(f"plus {over:.1%} of the model (at most 15 %)")
            for rank in ranks:
                rank.wait()
    finally:
        for rank in ranks:
            rank.kill()


def main() -> None:
    """Measure, or be a rank."""
    task, *rest = sys.argv[1:] or [""]
    if task in ("save", "resume"):
        torch.set_num_threads(1)
        world = start_world("cpu", timeout_s=300)
        (save_and_be_killed if task == "save" else resume)(Path(rest[0]), world)
        stop_world()
    else:
        print(f"load of the machine: {os.getloadavg()[0]:.1f}")
        folder = Path(tempfile.mkdtemp())
        try:
            measure(folder, int(task or LAYERS))
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
