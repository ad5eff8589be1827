"""Exchanges between two processes, and the errors if one of them fails or does not answer."""

import json
from typing import Any

import pytest
import torch

from agentrl.errors import RankError
from agentrl.workers.distributed import World, start_world
from agentrl.workers.rank_status import RankStatus
from tests.fakes.rank_exchanges import LIMIT_S, SCENARIOS
from tests.fakes.torchrun import free_port, ranks_of

Outcomes = list[dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What each rank saw of each scenario."""
    folder = tmp_path_factory.mktemp("exchange")
    ports = [str(free_port()) for _ in SCENARIOS]
    with ranks_of("tests.fakes.rank_exchanges", str(folder), *ports) as ranks:
        ended = [rank.wait() for rank in ranks]
    assert [rank.code for rank in ended] == [0, 9], [rank.err for rank in ended]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
def test_ranks_exchange_rows_of_any_number(outcomes: Outcomes):
    first, second = (own["agrees"]["result"] for own in outcomes)
    assert first["rows"] == second["rows"] == [[1.0, 1.0]] * 3
    assert first["bits"] == [[True, True]] * 2
    assert (first["on_main"], second["on_main"]) == ([0, 1], [])
    assert first["flat"] == ["a"]
    assert first["sum"] == [2.0, 1.0]


@pytest.mark.slow
def test_what_one_rank_raises_ends_all(outcomes: Outcomes):
    first, second = (own["one_raises"] for own in outcomes)
    assert (second["error"], second["words"]) == ("ValueError", "no such tool")
    assert (first["error"], first["words"]) == (
        "RankError",
        "rank 1 failed: ValueError: no such tool",
    )
    assert first["is_shared"]
    assert second["is_shared"]


@pytest.mark.slow
def test_a_rank_that_waits_too_long_says_where_and_for_whom(outcomes: Outcomes):
    first, second = (own["one_is_late"] for own in outcomes)
    assert LIMIT_S <= first["seconds"] < 2 * LIMIT_S
    expected = "rank 0 waited longer than 2 s for the other ranks in the wait after gen of step 2"
    assert first["words"].startswith(expected)
    assert "rank 1 started gen of step 2" in first["words"]
    assert "key: trainer.collective_timeout_s" in first["words"]
    assert second["error"] == "RankError", "the late rank finds no other rank"


@pytest.mark.slow
def test_a_rank_that_failed_elsewhere_leaves_its_reason(outcomes: Outcomes):
    found = outcomes[0]["one_fails_elsewhere"]
    assert found["words"].startswith("rank 0 lost the other ranks in update_actor of step 3")
    assert "rank 1 ended with OSError: disk full" in found["words"]
    assert "key:" not in found["words"], "a longer limit would not have helped"
    assert not any(own["one_fails_elsewhere"]["is_shared"] for own in outcomes)


@pytest.mark.slow
def test_what_the_main_rank_alone_does_fails_on_all(outcomes: Outcomes):
    for own in outcomes:
        found = own["main_raises"]
        assert (found["error"], found["words"]) == ("OSError", "disk full")
        assert found["is_shared"]


@pytest.mark.slow
def test_a_rank_that_was_killed_ends_the_other_at_once(outcomes: Outcomes):
    found = outcomes[0]["one_is_killed"]
    assert found["seconds"] < 10
    assert found["words"].startswith("rank 0 lost the other ranks in update_actor of step 4")
    assert "rank 1 started gen of step 4" in found["words"]


def test_a_rank_that_cannot_join_raises_a_rank_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(
        RankError, match=r"rank 0 of 2 could not join the others within 0\.2 s"
    ) as e:
        start_world("cpu", timeout_s=0.2)
    assert e.value.key == "trainer.collective_timeout_s"


def test_one_rank_alone_agrees_with_itself(world: World):
    with pytest.raises(KeyError), world.raise_on_all_ranks():
        raise KeyError("a")
    rows = torch.zeros(2, 3)
    assert world.gather_rows(rows) is rows
    assert world.gather_on_main(iter("ab")) == ["a", "b"]


def test_an_error_that_is_no_exchange_keeps_its_words():
    status = RankStatus(None, rank=0, size=2, timeout_s=1.0)
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), status.explain_errors():
        raise RuntimeError("shapes differ")
    with (
        pytest.raises(RankError, match="lost the other ranks in the start"),
        status.explain_errors(),
    ):
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
