"""Every kernel of packed attention gives the results and gradients of plain attention."""

import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen2Config

from agentrl.workers.attention_flash import CpuFlash, VarlenFlash
from agentrl.workers.attention_kernels import (
    FlashKernel,
    FlexKernel,
    PackedKernel,
    SdpaKernel,
    choose_kernel,
)
from agentrl.workers.attention_plan import AttentionPlan

CPU = torch.device("cpu")
TREE = AttentionPlan((40, 5, 9, 7, 3, 10, 2, 4, 6), (-1, 0, 0, 2, 2, 0, -1, 6, 6))
RAGGED = AttentionPlan((7, 12, 1, 3))
LONG = AttentionPlan((600, 3, 301))


def attend(
    kernel: PackedKernel, plan: AttentionPlan, window: int | None = None, value_size: int = 16
) -> list[Tensor]:
    """The result, and the gradients of query, key and value."""
    draw = torch.Generator().manual_seed(3)
    shapes = (4, 16), (2, 16), (2, value_size)
    inputs = [
        torch.randn(plan.ends[-1], *shape, generator=draw).requires_grad_() for shape in shapes
    ]
    out = kernel(*inputs, plan, window, 0.3)
    weight = torch.randn(out.shape, generator=draw)
    return [out.detach(), *torch.autograd.grad(out, inputs, weight)]


def assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=5e-6)


def naive(plan: AttentionPlan, window: int | None) -> Tensor:
    """Who sees whom, from each token's list of (segment, position in it)."""
    paths: list[list[tuple[int, int]]] = []
    tokens: list[tuple[int, int]] = []
    parents = plan.parents or (-1,) * len(plan.lengths)
    for segment, (length, parent) in enumerate(zip(plan.lengths, parents, strict=True)):
        own = [(segment, place) for place in range(length)]
        paths.append((paths[parent] if parent >= 0 else []) + own)
        tokens += own
    seen = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for query, at in enumerate(tokens):
        path = paths[at[0]]
        until = path.index(at) + 1
        for key in path[max(0, until - (window or until)) : until]:
            seen[query, tokens.index(key)] = True
    return seen


@st.composite
def plans(draw: st.DrawFn) -> AttentionPlan:
    """Trees of segments, depth first."""
    parents: list[int] = []
    for segment in range(draw(st.integers(1, 8))):
        branch = [-1]
        if segment:
            above = segment - 1
            while above >= 0:
                branch.append(above)
                above = parents[above]
        parents.append(draw(st.sampled_from(branch)))
    lengths = draw(st.lists(st.integers(1, 9), min_size=len(parents), max_size=len(parents)))
    return AttentionPlan(tuple(lengths), tuple(parents))


@given(plans(), st.none() | st.integers(1, 12))
def test_token_sees_its_segment_and_those_above_it(plan: AttentionPlan, window: int | None):
    assert torch.equal(plan.visible(window, CPU), naive(plan, window))


def test_example_of_the_plans_docstring():
    plan = AttentionPlan((2, 2, 1), (-1, 0, 0))
    assert (plan.starts, plan.ends, plan.family_ends) == ((0, 2, 4), (2, 4, 5), (5, 4, 5))
    assert (plan.offsets, plan.longest, plan.generations) == ((0, 2, 2), 4, ((0,),))


@settings(deadline=None, max_examples=30)
@given(plans())
def test_shared_prefixes_equal_plain_attention(plan: AttentionPlan):
    assert_equal(attend(FlashKernel("flash", CpuFlash()), plan), attend(SdpaKernel(), plan))


@pytest.mark.parametrize("window", [None, 1, 4, 300])
@pytest.mark.parametrize("plan", [RAGGED, LONG], ids=["ragged", "long"])
def test_windows_equal_plain_attention(plan: AttentionPlan, window: int | None):
    found = attend(FlashKernel("flash", CpuFlash()), plan, window)
    assert_equal(found, attend(SdpaKernel(), plan, window))


def test_values_may_be_smaller_than_keys():
    found = attend(FlashKernel("flash", CpuFlash()), TREE, value_size=8)
    assert found[0].shape[-1] == 8
    assert_equal(found, attend(SdpaKernel(), TREE, value_size=8))


