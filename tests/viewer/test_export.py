"""Pages as files: complete, bounded, without a server."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.errors import ConfigError
from agentrl.viewer.export import export_runs
from agentrl.viewer.runs import RunReader
from tests.fakes.viewer_runs import write_view_run


@pytest.fixture
def run(tmp_path: Path) -> RunReader:
    return RunReader(write_view_run(tmp_path / "run"))


def read_data(folder: Path) -> dict[str, Any]:
    text = (folder / "data.js").read_text()
    return json.loads(text.removeprefix("window.AGENTRL_EXPORT = ").removesuffix(";\n"))


def test_an_export_has_the_chosen_step_up_to_the_limit(run: RunReader, tmp_path: Path):
    done = export_runs([run], tmp_path / "out", steps=[2], limit=10)
    assert (done.num_trajectories, done.num_left_out) == (10, 6)
    data = read_data(tmp_path / "out")
    assert [one["label"] for one in data["answers"]["runs?"]["runs"][0]["files"]] == [
        "rollouts/step_000002"
    ]
    assert len(data["lists"]["0"]) == len(data["files"]) == 10
    assert all((tmp_path / "out" / name).is_file() for name in data["files"].values())


def test_an_export_has_the_tokens_of_prompt_and_response(run: RunReader, tmp_path: Path):
    export_runs([run], tmp_path / "out", steps=[2], limit=1)
    text = (tmp_path / "out" / "trajectories" / "00000.js").read_text()
    keys = [json.loads(line.split("[", 1)[1].split("] = ")[0]) for line in text.splitlines()]
    name = "id=rollouts%2Fstep_000002%3A0"
    assert keys == [
        f"trajectory?{name}&run=0",
        f"tokens?{name}&run=0&sequence=0&start=0",
        f"tokens?{name}&part=prompt&run=0&sequence=0&start=0",
    ]


def test_the_last_step_is_exported_by_default(run: RunReader, tmp_path: Path):
    export_runs([run], tmp_path / "out")
    assert "step?file=rollouts%2Fstep_000003&run=0" in read_data(tmp_path / "out")["answers"]


def test_an_unknown_step_and_a_folder_with_files_are_refused(run: RunReader, tmp_path: Path):
    with pytest.raises(ConfigError, match="no rollouts of step 7"):
        export_runs([run], tmp_path / "out", steps=[7])
    with pytest.raises(ConfigError, match="is not empty"):
        export_runs([run], run.folder)
