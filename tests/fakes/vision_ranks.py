"""One of several ranks of `tests/workers/test_vision.py`: the update of rows with pictures."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from agentrl.cli import leave_rank
from agentrl.config.schema.training import FsdpConfig
from agentrl.protocol import DataProto
from agentrl.workers import row_exchange
from agentrl.workers.distributed import World, start_world, stop_world
from tests.fakes.vision_models import make_vision_model
from tests.fakes.vision_rows import (
    TEMPERATURE,
    build,
    expected_log_probs,
    make_rows,
    packed_update,
    picture_batch,
)

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
CASES: dict[str, Any] = {
    "sharded": build,
    "many_micro_batches": partial(build, budget=60),
    "copies_that_are_not_sharded": partial(build, fsdp=FsdpConfig(fsdp_size=1)),
    "offloaded": partial(build, fsdp=FsdpConfig(offload_policy=True)),
    "checkpointed": partial(build, checkpointing=True),
    "frozen": partial(build, is_frozen=True),
    "frozen_in_many_micro_batches": partial(build, is_frozen=True, budget=60),
}


def share_of(world: World, family: str) -> DataProto:
    """This rank's rows: the last rank has those without pictures."""
    rows = make_rows(family)
    batch = picture_batch(rows)
    numbers = {uid: number for number, uid in enumerate(dict.fromkeys(row.uid for row in rows))}
    assert batch.batch is not None
    batch.batch["batch_data_id"] = torch.tensor([numbers[row.uid] for row in rows])
    texts = [index for index, row in enumerate(rows) if not row.spans]
    if world.rank == world.size - 1:
        return batch.select_idxs(texts)
    pictures = [index for index in range(len(rows)) if index not in texts]
    return batch.select_idxs(pictures[world.rank :: world.size - 1])


def largest_distance(world: World, family: str, **settings: Any) -> float:
    """How far the log-probabilities of this rank's rows are from the plain ones."""
    batch, rows = share_of(world, family), make_rows(family)
    own = [rows[int(name[1:])] for name in batch.non_tensor_batch["request_id"]]
    expected = expected_log_probs(make_vision_model(family), own)
    found = build(world, family, **settings).compute_log_probs(batch, temperature=TEMPERATURE)
    pairs = zip(found.log_probs, expected, strict=True)
    return max(float((row[: len(one)] - one).abs().max()) for row, one in pairs)


def run(folder: Path) -> None:
    """Write this rank's results of every case, with rows that move and with rows that stay."""
    world, found = start_world("cpu", timeout_s=60), dict[tuple[str, str], Any]()
    groups = world.with_sequence_groups(2)
    for family in FAMILIES:
        for name, case in CASES.items():
            found[family, name] = update(world, family, case)
        for name in ("frozen", "sharded"):
            found[family, f"ulysses_{name}"] = update(groups, family, CASES[name])
        found[family, "log_probs"] = largest_distance(world, family)
    row_exchange._MIN_GAIN = 2.0  # so rows stay where they are
    for family in FAMILIES:
        for name, case in CASES.items():
            found[family, f"{name}_without_exchange"] = update(world, family, case)
        found[family, "log_probs_without_exchange"] = largest_distance(world, family)
    torch.save(found, folder / f"rank_{world.rank}.pt")
    stop_world()


def update(world: World, family: str, case: Any) -> dict[str, Any]:
    return packed_update(case(world, family), share_of(world, family))._asdict()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]))
    leave_rank(SystemExit(0))
