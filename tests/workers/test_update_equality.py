"""The same batch gives the same losses and gradients in every configuration of the update."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.workers.actor import Actor
from agentrl.workers.attention_flash import VarlenFlash
from agentrl.workers.attention_kernels import FlashKernel, FlexKernel, SdpaKernel
from agentrl.workers.distributed import World
from tests.fakes import value_equality
from tests.fakes.torchrun import ranks_of
from tests.fakes.update_equality import (
    CASES,
    LORA,
    PLAIN,
    RANK_CASES,
    TERMS,
    Update,
    build,
    naive_update,
    packed_update,
)

of_terms = pytest.mark.parametrize("terms", [PLAIN, TERMS], ids=["policy_loss", "all_terms"])


def assert_equal(found: Update, naive: Update) -> None:
    assert math.isclose(found.loss, naive.loss, rel_tol=1e-5, abs_tol=1e-6)
    assert found.gradients.keys() == naive.gradients.keys()
    assert any(gradient.abs().max() > 1e-3 for gradient in naive.gradients.values())
    for name, gradient in naive.gradients.items():
        assert torch.allclose(found.gradients[name], gradient, rtol=1e-5, atol=1e-6), name


@of_terms
@pytest.mark.parametrize("name", CASES)
def test_layout_is_invisible_update_equals_the_naive_padded_one(
    world: World, name: str, terms: Mapping[str, Any]
):
    naive = naive_update(terms, has_lora=name.startswith(LORA))
    assert_equal(packed_update(world, CASES[name], terms), naive)


KERNELS = {
    "varlen": partial(FlashKernel, "varlen", VarlenFlash()),
    "flex_attention": FlexKernel,
    "scaled_dot_product_attention": SdpaKernel,
}
"""The kernels of CUDA, and the fallback; the cases above have that of a CPU."""


@pytest.mark.usefixtures("cuda_kernels")
@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("name", KERNELS)
def test_layout_is_invisible_update_with_each_kernel_equals_the_naive_padded_one(
    world: World, name: str, shared: bool
):
    def case(world: World, terms: Mapping[str, Any]) -> Actor:
        actor = build(world, terms, share_prefixes=shared)
        actor.policy.kernel = KERNELS[name]()
        actor.policy.kernel.shares = True
        return actor

    assert_equal(packed_update(world, case, TERMS), naive_update(TERMS))


@pytest.fixture(scope="module", params=[2, 4])
def of_ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[tuple[str, bool], dict[str, Any]]]:
    """What each of 2 or 4 ranks computed, by case."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    with ranks_of("tests.fakes.update_equality", str(folder), size=request.param) as ranks:
        ended = [rank.wait() for rank in ranks]
    assert not any(rank.code for rank in ended), "\n".join(rank.err for rank in ended)
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(request.param)]


@pytest.mark.slow
@of_terms
@pytest.mark.parametrize("name", RANK_CASES)
def test_layout_is_invisible_update_of_several_ranks_equals_the_naive_padded_one(
    of_ranks: list[dict[tuple[str, bool], dict[str, Any]]], name: str, terms: Mapping[str, Any]
):
    for found in of_ranks:
        naive = naive_update(terms, has_lora=name.startswith(LORA))
        assert_equal(Update(**found[name, bool(terms)]), naive)


@pytest.mark.parametrize("case", value_equality.CASES.values(), ids=value_equality.CASES)
def test_layout_is_invisible_critics_update_equals_the_naive_padded_one(
    world: World, case: value_equality.Case
):
    assert_equal(value_equality.packed_update(world, case), value_equality.naive_update())


@pytest.mark.slow
def test_layout_is_invisible_critics_update_of_two_ranks_equals_the_naive_padded_one(
    tmp_path: Path,
):
    with ranks_of("tests.fakes.value_equality", str(tmp_path), size=2) as ranks:
        ended = [rank.wait() for rank in ranks]
    assert not any(rank.code for rank in ended), "\n".join(rank.err for rank in ended)
    for rank in range(2):
        for name, found in torch.load(tmp_path / f"rank_{rank}.pt").items():
            assert found["gradients"], name
            assert_equal(Update(**found), value_equality.naive_update())
