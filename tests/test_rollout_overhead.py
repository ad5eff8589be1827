"""`benchmarks/rollout_overhead.py`: that it measures the rollout that it says it measures."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.fakes.templates import DATA

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return import_module("rollout_overhead")


@pytest.fixture
def bench(overhead: ModuleType):
    tokenizer = DATA / "tokenizers/qwen2_5"
    if not tokenizer.exists():
        pytest.skip(f"needs the tokenizer in {tokenizer}")
    return overhead.Bench(str(tokenizer), overhead.Sizes(requests=12, turns=3, group=4))


def test_every_request_takes_the_turns_that_were_written_for_it(overhead: ModuleType, bench):
    finished = bench.roll_out(bench.make_manager(waits=False))
    overhead.check_outcome(finished, bench.sizes)
    for request, episode in zip(finished, bench.episodes, strict=True):
        said = [turn for turn in request.turns if turn.role == "assistant"]
        ids = [request.response_ids[turn.start : turn.end] for turn in said]
        assert ids == episode.completions
        shown = [message.text for message in request.messages if message.role == "tool"]
        assert shown == [lookup.observation for lookup in episode.lookups]


def test_a_rollout_that_went_otherwise_is_refused(overhead: ModuleType, bench):
    finished = bench.roll_out(bench.make_manager(waits=False))
    finished[3].turns[1].end += 100
    with pytest.raises(AssertionError):
        overhead.check_outcome(finished, bench.sizes)


def test_every_figure_is_measured_and_printed(
    overhead: ModuleType, bench, capsys: pytest.CaptureFixture[str]
):
    figures = overhead.measure_cpu(bench, 1)
    assert min(figures.rollout_s, figures.tokenizer_s, figures.together_s) > 0
    parts = overhead.Parts(bench).seconds(1)
    assert all(seconds > 0 for seconds in parts.values())
    overhead.report(bench, figures, 30.0, parts)
    output = capsys.readouterr().out
    assert all(name in output for name in parts)
    assert "load:" in output


def test_the_critical_path_is_the_longest_of_the_requests_waits(bench):
    waits = [3.0 + sum(lookup.delay_s for lookup in e.lookups) for e in bench.episodes]
    assert [episode.wait_s for episode in bench.episodes] == waits
