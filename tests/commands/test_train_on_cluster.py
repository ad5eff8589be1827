"""`agentrl train` on several devices without ray."""

from pathlib import Path

import pytest

from agentrl.commands.run_file import Purpose, read_run_file, uses_cluster
from agentrl.commands.train_on_cluster import train_on_cluster
from agentrl.errors import MissingExtraError
from agentrl.plugins import environment
from tests.fakes.runs import tiny_run, write_yaml


def test_several_devices_without_ray_name_the_extra(
    tiny_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = tiny_run(tiny_home, tmp_path / "run", trainer__nnodes=2)
    file = read_run_file(write_yaml(tmp_path / "run.yaml", config), [], Purpose.TRAIN)
    assert uses_cluster(file.config)
    monkeypatch.setattr(environment, "find_spec", lambda _: None)
    with pytest.raises(
        MissingExtraError, match=r"a run on several devices needs the package 'ray'"
    ):
        train_on_cluster(file)
