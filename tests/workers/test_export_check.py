"""Every kind of damage to an exported model is found."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from agentrl.config import parse_config
from agentrl.errors import CheckpointError
from agentrl.trainer.setup.plugins import load_plugins
from agentrl.trainer.setup.rollout_setup import probe_model
from agentrl.workers import export
from agentrl.workers.distributed import World
from agentrl.workers.export import export_adapter, export_hf
from agentrl.workers.export_check import WrittenTensor, find_config_damage, find_damage
from agentrl.workers.model import PolicyModel
from tests.fakes.plugins import CHAT_TEMPLATE, tiny_tokenizer
from tests.fakes.training import make_lora_policy, make_policy

NORM = "model.layers.1.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def policy(world: World) -> PolicyModel:
    return make_policy(world)


@pytest.fixture
def folder(policy: PolicyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An export of several files."""
    monkeypatch.setattr(export, "SHARD_BYTES", 20_000)
    export_hf(policy, tiny_tokenizer(), tmp_path / "out")
    return tmp_path / "out"


def file_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    return folder / index["weight_map"][name]


def change(name: str, act: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    """Damage the file that has a tensor."""

    def damage(folder: Path) -> None:
        file = file_of(folder, name)
        tensors = load_file(file)
        act(tensors)
        save_file(tensors, file, metadata={"format": "pt"})

    return damage


def truncate(folder: Path) -> None:
    file = file_of(folder, EMBEDDING)
    file.write_bytes(file.read_bytes()[:-1])


def misplace(folder: Path) -> None:
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"][NORM] = file_of(folder, EMBEDDING).name
    file.write_text(json.dumps(index))


def write(name: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_text(text)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a tensor is missing": (change(NORM, lambda t: t.pop(NORM)), f"{NORM} is missing"),
    "a tensor is not the policy's": (
        change(NORM, lambda t: t.update(more=torch.ones(1))),
        "more is not a tensor",
    ),
    "a shape": (
        change(EMBEDDING, lambda t: t.update({EMBEDDING: t[EMBEDDING].T.contiguous()})),
        f"{EMBEDDING} is \\(",
    ),
    "a dtype": (
        change(NORM, lambda t: t.update({NORM: t[NORM].bfloat16()})),
        f"{NORM} is .*bfloat16",
    ),
    "values": (change(NORM, lambda t: t[NORM].add_(1e-3)), f"{NORM} has other values"),
    "one value": (change(NORM, lambda t: t[NORM][-1:].add_(1e-3)), f"{NORM} has other values"),
    "a truncated file": (truncate, "cannot be read"),
    "a missing file": (lambda f: file_of(f, EMBEDDING).unlink(), f"{EMBEDDING} is missing"),
    "no index": (
        lambda f: (f / "model.safetensors.index.json").unlink(),
        "does not list the tensors",
    ),
    "an index of other files": (misplace, "does not list the tensors"),
    "a second file": (
        lambda f: save_file({NORM: load_file(file_of(f, NORM))[NORM]}, f / "model.safetensors"),
        "does not list the tensors",
    ),
    "a template": (write("chat_template.jinja", "{{ messages }}"), "is not the chat template"),
    "no template": (lambda f: (f / "chat_template.jinja").unlink(), "is not the chat template"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found(kind: str, folder: Path):
    written = {
        name: WrittenTensor.of(tensor)
        for file in folder.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    assert not list(find_damage(folder, written, tiny_tokenizer()))
    act, message = DAMAGE[kind]
    act(folder)
    found = "\n".join(find_damage(folder, written, tiny_tokenizer()))
    assert re.search(message, found), found


@pytest.mark.parametrize(
    ("key", "value"),
    [("tie_word_embeddings", False), ("rms_norm_eps", 1e-3), ("rope_theta", 3.0)],
)
def test_keys_that_are_not_the_models_are_found(
    key: str, value: object, policy: PolicyModel, folder: Path
):
    assert not list(find_config_damage(folder, policy.config, is_tied=True))
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {key: value}
    if key == "rope_theta":
        del config["rope_parameters"]
    file.write_text(json.dumps(config))
    (found,) = find_config_damage(folder, policy.config, is_tied=True)
    assert key in found


@pytest.mark.parametrize("kind", ["merged", "adapter"])
def test_damaged_export_is_an_error_and_no_folder(
    kind: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def save_zeros(tensors: dict[str, torch.Tensor], file: Path, **options: Any) -> None:
        save_file({name: torch.zeros_like(one) for name, one in tensors.items()}, file, **options)

    monkeypatch.setattr(export, "save_file", save_zeros)
    policy = make_lora_policy(world)
    write = export_hf if kind == "merged" else export_adapter
    with pytest.raises(CheckpointError, match=r"safetensors: .* has other values") as caught:
        write(policy, tiny_tokenizer(), tmp_path / "out", about={"step": 1})
    assert caught.value.details["path"] == tmp_path / "out"
    assert not (tmp_path / "out").exists()


def test_templates_of_an_earlier_export_do_not_stay(policy: PolicyModel, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(save_tokenizer(tmp_path / "tokenizer"))
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    export_hf(policy, tokenizer, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tokenizer.chat_template
    export_hf(policy, tiny_tokenizer(), tmp_path / "out")
    found = AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert found == tiny_tokenizer().chat_template


@pytest.mark.parametrize("kind", ["merged", "adapter"])
@pytest.mark.parametrize("is_file", [True, False])
def test_export_has_the_chat_template_of_the_run(
    kind: str, is_file: bool, world: World, tmp_path: Path
):
    template = "{{ '' }}" + CHAT_TEMPLATE
    (tmp_path / "own.jinja").write_text(template, encoding="utf-8")
    model = {
        "path": str(save_tokenizer(tmp_path / "model")),
        "custom_chat_template": str(tmp_path / "own.jinja") if is_file else template,
    }
    config = parse_config({"data": {"train_files": ["rows.jsonl"]}, "model": model})
    tokenizer = probe_model(config, load_plugins(config)).tokenizer
    write = export_hf if kind == "merged" else export_adapter
    write(make_lora_policy(world), tokenizer, tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == template


def save_tokenizer(folder: Path) -> Path:
    tiny_tokenizer().save_pretrained(folder)
    return folder
