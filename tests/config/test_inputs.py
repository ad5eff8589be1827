import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.config import parse_config
from agentrl.config.inputs import INPUT_KEYS, OTHER_KEYS, input_paths, with_inputs
from agentrl.config.schema.run import RunConfig
from agentrl.config.schema.section import Section

MODULE_INPUTS = {
    "plugins[0]",
    "data.custom_cls.path",
    "reward.custom_reward_function.path",
    "rollout.multi_turn.function_tool_path",
}
PATH_CHECKS = ("_expand_home", "_refuse_colon", "_check_location")
"""Validators of the types of paths."""


def path_keys(section: type[Section], prefix: str = "") -> Iterator[str]:
    hints = typing.get_type_hints(section, include_extras=True)
    for name in section.model_fields:
        kinds = [hints[name], *typing.get_args(hints[name])]
        kinds += [inner for kind in list(kinds) for inner in typing.get_args(kind)]
        sections = {k for k in kinds if isinstance(k, type) and issubclass(k, Section)}
        for inner in sections:
            yield from path_keys(inner, f"{prefix}{name}.")
        if not sections and any(check in str(hints[name]) for check in PATH_CHECKS):
            yield f"{prefix}{name}"


def test_every_key_with_a_path_is_an_input_or_declared_as_something_else():
    found = set(path_keys(RunConfig))
    assert {"model.path", "data.train_files", "data.custom_cls.path"} <= found
    unknown = {
        key
        for key in found - set(INPUT_KEYS)
        if not any(key == other or key.startswith(f"{other}.") for other in OTHER_KEYS)
    }
    assert unknown == set(), "add each to INPUT_KEYS, if every process of a run reads it"


def make_config(folder: Path, **changes: Any) -> RunConfig:
    for name in ("a.jsonl", "b.jsonl", "score.py", "rules.py", "tools.yaml"):
        (folder / name).write_text("")
    (folder / "policy").mkdir()
    return parse_config(
        {
            "plugins": ["package.module", f"{folder}/rules.py"],
            "data": {
                "train_files": [f"{folder}/a.jsonl", f"{folder}/later.jsonl"],
                "val_files": {"held_out": f"{folder}/b.jsonl"},
            },
            "model": {"path": f"{folder}/policy", "custom_chat_template": "{% for m in x %}\n"},
            "ref": {"path": "org/name-on-the-hub"},
            "reward": {"custom_reward_function": {"path": f"{folder}/score.py"}},
            "rollout": {"multi_turn": {"tool_config_path": f"{folder}/tools.yaml"}},
        }
        | changes
    )


def test_inputs_are_the_values_that_are_files_or_folders_here(tmp_path: Path):
    assert input_paths(make_config(tmp_path)) == {
        "plugins[1]": tmp_path / "rules.py",
        "data.train_files[0]": tmp_path / "a.jsonl",
        "data.val_files.held_out": tmp_path / "b.jsonl",
        "model.path": tmp_path / "policy",
        "reward.custom_reward_function.path": tmp_path / "score.py",
        "rollout.multi_turn.tool_config_path": tmp_path / "tools.yaml",
    }


def test_folder_with_the_name_of_a_module_is_no_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine.py").touch()
    for name, expected in (("mine", set[str]()), ("mine.py", MODULE_INPUTS)):
        config = parse_config(
            {
                "plugins": [name],
                "data": {"train_files": ["a.jsonl"], "custom_cls": {"path": name, "name": "Rows"}},
                "model": {"path": "org/name"},
                "reward": {"custom_reward_function": {"path": name}},
                "rollout": {"multi_turn": {"function_tool_path": name}},
            }
        )
        assert set(input_paths(config)) == expected


def test_inputs_are_replaced_and_everything_else_stays(tmp_path: Path):
    config = make_config(tmp_path)
    moved = {key: Path("/cache") / path.name for key, path in input_paths(config).items()}
    changed = with_inputs(config, moved)
    assert changed.data.train_files == [Path("/cache/a.jsonl"), tmp_path / "later.jsonl"]
    assert changed.data.val_files == {"held_out": Path("/cache/b.jsonl")}
    assert changed.model.path == "/cache/policy"
    assert changed.plugins == ["package.module", "/cache/rules.py"]
    assert (changed.ref, changed.model.custom_chat_template) == (
        config.ref, config.model.custom_chat_template,
    )  # fmt: skip
    assert changed.model_fields_set == config.model_fields_set
    assert config.model.path == f"{tmp_path}/policy"
    back = with_inputs(changed, input_paths(config))
    assert back == config
