"""Out-of-memory errors in training, with the computation and the keys that reduce its memory."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agentrl.errors import OutOfMemoryError, is_out_of_memory
from agentrl.workers.packing import PackedBatch

_MAX_REASON_CHARS = 300


@contextmanager
def explain_out_of_memory(doing: str, packed: PackedBatch) -> Iterator[None]:
    """Replace an out-of-memory error of the block by one with the micro-batch and remedies.

    Args:
        doing: Name of the computation, for the message.
        packed: Its micro-batch.

    Raises:
        OutOfMemoryError: instead of the error of torch or Python.
    """
    micro_batch = (
        f"{packed.input_ids.numel()} tokens of {len(packed.row_index)} sequences, "
        f"{len(packed.targets)} of them trained"
    )
    with _replace_error(
        doing,
        micro_batch=micro_batch,
        expected="a smaller actor.ppo_max_token_len_per_gpu (a micro-batch holds at least its "
        "longest sequence), actor.logits_block_bytes or, for the engine's cache, "
        "rollout.engine.transformers.num_pages; model.enable_gradient_checkpointing=true; "
        "more ranks",
    ):
        yield


@contextmanager
def explain_out_of_memory_in_step() -> Iterator[None]:
    """Do the same for the optimizer's step; the first step allocates the moments.

    Raises:
        OutOfMemoryError: instead of the error of torch or Python.
    """
    with _replace_error(
        "the optimizer's step",
        expected="memory for two float32 moments of each weight: more ranks, "
        "actor.fsdp_config.offload_policy=true, or a smaller "
        "rollout.engine.transformers.num_pages",
    ):
        yield


def give_back_cached(device: torch.device) -> None:
    """Return the allocator's cached memory to the device, for other processes."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


@contextmanager
def _replace_error(doing: str, **details: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:_MAX_REASON_CHARS] or type(error).__name__
        raise OutOfMemoryError(f"memory ran out in {doing}: {reason}", **details) from error
