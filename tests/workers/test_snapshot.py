import errno
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from agentrl.errors import CheckpointError
from agentrl.workers import snapshot
from agentrl.workers.distributed import World
from agentrl.workers.snapshot import export_hf
from tests.fakes.plugins import tiny_tokenizer
from tests.fakes.training import make_policy, weights


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the disk be full after the weights were written."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(snapshot, "_link_other_files", full)


def test_export_that_fails_leaves_no_folder(
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    fill_disk(monkeypatch)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        export_hf(make_policy(world), tokenizer, tmp_path / "out")
    assert caught.value.details["path"] == tmp_path / "out"
    assert not list(tmp_path.iterdir())


def test_export_that_fails_leaves_the_earlier_model_as_it_was(
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    export_hf(make_policy(world), tokenizer, tmp_path / "out")
    before = contents(tmp_path)
    fill_disk(monkeypatch)
    policy = make_policy(world, seed=1)
    with pytest.raises(CheckpointError):
        export_hf(policy, tokenizer, tmp_path / "out")
    assert contents(tmp_path) == before
    assert policy.config._attn_implementation == "agentrl_packed"


def test_earlier_model_gives_way_as_a_whole_and_what_is_no_model_stays(
    world: World, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
):
    out = tmp_path / "out"
    (out / "data").mkdir(parents=True)
    mine = {"manifest.json": b"{}", "data/train.jsonl": b"rows", "data/config.json": b"own"}
    stale = {"model-00001-of-00002.safetensors": b"old", "adapter_config.json": b"{}"}
    for name, content in (mine | stale).items():
        (out / name).write_bytes(content)
    policy = make_policy(world)
    export_hf(policy, tokenizer, out)
    found = contents(out)
    assert mine.items() <= found.items()
    assert not stale.keys() & found.keys()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    plain = AutoModelForCausalLM.from_pretrained(out)
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, weights(policy)[name])


def test_link_to_a_folder_stays_a_link(
    world: World, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    export_hf(make_policy(world), tokenizer, tmp_path / "out")
    assert (tmp_path / "out").is_symlink()
    assert (tmp_path / "disk/config.json").is_file()
