"""`benchmarks/gateway.py`: that it measures the calls that it says it measures."""

import asyncio
from importlib import import_module
from pathlib import Path

import pytest

from tests.fakes.templates import DATA

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_every_call_goes_through_the_gateway_and_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    gateway = import_module("gateway")
    tokenizer = DATA / "tokenizers/qwen2_5"
    if not tokenizer.exists():
        pytest.skip(f"needs the tokenizer in {tokenizer}")
    sizes = gateway.Sizes(4, 3, 60, group=2, turn_s=0.05)
    bench = gateway.make_bench(str(tokenizer), sizes)
    figures = asyncio.run(gateway.measure(bench))
    assert len(figures.latencies_s) == sizes.num_turns
    assert min(figures.latencies_s) >= sizes.turn_s
    assert min(figures.wall_s, figures.direct_wall_s) >= 3 * sizes.turn_s
    assert figures.cpu_s > figures.direct_cpu_s > 0
    gateway.report(bench, figures)
    assert "ratio" in capsys.readouterr().out
