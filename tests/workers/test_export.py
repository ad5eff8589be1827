import errno
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from agentrl.config.schema.run import ModelConfig
from agentrl.config.schema.training import FsdpConfig
from agentrl.errors import CheckpointError
from agentrl.workers import export
from agentrl.workers.distributed import World
from agentrl.workers.export import export_hf
from agentrl.workers.load import load_policy
from tests.fakes.engines import tiny_model
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

    monkeypatch.setattr(export, "_link_other_files", full)


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


def test_export_has_the_buffers_of_the_models_files(
    world: World, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
):
    policy = make_policy(world)
    gate = policy.lm.get_submodule("model.layers.1.mlp")
    gate.register_buffer("bias", torch.tensor([3.0, 4.0]))
    gate.register_buffer("scratch", torch.zeros(1), persistent=False)
    export_hf(policy, tokenizer, tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    assert found["model.layers.1.mlp.bias"].tolist() == [3.0, 4.0]
    assert "model.layers.1.mlp.scratch" not in found


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


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
def test_exported_weights_have_the_dtype_and_the_files_of_their_model(
    world: World,
    tokenizer: PreTrainedTokenizerBase,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shard_bytes: int,
):
    lm = tiny_model(tie_word_embeddings=False)
    torch.nn.Module.to(lm, torch.bfloat16)
    lm.save_pretrained(tmp_path / "model")
    policy = load_policy(ModelConfig(path=str(tmp_path / "model")), world, FsdpConfig())
    monkeypatch.setattr(export, "SHARD_BYTES", shard_bytes)
    export_hf(policy, tokenizer, tmp_path / "out")
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (shard_bytes < 10**9)
    assert all(file.stat().st_size < shard_bytes for file in files)
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"
    assert policy.config.dtype == torch.float32
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, weight in plain.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, lm.get_parameter(name))
    again = load_policy(ModelConfig(path=str(tmp_path / "out")), world, FsdpConfig())
    assert all(torch.equal(w, weights(policy)[name]) for name, w in weights(again).items())
