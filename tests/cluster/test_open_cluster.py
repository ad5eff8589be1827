"""What a run says if its processes do not start, on a local cluster of this process."""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RunConfig, parse_config
from agentrl.errors import ClusterError
from tests.fakes.runs import ROOT, tiny_run

pytest.importorskip("ray")

from ray._private import worker

from agentrl.cluster.connection import connected
from agentrl.cluster.driver import ClusterRun, open_cluster
from agentrl.cluster.handles import ClusterHandles

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Broken:
    """A rank whose constructor raises."""

    def __init__(self) -> None:
        raise LookupError("no such thing")


class Telling:
    """A rank that fails and names the variables that it got."""

    def __init__(self) -> None:
        names = [name for name in ("JUDGE_API_KEY", "PLAIN") if os.environ.get(name)]
        raise LookupError(", ".join(names))


class Slow:
    """A rank whose constructor does not return."""

    def __init__(self) -> None:
        print("reading the weights", flush=True)
        time.sleep(600)


@pytest.fixture(scope="module", autouse=True)
def local_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster with two CPUs at most; the runs of the tests connect to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        config = parse_config({"data": {}, "model": {"path": "m"}, "cluster": {}}).cluster
        with connected(config, min_cpus=2):
            yield


def make_config(folder: Path, **cluster: Any) -> RunConfig:
    given = tiny_run(folder, folder / "run", cluster={"address": "local"} | cluster)
    given["trainer"] |= {"n_gpus_per_node": 2, "max_restarts": 3, "device": "cpu"}
    return parse_config(given)


def opened(config: RunConfig, said: list[str]) -> AbstractContextManager[ClusterRun]:
    return open_cluster(config, say=said.append)


def test_a_rank_whose_constructor_raises_ends_the_run_without_a_restart(tmp_path: Path):
    said: list[str] = []
    with opened(make_config(tmp_path), said) as run, pytest.raises(ClusterError) as caught:
        run.train(f"{__name__}:Broken", (), ClusterHandles())
    assert "did not start" in str(caught.value)
    assert caught.value.details["reason"] == "LookupError: no such thing"
    assert not any("restart" in line for line in said)


def test_named_variables_reach_processes_and_no_log_has_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    values = {"JUDGE_API_KEY": "sk-1f6c0de5ec2e7", "PLAIN": "value-9a3b7c5d1e"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    config = make_config(tmp_path, runtime_env={"env_vars": list(values)})
    with opened(config, said) as run, pytest.raises(ClusterError) as caught:
        run.train(f"{__name__}:Telling", (), ClusterHandles())
    assert caught.value.details["reason"] == "LookupError: JUDGE_API_KEY, PLAIN"
    session = Path(worker._global_node.get_session_dir_path())
    written = [*session.rglob("*"), *(tmp_path / "run").rglob("*")]
    texts = [file.read_bytes() for file in written if file.is_file()]
    assert len(texts) > 10
    for value in values.values():
        assert not any(value.encode() in text for text in texts)
        assert not any(value in line for line in (*said, str(caught.value)))


def test_a_rank_that_does_not_start_in_time_is_named_with_its_log(tmp_path: Path):
    config = make_config(tmp_path, start_timeout_s=8)
    with opened(config, []) as run, pytest.raises(ClusterError) as caught:
        run.train(f"{__name__}:Slow", (), ClusterHandles())
    assert "rank_0 did not start within 8 s" in str(caught.value)
    assert "reading the weights" in str(caught.value)


def test_resources_that_stay_in_use_end_the_run_after_the_limit(tmp_path: Path):
    config, said = make_config(tmp_path, placement_timeout_s=1), list[str]()
    with (
        opened(config, []),
        pytest.raises(ClusterError, match="the cluster has no free resources after 1 s") as caught,
        opened(config, said),
    ):
        raise AssertionError("it was placed")
    assert "main: 1 node x 2 CPU" in str(caught.value)
    assert any(line.startswith("waiting up to 1 s: other work uses") for line in said)
