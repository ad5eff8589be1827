"""`benchmarks/soak.py`: one failure is one failure, thousands of times, and nothing is left."""

import asyncio
import logging
import os
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.fakes.plugins import tiny_tokenizer

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def from_benchmarks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")


@pytest.fixture
def work() -> ModuleType:
    return import_module("soak_work")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def soaked(tokenizer: str, sizes: Any, folder: Path, caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.ERROR, "agentrl")
    return asyncio.run(import_module("soak_run").run(tokenizer, sizes, folder))


@pytest.mark.slow
def test_every_request_ends_as_it_must_and_nothing_leaks(
    work: ModuleType,
    tokenizer: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
):
    sizes = work.Sizes(requests=150, slots=16, timeout_s=2.0, seed=3)
    done, found, process_s = soaked(tokenizer, sizes, tmp_path, caplog)
    for method in ("create", "calc_reward", "release"):
        assert {getattr(life, method) for life in done.lives} == {"fine", *work.FAULTS}
    assert {act for life in done.lives for act in life.execute} == {"fine", *work.FAULTS}
    assert len(found.finished) == 150
    assert found.after == found.before
    assert found.most.processes > found.before.processes + 4, "processes ran beside each other"
    assert found.wall_s >= max(done.waits())
    import_module("soak").report(done, found, process_s)
    assert "ratio" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_thousand_requests_end_as_they_must(
    work: ModuleType, tokenizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    _, found, _ = soaked(tokenizer, work.Sizes(requests=2000), tmp_path, caplog)
    assert len(found.finished) == 2000
    assert found.after == found.before
    before, peak, _ = found.memory_bytes
    assert peak - before < 256 << 20, "all finished requests are held meanwhile"


def small(work: ModuleType, tokenizer: str, folder: Path, **sizes: Any) -> Any:
    calm = work.Sizes(requests=3, slots=2, timeout_s=5.0, faults={})
    return work.Work(tokenizer, folder / "log", replace(calm, **sizes))


def test_the_bound_is_the_waits_in_order_on_so_many_slots(
    work: ModuleType, tokenizer: str, tmp_path: Path
):
    few = small(work, tokenizer, tmp_path)
    fine = work.Life("fine", ["fine"], "fine", "fine")
    few.lives = [fine, replace(fine, execute=["hang"]), fine]
    assert few.waits() == pytest.approx([0.1, 5.1, 0.1])
    assert few.bound_s() == pytest.approx(5.1), "the third goes behind the first"
    few.lives = [fine, replace(fine, create="hang"), replace(fine, calc_reward="hang")]
    assert few.bound_s() == pytest.approx(0.1 + 5.1)


@pytest.mark.parametrize(
    ("create", "execute", "calc_reward", "release", "hangs", "processes"),
    [
        ("fine", ["fine", "raise"], "garbage", "fine", 0, 1),
        ("hang", ["hang"], "hang", "fine", 1, 2),
        ("fine", ["hang", "hang"], "fine", "fine", 2, 3),
        ("fine", ["kill"], "fine", "hang", 2, 3),
        ("kill", ["fine"], "fine", "hang", 1, 2),
    ],
)
def test_what_a_life_costs_is_counted(
    work: ModuleType,
    create: str,
    execute: list[str],
    calc_reward: str,
    release: str,
    hangs: int,
    processes: int,
):
    life = work.Life(create, execute, calc_reward, release)
    assert (life.num_hangs(), life.num_processes()) == (hangs, processes)


def test_a_soak_that_went_otherwise_is_refused(work: ModuleType, tokenizer: str, tmp_path: Path):
    few = small(work, tokenizer, tmp_path)
    finished = asyncio.run(few.manager.drive(few.requests))
    few.check(finished)
    with pytest.raises(AssertionError, match="lost"):
        few.check(finished[1:])
    few.notes.open.add("forgotten")
    with pytest.raises(AssertionError, match="not released"):
        few.check(finished)
    few.notes.open.clear()
    finished[0].turns[0].calls[0].outcome = "timeout"
    with pytest.raises(AssertionError):
        few.check(finished)


def test_what_is_left_over_is_seen(work: ModuleType):
    run = import_module("soak_run")

    async def leak() -> tuple[Any, Any]:
        before = await run.settle()
        descriptor = os.open(os.devnull, os.O_RDONLY)
        after = run.Holdings.now()
        os.close(descriptor)
        return before, after

    before, after = asyncio.run(leak())
    assert after.descriptors == before.descriptors + 1
