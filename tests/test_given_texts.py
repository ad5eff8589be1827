"""Values of run files, overrides and plug-in YAMLs: the type of the key decides what they are."""

import json
import math
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.interactions import initialize_interactions_from_config

ERROR, NAN = "error", math.nan
# The given text: what an int key, a float key and a bool key read. A text key keeps it.
VALUES: dict[str, tuple[Any, Any, Any]] = {
    "123456": (123456, 123456.0, ERROR),
    "0123": (123, 123.0, ERROR),
    "010": (10, 10.0, ERROR),
    "007": (7, 7.0, ERROR),
    "08": (8, 8.0, ERROR),
    "+5": (5, 5.0, ERROR),
    "1_000": (1000, 1000.0, ERROR),
    "20260101_1234": (202601011234, 202601011234.0, ERROR),
    "0x10": (16, 16.0, ERROR),
    "1e5": (100000, 1e5, ERROR),
    "1e-6": (ERROR, 1e-6, ERROR),
    "1.50": (ERROR, 1.5, ERROR),
    "12:30": (ERROR, ERROR, ERROR),
    "12:30:45": (ERROR, ERROR, ERROR),
    "1:2.5": (ERROR, ERROR, ERROR),
    "2026-01-01": (ERROR, ERROR, ERROR),
    "true": (NAN, NAN, True),
    "False": (NAN, NAN, False),
    "on": (NAN, NAN, True),
    "Off": (NAN, NAN, False),
    "yes": (NAN, NAN, True),
    "NO": (NAN, NAN, False),
    ".inf": (ERROR, ERROR, ERROR),
    ".nan": (ERROR, ERROR, ERROR),
    "null": (ERROR, ERROR, ERROR),
    "~": (ERROR, ERROR, ERROR),
}
NULLS = ("null", "~")
TEXT_KEYS = {
    "trainer.experiment_name": "{}",
    "trainer.default_local_dir": "{}",
    "model.path": "{}",
    "rollout.stop": "[{}, abc]",
    "rollout.agent.env": "{{A: {}, B: x}}",
}
ROWS = {"data": {"train_files": "a.jsonl"}, "model": {"path": "m"}}
VERLS = {
    "data": {"train_files": "a.jsonl", "val_files": "a.jsonl", "train_batch_size": 4},
    "actor_rollout_ref": {"model": {"path": "m"}, "actor": {"ppo_mini_batch_size": 4}},
}


def read(folder: Path, key: str, value: str, how: str) -> Any:
    """Return what a run reads for `key: value`, given by a file or by an override."""
    tree: dict[str, Any] = json.loads(json.dumps(VERLS if how == "verl" else ROWS))
    overrides = [f"{key}={value}"]
    if how in ("file", "block"):
        overrides, (*sections, leaf) = [], key.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[leaf] = "VALUE"
    path = folder / "run.yaml"
    if how == "block":
        path.write_text(yaml.safe_dump(tree).replace("VALUE", f"{value}  # a comment"))
    else:
        path.write_text(json.dumps(tree).replace('"VALUE"', value))
    try:
        found: Any = load_config(path, overrides)
    except ConfigError:
        return ERROR
    for name in key.split("."):
        found = getattr(found, name)
    return found


def texts_of(found: Any) -> list[str]:
    found = list(found.values()) if isinstance(found, dict) else found
    return [str(one) for one in (found if isinstance(found, list) else [found])]


@pytest.mark.parametrize("how", ["file", "block", "override"])
@pytest.mark.parametrize("key", TEXT_KEYS)
@pytest.mark.parametrize("value", VALUES)
def test_a_key_whose_type_is_text_keeps_the_given_text(
    tmp_path: Path, value: str, key: str, how: str
):
    found = read(tmp_path, key, TEXT_KEYS[key].format(value), how)
    if value in NULLS:
        assert found == ERROR or value not in texts_of(found)
    else:
        assert found != ERROR
        assert texts_of(found)[0] == value


@pytest.mark.parametrize("how", ["file", "block", "override"])
@pytest.mark.parametrize(
    ("key", "place"), [("data.seed", 0), ("actor.optim.lr", 1), ("trainer.val_before_train", 2)]
)
@pytest.mark.parametrize("value", VALUES)
def test_other_keys_read_numbers_as_people_write_them(
    tmp_path: Path, value: str, key: str, place: int, how: str
):
    expected = VALUES[value][place]
    if expected is NAN:  # a truth value for a number is pydantic's concern
        return
    found = read(tmp_path, key, value, how)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize("value", [value for value in VALUES if value not in (*NULLS, ".nan")])
def test_a_text_key_of_verls_tree_keeps_the_given_text(tmp_path: Path, value: str):
    assert read(tmp_path, "trainer.experiment_name", value, "verl") == value


PLAIN = st.text(string.ascii_letters + string.digits + "._+-:", min_size=1, max_size=12).filter(
    lambda text: (
        text[0] not in "-:" and text[-1] != ":" and text not in (".", "null", "Null", "NULL")
    )
)


@given(value=PLAIN | st.from_regex(r"[+-]?[0-9_]{1,6}(:[0-5][0-9]){0,2}", fullmatch=True))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_any_plain_text_is_kept(tmp_path: Path, value: str):
    for how in ("block", "override"):
        assert read(tmp_path, "trainer.experiment_name", value, how) == value


def test_names_in_a_mapping_and_files_are_texts(tmp_path: Path):
    found = read(tmp_path, "data.val_files", "{on: 007, 1_0: x}", "override")
    assert {name: str(path) for name, path in found.items()} == {"on": "007", "1_0": "x"}
    assert texts_of(read(tmp_path, "data.train_files", "007", "override")) == ["007"]
    assert texts_of(read(tmp_path, "data.val_files", "[007]", "override")) == ["007"]


def test_a_value_that_no_reading_makes_right_is_shown_as_it_was_read(tmp_path: Path):
    (path := tmp_path / "run.yaml").write_text(json.dumps(ROWS))
    with pytest.raises(ConfigError, match=r"data\.seed: 1\.5 is not allowed here"):
        load_config(path, ["data.seed=1.5"])
    with pytest.raises(ConfigError, match=r"trainer\.experiment_name: \[1\] is not allowed"):
        load_config(path, ["trainer.experiment_name=[1]"])


def test_the_yaml_of_plug_ins_keeps_texts_too(tmp_path: Path):
    (path := tmp_path / "users.yaml").write_text(
        "interaction:\n"
        "- class_name: agentrl.interactions.gsm8k_interaction.Gsm8kInteraction\n"
        "  name: 0123\n"
        "  data_sources: [on, 12:30, 1e5]\n"
        "  config: {max_hints: 010, hints: [!!str 010, '010']}\n"
    )
    [(name, user)] = initialize_interactions_from_config(path).items()
    assert (name, user.data_sources) == ("0123", ("on", "12:30", "1e5"))
    assert (user.config["max_hints"], user.config["hints"]) == (10, ["010", "010"])
