"""Checks of a run's folders by all ranks; those of a run file are tested with its commands."""

from pathlib import Path

import pytest

from agentrl.config.schema.run import TrainerConfig
from agentrl.errors import ConfigError
from agentrl.trainer.setup.preflight import check_owner
from tests.fakes.torchrun import ranks_of


def test_rollouts_in_the_folder_of_another_run_are_refused(tmp_path: Path):
    (tmp_path / "a/starts").mkdir(parents=True)

    def folders(run: str, rollouts: str) -> TrainerConfig:
        return TrainerConfig(default_local_dir=tmp_path / run, rollout_data_dir=tmp_path / rollouts)

    with pytest.raises(ConfigError, match="in the folder of another run") as caught:
        check_owner(folders("b", "a/rollouts"))
    assert f"{tmp_path}/b/rollouts" in str(caught.value)
    with pytest.raises(ConfigError, match="a is the folder of another run"):
        check_owner(folders("b", "a"))
    own = [("a", "a/rollouts"), ("b", "rollouts"), ("a/b", "a/rollouts"), ("a", "a")]
    for run, rollouts in (*own, ("b", "a/../b/rollouts"), ("a/../b", "b/rollouts")):
        check_owner(folders(run, rollouts))


@pytest.mark.slow
def test_ranks_that_have_different_folders_are_refused_at_the_start(tmp_path: Path):
    with ranks_of("tests.fakes.folder_ranks", f"{tmp_path}/run{{rank}}") as ranks:
        first, second = (rank.wait() for rank in ranks)
    assert f"ConfigError: {tmp_path}/run1 of rank 1 on node" in second.out, second
    assert "trainer.default_remote_dir" in second.out
    assert "RankError: rank 1 failed: ConfigError" in first.out, first
    assert not list(tmp_path.glob("run?/.*")), "the mark is removed"
