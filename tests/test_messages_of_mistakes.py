"""What users are told of mistakes that misled them, or came as tracebacks."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import RunConfig, load_config, parse_config
from agentrl.config.schema.run import ModelConfig
from agentrl.data.files import read_rows
from agentrl.errors import CheckpointError, ConfigError, PluginError
from agentrl.plugins import load_object
from agentrl.rewards import make_reward_manager
from agentrl.tools import BaseTool, function_tool, initialize_tools_from_config
from agentrl.tools.function_tool import FunctionTool
from agentrl.trainer.setup.plugins import Plugins
from agentrl.trainer.setup.preflight import find_trained_validation, find_undescribed
from agentrl.trainer.state.resume import find_checkpoint
from agentrl.workers.distributed import start_world, stop_world
from agentrl.workers.load import load_causal_lm
from agentrl.workers.tokenizer import load_tokenizer
from tests.fakes.runs import write_yaml

RUN: dict[str, Any] = {"data": {"train_files": ["t.jsonl"]}, "model": {"path": "m"}}


def config_of(**sections: Any) -> RunConfig:
    return parse_config(RUN | sections)


def copy_of_policy(home: Path, folder: Path) -> Path:
    shutil.copytree(home / "policy", folder)
    return folder


def test_a_folder_without_a_tokenizer_is_named(tiny_home: Path, tmp_path: Path):
    folder = copy_of_policy(tiny_home, tmp_path / "m")
    for file in [*folder.glob("*token*"), *folder.glob("vocab*"), *folder.glob("merges*")]:
        file.unlink()
    with pytest.raises(ConfigError, match="m has no tokenizer") as caught:
        load_tokenizer(ModelConfig(path=str(folder)))
    assert caught.value.details["key"] == "model.path"


def test_cut_weights_are_no_traceback(tiny_home: Path, tmp_path: Path):
    folder = copy_of_policy(tiny_home, tmp_path / "m")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match="no model can be loaded from") as caught:
        load_causal_lm(ModelConfig(path=str(folder)))
    assert caught.value.details["key"] == "model.path"


def test_a_tab_is_called_a_tab(tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text("data:\n\ttrain_files: [a]\n")
    with pytest.raises(ConfigError, match=r"line 2, column 1: a tab, but YAML allows only"):
        load_config(file)
    with pytest.raises(ConfigError, match="a tab, but YAML allows only spaces"):
        initialize_tools_from_config(file)


def test_an_unknown_section_of_the_command_line_is_located_there(tmp_path: Path):
    file = write_yaml(tmp_path / "run.yaml", RUN)
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["rolout.n=4"])
    assert "did you mean 'rollout'? (given on the command line)" in str(caught.value)
    assert "file" not in caught.value.details
    with pytest.raises(ConfigError) as caught:
        load_config(write_yaml(tmp_path / "other.yaml", RUN | {"rolout": {"n": 4}}))
    assert "command line" not in str(caught.value)


def test_a_path_that_contains_the_function_is_distinguished():
    wrong = {"custom_reward_function": {"path": "score.py:compute_score"}}
    with pytest.raises(ConfigError, match=r"write 'compute_score' under .* path: score\.py"):
        config_of(reward=wrong)


def test_the_file_of_a_module_that_has_no_such_name_is_shown():
    with pytest.raises(PluginError, match=r"json \(.*json/__init__\.py\) has no 'SqlTool'"):
        load_object("json.SqlTool")


@pytest.mark.parametrize(("path", "message"), [(None, "is not set"), ("gone", "no folder gone")])
def test_a_missing_checkpoint_is_reported_with_an_example(path: str | None, message: str):
    trainer: dict[str, Any] = {"resume_mode": "auto", "default_local_dir": "runs/x"}
    config = config_of(trainer=trainer)
    chosen = {"resume_mode": "resume_path", "resume_from_path": path and Path(path)}
    changed = config.trainer.model_copy(update=chosen)
    with pytest.raises(CheckpointError, match=message) as caught:
        find_checkpoint(
            config.model_copy(update={"trainer": changed}), start_world("cpu", timeout_s=60)
        )
    stop_world()
    assert "runs/x/checkpoints/global_step_10" in str(caught.value)


def test_a_byte_order_mark_is_passed_over(tmp_path: Path):
    for name, text in (("rows.jsonl", '{"a": 1}\r\n'), ("rows.json", '[{"a": 1}]')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
        assert read_rows(tmp_path / name) == [{"a": 1}]


def test_a_missing_tool_yaml_is_reported_with_the_searched_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        initialize_tools_from_config("tools.yaml")
    assert caught.value.details["looked_in"] == tmp_path


def test_a_function_tool_that_tells_the_model_nothing_is_noted():
    @function_tool
    def bare(word):  # pyright: ignore[reportUnknownParameterType, reportMissingParameterType]
        return word

    @function_tool
    def described(word: str) -> str:
        """Look a word up."""
        return word

    def notes(function: Any) -> list[str]:
        tools: list[BaseTool] = [FunctionTool(function)]
        return list(find_undescribed(Plugins(tools, {}, make_reward_manager(config_of().reward))))

    assert notes(bare) == [
        "the function tool 'bare' has no annotation for word",
        "the function tool 'bare' has no docstring: the model does not see what it does",
    ]
    assert notes(described) == []


def test_validation_on_the_training_file_is_noted():
    config = config_of(data={"train_files": ["a.jsonl"], "val_files": ["a.jsonl", "b.jsonl"]})
    (note,) = find_trained_validation(config)
    assert note == "data.val_files.a is a training file too: a.jsonl"
