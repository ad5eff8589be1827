"""Every kernel of packed attention gives the results and gradients of plain attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen2Config

from agentrl.workers.attention_flash import CpuFlash, VarlenFlash
from agentrl.workers.attention_kernels import (
    AttentionInputs,
    FlashKernel,
    FlexKernel,
    PackedKernel,
    SdpaKernel,
    choose_kernel,
    make_block_mask,
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
    out = kernel(AttentionInputs(*inputs, plan, window, 0.3))
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


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("window", [None, 6])
def test_flex_attention_equals_plain_attention(window: int | None):
    assert_equal(attend(FlexKernel(), TREE, window), attend(SdpaKernel(), TREE, window))


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize(
    ("plan", "window"),
    [(RAGGED, None), (RAGGED, 4), (TREE, None)],
    ids=["ragged", "window", "tree"],
)
def test_boundaries_of_the_variable_length_kernel(plan: AttentionPlan, window: int | None):
    found = attend(FlashKernel("varlen", VarlenFlash()), plan, window)
    assert_equal(found, attend(SdpaKernel(), plan, window))


def listed(counts: Tensor, blocks: Tensor) -> Tensor:
    """The table `[query blocks, key blocks]` of a block mask's lists."""
    table = torch.zeros(blocks.shape[2:], dtype=torch.bool)
    for row, (count, columns) in enumerate(zip(counts[0, 0], blocks[0, 0], strict=True)):
        table[row, columns[:count].long()] = True
    return table


@given(plans(), st.none() | st.integers(1, 12), st.sampled_from([2, 4]))
def test_block_mask_has_the_blocks_of_the_plan(plan: AttentionPlan, window: int | None, size: int):
    mask = make_block_mask(plan, window, CPU, block_size=size)
    seen = torch.nn.functional.pad(plan.visible(window, CPU), 2 * (0, -plan.ends[-1] % size))
    seen = seen.unflatten(1, (-1, size)).unflatten(0, (-1, size)).transpose(1, 2).flatten(2)
    every = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    some = listed(mask.kv_num_blocks, mask.kv_indices) | every
    assert (seen.any(2) <= some).all()
    assert (every <= seen.all(2)).all()
    if window is None or not plan.generations:
        assert torch.equal(some, seen.any(2))
        assert torch.equal(every, seen.all(2))


def test_variable_length_kernel_keeps_device_shapes_and_types():
    shapes = [(TREE.ends[-1], heads, 16) for heads in (4, 2, 2)]
    inputs = [torch.empty(one, device="meta", dtype=torch.bfloat16) for one in shapes]
    plan = AttentionPlan(TREE.lengths, TREE.parents)
    parts = [one.requires_grad_() for one in inputs]
    out = FlashKernel("varlen", VarlenFlash())(AttentionInputs(*parts, plan, None, 0.3))
    grads = torch.autograd.grad(out.sum(), inputs)
    assert [one.shape for one in (out, *grads)] == [shapes[0], *shapes]
    found = {(one.device.type, one.dtype) for one in (out, *grads)}
    assert found == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fast_kernel_is_chosen_on_a_cpu(dtype: torch.dtype):
    config = Qwen2Config(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert choose_kernel(config, CPU, dtype).name == "flash"
