"""Memory of 64 conversations with 8 images of one megapixel each, from the rows to the batch.

Rows with images as PNG are rolled out with the scripted engine and collated, with the processor of
Qwen2-VL (patches of 14 pixels, at most 1,003,520 pixels of an image). The cases, each in a process
of its own: every conversation has images of its own; groups of 8 samples share the images of their
row. Resident memory is read while the requests and the batch are held, less that before the
rollout, with the rows loaded. The allocator first returns what is free; the peak has that too.

Expectation: each image once as decoded (4 bytes a pixel in Pillow), and at most 512 MiB of inputs
of the vision tower (`agentrl.media.processor.MAX_CACHED_INPUT_BYTES`): at most 1.15 times their
sum. The batch adds no pictures.

Run: python -m benchmarks.media_memory
"""

import asyncio
import ctypes
import gc
import multiprocessing
import os
import resource
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from PIL import Image
from transformers import Qwen2VLImageProcessorPil

from agentrl.collate import collate
from agentrl.config import parse_config
from agentrl.config.schema.reward import RewardConfig
from agentrl.data.dataset import load_prompts
from agentrl.data.files import write_parquet
from agentrl.engines import ScriptedEngine
from agentrl.media.processor import MAX_CACHED_INPUT_BYTES
from agentrl.rewards import make_reward_manager
from agentrl.rollout import AsyncRolloutRequest
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.rollout_setup import make_manager, make_rollout_setup, probe_model
from tests.fakes.vision_runs import encode_png, save_vision_model

CONVERSATIONS, IMAGES, SIDE = 64, 8, 1000
MIB = 2**20
BOUND = 1.15


def measure(name: str, group: int) -> None:
    """Roll out and collate one case, and print its memory."""
    with tempfile.TemporaryDirectory() as folder:
        _measure(name, group, Path(folder))


def _measure(name: str, group: int, folder: Path) -> None:
    file = folder / "train.parquet"
    write_parquet(file, [_row(index) for index in range(CONVERSATIONS // group)])
    config = parse_config(
        {
            "data": {
                "train_files": [str(file)],
                "max_prompt_length": 20_000,
                "max_response_length": 64,
            },
            "model": {"path": str(_save_model(folder / "policy"))},
            "rollout": {"n": group, "max_concurrent_requests": CONVERSATIONS},
        }
    )
    plugins = Plugins([], {}, make_reward_manager(RewardConfig()))
    setup = make_rollout_setup(config, plugins, probe_model(config, plugins))
    manager = make_manager(config, setup, ScriptedEngine(["Seen."], tokenizer=setup.tokenizer))
    prompts = load_prompts([file], config.data)
    before = _resident()
    requests = asyncio.run(manager.rollout(manager.make_requests(prompts, manager.train_plan())))
    assert all(len(request.media_spans) == IMAGES for request in requests), requests[0].error
    rolled_out = _resident() - before
    batch = collate(requests, pad_token_id=setup.pad_token_id, processor=setup.processor)
    collated = _resident() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    pictures = sum(picture.width * picture.height * 4 for picture in _distinct(requests))
    expected = pictures + MAX_CACHED_INPUT_BYTES
    print(
        f"{name}: {len(batch)} conversations of {len(requests[0].input_ids)} tokens, "
        f"{pictures / MIB:.0f} MiB of different pictures; after the rollout "
        f"{rolled_out / MIB:.0f} MiB (peak {peak / MIB:.0f}), with the batch "
        f"{collated / MIB:.0f} MiB: "
        f"{collated / expected:.2f} of pictures and cached inputs (at most {BOUND})",
        flush=True,
    )


def _row(index: int) -> dict[str, Any]:
    pictures = [_picture(IMAGES * index + one) for one in range(IMAGES)]
    return {
        "data_source": "pictures",
        "prompt": [{"role": "user", "content": "<image>" * IMAGES + "What is it?"}],
        "images": [{"bytes": encode_png(picture), "path": None} for picture in pictures],
    }


def _picture(seed: int) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((SIDE, SIDE), Image.Resampling.NEAREST)


def _save_model(folder: Path) -> Path:
    save_vision_model("qwen2_vl", folder)
    processor = Qwen2VLImageProcessorPil(min_pixels=56 * 56, max_pixels=28 * 28 * 1280)
    processor.save_pretrained(folder)
    return folder


def _distinct(requests: Iterable[AsyncRolloutRequest]) -> list[Image.Image]:
    spans = (span for request in requests for span in request.media_spans)
    return list({id(span.item.loaded.data): span.item.loaded.data for span in spans}.values())


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


if __name__ == "__main__":
    print(f"load {os.getloadavg()[0]:.1f}")
    context = multiprocessing.get_context("spawn")
    failed = 0
    for case in (("images of each conversation", 1), ("images of each group of 8", 8)):
        process = context.Process(target=measure, args=case)
        process.start()
        process.join()
        failed |= process.exitcode or 0
    sys.exit(failed)