@pytest.mark.parametrize("window", [None, 6])
def test_flex_attention_equals_plain_attention(window: int | None):
    # It has no backward pass on a CPU.
    draw = torch.Generator().manual_seed(3)
    inputs = [torch.randn(TREE.ends[-1], heads, 16, generator=draw) for heads in (4, 2, 2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = FlexKernel()(*inputs, TREE, window, 0.3)
    assert torch.allclose(found, SdpaKernel()(*inputs, TREE, window, 0.3), atol=5e-6)


@pytest.fixture
def varlen_on_cpu() -> Iterator[None]:
    """Give the operators of the CUDA kernel a plain implementation on a CPU."""

    def dense(
        query: Tensor, key: Tensor, causal: bool, scale: float, left: int, right: int
    ) -> Tensor:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        distance = torch.arange(len(query))[:, None] - torch.arange(len(key))
        hidden = (distance < 0) if causal else torch.zeros_like(distance, dtype=torch.bool)
        hidden = hidden | ((distance > left) if left >= 0 else hidden)
        hidden = hidden | ((-distance > right) if right >= 0 else hidden)
        return scores.masked_fill(hidden, -torch.inf)

    def forward(
        query, key, value, ends_q, ends_k, max_q, max_k, dropout, causal, debug, *,
        scale=None, window_size_left=None, window_size_right=None, seqused_k=None,
        alibi_slopes=None, block_table=None, num_splits=None,
    ):  # fmt: skip
        assert (ends_q.dtype, ends_k.dtype) == (torch.int32, torch.int32)
        assert (int(ends_q[-1]), int(ends_k[-1])) == (len(query), len(key))
        assert (int(ends_q.diff().max()), int(ends_k.diff().max())) == (max_q, max_k)
        outs, sums = [], []
        value = value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        for (q0, q1), (k0, k1) in zip(
            torch.stack([ends_q[:-1], ends_q[1:]], 1).tolist(),
            torch.stack([ends_k[:-1], ends_k[1:]], 1).tolist(),
            strict=True,
        ):
            scores = dense(
                query[q0:q1], key[k0:k1], causal, scale, window_size_left, window_size_right
            )
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[k0:k1]))
            sums.append(scores.logsumexp(-1))
        empty = torch.empty(0)
        return torch.cat(outs), torch.cat(sums, 1), empty, empty, empty

    def backward(
        grad, query, key, value, out, logsumexp, ends_q, ends_k, max_q, max_k, dropout, causal,
        seed, unused, *, scale=None, window_size_left=None, window_size_right=None,
    ):  # fmt: skip
        copies = query.shape[1] // key.shape[1]
        grads = [torch.zeros_like(one) for one in (query, key, value)]
        delta = (grad * out).sum(-1).T
        for q0, q1, k0, k1 in zip(
            *(x.tolist() for x in (ends_q[:-1], ends_q[1:], ends_k[:-1], ends_k[1:])), strict=True
        ):
            scores = dense(
                query[q0:q1], key[k0:k1], causal, scale, window_size_left, window_size_right
            )
            weights = (scores - logsumexp[:, q0:q1, None]).exp()
            wide = value[k0:k1].repeat_interleave(copies, dim=1)
            slopes = torch.einsum("qhd,khd->hqk", grad[q0:q1], wide) - delta[:, q0:q1, None]
            slopes = weights * slopes * scale
            wide = key[k0:k1].repeat_interleave(copies, dim=1)
            grads[0][q0:q1] = torch.einsum("hqk,khd->qhd", slopes, wide)
            by_key = torch.einsum("hqk,qhd->khd", slopes, query[q0:q1])
            by_value = torch.einsum("hqk,qhd->khd", weights, grad[q0:q1])
            grads[1][k0:k1] = by_key.unflatten(1, (-1, copies)).sum(2)
            grads[2][k0:k1] = by_value.unflatten(1, (-1, copies)).sum(2)
        return tuple(grads)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.mark.usefixtures("varlen_on_cpu")
@pytest.mark.parametrize(
    ("plan", "window"),
    [(RAGGED, None), (RAGGED, 4), (TREE, None)],
    ids=["ragged", "window", "tree"],
)
def test_boundaries_of_the_variable_length_kernel(plan: AttentionPlan, window: int | None):
    found = attend(FlashKernel("varlen", VarlenFlash()), plan, window)
    assert_equal(found, attend(SdpaKernel(), plan, window))


def test_variable_length_kernel_keeps_device_shapes_and_types():
    shapes = [(TREE.ends[-1], heads, 16) for heads in (4, 2, 2)]
    inputs = [torch.empty(one, device="meta", dtype=torch.bfloat16) for one in shapes]
    plan = AttentionPlan(TREE.lengths, TREE.parents)
    out = FlashKernel("varlen", VarlenFlash())(
        *(one.requires_grad_() for one in inputs), plan, None, 0.3
    )
    grads = torch.autograd.grad(out.sum(), inputs)
    assert [one.shape for one in (out, *grads)] == [shapes[0], *shapes]
    found = {(one.device.type, one.dtype) for one in (out, *grads)}
    assert found == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_kernel_is_chosen_on_a_cpu(dtype: torch.dtype):
    config = Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert choose_kernel(config, CPU, dtype).name == "flash"
