"""What the engine is told round an update, and what a sync leaves in the figures."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl import Trainer
from agentrl.config import parse_config
from agentrl.engines import ScriptedEngine
from agentrl.engines.protocol import ALL_MEMORY
from agentrl.errors import EngineError
from agentrl.trainer.components import start_components
from agentrl.trainer.engine_sync import EngineSync
from agentrl.trainer.setup.rollout_setup import make_manager
from tests.fakes.runs import CALL, read_lines, tiny_run

pytestmark = pytest.mark.usefixtures("alone")

SLEEP = "sleep weights kv_cache"


class RecordingEngine(ScriptedEngine):
    """Writes down what it is asked; its first updates fail."""

    def __init__(self, *answers: Any, num_failures: int = 0, **settings: Any) -> None:
        super().__init__(*answers, **settings)
        self.events: list[str] = []
        self._num_failures = num_failures

    def record(self, what: str) -> None:
        if what != "generate" or self.events[-1:] != ["generate"]:
            self.events.append(what)

    async def generate(self, *arguments: Any, **named: Any) -> Any:
        self.record("generate")
        return await super().generate(*arguments, **named)

    async def sleep(self, tags: Any = ALL_MEMORY) -> None:
        self.record(" ".join(("sleep", *tags)))
        await super().sleep(tags)

    async def wake(self, tags: Any = ALL_MEMORY) -> None:
        self.record(" ".join(("wake", *tags)))
        await super().wake(tags)

    async def update_weights(self, named_tensors: Any, *, version: int) -> Any:
        self.record(f"weights {version}")
        if self._num_failures:
            self._num_failures -= 1
            raise EngineError("no room")
        return await super().update_weights(named_tensors, version=version)


def make_trainer(home: Path, folder: Path, *, num_failures: int = 0, **changes: Any) -> Trainer:
    config = parse_config(tiny_run(home, folder, **changes))
    parts = start_components(config)
    engine = RecordingEngine(
        [CALL, "#### 42"], tokenizer=parts.setup.tokenizer, num_failures=num_failures
    )
    manager = make_manager(config, parts.setup, engine)
    trainer = Trainer(config, replace(parts, engine=engine, manager=manager))
    note_update(trainer, engine)
    return trainer


def note_update(trainer: Trainer, engine: RecordingEngine) -> None:
    """Record updates among the events of the engine."""
    update = trainer.components.actor.update_policy

    def noted(*arguments: Any, **named: Any) -> Any:
        engine.record("update")
        return update(*arguments, **named)

    trainer.components.actor.update_policy = noted


def engine_events(trainer: Trainer) -> list[str]:
    engine: Any = trainer.components.engine
    return engine.events


def test_engine_that_shares_the_accelerator_sleeps_through_the_update_and_wakes_in_two_steps(
    tiny_home: Path, tmp_path: Path
):
    trainer = make_trainer(tiny_home, tmp_path / "run")
    trainer.engine_sync.gives_memory = True
    trainer.fit()
    before = ["wake weights", "weights 0", "wake kv_cache", "generate"]
    step = ["generate", SLEEP, "update", "wake weights", "weights {}", "wake kv_cache"]
    steps = [call.format(number) for number in (1, 2) for call in step]
    assert engine_events(trainer) == [*before, *steps[1:], "generate"]


def test_on_a_cpu_nothing_sleeps(tiny_home: Path, tmp_path: Path):
    trainer = make_trainer(tiny_home, tmp_path / "run")
    trainer.fit()
    assert engine_events(trainer) == [
        "weights 0", "generate", "update", "weights 1", "generate", "update", "weights 2",
        "generate",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("device", "asked", "is_shared", "expected"),
    [("cuda", True, False, True), ("cuda", False, False, False), ("cuda", True, True, False),
     ("cpu", True, False, False)],
)  # fmt: skip
def test_engine_sleeps_where_it_has_the_trainers_accelerator_and_the_key_says_so(
    tiny_home: Path, tmp_path: Path, device: str, asked: bool, is_shared: bool, expected: bool
):
    changes = {"rollout__free_cache_engine": asked}
    config = parse_config(tiny_run(tiny_home, tmp_path / "run", **changes))
    engine = ScriptedEngine(["a"])
    engine.is_shared = is_shared
    policy: Any = SimpleNamespace(world=SimpleNamespace(device=SimpleNamespace(type=device)))
    assert EngineSync.of(config, engine, policy).gives_memory is expected


def test_every_step_says_what_its_sync_cost(tiny_home: Path, tmp_path: Path):
    trainer = Trainer(parse_config(tiny_run(tiny_home, tmp_path / "run")))
    trainer.fit()
    for line in read_lines(tmp_path / "run" / "metrics.jsonl")[1:]:
        assert line["weight_sync/bytes"] == 0, "the embedded engine has the trainer's tensors"
        assert line["weight_sync/attempts"] == 1
        assert 0 < line["weight_sync/seconds"] <= line["timing_s/sync_weights"]


def test_sync_that_fails_once_is_repeated_and_counted(tiny_home: Path, tmp_path: Path):
    trainer = make_trainer(tiny_home, tmp_path / "run", num_failures=1)
    trainer.fit()
    assert engine_events(trainer)[:2] == ["weights 0", "weights 0"]


def test_sync_that_fails_for_good_ends_the_run(tiny_home: Path, tmp_path: Path):
    trainer = make_trainer(tiny_home, tmp_path / "run", num_failures=9, weight_sync__max_attempts=3)
    with pytest.raises(EngineError, match="no room"):
        trainer.fit()
    assert engine_events(trainer) == ["weights 0"] * 3
