"""`rollout.deterministic` in a whole run: kernels, the cache's size, and the same weights again."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import Trainer
from agentrl.config import parse_config
from agentrl.errors import EngineError
from agentrl.trainer.components import start_components
from agentrl.workers.distributed import stop_world
from agentrl.workers.rng import choose_exact_kernels
from tests.fakes.runs import tiny_run

DETERMINISTIC = {"rollout__deterministic": True}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """The process as it was: threads, kernels, process group."""
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(False)  # another test's run may have chosen them
    yield
    stop_world()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def start(home: Path, folder: Path, **changes: Any) -> Any:
    return start_components(parse_config(tiny_run(home, folder, **changes)))


def test_kernels_are_exact_in_a_deterministic_run_alone(tiny_home: Path, tmp_path: Path):
    start(tiny_home, tmp_path)
    assert not torch.are_deterministic_algorithms_enabled()
    start(tiny_home, tmp_path, **DETERMINISTIC)
    assert torch.are_deterministic_algorithms_enabled()


def test_exact_kernels_add_up_the_gradient_of_an_indexed_tensor_in_one_order():
    torch.set_num_threads(2)
    choose_exact_kernels(torch.device("cpu"))
    rows = torch.randn(50, 16, requires_grad=True)
    places, slopes = torch.randint(0, 50, (200_000,)), torch.randn(200_000, 16)

    def gradient() -> torch.Tensor:
        return torch.autograd.grad((rows[places] * slopes).sum(), rows)[0]

    expected = gradient()
    assert all(torch.equal(gradient(), expected) for _ in range(3))


def test_a_cache_that_memory_would_cut_is_refused_in_a_deterministic_run(
    tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("agentrl.engines.transformers.cache_size._free_bytes", lambda _: 40_000_000)
    start(tiny_home, tmp_path)
    with pytest.raises(EngineError, match=r"rollout.deterministic") as caught:
        start(tiny_home, tmp_path, **DETERMINISTIC)
    assert caught.value.details["key"] == "rollout.engine.transformers.num_pages"
    start(tiny_home, tmp_path, rollout__engine__transformers__num_pages=500, **DETERMINISTIC)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", [1, 2])
def test_resume_is_exact_two_deterministic_runs_leave_the_same_weights_bit_for_bit(
    num_threads: int, tiny_home: Path, tmp_path: Path
):
    torch.set_num_threads(num_threads)
    scorer = tmp_path / "score.py"
    scorer.write_text(
        "def compute_score(solution_str, **_):\n    return sum(map(ord, solution_str)) % 7 / 7\n"
    )
    given: dict[str, Any] = {"reward__custom_reward_function__path": str(scorer)}

    def train(name: str) -> dict[str, torch.Tensor]:
        run = tiny_run(tiny_home, tmp_path / name, **DETERMINISTIC, **given)
        trainer = Trainer(parse_config(run))
        before = {name: weight.clone() for name, weight in weights_of(trainer)}
        trainer.fit()
        after = dict(weights_of(trainer))
        assert any(not torch.equal(before[name], after[name]) for name in before)
        return after

    def weights_of(trainer: Trainer) -> list[tuple[str, torch.Tensor]]:
        policy = trainer.components.actor.policy
        return [(name, weight.detach()) for name, weight in policy.named_weights()]

    one, other = train("one"), train("other")
    assert all(torch.equal(one[name], other[name]) for name in one)
