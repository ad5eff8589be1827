"""Values that sections read in more than one form."""

import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentrl.config import load_config
from agentrl.config.schema.reward import OverlongBufferConfig, RewardConfig
from agentrl.config.schema.section import Section
from agentrl.errors import ConfigError
from agentrl.interactions.gsm8k_interaction import Gsm8kInteraction, Gsm8kSettings
from agentrl.tools import initialize_tools_from_config
from agentrl.tools.geo3k_tool import Geo3kTool
from agentrl.tools.gsm8k_tool import Gsm8kTool, Gsm8kToolConfig

PENALTIES = [
    (RewardConfig, "length_penalty", 1),
    (OverlongBufferConfig, "penalty_factor", 1),
    (Gsm8kSettings, "hint_penalty", 1),
    (Gsm8kToolConfig, "repeat_penalty", -1),
    (Geo3kTool.keys_class, "repeat_penalty", -1),
]


@pytest.mark.parametrize(("section", "key", "sign"), PENALTIES)
@given(amount=st.floats(0, 1e6), is_negative=st.booleans())
def test_a_penalty_is_its_amount_with_either_sign(section, key, sign, amount, is_negative):
    read = getattr(section.model_validate({key: -amount if is_negative else amount}), key)
    assert read == sign * amount
    assert getattr(section.model_validate({key: read}), key) == read


@pytest.mark.parametrize(("section", "key", "sign"), PENALTIES)
def test_a_penalty_of_the_other_sign_is_noted(section, key, sign, caplog):
    with caplog.at_level(logging.WARNING):
        section.model_validate({key: sign * 0.25})
        assert not caplog.messages
        section.model_validate({key: -sign * 0.25})
    [note] = caplog.messages
    assert note.startswith(f"{key} is {-sign * 0.25:g}: a penalty lowers the reward")
    assert note.endswith(f"read as {sign * 0.25:g}")


def test_every_penalty_of_a_section_is_in_the_table():
    named = {(section, key) for section, key, _ in PENALTIES}
    for section in {section for section, _, _ in PENALTIES}:
        assert {(section, key) for key in section.model_fields if "penalty" in key} <= named


@pytest.mark.parametrize("amount", [0.1, -0.1])
def test_plug_ins_read_a_penalty_with_either_sign(amount: float):
    assert vars(Gsm8kInteraction({"hint_penalty": amount}))["_settings"].hint_penalty == 0.1
    assert vars(Gsm8kTool({"repeat_penalty": amount}))["_keys"].repeat_penalty == -0.1


class Words(Section):
    number: int = 0
    share: float | None = None
    numbers: tuple[int, ...] = ()
    either: int | str = ""
    flag: bool = False
    both: bool | int = 0
    text: str = ""
    anything: Any = None


@pytest.mark.parametrize("key", ["number", "share", "numbers", "either"])
@pytest.mark.parametrize("word", [True, False])
def test_a_truth_value_is_not_a_number(key: str, word: bool):
    with pytest.raises(ValidationError, match="YAML reads yes, no, on, off"):
        Words.model_validate({key: [word] if key == "numbers" else word})


def test_truth_values_are_read_where_they_are_meant():
    read = Words(flag=True, both=True, anything=True)
    assert (read.flag, read.both, read.anything) == (True, True, True)


@pytest.mark.parametrize("word", ["on", "off", "yes", "no", "true", "False"])
def test_words_in_a_run_file_are_refused_as_numbers_and_kept_as_texts(tmp_path: Path, word: str):
    file = tmp_path / "run.yaml"
    file.write_text("data: {train_files: [a.jsonl]}\nmodel: {path: policy}\n", encoding="utf-8")
    for key in ("data.seed", "actor.optim.lr", "rollout.n"):
        with pytest.raises(ConfigError, match=key):
            load_config(file, [f"{key}={word}"])
    assert load_config(file, [f"trainer.experiment_name={word}"]).trainer.experiment_name == word


def test_words_in_the_keys_of_a_plug_in_are_refused_with_their_key(tmp_path: Path):
    file = tmp_path / "tools.yaml"
    file.write_text(
        "tools: [{class_name: agentrl.tools.gsm8k_tool.Gsm8kTool, config: {repeat_penalty: on}}]\n",
        encoding="utf-8",
    )
    with pytest.raises(ConfigError, match="repeat_penalty is True"):
        initialize_tools_from_config(file)
