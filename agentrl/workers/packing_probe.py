"""Whether a model keeps packed sequences apart, found by scoring some of them together and alone.

Not every model of transformers computes its attention by the interface that gets the plan: some
would attend to the other sequences of a micro-batch, or ignore where a sequence begins, without an
error.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from agentrl.workers.packing import PackedBatch, PaddedRows, pack_rows

_PREFIX, _LENGTHS = 12, (15, 18, 5)
"""The first two rows have a common prefix."""


@torch.no_grad()
def measure_crossing(
    score: Callable[[PackedBatch], Tensor],
    *,
    vocab_size: int,
    device: torch.device,
    max_sharing_length: int,
) -> tuple[float, float]:
    """Compare the log-probabilities of random rows in one micro-batch with those of each alone.

    Args:
        score: Computes the log-probabilities of a micro-batch's targets. It is called with equal
            micro-batches on every rank.
        vocab_size: Tokens are drawn below it.
        device: Of the micro-batches.
        max_sharing_length: As of `pack_rows`.

    Returns:
        Mean differences in nats, of a row: packed with others, and with a shared prefix too.
    """
    rows = _draw_rows(vocab_size)
    index = range(len(_LENGTHS))

    def scores(of: list[int], sharing: int) -> Tensor:
        packed = pack_rows(rows, of, device, max_sharing_length=sharing)
        found = torch.zeros(rows.response_mask.shape)
        found[list(packed.row_index)] = packed.unpack(score(packed).float()).cpu()
        return found

    alone = torch.stack([scores([row], 0)[row] for row in index])

    def distance(sharing: int) -> float:
        apart = (scores(list(index), sharing) - alone).abs().sum(1)
        return float((apart / rows.response_mask.sum(1)).max())

    return distance(0), distance(max_sharing_length) if max_sharing_length else 0.0


def _draw_rows(vocab_size: int) -> PaddedRows:
    longest = max(_LENGTHS)
    ids = torch.randint(
        0, vocab_size, (len(_LENGTHS), longest), generator=torch.Generator().manual_seed(0)
    )
    ids[1, :_PREFIX] = ids[0, :_PREFIX]
    real = (torch.arange(longest) < torch.tensor(_LENGTHS)[:, None]).long()
    return PaddedRows(input_ids=ids, attention_mask=real, response_mask=real[:, 1:])
