"""Whether a model keeps packed sequences apart, found by scoring some of them together and alone.

Not every model of transformers computes its attention by the interface that gets the plan: some
would attend to the other sequences of a micro-batch, or ignore where a sequence begins, without an
error.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.engines.model_config import find_length_border, read_attribute
from agentrl.workers.packing import PackedBatch, PaddedRows, pack_rows

_PREFIX, _LENGTHS = 12, (15, 18, 5)
"""The first two rows have a common prefix."""
_RULE = re.compile("window(?!_layers)|chunk|original_max")
_LONGEST = 4096
"""Largest length of a rule that is probed."""


def find_probe_length(config: Any) -> int:
    """Return the length of a row that is longer than what the layers of a model distinguish.

    The other rows are shorter, so the probe has rows on both sides of a window, a chunk or a length
    of the pretraining. A row never has more tokens than a run may have (`find_length_border`).
    """
    text = config.get_text_config().to_dict()
    parts = [text, *(part for part in text.values() if isinstance(part, dict))]
    found = [
        value
        for part in parts
        for key, value in part.items()
        if type(value) is int and value <= _LONGEST and _RULE.search(str(key))
    ]
    longest = read_attribute(config, "max_position_embeddings", _LONGEST)
    return min(2 + max(found, default=0), find_length_border(config) or longest, longest)


@torch.no_grad()
def measure_crossing(
    score: Callable[[PackedBatch], Tensor],
    *,
    vocab_size: int,
    device: torch.device,
    max_sharing_length: int,
    longest: int = 0,
) -> tuple[float, float]:
    """Compare the log-probabilities of random rows in one micro-batch with those of each alone.

    Args:
        score: Computes the log-probabilities of a micro-batch's targets. It is called with equal
            micro-batches on every rank.
        vocab_size: Tokens are drawn below it.
        device: Of the micro-batches.
        max_sharing_length: As of `pack_rows`.
        longest: Tokens of one more row, if the others are shorter (`find_probe_length`).

    Returns:
        Mean differences in nats, of a row: packed with others, and with a shared prefix too.
    """
    lengths = (*_LENGTHS, longest) if longest > max(_LENGTHS) else _LENGTHS
    rows = _draw_rows(vocab_size, lengths)
    index = range(len(lengths))

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


def _draw_rows(vocab_size: int, lengths: Sequence[int]) -> PaddedRows:
    longest = max(lengths)
    ids = torch.randint(
        0, vocab_size, (len(lengths), longest), generator=torch.Generator().manual_seed(0)
    )
    ids[1, :_PREFIX] = ids[0, :_PREFIX]
    real = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    return PaddedRows(input_ids=ids, attention_mask=real, response_mask=real[:, 1:])
