"""Checks of a run's folders by all ranks; those of a run file are tested with its commands."""

from pathlib import Path

import pytest

from tests.fakes.torchrun import ranks_of


@pytest.mark.slow
def test_ranks_that_have_different_folders_are_refused_at_the_start(tmp_path: Path):
    with ranks_of("tests.fakes.folder_ranks", f"{tmp_path}/run{{rank}}") as ranks:
        first, second = (rank.wait() for rank in ranks)
    assert f"ConfigError: {tmp_path}/run1 of rank 1 on node" in second.out, second
    assert "trainer.default_remote_dir" in second.out
    assert "RankError: rank 1 failed: ConfigError" in first.out, first
    assert not list(tmp_path.glob("run?/.*")), "the mark is removed"
