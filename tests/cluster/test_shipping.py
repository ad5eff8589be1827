"""Inputs that only the driver's machine has, on the nodes of a run."""

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml

pytest.importorskip("ray")

from agentrl.cluster import inputs, shipping
from agentrl.cluster.inputs import InputServer, describe_input, fetch_input
from agentrl.cluster.shipping import find_absent, list_input
from agentrl.config import parse_config
from agentrl.errors import ClusterError, ConfigError
from tests.fakes.ray_nodes import POOLS, Nodes, ray_nodes, wait_until
from tests.fakes.runs import ROOT, read_lines, tiny_run, write_yaml
from tests.fakes.stores import s3_server


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A folder with a file in a subfolder, an empty file, and a link as in the hub's cache."""
    folder = tmp_path / "policy"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "blob").write_bytes(os.urandom(1000))
    (folder / "weights").symlink_to(tmp_path / "blob")
    (folder / "deep/more").write_bytes(b"more")
    (folder / "empty").touch()
    return folder


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_copy_has_the_same_files_and_is_made_once(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(inputs, "PIECE_BYTES", 300)
    one = describe_input(policy, tmp_path / "cache")
    server = InputServer({one.digest: str(policy)})
    expected = contents(policy)
    threads = [threading.Thread(target=fetch_input, args=(one, server.read)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    shutil.rmtree(policy)
    assert contents(Path(one.target)) == expected
    assert not Path(one.target, "weights").is_symlink()
    fetch_input(one, server.read)  # reads nothing: the server's folder is gone


def test_a_single_file_is_copied_under_its_name(policy: Path, tmp_path: Path):
    file = policy / "deep/more"
    one = describe_input(file, tmp_path / "cache")
    fetch_input(one, InputServer({one.digest: str(file)}).read)
    assert Path(one.target).name == "more"
    assert Path(one.target).read_bytes() == b"more"


def test_digest_is_that_of_names_and_content(policy: Path, tmp_path: Path):
    def digest() -> str:
        return describe_input(policy, tmp_path).digest

    first = digest()
    os.utime(policy / "empty", (1, 1))
    assert digest() == first
    (policy / "deep/more").write_bytes(b"less")
    changed = digest()
    (policy / "empty").rename(policy / "vacant")
    assert len({first, changed, digest()}) == 3


def test_file_that_changes_while_it_is_copied_leaves_no_copy(policy: Path, tmp_path: Path):
    one = describe_input(policy, tmp_path / "cache")
    (policy / "deep/more").write_bytes(b"less")
    with pytest.raises(ClusterError, match=r"deep/more .*changed on the driver's machine"):
        fetch_input(one, InputServer({one.digest: str(policy)}).read)
    assert not Path(one.target).parent.exists()


def test_node_that_cannot_store_a_copy_names_the_key(policy: Path, tmp_path: Path):
    (tmp_path / "cache").touch()
    one = describe_input(policy, tmp_path / "cache")
    with pytest.raises(ConfigError) as caught:
        fetch_input(one, InputServer({one.digest: str(policy)}).read)
    assert caught.value.details["key"] == "cluster.cache_dir"


def test_input_is_absent_if_it_is_missing_or_has_other_files(policy: Path, tmp_path: Path):
    listing = list_input(policy)
    assert sorted(listing) == ["deep/more", "empty", "weights"]

    def is_absent(path: Path, *, has_times: bool = True) -> bool:
        return find_absent({"model.path": (str(path), listing, has_times)}) == ["model.path"]

    assert not is_absent(policy)
    assert is_absent(tmp_path / "none")
    copy = tmp_path / "copy"
    shutil.copytree(policy, copy)
    os.utime(copy / "empty", (1, 1))
    assert is_absent(copy)
    assert not is_absent(copy, has_times=False)
    (copy / "empty").write_text("x")
    assert is_absent(copy, has_times=False)


def test_yaml_that_names_a_file_is_refused_and_one_that_names_modules_is_not(tmp_path: Path):
    (tmp_path / "tool.py").touch()
    file = tmp_path / "tools.yaml"
    for name, is_refused in ((f"{tmp_path}/tool.py:Tool", True), ("package.tool.Tool", False)):
        write_yaml(file, {"tools": [{"class_name": name, "config": {"type": "native"}}]})
        if is_refused:
            with pytest.raises(ConfigError, match=r"tools.yaml names .*tool.py") as caught:
                shipping._refuse_references("rollout.multi_turn.tool_config_path", file)
            assert "cluster.runtime_env.working_dir" in str(caught.value)
        else:
            shipping._refuse_references("rollout.multi_turn.tool_config_path", file)


def test_data_that_one_node_would_prepare_is_refused_and_finished_data_is_left_out(tmp_path: Path):
    made = tmp_path / "made"
    made.mkdir()
    config = parse_config(
        {
            "data": {"train_files": [f"{made}/train.parquet"]},
            "model": {"path": "policy"},
            "prepare": {"arithmetic": {"out_dir": str(made), "num_train": 8}},
        }
    )
    with pytest.raises(ConfigError, match=r"prepare.arithmetic would be made on one node"):
        shipping._without_finished_preparation(config)
    manifest = {"maker": "arithmetic", "arguments": {}, "complete": True}
    (made / "manifest.json").write_text(json.dumps(manifest))
    assert shipping._without_finished_preparation(config).prepare.arithmetic is None


SCORER = """
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert not Path("HOME").exists(), "the driver's folder is gone"
    return {"score": float(len(solution_str) % 5), "is_copy": float("CACHE" in __file__)}
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ranks_read_copies_of_what_only_the_driver_has(tiny_home: Path, tmp_path: Path):
    mine, cache = tmp_path / "mine", tmp_path / "cache"
    shutil.copytree(tiny_home, mine)
    scorer = SCORER.replace("HOME", str(mine)).replace("CACHE", str(cache))
    (mine / "score.py").write_text(scorer)
    with ray_nodes("train_node", "train_node") as nodes:
        config = tiny_run(
            mine,
            tmp_path / "run",
            cluster={"address": nodes.address, "pools": POOLS, "cache_dir": str(cache)},
            data__cache_dir=str(tmp_path / "lengths"),
            reward__custom_reward_function={"path": f"{mine}/score.py"},
            trainer__val_before_train=False,
            trainer__total_training_steps=1,
        )
        file = write_yaml(tmp_path / "run.yaml", config)
        # The nodes are pretended to have nothing of it; the folder is moved before the first step.
        command = [sys.executable, "-m", "tests.fakes.unshared_driver", str(mine), str(file)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, (done.stdout, done.stderr)
        wait_until(lambda: not nodes.processes(), seconds=30)
    assert not mine.exists()
    assert "nodes lack data.train_files[0], data.val_files.arithmetic, model.path" in done.stdout
    (line,) = (line for line in read_lines(tmp_path / "run/metrics.jsonl") if line["step"] == 1)
    assert line["scorer/is_copy/mean"] == 1.0
    resolved = yaml.safe_load((tmp_path / "run/starts/0001/resolved.yaml").read_text())
    read = [resolved["model"]["path"], *resolved["data"]["train_files"]]
    assert all(Path(path).is_relative_to(cache) for path in read)
    assert len([path for path in cache.iterdir() if path.is_dir()]) == 4


@pytest.fixture
def separate(tmp_path: Path) -> Iterator[tuple[Nodes, Path]]:
    """Two nodes for training, and a folder of which each has its own, empty at first."""
    folder = tmp_path / "mine"
    folder.mkdir()
    with ray_nodes() as nodes:
        try:
            for _ in range(2):
                nodes.add_with_own_folder("train_node", folder)
        except PermissionError:
            pytest.skip("this user may not mount")
        yield nodes, folder


def train_on(
    nodes: Nodes, home: Path, folder: Path, **changes: Any
) -> subprocess.CompletedProcess[str]:
    config = tiny_run(
        home,
        folder / "run",
        cluster={"address": nodes.address, "pools": POOLS, "cache_dir": str(folder / "cache")}
        | changes.pop("cluster", {}),
        data__cache_dir=str(folder / "lengths"),
        trainer__total_training_steps=1,
        **changes,
    )
    file = write_yaml(folder / "run.yaml", config)
    command = [sys.executable, "-m", "agentrl", "train", str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nodes_with_separate_folders_are_refused_without_a_store(
    separate: tuple[Nodes, Path], tiny_home: Path
):
    nodes, folder = separate
    done = train_on(nodes, tiny_home, folder)
    assert done.returncode == 2, (done.stdout, done.stderr)
    said = done.stdout + done.stderr
    assert f"{folder}/run of rank 1 on node" in said
    assert "key: trainer.default_local_dir" in said
    assert "trainer.default_remote_dir" in said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nodes_that_share_no_folder_train_with_a_store(
    separate: tuple[Nodes, Path], tiny_home: Path
):
    nodes, folder = separate
    home = folder / "home"
    shutil.copytree(tiny_home, home)
    with s3_server("bucket") as variables:
        done = train_on(
            nodes,
            home,
            folder,
            cluster={"runtime_env": {"env_vars": list(variables)}},
            trainer__default_remote_dir="s3://bucket/run",
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        saved = fsspec.filesystem("s3").find("bucket/run")
    assert "nodes lack data.train_files[0], data.val_files.arithmetic, model.path" in done.stdout
    assert "bucket/run/checkpoints/global_step_1/manifest.json" in saved
    assert not list(folder.glob("run/*.json*")), "the metrics are on the node of rank 0"
    assert list(folder.glob("run/logs/rank_*.log"))
