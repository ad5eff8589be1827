"""Memory that runs out in training: what was computed, and which keys make it need less."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agentrl.errors import OutOfMemoryError, is_out_of_memory
from agentrl.workers.packing import PackedBatch

_LONGEST_REASON = 300


@contextmanager
def explain_out_of_memory(doing: str, packed: PackedBatch) -> Iterator[None]:
    """Let memory that runs out in the block say in which micro-batch, and what may be done.

    Args:
        doing: What is computed, in words.
        packed: Of what.

    Raises:
        OutOfMemoryError: instead of what torch or Python raise then.
    """
    micro_batch = (
        f"{packed.input_ids.numel()} tokens of {len(packed.row_index)} sequences, "
        f"{len(packed.targets)} of them trained"
    )
    with _telling(
        doing,
        micro_batch=micro_batch,
        expected="a smaller actor.ppo_max_token_len_per_gpu (no micro-batch is smaller than "
        "its longest sequence), actor.logits_block_bytes or, for what the engine keeps, "
        "rollout.engine.transformers.num_pages; model.enable_gradient_checkpointing=true; "
        "more ranks",
    ):
        yield


@contextmanager
def explain_out_of_memory_in_step() -> Iterator[None]:
    """The same for the optimizer's step, whose moments are made by the first one.

    Raises:
        OutOfMemoryError: instead of what torch or Python raise then.
    """
    with _telling(
        "the optimizer's step",
        expected="room for two moments of each weight, in float32: more ranks, "
        "actor.fsdp_config.offload_policy=true, or a smaller "
        "rollout.engine.transformers.num_pages",
    ):
        yield


def give_back_cached(device: torch.device) -> None:
    """Give what the allocator keeps for later back to the device, for another process to take."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


@contextmanager
def _telling(doing: str, **details: str) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"memory ran out in {doing}: {_reason(error)}", **details) from error


def _reason(error: BaseException) -> str:
    return " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
