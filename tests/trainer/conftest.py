"""Runs on which faults are visited."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl import Trainer
from agentrl.config import parse_config
from agentrl.workers.distributed import stop_world
from tests.fakes.fault_runs import Train, limit_file_size, make_plugin_folder, make_run
from tests.fakes.runs import CommandOutput, run_agentrl, write_yaml


@pytest.fixture
def alone() -> Iterator[None]:
    """One thread, and neither a process group nor exact kernels left behind."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    stop_world()
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture
def plugin_folder(tmp_path: Path) -> Path:
    """A folder with the code of a tool and a scorer, and twelve rows."""
    return make_plugin_folder(tmp_path / "plugin_folder")


@pytest.fixture
def train(
    tiny_home: Path, plugin_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Train:
    """`agentrl train` on `make_run` with changes; no file may be longer than `limit` bytes."""

    def run(*, limit: int | None = None, **changes: Any) -> CommandOutput:
        content = make_run(tiny_home, plugin_folder, tmp_path / "run", **changes)
        file = write_yaml(tmp_path / "run.yaml", content)
        with limit_file_size(limit):
            return run_agentrl(capsys, "train", file)

    return run


@pytest.fixture(scope="session")
def whole(tiny_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was never stopped, each step saved."""
    folder = tmp_path_factory.mktemp("whole")
    shop = make_plugin_folder(folder / "plugin_folder")
    content = make_run(tiny_home, shop, folder / "run", trainer__save_freq=1)
    Trainer(parse_config(content)).fit()
    stop_world()
    return folder / "run"
