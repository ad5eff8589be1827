"""The arguments of kernels that read pages in place, and the trial before one is used."""

import logging
from typing import Any

import pytest
import torch

from agentrl.engines.transformers.paged_kernel import find_paged_kernel
from tests.fakes.engines import read_pages, tiny_model

PAGE = 8


@pytest.mark.parametrize("page_size", [4, PAGE, 256])
def test_a_kernel_that_agrees_with_the_copying_path_is_used(page_size: int):
    kernel = find_paged_kernel(tiny_model(), page_size, attend=read_pages)
    assert kernel is not None
    assert not kernel.takes_key_ends


def test_a_kernel_that_needs_the_ends_of_the_keys_gets_them():
    ends: list[list[int]] = []

    def needs_key_ends(*arguments: Any, **keywords: Any) -> torch.Tensor:
        if arguments[4] is None:
            raise RuntimeError("cum_seq_k must be given")
        ends.append(arguments[4].tolist())
        return read_pages(*arguments, **keywords)

    kernel = find_paged_kernel(tiny_model(), PAGE, attend=needs_key_ends)
    assert kernel is not None
    assert kernel.takes_key_ends
    assert ends == [[0, 5, 9, 9 + PAGE + 6, 9 + PAGE + 6 + 2 * PAGE]]


def test_a_kernel_that_reads_other_pages_is_refused_with_a_warning(
    caplog: pytest.LogCaptureFixture,
):
    def reads_others(*arguments: Any, block_table: torch.Tensor, **keywords: Any) -> torch.Tensor:
        return read_pages(*arguments, block_table=block_table.flip(0), **keywords)

    with caplog.at_level(logging.WARNING):
        assert find_paged_kernel(tiny_model(), PAGE, attend=reads_others) is None
    assert "differs by" in caplog.text
    assert "copies the keys and values" in caplog.text


def test_a_device_without_a_kernel_gets_the_copying_path(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        assert find_paged_kernel(tiny_model(), PAGE) is None
    assert "no kernel reads pages of 8 tokens in torch.float32" in caplog.text
