import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.data import lengths
from agentrl.data.dataset import PromptDataset
from agentrl.data.lengths import drop_overlong, measure_prompts
from agentrl.data.rows import Prompt
from agentrl.errors import DataError
from agentrl.rollout.fitting import Truncation, fit_prompt

SIDES: tuple[Truncation, ...] = ("left", "right", "middle")


def dataset_of(*sizes: int) -> PromptDataset:
    return PromptDataset(
        Prompt.model_validate({"index": n, "messages": [{"role": "user", "content": "x" * size}]})
        for n, size in enumerate(sizes)
    )


def encode(prompt: Prompt) -> list[int]:
    return list(prompt.messages[0].text.encode())


class CountingEncoder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, prompt: Prompt) -> list[int]:
        self.calls += 1
        return encode(prompt)


def test_prompts_are_measured_in_order(tmp_path):
    dataset = dataset_of(3, 1, 2)
    assert measure_prompts(dataset, encode, fingerprint="a", cache_dir=tmp_path) == [3, 1, 2]


def test_lengths_are_measured_once_for_the_same_data_and_template(tmp_path):
    count = CountingEncoder()
    for fingerprint, sizes, calls in (
        ("template", (1, 2), 2),
        ("template", (1, 2), 2),
        ("other template", (1, 2), 4),
        ("template", (1, 3), 6),
    ):
        measure_prompts(dataset_of(*sizes), count, fingerprint=fingerprint, cache_dir=tmp_path)
        assert count.calls == calls


def test_a_damaged_cache_is_measured_again(tmp_path, caplog):
    dataset = dataset_of(4, 5)
    measure_prompts(dataset, encode, fingerprint="a", cache_dir=tmp_path)
    (cache,) = tmp_path.rglob("*.npy")
    cache.write_bytes(cache.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING):
        assert measure_prompts(dataset, encode, fingerprint="a", cache_dir=tmp_path) == [4, 5]
    assert "measured again" in caplog.text
    caplog.clear()
    assert measure_prompts(dataset, encode, fingerprint="a", cache_dir=tmp_path) == [4, 5]
    assert not caplog.text


def test_a_cache_that_cannot_be_written_costs_only_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING):
        assert measure_prompts(dataset_of(2), encode, fingerprint="a", cache_dir=blocked) == [2]
    assert "cannot be" in caplog.text


def test_processes_measure_what_one_would_and_leave_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "WORTH_FORKING_S", 0.0)
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    sizes = [n % 17 + 1 for n in range(700)]
    parent = os.getpid()
    seen: list[int] = []

    def closure(prompt: Prompt) -> list[int]:
        seen.append(os.getpid())
        return encode(prompt)

    found = measure_prompts(
        dataset_of(*sizes), closure, fingerprint="a", cache_dir=tmp_path, num_workers=2
    )
    assert found == sizes
    assert seen == [parent] * 64, "only the first prompts are measured here"
    assert "TOKENIZERS_PARALLELISM" not in os.environ


@pytest.mark.parametrize("bad", [3, 500])
def test_a_prompt_that_cannot_be_encoded_is_reported_with_its_row(tmp_path, monkeypatch, bad):
    monkeypatch.setattr(lengths, "WORTH_FORKING_S", 0.0)

    def fragile(prompt: Prompt) -> list[int]:
        if prompt.index == bad:
            raise KeyError("no such role")
        return [0]

    with pytest.raises(DataError, match="no such role") as caught:
        measure_prompts(
            dataset_of(*[1] * 600), fragile, fingerprint="a", cache_dir=tmp_path, num_workers=2
        )
    assert caught.value.row == bad


def test_a_process_that_dies_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "WORTH_FORKING_S", 0.0)

    def deadly(prompt: Prompt) -> list[int]:
        if prompt.index == 300:
            os._exit(1)
        return [0]

    with pytest.raises(DataError, match="died"):
        measure_prompts(
            dataset_of(*[1] * 600), deadly, fingerprint="a", cache_dir=tmp_path, num_workers=2
        )


def test_overlong_prompts_are_dropped_and_counted():
    dataset = dataset_of(3, 9, 5)
    filtered = drop_overlong(dataset, [3, 9, 5], 5)
    assert [prompt.index for prompt in filtered.dataset] == [0, 2]
    assert (filtered.num_dropped, filtered.longest) == (1, 9)
    assert "1 of 3 prompts were dropped" in str(filtered)


def test_nothing_left_is_an_error_that_says_what_would_fit():
    with pytest.raises(DataError, match="every prompt is longer") as caught:
        drop_overlong(dataset_of(8, 9), [8, 9], 5)
    assert "at least 8" in str(caught.value)


@pytest.mark.parametrize(
    ("side", "left"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])]
)
def test_truncation_names_the_side_that_goes(side, left):
    assert fit_prompt([1, 2, 3, 4, 5], 3, side) == left


def test_an_overlong_prompt_is_an_error_where_nothing_may_be_cut():
    assert fit_prompt([1, 2], 2, "error") == [1, 2]
    with pytest.raises(DataError, match="3 tokens is longer than") as caught:
        fit_prompt([1, 2, 3], 2, "error")
    assert "data.truncation" in str(caught.value)


@given(st.lists(st.integers()), st.integers(1, 20), st.sampled_from(SIDES))
def test_budgets_a_fitted_prompt_uses_its_budget_and_no_more(ids, budget, side):
    fitted = fit_prompt(ids, budget, side)
    assert len(fitted) == min(len(ids), budget)
    remaining = iter(ids)
    assert all(token in remaining for token in fitted), "tokens keep their order"
