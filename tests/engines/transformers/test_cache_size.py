"""The cache's size: what can run at once, within the memory that others leave."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Qwen2ForCausalLM

from agentrl.engines import TransformersEngine
from agentrl.engines.transformers.cache_size import (
    CACHE_MEMORY_FRAC,
    CONTIGUOUS_SHARE,
    TransformersEngineSettings,
    choose_limits,
    free_bytes_of_cgroup,
)
from agentrl.engines.transformers.paged_attention import register_paged_attention
from agentrl.errors import EngineError
from tests.fakes.engines import tiny_model

PAGE_BYTES = 16 * 2 * 2 * 2 * 8 * 4
"""16 tokens of two layers, keys and values, two heads of 8 numbers in 4 bytes."""
SHARE = 1 + CONTIGUOUS_SHARE


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    model = tiny_model().eval()
    model.config._attn_implementation = register_paged_attention()
    return model


def set_free_bytes(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr("agentrl.engines.transformers.cache_size._free_bytes", lambda _: free_bytes)


def test_cache_is_sized_for_a_full_batch(model: Qwen2ForCausalLM):
    settings = TransformersEngineSettings(page_size=16, max_batch_size=10)
    limits = choose_limits(settings, model, max_model_len=100)
    assert limits.num_pages == 10 * 7 + 1
    assert (limits.page_size, limits.max_batch_size) == (16, 10)


def test_cache_that_may_not_be_cut_to_memory_is_an_error_that_names_its_key(
    model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
):
    settings = TransformersEngineSettings(page_size=16, max_batch_size=10, fit_memory=False)
    assert choose_limits(settings, model, max_model_len=100).num_pages == 10 * 7 + 1
    set_free_bytes(monkeypatch, math.ceil(20 * PAGE_BYTES * SHARE / CACHE_MEMORY_FRAC))
    with pytest.raises(EngineError, match=r"71 pages.*only 20 fit") as caught:
        choose_limits(settings, model, max_model_len=100)
    assert caught.value.details["key"] == "rollout.engine.transformers.num_pages"
    given = replace(settings, num_pages=30)
    assert choose_limits(given, model, max_model_len=100).num_pages == 30


def test_cache_is_sized_within_memory(model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch):
    set_free_bytes(monkeypatch, 25_000_000)
    settings = TransformersEngineSettings(page_size=16)
    limits = choose_limits(settings, model, max_model_len=10_000)
    assert limits.num_pages == 7_500_000 / SHARE // PAGE_BYTES
    reserved = replace(settings, reserved_bytes=20_000_000)
    limits = choose_limits(reserved, model, max_model_len=1_000)
    assert limits.num_pages == 1_500_000 / SHARE // PAGE_BYTES


def test_memory_below_one_sequence_is_reported_with_the_keys_to_change(
    model: Qwen2ForCausalLM, monkeypatch: pytest.MonkeyPatch
):
    set_free_bytes(monkeypatch, 250_000)
    settings = TransformersEngineSettings(page_size=16, max_model_len=1000)
    with pytest.raises(
        EngineError, match=r"fits into the free memory: 7 pages.* needs 64"
    ) as caught:
        TransformersEngine.from_model(model, settings=settings)
    assert "data.max_response_length" in str(caught.value.details["expected"])


@pytest.mark.parametrize(
    ("names", "limit", "expected"),
    [
        (("memory.max", "memory.current", "inactive_file"), "1000", 450),
        (("memory.max", "memory.current", "inactive_file"), "max", None),
        (("memory.max", "memory.current", "inactive_file"), "500", 0),
        (
            (
                "memory/memory.limit_in_bytes",
                "memory/memory.usage_in_bytes",
                "total_inactive_file",
            ),
            "1000",
            450,
        ),
    ],
)
def test_a_container_s_limit_counts(
    tmp_path: Path, names: tuple[str, str, str], limit: str, expected: int | None
):
    assert free_bytes_of_cgroup(tmp_path) is None
    limit_name, used_name, cached_name = names
    (tmp_path / limit_name).parent.mkdir(exist_ok=True)
    (tmp_path / limit_name).write_text(f"{limit}\n")
    (tmp_path / used_name).write_text("600\n")
    stat = f"anon 5\n{cached_name} 50\n"
    (tmp_path / limit_name).with_name("memory.stat").write_text(stat)
    assert free_bytes_of_cgroup(tmp_path) == expected
