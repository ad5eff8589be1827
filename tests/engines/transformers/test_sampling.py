"""Sampling: rows independent of each other, exact truncation, log-probabilities over everything."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engines.protocol import SamplingParams
from agentrl.engines.transformers.sampling import Draw, SamplingRows, sample_tokens

CPU = torch.device("cpu")
VOCAB = 30

params = st.builds(
    SamplingParams,
    max_new_tokens=st.just(1),
    temperature=st.sampled_from([0, 0.1, 0.7, 1.0, 3.0]),
    top_p=st.sampled_from([0.0, 0.01, 0.3, 0.9, 1.0]),
    top_k=st.sampled_from([-1, 1, 2, 10, VOCAB, VOCAB + 5]),
)
draws = st.builds(Draw, params, st.floats(0, 1, exclude_max=True))


def rows_of(*rows: Draw) -> SamplingRows:
    return SamplingRows.of(rows, vocab_size=VOCAB, device=CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_never_samples_a_token_without_probability(dtype: torch.dtype):
    rows = rows_of(Draw(SamplingParams(max_new_tokens=1), 0.0))
    rows = replace(rows, uniforms=torch.ones(1, 1, dtype=dtype))
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert sample_tokens(logits, rows).token_ids.tolist() == [1]


def allowed(logits: torch.Tensor, sampling: SamplingParams) -> set[int]:
    """Which tokens top-k, then top-p, leave; by the definition, one row at a time."""
    if sampling.temperature == 0:
        return {int(logits.argmax())}
    probs = (logits / sampling.temperature).softmax(-1)
    order = probs.argsort(descending=True).tolist()
    order = order[: sampling.top_k] if sampling.top_k > 0 else order
    total = float(probs[order].sum())
    kept, mass = set(), 0.0
    for token in order:
        kept.add(token)
        mass += float(probs[token]) / total
        # One token more is allowed where rounding decides.
        if mass >= sampling.top_p + 1e-5:
            break
    return kept


@settings(max_examples=60, deadline=None)
@given(st.lists(draws, min_size=1, max_size=6), st.integers(0, 1000))
def test_every_row_is_sampled_and_scored_as_if_it_were_alone(rows: list[Draw], seed: int):
    logits = 3 * torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed))
    together = sample_tokens(logits, rows_of(*rows))
    for i, row in enumerate(rows):
        alone = sample_tokens(logits[i : i + 1], rows_of(row))
        assert together.token_ids[i] == alone.token_ids[0]
        assert int(alone.token_ids[0]) in allowed(logits[i], row.sampling)
        scores = torch.log_softmax(logits[i] / (row.sampling.temperature or 1.0), dim=-1)
        torch.testing.assert_close(together.log_probs[i], scores[together.token_ids[i]])


def test_frequencies_are_the_probabilities():
    logits = torch.tensor([2.0, 0.0, 1.0, -3.0])
    count = 20_000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    sampling = SamplingParams(max_new_tokens=1, temperature=0.8)
    rows = SamplingRows.of([Draw(sampling, u) for u in uniforms.tolist()], vocab_size=4, device=CPU)
    sampled = sample_tokens(logits.expand(count, 4), rows).token_ids
    expected = (logits / 0.8).softmax(-1)
    actual = sampled.bincount(minlength=4) / count
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
def test_a_token_without_mass_is_never_taken(uniform: float):
    logits = torch.full((1, VOCAB), -torch.inf)
    logits[0, [3, 17]] = torch.tensor([1.0, 1.0])
    row = rows_of(Draw(SamplingParams(max_new_tokens=1), uniform))
    assert int(sample_tokens(logits, row).token_ids) in {3, 17}


def test_what_no_row_asks_for_is_not_computed():
    rows = rows_of(Draw(SamplingParams(max_new_tokens=1), 0.5))
    assert rows.greedy is rows.top_k is rows.top_p is None


def test_half_precision_is_scored_in_float32():
    logits = torch.randn(3, VOCAB).to(torch.bfloat16)
    row = Draw(SamplingParams(max_new_tokens=1, temperature=0), 0.0)
    sampled = sample_tokens(logits, rows_of(row, row, row))
    expected = torch.log_softmax(logits.float(), dim=-1).max(-1).values
    assert sampled.log_probs.dtype == torch.float32
    torch.testing.assert_close(sampled.log_probs, expected)
