"""What two processes tell each other, and what each is told when the other one does not answer."""

import json
from typing import Any

import pytest
import torch

from agentrl.errors import RankError
from agentrl.workers.board import Board
from agentrl.workers.distributed import World, start_world
from tests.fakes.exchange import LIMIT_S, SCENES
from tests.fakes.torchrun import free_port, ranks_of

Outcomes = list[dict[str, Any]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """What each rank saw of each scene."""
    folder = tmp_path_factory.mktemp("exchange")
    ports = [str(free_port()) for _ in SCENES]
    with ranks_of("tests.fakes.exchange", str(folder), *ports) as ranks:
        told = [rank.wait() for rank in ranks]
    assert [rank.code for rank in told] == [0, 9], [rank.err for rank in told]
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
    said = "rank 0 waited longer than 2 s for the others in the wait behind gen of step 2"
    assert first["words"].startswith(said)
    assert "rank 1 came to gen of step 2" in first["words"]
    assert "key: trainer.collective_timeout_s" in first["words"]
    assert second["error"] == "RankError", "who comes late finds nobody"


@pytest.mark.slow
def test_a_rank_that_failed_elsewhere_leaves_its_reason(outcomes: Outcomes):
    told = outcomes[0]["one_fails_elsewhere"]
    assert told["words"].startswith("rank 0 lost the others in update_actor of step 3")
    assert "rank 1 ended with OSError: disk full" in told["words"]
    assert "key:" not in told["words"], "a longer limit would not have helped"
    assert not any(own["one_fails_elsewhere"]["is_shared"] for own in outcomes)


@pytest.mark.slow
def test_what_the_main_rank_alone_does_fails_on_all(outcomes: Outcomes):
    for own in outcomes:
        told = own["main_raises"]
        assert (told["error"], told["words"]) == ("OSError", "disk full")
        assert told["is_shared"]


@pytest.mark.slow
def test_a_rank_that_was_killed_ends_the_other_at_once(outcomes: Outcomes):
    told = outcomes[0]["one_is_killed"]
    assert told["seconds"] < 10
    assert told["words"].startswith("rank 0 lost the others in update_actor of step 4")
    assert "rank 1 came to gen of step 4" in told["words"]


def test_a_rank_that_finds_nobody_says_so(monkeypatch: pytest.MonkeyPatch):
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
    with pytest.raises(KeyError), world.agreeing():
        raise KeyError("a")
    rows = torch.zeros(2, 3)
    assert world.gather_rows(rows) is rows
    assert world.gather_on_main(iter("ab")) == ["a", "b"]


def test_an_error_that_is_no_exchange_keeps_its_words():
    board = Board(None, rank=0, size=2, timeout_s=1.0)
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), board.explaining():
        raise RuntimeError("shapes differ")
    with pytest.raises(RankError, match="lost the others in the start"), board.explaining():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")
